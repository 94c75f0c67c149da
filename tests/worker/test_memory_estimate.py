"""Megatron-LM's theoretical report to the byte, and what is true of activations beside it."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from rsup.worker.observe.activation_memory import Recompute, StepShape, kept_by_layer, megatron_activation_bytes
from rsup.worker.observe.memory_estimate import (
    MEGATRON_ADAM,
    MIB,
    OPTIMIZERS,
    estimate,
    report_lines,
    weight_and_optimizer_bytes,
)
from rsup.worker.observe.memory_fit import fits
from rsup.worker.observe.model_description import DescriptionError, ModelDescription, described, layers_with_experts
from rsup.worker.observe.parallel_layout import LayoutError, ParallelLayout, Sharding
from rsup.worker.observe.parameter_count import layer_counts, most_loaded_share, parameter_counts

ONE = ParallelLayout()
OPTIM = Sharding.OPTIMIZER
GATED: dict[str, Any] = {"swiglu": True, "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True}
TINY = ModelDescription(2, 8, 2, 32, ffn_hidden_size=16)
SEVEN_B = ModelDescription(32, 4096, 32, 32000, 11008, **GATED)
SEVENTY_B = ModelDescription(80, 8192, 64, 128256, 28672, num_query_groups=8, **GATED)
EIGHT_EXPERTS = ModelDescription(
    32, 4096, 32, 32000, 14336, num_query_groups=8, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=14336, **GATED
)
LATENT = ModelDescription(
    27,
    2048,
    16,
    102400,
    10944,
    num_experts=64,
    moe_router_topk=6,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=2816,
    moe_layers=(False, *[True] * 26),
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    **GATED,
)
LAST_TINY = ModelDescription(
    2,
    8,
    2,
    32,
    16,
    normalization="RMSNorm",
    num_experts=4,
    moe_router_topk=1,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=8,
    moe_layers=(False, True),
)
SELECTIVE = StepShape(4096, recompute=Recompute.SELECTIVE)


def exactly(*sizes: Fraction) -> list[float]:
    """Whole numbers of bytes or parameters."""
    assert all(size.denominator == 1 for size in sizes), sizes
    return [float(size) for size in sizes]


def in_megabytes(size_bytes: Fraction) -> float:
    return round(float(size_bytes) / MIB, 2)


# --------------------------------------------------------------------------------------------- Megatron-LM's six examples


def test_example_1_tiny() -> None:
    counts = parameter_counts(TINY)
    assert (layer_counts(TINY).dense_layer, counts.block, counts.embedding, counts.total) == (544, 1104, 256, 1360)
    assert weight_and_optimizer_bytes(TINY, ONE) == 24_480
    selective = StepShape(4, 2, recompute=Recompute.SELECTIVE)
    assert megatron_activation_bytes(TINY, ParallelLayout(sequence_parallel=True), selective) == 4736
    assert megatron_activation_bytes(TINY, ONE, StepShape(4, 2)) == 5376


def test_example_2_seven_billion() -> None:
    layout = ParallelLayout(8, sharding=OPTIM)
    assert layer_counts(SEVEN_B).dense_layer == 202_383_360
    assert parameter_counts(SEVEN_B).total == 6_738_415_616
    weights = weight_and_optimizer_bytes(SEVEN_B, layout)
    activations = megatron_activation_bytes(SEVEN_B, layout, StepShape(4096))
    assert exactly(weights) == [50_538_117_120] and in_megabytes(weights) == 48196.90
    assert activations == Fraction("19494425395.2") and in_megabytes(activations) == 18591.33
    assert in_megabytes(weights + activations) == 66788.24
    assert estimate(SEVEN_B, layout, StepShape(4096)).megatron_total == weights + activations
    assert megatron_activation_bytes(SEVEN_B, replace(layout, sequence_parallel=True), SELECTIVE) == 16_043_245_568
    assert weight_and_optimizer_bytes(SEVEN_B, ParallelLayout(8)) == 121_291_481_088


def test_example_3_seventy_billion() -> None:
    layout = ParallelLayout(64, 8, 4, 5, sequence_parallel=True, sharding=OPTIM)
    share = most_loaded_share(SEVENTY_B, layout)
    assert exactly(share.split, share.whole, share.experts) == [2_270_429_184, 329_728, 0]
    weights = weight_and_optimizer_bytes(SEVENTY_B, layout)
    shape = replace(SELECTIVE, seq_length=8192)
    activations = megatron_activation_bytes(SEVENTY_B, layout, shape)
    assert exactly(weights, activations) == [27_249_106_944, 24_734_687_232]
    assert [in_megabytes(size) for size in (weights, activations, weights + activations)] == [25986.77, 23588.84, 49575.61]
    plain = replace(layout, virtual_pipeline=None)
    few = megatron_activation_bytes(SEVENTY_B, plain, replace(shape, num_microbatches=2))
    assert exactly(few) == [10_754_211_840] and in_megabytes(few) == 10256.02


def test_example_4_eight_experts() -> None:
    layout = ParallelLayout(64, 2, 2, expert=8, expert_tensor=1, sequence_parallel=True, sharding=OPTIM)
    share = most_loaded_share(EIGHT_EXPERTS, layout)
    assert exactly(share.split, share.whole, share.experts) == [401_080_320, 657_408, 2_818_572_288]
    assert (layout.data, layout.expert_data) == (16, 4)
    assert weight_and_optimizer_bytes(EIGHT_EXPERTS, layout) == 28_078_880_256
    shape = replace(SELECTIVE, num_microbatches=8)
    assert megatron_activation_bytes(EIGHT_EXPERTS, layout, shape) == 8_606_744_576
    counts = parameter_counts(EIGHT_EXPERTS)
    assert (round(counts.total / 1e9, 2), round(counts.active / 1e9, 2)) == (46.70, 12.88)


def test_example_5_latent_attention_and_experts() -> None:
    layout = ParallelLayout(8, expert=8, sharding=OPTIM)
    assert layer_counts(LATENT).attention_split == 13_763_072
    share = most_loaded_share(LATENT, layout)
    assert exactly(share.split, share.whole, share.experts) == [1_308_112_384, 3_520_512, 1_799_356_416]
    assert weight_and_optimizer_bytes(LATENT, layout) == 42_225_662_208
    assert megatron_activation_bytes(LATENT, layout, StepShape(4096)) == Fraction("8993041612.8")


def test_example_6_expert_groups_of_their_own() -> None:
    layout = ParallelLayout(64, 2, 2, expert=2, expert_tensor=4, sharding=OPTIM)
    assert weight_and_optimizer_bytes(LAST_TINY, layout) == 3195


def test_more_ranks_never_need_more() -> None:
    plain = ParallelLayout(64, sharding=OPTIM)
    for name in ("tensor", "expert", "expert_tensor"):
        groups: list[dict[str, Any]] = [{name: size} for size in (1, 2, 4, 8)]
        sizes = [weight_and_optimizer_bytes(EIGHT_EXPERTS, replace(plain, **some)) for some in groups]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4, name


# ------------------------------------------------------------------------------------------------------ what is true


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "recompute", "expected"),
    [
        (1, False, Recompute.NONE, lambda a, s, h, t: 34 + 5 * Fraction(a * s, h)),
        (8, False, Recompute.NONE, lambda a, s, h, t: 10 + Fraction(24, t) + 5 * Fraction(a * s, h * t)),
        (8, True, Recompute.NONE, lambda a, s, h, t: (34 + 5 * Fraction(a * s, h)) / t),
        (8, False, Recompute.SELECTIVE, lambda a, s, h, t: 10 + Fraction(24, t)),
        (8, True, Recompute.SELECTIVE, lambda a, s, h, t: Fraction(34, t)),
        (1, False, Recompute.FULL, lambda a, s, h, t: 2),
        (8, True, Recompute.FULL, lambda a, s, h, t: Fraction(2, t)),
    ],
)
def test_a_plain_layer_keeps_what_the_paper_says(
    tensor: int, sequence_parallel: bool, recompute: Recompute, expected: Callable[[int, int, int, int], Fraction]
) -> None:
    model = ModelDescription(4, 1024, 16, 50257)
    layout = ParallelLayout(8, tensor, sequence_parallel=sequence_parallel)
    shape = StepShape(2048, 2, recompute=recompute, flash_attention=False, dropout=True)
    assert kept_by_layer(model, layout, shape, moe=False) == 2048 * 2 * 1024 * expected(16, 2048, 1024, tensor)


def test_each_way_to_save_activations_saves_some() -> None:
    plain = StepShape(4096, flash_attention=False)
    shapes = [plain, replace(plain, recompute=Recompute.SELECTIVE), replace(plain, recompute=Recompute.FULL)]
    for model in (SEVEN_B, SEVENTY_B, EIGHT_EXPERTS, LATENT):
        sizes = [estimate(model, ONE, shape).activations for shape in shapes]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
        with_flash = estimate(model, ONE, StepShape(4096)).activations
        assert sizes[1] < with_flash < sizes[0]


def test_experts_count_with_their_own_width() -> None:
    narrow, wide = (replace(LATENT, moe_ffn_hidden_size=width) for width in (704, 1408))
    shape = StepShape(4096)
    more = kept_by_layer(wide, ONE, shape, True) - kept_by_layer(narrow, ONE, shape, True)
    assert more == 4096 * 6 * 2 * 3 * 704  # six experts a token; gate, product and what the second matrix gets
    assert megatron_activation_bytes(wide, ONE, shape) == megatron_activation_bytes(narrow, ONE, shape)


def test_shardings_divide_what_they_say() -> None:
    counts = parameter_counts(SEVEN_B).total
    sizes = {
        sharding: weight_and_optimizer_bytes(SEVEN_B, ParallelLayout(8, sharding=sharding)) / counts for sharding in Sharding
    }
    assert [float(size) for size in sizes.values()] == [18, 6 + 12 / 8, 2 + 16 / 8, 18 / 8]
    assert MEGATRON_ADAM.unsharded == 18 and OPTIMIZERS["adamw-fp32"].unsharded == 16


# ------------------------------------------------------------------------------------------------------- what is said


def test_the_report_says_what_megatrons_says() -> None:
    lines = report_lines(TINY, ONE, StepShape(4, 2))
    assert lines[0] == "parameters in billions: 0.000001 in all, 0.000001 active; blocks 0.000001, embedding 0.000000"
    assert lines[-1].startswith(
        "theoretical memory footprints: weight and optimizer=0.02 MB, activation=0.01 MB, total=0.03 MB"
    )


def test_the_table_goes_to_more_parallelism_only_where_it_must() -> None:
    found = {(fit.num_gpus, fit.gpu_gb): fit for fit in fits(SEVENTY_B, StepShape(4096), numbers=(1, 8, 64, 256))}
    assert found[1, 80].layout is None and found[1, 80].described == "does not fit"
    for fit in found.values():
        if fit.layout is not None:
            assert fit.estimate.total <= (fit.gpu_gb - 6) * 10**9
            assert fit.layout.world_size == fit.num_gpus
    at_141, at_80 = found[256, 141], found[256, 80]
    assert at_141.layout is not None and at_80.layout is not None
    assert at_141.layout.tensor * at_141.layout.pipeline <= at_80.layout.tensor * at_80.layout.pipeline
    odd = [fit.layout for fit in fits(EIGHT_EXPERTS, StepShape(4096), numbers=(6, 12, 24, 63), gpu_sizes_gb=(141,))]
    assert [layout and layout.world_size for layout in odd] == [None, 12, 24, None]
    small = fits(TINY, StepShape(4), numbers=(1,), gpu_sizes_gb=(80,))
    assert small[0].described == "one rank"


def test_what_is_wrong_is_said_in_one_line() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_layers": 2, "hidden_size": 8}, "x: the description lacks num_attention_heads and vocab_size"),
        ({"num_layer": 2}, "x: unknown field num_layer; is it num_layers?"),
        ({"num_layers": "2"}, "x: num_layers is '2'; it should be a whole number"),
        ({"swiglu": 1}, "x: swiglu is 1; it should be true or false"),
        ({"num_layers": 0}, "x: num_layers is 0; it should be 1 or more"),
        ({"hidden_size": 9}, "x: hidden_size 9 is not divisible by num_attention_heads 2; give kv_channels"),
        ({"num_experts": 4}, "x: moe_router_topk is missing; with 4 experts it should be 1 to 4"),
        ({"moe_router_topk": 1}, "x: the description has moe_router_topk and lacks num_experts"),
        ({"num_experts": 4, "moe_router_topk": 1, "moe_layers": [1]}, "x: moe_layers: 1 entries for 2 layers; give one"),
        ({"kv_lora_rank": 4}, "x: the description has kv_lora_rank and lacks qk_head_dim and qk_pos_emb_head_dim and v_head"),
        ({"normalization": "BatchNorm"}, "x: normalization is 'BatchNorm'; it should be LayerNorm or RMSNorm"),
    ]
    whole = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32}
    for fields, text in cases:
        given = fields if "lacks num_att" in text else {**whole, **fields}
        with pytest.raises(DescriptionError) as caught:
            described(given, "x")
        assert str(caught.value).startswith(text) and "\n" not in str(caught.value)
    assert described(whole, "x") == ModelDescription(2, 8, 2, 32)


def test_layouts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"8 ranks are no multiple of tensor 3 x pipeline 1 x context 1 = 3"):
        ParallelLayout(8, 3)
    with pytest.raises(LayoutError, match=r"8 ranks are no multiple of expert 16 x expert tensor 1 x pipeline 1 = 16"):
        ParallelLayout(8, expert=16)
    with pytest.raises(LayoutError, match=r"pipeline is 0; it should be 1 or more"):
        ParallelLayout(8, pipeline=0)
    assert layers_with_experts(3, 5) == (True, False, False, True, False)
