"""What fits on how many GPUs: for each number of them the plainest layout that leaves a GPU enough room. Pure.

*Plainest*: the fewest pipeline stages, then the least recomputation (it costs a third of the computation), then the least
tensor parallelism, then experts on the fewest ranks. The optimizer is sharded over data-parallel ranks (Megatron-LM's
distributed optimizer, which costs next to nothing); tensor parallelism stays within a node, and has sequence parallelism with
it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rsup.worker.observe.activation_memory import Recompute, StepShape
from rsup.worker.observe.memory_estimate import MEGATRON_ADAM, MemoryEstimate, OptimizerKind, estimate
from rsup.worker.observe.model_description import ModelDescription
from rsup.worker.observe.parallel_layout import ParallelLayout, Sharding

GPU_SIZES_GB = (80, 141)
"""H100 and H200; GB as their makers count them, 10^9 bytes, which is a little less than the device has."""
RESERVE_GB = 6.0
"""Of a GPU, for the CUDA context, NCCL, workspaces and what the allocator cannot use."""
NUMBERS_OF_GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GPUS_IN_NODE = 8


@dataclass(frozen=True)
class Fit:
    """A layout that fits, and what it needs; or None, and the least that any layout needs."""

    num_gpus: int
    gpu_gb: float
    layout: ParallelLayout | None
    shape: StepShape
    estimate: MemoryEstimate

    @property
    def described(self) -> str:
        """The layout in words."""
        if self.layout is None:
            return "does not fit"
        recompute = "" if self.shape.recompute is Recompute.NONE else f", {self.shape.recompute} recompute"
        return f"{self.layout}{recompute}"


def fits(
    model: ModelDescription,
    shape: StepShape,
    *,
    kind: OptimizerKind = MEGATRON_ADAM,
    gpu_sizes_gb: Sequence[float] = GPU_SIZES_GB,
    numbers: Sequence[int] = NUMBERS_OF_GPUS,
    reserve_gb: float = RESERVE_GB,
    shards: Sharding = Sharding.OPTIMIZER,
) -> list[Fit]:
    """For each number of GPUs and each size of theirs, one `Fit`. Recomputation is chosen here, `shape`'s is the least."""
    found = []
    for num_gpus in numbers:
        tried = [(layout, some, estimate(model, layout, some, kind)) for layout, some in _ways(model, shape, num_gpus, shards)]
        for gpu_gb in gpu_sizes_gb:
            room = (gpu_gb - reserve_gb) * 1e9
            first = next(((layout, some, needs) for layout, some, needs in tried if needs.total <= room), None)
            if first is None:
                _, some, least = min(tried, key=lambda way: way[2].total)
                found.append(Fit(num_gpus, gpu_gb, None, some, least))
            else:
                found.append(Fit(num_gpus, gpu_gb, *first))
    return found


def _ways(
    model: ModelDescription, shape: StepShape, num_gpus: int, shards: Sharding
) -> Iterator[tuple[ParallelLayout, StepShape]]:
    """Layouts of so many GPUs, the plainest first."""
    recomputes = [Recompute.NONE, Recompute.FULL]
    if not shape.flash_attention:
        recomputes.insert(1, Recompute.SELECTIVE)
    order = list(Recompute)
    for pipeline in _pipelines(model, num_gpus):
        experts = _experts(model, num_gpus, pipeline)
        for recompute in [one for one in recomputes if order.index(one) >= order.index(shape.recompute)]:
            for tensor in _tensors(model, num_gpus, pipeline):
                for expert in experts:
                    layout = ParallelLayout(
                        num_gpus,
                        tensor,
                        pipeline,
                        expert=expert,
                        expert_tensor=1 if model.num_experts else None,
                        sequence_parallel=tensor > 1,
                        sharding=shards,
                    )
                    yield layout, replace(shape, recompute=recompute)


def _tensors(model: ModelDescription, num_gpus: int, stages: int) -> list[int]:
    """Within a node, and heads divide among them."""
    sizes = [size for size in range(1, GPUS_IN_NODE + 1) if num_gpus % (size * stages) == 0]
    heads = (model.num_attention_heads, model.num_groups)
    return [size for size in sizes if all(number % size == 0 for number in heads)]


def _pipelines(model: ModelDescription, num_gpus: int) -> list[int]:
    """One stage; more where layers divide among them. Stages are only for what is too large for one node."""
    stages = [2**power for power in range(1, 6) if 2**power * GPUS_IN_NODE <= num_gpus and num_gpus % 2**power == 0]
    return [1, *(number for number in stages if number <= model.num_layers)]


def _experts(model: ModelDescription, num_gpus: int, stages: int) -> list[int]:
    """Experts on one rank, or spread over as many as divide them: ranks of one stage."""
    if not model.num_experts:
        return [1]
    in_a_stage = num_gpus // stages
    sizes = range(1, min(model.num_experts, in_a_stage) + 1)
    return [size for size in sizes if model.num_experts % size == 0 and in_a_stage % size == 0]
