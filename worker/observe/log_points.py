"""What the writers get: the public names of the numbers, as in the seed's section 2.1 and Megatron-LM's TensorBoard files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rsup.worker.observe.contract import Point
from rsup.worker.observe.interval_counters import Interval

_MEMORY_KEYS = {
    "mem-reserved-bytes": "reserved_bytes.all.current",
    "mem-allocated-bytes": "allocated_bytes.all.current",
    "mem-max-allocated-bytes": "allocated_bytes.all.peak",
    "mem-allocated-count": "allocation.all.current",
}


@dataclass(frozen=True)
class StepRecord:
    """One step, over all ranks; None where nobody has the number. `memory`: of this rank, by public name. `at_s`: when this
    rank ended it, in seconds since the epoch."""

    iteration: int
    consumed_samples: int
    global_batch_size: int
    losses: Mapping[str, float]
    learning_rate: float | None
    loss_scale: float | None
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    skipped_samples: int
    memory: Mapping[str, float]
    at_s: float
    max_attention_logit: float | None = None


def step_points(record: StepRecord, log_loss_scale: bool, world_size: int | None) -> list[Point]:
    """The numbers of one step, in the seed's order. `world_size`: None where it is not asked for."""
    loss_scale = (1.0 if record.loss_scale is None else record.loss_scale) if log_loss_scale else None
    figures: Sequence[tuple[str, float | None]] = (
        ("loss-scale", loss_scale),
        ("world-size", None if world_size is None else float(world_size)),
        ("grad-norm", record.grad_norm),
        ("num-zeros", record.num_zeros),
        ("params-norm", record.params_norm),
    )
    points = [] if record.learning_rate is None else [Point("learning-rate", record.learning_rate, True)]
    if record.skipped_samples > 0:
        points.append(Point("skipped-train-samples", float(record.skipped_samples)))
    points.append(Point("batch-size", float(record.global_batch_size), True))
    points.extend(Point(name, loss, True) for name, loss in record.losses.items())
    points.extend(Point(name, value, True) for name, value in figures if value is not None)
    if record.max_attention_logit is not None:
        points.append(Point("max_attention_logit", record.max_attention_logit))
    points.extend(Point(name, value) for name, value in record.memory.items())
    return points


def interval_points(interval: Interval, tflops_per_rank: float | None, tokens_per_sample: int) -> list[Point]:
    """What is known of an interval only. Seconds; counts are those of the interval."""
    points = [Point("iteration-time", interval.step_s, True)]
    if tflops_per_rank is not None:
        points.append(Point("throughput", tflops_per_rank, True))
    if tokens_per_sample:
        points.append(Point("tokens-per-second", interval.samples_per_s * tokens_per_sample))
    counts = (("skipped-iterations", interval.num_skipped), ("nan-iterations", interval.num_non_finite))
    return points + [Point(name, float(count)) for name, count in counts]


def validation_points(losses: Mapping[str, float], ppls: Mapping[str, float], suffix: str) -> list[Point]:
    """The means of an evaluation."""
    points = []
    for name, loss in losses.items():
        points.append(Point(f"{name} validation{suffix}", loss, True))
        if name in ppls:
            points.append(Point(f"{name} validation{suffix} ppl", ppls[name], True))
    return points


def memory_points() -> dict[str, float]:
    """What the allocator of the current GPU says now; nothing without one. Does not wait for it."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    statistics = torch.cuda.memory_stats()
    return {name: float(statistics[key]) for name, key in _MEMORY_KEYS.items() if key in statistics}
