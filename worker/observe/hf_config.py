"""Reads Hugging Face's `config.json` as a `ModelDescription`. No torch, no transformers, no network.

The families differ in what their configuration leaves unsaid: biases, norms, gates, whether the output layer shares the
embedding's matrix. That is in `_FAMILIES`; parameter counts of published models are its test.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rsup.worker.observe.model_description import MAX_LAYERS, MOST, DescriptionError, ModelDescription, layers_with_experts

Config = Mapping[str, Any]


@dataclass(frozen=True)
class _Family:
    """What a family's models have unless their configuration says otherwise. `experts`: reads the fields of experts."""

    norm: str = "RMSNorm"
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    projection_bias: bool = False
    mlp_bias: bool = False
    has_learned_positions: bool = False
    norms_per_layer: int = 2
    head_norms: str = ""
    """Norms on queries and keys: `head` (one head's width each) or `full`."""
    experts: Callable[["_Reader"], dict[str, Any]] | None = None
    has_latent_attention: bool = False
    names_head_dim: bool = False
    """A head is not the hidden size's share: `head_dim` must say how wide it is."""
    may_omit_width: bool = False
    """Without a width of the feed-forward part it is four times the hidden size."""


class _Reader:
    """Takes fields of a configuration by one of several names."""

    def __init__(self, config: Config, source: str) -> None:
        self.config = config
        self.source = source

    def whole(self, *names: str, default: int | None = None, least: int = 0, most: int = MOST) -> int:
        """A whole number from `least` to `most`. Raise `DescriptionError` where there is none and no default."""
        for name in names:
            value = self.config.get(name)
            if type(value) is int and least <= value <= most:
                return value
            if value is not None:
                what = (
                    "a whole number" if type(value) is not int else f"{least} or more" if value < least else f"{most} or less"
                )
                raise self.wrong(name, what)
        if default is None:
            raise DescriptionError(f"{self.source}: the configuration lacks {' or '.join(names)}")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no. Raise `DescriptionError` for what is neither."""
        value = self.config.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def layers(self) -> int:
        """How many there are."""
        return self.whole("num_hidden_layers", "n_layer", least=1, most=MAX_LAYERS)

    def heads(self) -> int:
        """Of queries."""
        return self.whole("num_attention_heads", "n_head", least=1)

    def wrong(self, name: str, should_be: str) -> DescriptionError:
        """What is wrong with that field, in one line however large it is."""
        return DescriptionError(f"{self.source}: {name} is {reprlib.repr(self.config.get(name))}; it should be {should_be}")


def described_by_hugging_face(config: Config, source: str) -> ModelDescription:
    """The model of that configuration; of one with several parts, its language model. `source` is named in errors.

    Raise `DescriptionError` for a family that is not known, or a field that is missing.
    """
    for part in ("text_config", "llm_config"):
        if isinstance(config.get(part), dict):
            config = config[part]
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        what = f"model_type {kind!r} is not known" if kind else "the configuration lacks model_type"
        raise DescriptionError(
            f"{source}: {what}; known are {', '.join(sorted(_FAMILIES))}. Describe the model in a file instead"
        )
    reader = _Reader(config, source)
    fields = _dimensions(reader, family) | _attention(reader, family) | _kind(reader, family)
    if family.experts is not None:
        fields |= family.experts(reader)
    try:
        return ModelDescription(**fields)
    except DescriptionError as error:
        raise DescriptionError(f"{source}: {error}") from None


def _dimensions(reader: _Reader, family: _Family) -> dict[str, Any]:
    width = 0 if family.may_omit_width else None
    return {
        "num_layers": reader.layers(),
        "hidden_size": reader.whole("hidden_size", "n_embd"),
        "num_attention_heads": reader.heads(),
        "vocab_size": reader.whole("vocab_size"),
        "ffn_hidden_size": reader.whole("intermediate_size", "n_inner", "ffn_dim", default=width),
    }


def _attention(reader: _Reader, family: _Family) -> dict[str, Any]:
    hidden, heads = reader.whole("hidden_size", "n_embd"), reader.heads()
    if family.has_latent_attention:
        return {
            "kv_lora_rank": reader.whole("kv_lora_rank"),
            "q_lora_rank": reader.whole("q_lora_rank", default=0),
            "qk_head_dim": reader.whole("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": reader.whole("qk_rope_head_dim"),
            "v_head_dim": reader.whole("v_head_dim"),
        }
    head = reader.whole("head_dim", default=None if family.names_head_dim else 0)
    groups = reader.whole("num_key_value_heads", default=heads, least=1)
    size = head or hidden // heads
    norms = {"": 0, "head": 2 * size, "full": size * (heads + groups)}[family.head_norms]
    return {"kv_channels": head, "num_query_groups": groups, "qk_norm_size": norms}


def _kind(reader: _Reader, family: _Family) -> dict[str, Any]:
    positions = reader.whole("n_positions", "max_position_embeddings") if family.has_learned_positions else 0
    return {
        "swiglu": family.gated,
        "normalization": family.norm,
        "untie_embeddings_and_output_weights": not reader.flag("tie_word_embeddings", family.tied),
        "learned_positions": positions,
        "qkv_bias": reader.flag("attention_bias", family.qkv_bias),
        "projection_bias": reader.flag("attention_bias", family.projection_bias),
        "mlp_bias": reader.flag("mlp_bias", family.mlp_bias),
        "norms_per_layer": family.norms_per_layer,
    }


def _mixtral(reader: _Reader) -> dict[str, Any]:
    return {"num_experts": reader.whole("num_local_experts"), "moe_router_topk": reader.whole("num_experts_per_tok")}


def _qwen_moe(reader: _Reader) -> dict[str, Any]:
    num_layers, step = reader.layers(), reader.whole("decoder_sparse_step", default=1, least=1)
    listed = reader.config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise reader.wrong("mlp_only_layers", "a list of whole numbers")
    dense = set(listed)
    shared = reader.whole("shared_expert_intermediate_size", default=0)
    return {
        "num_experts": reader.whole("num_experts"),
        "moe_router_topk": reader.whole("num_experts_per_tok"),
        "moe_ffn_hidden_size": reader.whole("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared > 0,
        "moe_layers": tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    }


def _deepseek(reader: _Reader) -> dict[str, Any]:
    num_layers, num_dense = reader.layers(), reader.whole("first_k_dense_replace", default=0)
    frequency = layers_with_experts(reader.whole("moe_layer_freq", default=1, least=1), num_layers)
    width = reader.whole("moe_intermediate_size")
    return {
        "num_experts": reader.whole("n_routed_experts"),
        "moe_router_topk": reader.whole("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * reader.whole("n_shared_experts", default=0),
        "moe_router_bias": reader.config.get("topk_method") == "noaux_tc",
        "moe_layers": tuple(layer >= num_dense and is_due for layer, is_due in enumerate(frequency)),
    }


_LLAMA = _Family()
_DEEPSEEK = _Family(experts=_deepseek, has_latent_attention=True)
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "granite": _LLAMA,
    "phi3": _LLAMA,
    "gemma": _Family(tied=True, names_head_dim=True),
    "gemma2": _Family(tied=True, norms_per_layer=4, names_head_dim=True),
    "olmo2": _Family(head_norms="full"),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms="head", names_head_dim=True),
    "mixtral": _Family(experts=_mixtral),
    "qwen2_moe": _Family(qkv_bias=True, experts=_qwen_moe),
    "qwen3_moe": _Family(head_norms="head", experts=_qwen_moe),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt2": _Family("LayerNorm", False, True, True, True, True, has_learned_positions=True, may_omit_width=True),
    "gpt_neox": _Family("LayerNorm", False, False, True, True, True),
}
