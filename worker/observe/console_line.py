"""The lines of the training log, as text: fields, order and units are those of the seed's section 2.1. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rsup.worker.observe.interval_counters import Interval

PPL_LIMIT = 20.0
"""A loss above it is taken for it: e**20 is as good as infinite."""


@dataclass(frozen=True)
class LineNumbers:
    """What a line says of the step that it follows. None: the field is left out."""

    iteration: int
    train_iters: int
    consumed_samples: int
    global_batch_size: int
    learning_rate: float | None = None
    loss_scale: float | None = 1.0
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    skipped_samples: int = 0
    tflops_per_rank: float | None = None
    energy_j: float | None = None
    """Of one step and rank."""
    power_w: float | None = None
    """Of one rank."""


def log_line(numbers: LineNumbers, interval: Interval) -> str:
    """The line of one interval. Losses are always printed, NaN and negative ones too."""
    width = len(str(numbers.train_iters))
    fields = [
        f" iteration {numbers.iteration:{width}d}/{numbers.train_iters}",
        f"consumed samples: {numbers.consumed_samples}",
        f"skipped samples: {numbers.skipped_samples}" if numbers.skipped_samples > 0 else "",
        f"elapsed time per iteration (ms): {interval.step_s * 1e3:.1f}",
        _field("throughput per GPU (TFLOP/s/GPU)", numbers.tflops_per_rank, ".1f"),
        _field("energy per GPU (J/iter/GPU)", numbers.energy_j, ".1f"),
        _field("power per GPU (W/GPU)", numbers.power_w, ".1f"),
        _field("learning rate", numbers.learning_rate, ".6E"),
        f"global batch size: {numbers.global_batch_size}",
        *(_field(name, loss, ".6E") for name, loss in interval.losses.items()),
        _field("loss scale", numbers.loss_scale, ".1f"),
        _field("grad norm", numbers.grad_norm, ".3f"),
        _field("num zeros", numbers.num_zeros, ".0f"),
        _field("params norm", numbers.params_norm, ".3f"),
        f"number of skipped iterations: {interval.num_skipped}",
        f"number of nan iterations: {interval.num_non_finite}",
    ]
    return " | ".join(field for field in fields if field) + " |"


def evaluation_line(iteration: int, losses: Mapping[str, float], ppls: Mapping[str, float], suffix: str = "") -> str:
    """The line of an evaluation. `suffix`: which of several sets it was on, as in `-held-out`."""
    said = [f" validation{suffix} loss at iteration {iteration}"]
    for name, loss in losses.items():
        said.append(_field(f"{name} value", loss, ".6E"))
        if name in ppls:
            said.append(_field(f"{name} PPL", ppls[name], ".6E"))
    return " | ".join(said) + " |"


def perplexity(loss: float) -> float:
    """e to the loss, which is taken for `PPL_LIMIT` where it is above it; NaN where it is."""
    return loss if math.isnan(loss) else math.exp(min(PPL_LIMIT, loss))


def _field(name: str, value: float | None, form: str) -> str:
    """`nan` and `inf` are written alike whatever the form: an E would make them upper case."""
    if value is None:
        return ""
    name = " ".join(name.split())  # a loss has any name, and a line is one line
    return f"{name}: {value:{form}}" if math.isfinite(value) else f"{name}: {value}"
