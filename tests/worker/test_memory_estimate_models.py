"""Parameter counts of published models, from what their `config.json` says."""

from typing import Any

import pytest

from rsup.worker.observe.hf_config import described_by_hugging_face
from rsup.worker.observe.model_description import DescriptionError
from rsup.worker.observe.parameter_count import parameter_counts


def config(kind: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    fields = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }
    return fields | more


_DEEPSEEK_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PUBLISHED = {
    "Llama-2-7B": (config("llama", 32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "Llama-3.1-8B": (config("llama", 32, 4096, 32, 8, 14336, 128256, attention_bias=False, mlp_bias=False), 8_030_261_248),
    "Llama-3.2-1B": (config("llama", 16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True, head_dim=64), 1_235_814_400),
    "Mistral-7B": (config("mistral", 32, 4096, 32, 8, 14336, 32000, head_dim=None), 7_241_732_096),
    "Qwen2.5-7B": (config("qwen2", 28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen3-8B": (config("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128, attention_bias=False), 8_190_735_360),
    "Mixtral-8x7B": (
        config("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        config("qwen2_moe", 24, 2048, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
        | {"shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        config("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
        | {"head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
        30_532_122_624,
    ),
    "DeepSeek-V2-Lite": (
        config("deepseek_v2", 27, 2048, 16, 16, 10944, 102400, moe_intermediate_size=1408, n_routed_experts=64)
        | {"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1}
        | {**_DEEPSEEK_HEADS, "q_lora_rank": None},
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        config("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, moe_intermediate_size=2048, n_routed_experts=256)
        | {"n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1}
        | {**_DEEPSEEK_HEADS, "q_lora_rank": 1536, "topk_method": "noaux_tc"},
        671_026_419_200,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
        124_439_808,
    ),
    "Pythia-70M": (
        config("gpt_neox", 6, 512, 8, 8, 2048, 50304, tie_word_embeddings=False),
        70_426_624,
    ),
    "Gemma-2-2B": (config("gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888),
    "Gemma-2B": (config("gemma", 18, 2048, 8, 1, 16384, 256000, head_dim=256), 2_506_172_416),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters(name: str) -> None:
    fields, expected = PUBLISHED[name]
    assert parameter_counts(described_by_hugging_face(fields, name)).total == expected


def test_a_model_with_pictures_is_its_language_model() -> None:
    fields, expected = PUBLISHED["Llama-3.1-8B"]
    nested = {"model_type": "with_pictures", "text_config": fields, "vision_config": {"hidden_size": 1}}
    assert parameter_counts(described_by_hugging_face(nested, "x")).total == expected


def test_what_a_configuration_lacks_is_named() -> None:
    fields, _ = PUBLISHED["Mixtral-8x7B"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_local_experts": None}, "c.json: the configuration lacks num_local_experts"),
        ({"hidden_size": None}, "c.json: the configuration lacks hidden_size or n_embd"),
        ({"vocab_size": "many"}, "c.json: vocab_size is 'many'; it should be a whole number"),
        ({"model_type": None}, "c.json: the configuration lacks model_type; known are deepseek_v2,"),
        ({"model_type": "mamba"}, "c.json: model_type 'mamba' is not known; known are deepseek_v2,"),
        ({"intermediate_size": None}, "c.json: the configuration lacks intermediate_size or n_inner or ffn_dim"),
        ({"num_key_value_heads": 0}, "c.json: num_key_value_heads is 0; it should be 1 or more"),
        ({"model_type": "gemma"}, "c.json: the configuration lacks head_dim"),
        ({"num_experts_per_tok": 9}, "c.json: moe_router_topk is 9; with 8 experts it should be 1 to 8"),
    ]
    for change, text in cases:
        with pytest.raises(DescriptionError) as caught:
            described_by_hugging_face(fields | change, "c.json")
        assert str(caught.value).startswith(text) and "\n" not in str(caught.value)
