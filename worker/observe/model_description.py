"""What a transformer is, as far as its FLOPs and its memory go. No torch, no GPU.

A description comes from code, from a JSON or YAML file with the names below (Megatron-LM's options where it has them), or from
a Hugging Face `config.json` (`hf_config`). What it must have and has not is named in one line.
"""

import dataclasses
import difflib
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rsup.supervisor.wire import UsageError

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
MAX_LAYERS = 10_000
MAX_EXPERTS = 20_000
MOST = 10**9
"""Of any other number: far beyond every model, and small enough to compute with."""
_MOST = {"num_layers": MAX_LAYERS, "mtp_num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS, "moe_router_topk": MAX_EXPERTS}


class DescriptionError(UsageError):
    """A model description that lacks something or contradicts itself; the text names the field and what it should be."""


@dataclass(frozen=True)
class ModelDescription:
    """A decoder of `num_layers` equal blocks, each with attention and a dense or a mixture-of-experts feed-forward part.

    Four fields have no default. A number of 0 means that there is no such thing. Raises `DescriptionError` where fields do not
    fit together.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    """Padded, as the embedding has it."""
    ffn_hidden_size: int = 0
    """Of dense layers; 4 times `hidden_size` unless given."""
    kv_channels: int = 0
    """Of one head; `hidden_size / num_attention_heads` unless given."""
    num_query_groups: int = 0
    """Heads of keys and values; as many as there are heads unless given."""
    swiglu: bool = False
    """The feed-forward part has a gate: three matrices in place of two."""
    normalization: str = "LayerNorm"
    untie_embeddings_and_output_weights: bool = False
    """The output layer has a matrix of its own."""
    learned_positions: int = 0
    """Rows of a learned position embedding."""

    qkv_bias: bool = False
    projection_bias: bool = False
    mlp_bias: bool = False
    qk_norm_size: int = 0
    """Weights of a layer's norms on queries and keys, together."""
    norms_per_layer: int = 2

    num_experts: int = 0
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    """Of one expert; `ffn_hidden_size` unless given."""
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_router_bias: bool = False
    moe_latent_size: int = 0
    moe_layers: tuple[bool, ...] = ()
    """Which layers have experts; all of them unless given."""

    kv_lora_rank: int = 0
    """Multi-latent attention, where it is given; then `qk_head_dim`, `qk_pos_emb_head_dim` and `v_head_dim` must be, too."""
    q_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0

    mtp_num_layers: int = 0
    """Layers that predict further tokens, of the last layer's kind."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def ffn_size(self) -> int:
        """Width of a dense feed-forward part."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Width of all queries together."""
        return self.head_size * self.num_attention_heads

    @property
    def key_size(self) -> int:
        """Width of all keys together, and of all values."""
        return self.head_size * self.num_groups

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values come from a latent (MLA)."""
        return self.kv_lora_rank > 0

    @property
    def mlp_matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.swiglu else 2

    @property
    def norm_size(self) -> int:
        """Weights of a norm for each channel: a LayerNorm has a bias."""
        return 1 if self.normalization == "RMSNorm" else 2

    @property
    def expert_ffn_size(self) -> int:
        """Width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def num_moe_layers(self) -> int:
        """Main layers with experts."""
        if not self.num_experts:
            return 0
        return sum(self.moe_layers) if self.moe_layers else self.num_layers

    @property
    def num_dense_layers(self) -> int:
        """Main layers without."""
        return self.num_layers - self.num_moe_layers

    @property
    def ends_with_experts(self) -> bool:
        """Whether the last layer, and so each one of `mtp_num_layers`, has experts."""
        return bool(self.num_experts) and (self.moe_layers[-1] if self.moe_layers else True)

    @property
    def num_mtp_moe_layers(self) -> int:
        """Those of `mtp_num_layers` that have experts."""
        return self.mtp_num_layers if self.ends_with_experts else 0

    @property
    def num_mtp_dense_layers(self) -> int:
        """Those that have none."""
        return self.mtp_num_layers - self.num_mtp_moe_layers


def layers_with_experts(frequency: int | tuple[bool, ...], num_layers: int) -> tuple[bool, ...]:
    """By layer, whether it has experts: Megatron-LM's `--moe-layer-freq`. A number f means every layer i with `i % f == 0`."""
    if isinstance(frequency, tuple):
        if len(frequency) != num_layers:
            raise DescriptionError(f"moe_layers: {len(frequency)} entries for {num_layers} layers; give one for each layer")
        return frequency
    if num_layers > MAX_LAYERS:
        raise DescriptionError(f"num_layers is {num_layers}; it should be {MAX_LAYERS} or less")
    if frequency < 1:
        raise DescriptionError(f"moe_layers: {frequency} is not 1 or more")
    return tuple(layer % frequency == 0 for layer in range(num_layers))


def described(fields: Mapping[str, Any], source: str) -> ModelDescription:
    """The model that `fields` describe: names and values of a JSON or YAML file. `source` is named in errors.

    `moe_layers` may be a frequency, or a list of 0 and 1. Raise `DescriptionError`, one line, for a field that is missing,
    unknown, or of the wrong kind.
    """
    known = {field.name: field for field in dataclasses.fields(ModelDescription)}
    kinds = typing.get_type_hints(ModelDescription)
    for name in fields:
        if name not in known:
            shown = name if isinstance(name, str) and name.isidentifier() else reprlib.repr(name)
            raise DescriptionError(f"{source}: unknown field {shown[:80]}{_near(str(name)[:80], list(known))}")
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields]
    if missing:
        raise DescriptionError(f"{source}: the description lacks {' and '.join(missing)}")
    values = {name: _value(name, value, kinds[name], source) for name, value in fields.items() if name != "moe_layers"}
    try:
        if "moe_layers" in fields:
            values["moe_layers"] = layers_with_experts(_pattern(fields["moe_layers"]), values["num_layers"])
        return ModelDescription(**values)
    except DescriptionError as error:
        raise DescriptionError(f"{source}: {error}") from None


def _near(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, 1)
    return f"; is it {found[0]}?" if found else f"; there are {', '.join(known)}"


def _value(name: str, value: Any, kind: type, source: str) -> Any:
    words = {bool: "true or false", int: "a whole number", str: "a word"}
    if type(value) is not kind:
        raise DescriptionError(f"{source}: {name} is {reprlib.repr(value)}; it should be {words[kind]}")
    return value


def _pattern(value: Any) -> int | tuple[bool, ...]:
    if type(value) is int:
        return value
    if isinstance(value, list) and all(entry in (0, 1) for entry in value):
        return tuple(map(bool, value))
    raise DescriptionError(f"moe_layers is {reprlib.repr(value)}; it should be a whole number, or a list of 0 and 1")


def _check(model: ModelDescription) -> None:
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        least = 1 if field.default is dataclasses.MISSING else 0
        if type(value) is int and value < least:
            raise DescriptionError(f"{field.name} is {value}; it should be {least} or more")
        most = _MOST.get(field.name, MOST)
        if type(value) is int and value > most:
            raise DescriptionError(f"{field.name} is {value:.4g}; it should be {most} or less")
    if model.normalization not in NORMALIZATIONS:
        raise DescriptionError(f"normalization is {model.normalization!r}; it should be {' or '.join(NORMALIZATIONS)}")
    if not model.kv_channels and model.hidden_size % model.num_attention_heads and not model.has_latent_attention:
        sizes = f"hidden_size {model.hidden_size} is not divisible by num_attention_heads {model.num_attention_heads}"
        raise DescriptionError(f"{sizes}; give kv_channels")
    if model.num_attention_heads % model.num_groups:
        raise DescriptionError(
            f"num_attention_heads {model.num_attention_heads} is not divisible by num_query_groups {model.num_groups}"
        )
    _check_experts(model)
    if model.has_latent_attention:
        lacking = [name for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim") if not getattr(model, name)]
        if lacking:
            raise DescriptionError(f"the description has kv_lora_rank and lacks {' and '.join(lacking)}")


def _check_experts(model: ModelDescription) -> None:
    if not model.num_experts:
        given = [name for name in ("moe_router_topk", "moe_ffn_hidden_size", "moe_layers") if getattr(model, name)]
        if given:
            raise DescriptionError(f"the description has {given[0]} and lacks num_experts")
        return
    if not 1 <= model.moe_router_topk <= model.num_experts:
        what = f"is {model.moe_router_topk}" if model.moe_router_topk else "is missing"
        raise DescriptionError(
            f"moe_router_topk {what}; with {model.num_experts} experts it should be 1 to {model.num_experts}"
        )
    if model.moe_layers and len(model.moe_layers) != model.num_layers:
        layers_with_experts(model.moe_layers, model.num_layers)  # says so
