"""What a rank needs in GPU memory before anything has run: weights, gradients, optimizer, activations. Pure, no GPU.

Sources: Megatron-LM's theoretical report for the shares of ranks and for 18 or 6 + 12 / DP bytes a parameter; Rajbhandari et
al. 2020 ("ZeRO") for the other shardings. `reference_memory` has the numbers of the reference trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rsup.worker.observe.activation_memory import StepShape, activation_bytes, megatron_activation_bytes
from rsup.worker.observe.model_description import ModelDescription
from rsup.worker.observe.parallel_layout import ParallelLayout, Sharding
from rsup.worker.observe.parameter_count import RankShare, layer_counts, most_loaded_share, other_share, parameter_counts

MIB = 1 << 20


@dataclass(frozen=True)
class OptimizerKind:
    """Bytes of a parameter: as the forward pass has it, of its gradient, and of what the optimizer keeps (a float32 copy
    included). `meaning`: for people."""

    name: str
    weight: int
    gradient: int
    state: int
    meaning: str

    @property
    def unsharded(self) -> int:
        """Bytes of a parameter where nothing is divided."""
        return self.weight + self.gradient + self.state


MEGATRON_ADAM = OptimizerKind("adam-bf16", 2, 4, 12, "bfloat16 weights, float32 gradients, master copy and Adam's moments")
ADAMW_FP32 = OptimizerKind("adamw-fp32", 4, 4, 8, "float32 throughout, also under autocast: the reference trainer's")
OPTIMIZERS = {
    kind.name: kind
    for kind in (
        MEGATRON_ADAM,
        OptimizerKind("adam-bf16-grads", 2, 2, 12, "bfloat16 weights and gradients, float32 master copy and moments"),
        OptimizerKind("adamw-bf16", 2, 2, 4, "bfloat16 throughout, moments too"),
        OptimizerKind("adam-8bit", 2, 2, 6, "bfloat16 weights and gradients, float32 master copy, moments in 8 bits"),
        ADAMW_FP32,
        OptimizerKind("sgd-momentum-fp32", 4, 4, 4, "float32 weights, gradients and momentum"),
        OptimizerKind("sgd-fp32", 4, 4, 0, "float32 weights and gradients"),
        OptimizerKind("muon-bf16", 2, 4, 8, "bfloat16 weights, float32 gradients, master copy and momentum"),
    )
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the most loaded rank. `megatron_activations`: as Megatron-LM's report has them; `activations`: what is kept."""

    weights: Fraction
    gradients: Fraction
    optimizer: Fraction
    activations: Fraction
    megatron_activations: Fraction

    @property
    def weights_and_optimizer(self) -> Fraction:
        """All that stays from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> Fraction:
        """All of it."""
        return self.weights_and_optimizer + self.activations

    @property
    def megatron_total(self) -> Fraction:
        """The sum that Megatron-LM prints."""
        return self.weights_and_optimizer + self.megatron_activations


def estimate(
    model: ModelDescription, layout: ParallelLayout, shape: StepShape, kind: OptimizerKind = MEGATRON_ADAM
) -> MemoryEstimate:
    """What the most loaded rank needs."""
    weights, gradients, optimizer = parameter_bytes(most_loaded_share(model, layout), layout, kind)
    if layout.sharding is Sharding.PARAMETERS and layout.data * layout.context > 1:
        weights += _gathered(model, layout, kind)
    activations = activation_bytes(model, layout, shape)
    return MemoryEstimate(weights, gradients, optimizer, activations, megatron_activation_bytes(model, layout, shape))


def weight_and_optimizer_bytes(
    model: ModelDescription, layout: ParallelLayout, kind: OptimizerKind = MEGATRON_ADAM
) -> Fraction:
    """Bytes of weights, gradients and optimizer of the most loaded rank: Megatron-LM's figure, for its kind of optimizer."""
    return sum(parameter_bytes(most_loaded_share(model, layout), layout, kind), Fraction(0))


def parameter_bytes(share: RankShare, layout: ParallelLayout, kind: OptimizerKind) -> tuple[Fraction, Fraction, Fraction]:
    """Bytes of weights, gradients and optimizer for a rank's share of parameters."""
    dense, experts = share.split + share.whole, share.experts
    by_data, by_expert_data = layout.data * layout.context, layout.expert_data

    def divided(size: int, is_sharded: bool) -> Fraction:
        if not is_sharded:
            return size * (dense + experts)
        return size * (dense / by_data + experts / max(by_expert_data, 1))

    sharding = layout.sharding
    return (
        divided(kind.weight, sharding is Sharding.PARAMETERS),
        divided(kind.gradient, sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS)),
        divided(kind.state, sharding is not Sharding.NONE),
    )


def _gathered(model: ModelDescription, layout: ParallelLayout, kind: OptimizerKind) -> Fraction:
    """Bytes of the two largest layers whole, the one that is computed and the one that is fetched ahead."""
    layer = layer_counts(model)
    experts = layer.routed if model.num_experts else 0
    dense = (layer.moe_layer - experts) if model.num_moe_layers else 0
    dense = max(dense, layer.dense_layer if model.num_dense_layers else 0, model.hidden_size * model.vocab_size)
    return 2 * kind.weight * (Fraction(dense, layout.tensor) + Fraction(experts, layout.expert * layout.expert_tensor_size))


def report_lines(
    model: ModelDescription, layout: ParallelLayout, shape: StepShape, kind: OptimizerKind = MEGATRON_ADAM
) -> Sequence[str]:
    """The theoretical report for people, with the items of Megatron-LM's; MB are 2^20 bytes."""
    counts = parameter_counts(model)
    found = estimate(model, layout, shape, kind)
    lines = [
        f"parameters in billions: {_billions(counts.total)} in all, {_billions(counts.active)} active; "
        f"blocks {_billions(counts.block)}, embedding {_billions(counts.embedding)}"
        + (f", further tokens {_billions(counts.mtp)}" if counts.mtp else ""),
        f"parameters in billions of the most loaded rank ({layout}): {_billions(most_loaded_share(model, layout).total)}"
        + (f", of one in the middle: {_billions(other_share(model, layout).total)}" if layout.pipeline > 1 else ""),
        theory_line(found.weights_and_optimizer, found.activations),
    ]
    return lines


def theory_line(weights_and_optimizer: Fraction | int, activations: Fraction | int) -> str:
    """The one line that Megatron-LM prints."""
    total = weights_and_optimizer + activations
    return (
        f"theoretical memory footprints: weight and optimizer={megabytes(weights_and_optimizer)} MB, "
        f"activation={megabytes(activations)} MB, total={megabytes(total)} MB"
    )


def megabytes(size_bytes: Fraction | int) -> str:
    """In units of 2^20 bytes, with two decimals."""
    return f"{float(size_bytes) / MIB:.2f}"


def _billions(count: Fraction | int) -> str:
    return f"{float(count) / 1e9:.2f}" if count >= 1e7 else f"{float(count) / 1e9:.6f}"
