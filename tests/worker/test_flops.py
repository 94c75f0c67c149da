"""FLOPs of a step: published check values, and each kind of model against its own number of parameters."""

import math
from typing import Any

import pytest

from rsup.worker.observe.flops import step_flops, tflops_per_device, training_flops
from rsup.worker.observe.model_description import ModelDescription, layers_with_experts
from rsup.worker.observe.parameter_count import layer_counts, parameter_counts

SMALL = ModelDescription(num_layers=2, hidden_size=128, num_attention_heads=4, vocab_size=1000, ffn_hidden_size=512)
LARGE = ModelDescription(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=32000,
    ffn_hidden_size=11008,
    swiglu=True,
    normalization="RMSNorm",
    untie_embeddings_and_output_weights=True,
)
LATENT = ModelDescription(
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=100,
    ffn_hidden_size=96,
    swiglu=True,
    normalization="RMSNorm",
    untie_embeddings_and_output_weights=True,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=48,
    moe_layers=(False, True, True),
    kv_lora_rank=16,
    q_lora_rank=12,
    qk_head_dim=10,
    qk_pos_emb_head_dim=6,
    v_head_dim=8,
)
GROUPED = ModelDescription(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    vocab_size=100,
    ffn_hidden_size=96,
    num_query_groups=2,
    swiglu=True,
    normalization="RMSNorm",
    untie_embeddings_and_output_weights=True,
    num_experts=4,
    moe_router_topk=2,
    moe_layers=layers_with_experts(2, 2),
    moe_latent_size=32,
)


def test_the_published_values() -> None:
    assert step_flops(SMALL, 2048)(4) == 51_388_612_608
    large = step_flops(LARGE, 4096)(256)
    assert large == 44_945_836_320_227_328
    assert tflops_per_device(large, 10.0, 64) == pytest.approx(70.2279, abs=5e-5)
    assert math.isnan(tflops_per_device(large, 0.0, 64))


@pytest.mark.parametrize("model", [SMALL, LARGE, GROUPED, LATENT], ids=["dense", "gated", "grouped experts", "latent"])
def test_a_matrix_costs_six_flops_a_token_for_each_of_its_weights(model: ModelDescription) -> None:
    counts, layer = parameter_counts(model), layer_counts(model)
    no_products = layer.norms * model.num_layers + model.hidden_size * model.norm_size
    no_products += model.hidden_size * model.num_experts * model.num_moe_layers  # the router, which Megatron-LM leaves out
    embedding = counts.embedding if model.untie_embeddings_and_output_weights else 0  # tied, it is the output layer's matrix
    assert training_flops(model, 1, 0) == 6 * (counts.active - embedding - no_products)


def test_attention_goes_over_pairs_of_tokens_and_half_of_them() -> None:
    assert training_flops(SMALL, 0, 1) == 2 * 6 * 128  # two layers; queries with keys, and weights with values
    assert training_flops(LATENT, 0, 1) == 3 * 3 * 4 * (10 + 6 + 8)
    packed = training_flops(SMALL, 2048, 2 * 1024**2)
    assert packed < training_flops(SMALL, 2048, 2048**2)


def test_what_predicts_further_tokens_costs_its_layers_and_logits() -> None:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "ffn_hidden_size": 512,
    }
    more = ModelDescription(**fields, mtp_num_layers=1)
    three = ModelDescription(**{**fields, "num_layers": 3})
    extra = 6 * (3 * 128 + 2 * 128**2) + 6 * 128 * 1000
    assert training_flops(more, 1, 1) == training_flops(three, 1, 1) + extra


def test_flops_follow_the_batch_size() -> None:
    of_step = step_flops(SMALL, 2048)
    assert [of_step(samples) for samples in (0, 1, 7)] == [0, of_step(1), 7 * of_step(1)]
