"""One step as it is handed to the training log, and while its numbers are on their way from the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from rsup.worker.observe.late_scalars import Value
from rsup.worker.observe.log_points import StepRecord
from rsup.worker.observe.plain_tensor import plain
from rsup.worker.observe.step_reduction import SumAndCount

Loss = Value | tuple[Value, Value] | None
"""Of one rank and step: a mean, a sum and a count, or none."""


def loss_values(loss: Loss) -> tuple[Sequence[Value], int]:
    """What is to be read of a loss, and how many numbers that is; 0 for None. Raise for what is none."""
    if type(loss) is float:
        return (loss,), 1
    if isinstance(loss, torch.Tensor):
        loss = plain(loss)
        if (size := loss.numel()) in (1, 2):
            return (loss,), size
        raise TypeError(f"it has the shape {list(loss.shape)}, not [] or [2], sum and count")
    if loss is None:
        return (), 0
    if isinstance(loss, tuple | list) and len(loss) == 2 and all(_is_number(part) for part in loss):
        return [number_of(part) for part in loss], 2
    if _is_number(loss):
        return (number_of(loss),), 1
    raise TypeError(f"it is a {type(loss).__name__}, neither a number nor (sum, count)")


def number_of(value: object) -> Value:
    """What is to be read of a figure. Raise for what is not one number."""
    if isinstance(value, torch.Tensor):
        tensor = plain(value)
        if tensor.numel() == 1:
            return tensor
        raise TypeError(f"it has the shape {list(tensor.shape)}, not []")
    if not _is_number(value):
        raise TypeError(f"it is a {type(value).__name__}, no number")
    return float(value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else hasattr(value, "__float__")


@dataclass(frozen=True)
class StepNumbers:
    """What one step gives the log. `iteration`: 1-based, global; `consumed_samples`: of all ranks, the step's included.

    `losses`: of this rank; `[]`, the mean, which counts as one; or `[2]`, or a tuple, sum and count (of tokens, say), which are
    added up over ranks before they are divided; None, or not there, where this rank has none. Tensors are on any device, and
    read as they are in the step's call, on the current stream; of a DTensor what each rank has alike. `learning_rate`,
    `grad_norm`, `params_norm`, `num_zeros`, `max_attention_logit` (the greatest product of a query and a key, before the
    softmax): the greatest of all ranks counts, None: this rank has none. `skipped`: parameters were not updated; `computed`:
    anything was computed at all.
    """

    iteration: int
    consumed_samples: int
    losses: Mapping[str, Loss]
    learning_rate: Value | None
    global_batch_size: int
    skipped: bool = False
    loss_scale: Value | None = None
    grad_norm: Value | None = None
    params_norm: Value | None = None
    num_zeros: Value | None = None
    computed: bool = True
    skipped_samples: int = 0
    """Since the beginning of the run: samples that are counted and that nobody trained on."""
    max_attention_logit: Value | None = None


FIGURES = ("learning rate", "loss scale", "grad norm", "num zeros", "params norm", "max attention logit")
"""For people, in the order of `StepFigures`."""


class StepFigures(NamedTuple):
    """What the device gave of one step, of this rank."""

    learning_rate: float | None
    loss_scale: float | None
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    max_attention_logit: float | None
    losses: dict[str, SumAndCount]


class PendingStep(NamedTuple):
    """A step whose numbers are on their way. `has`: which of `FIGURES` it has. `losses`: names, and how many numbers each.
    `at_s`: when it was handed in, in seconds since the epoch."""

    numbers: StepNumbers
    has: tuple[bool, ...]
    losses: tuple[tuple[str, int], ...]
    at_s: float
    memory: Mapping[str, float] = MappingProxyType({})

    def read(self, row: Sequence[float]) -> StepFigures:
        """What the copied numbers say, in the order in which they were handed to `LateScalars`."""
        values = iter(row)
        figures = [next(values) if has else None for has in self.has]
        losses = {name: (next(values), next(values) if size == 2 else 1.0) for name, size in self.losses}
        learning_rate, loss_scale, grad_norm, num_zeros, params_norm, max_attention_logit = figures
        return StepFigures(learning_rate, loss_scale, grad_norm, num_zeros, params_norm, max_attention_logit, losses)

    def record(self, figures: StepFigures, losses: Mapping[str, float], maxima: Sequence[float | None]) -> StepRecord:
        """The step over all ranks. `losses`: means; `maxima`: learning rate, gradient norm, zeros, norm of the parameters,
        logit."""
        numbers, (learning_rate, grad_norm, num_zeros, params_norm, max_attention_logit) = self.numbers, maxima
        return StepRecord(
            numbers.iteration,
            numbers.consumed_samples,
            numbers.global_batch_size,
            losses,
            learning_rate,
            figures.loss_scale,
            grad_norm,
            num_zeros,
            params_norm,
            numbers.skipped_samples,
            self.memory,
            self.at_s,
            max_attention_logit,
        )
