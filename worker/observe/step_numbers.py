"""One step as it is handed to the training log, and while its numbers are on their way from the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from rsup.worker.observe.late_scalars import Value
from rsup.worker.observe.log_points import StepRecord
from rsup.worker.observe.step_reduction import SumAndCount


@dataclass(frozen=True)
class StepNumbers:
    """What one step gives the log. `iteration`: 1-based, global; `consumed_samples`: of all ranks, the step's included.

    `losses`: of this rank; `[]`, the mean, which counts as one; or `[2]`, sum and count (of tokens, say), which are added up
    over ranks before they are divided; `{}` where this rank has none. Tensors are on any device, and read as they are in the
    step's call, on the current stream. `learning_rate`, `grad_norm`, `params_norm`, `num_zeros`: the greatest of all ranks
    counts, None: this rank has none. `skipped`: parameters were not updated; `computed`: anything was computed at all.
    """

    iteration: int
    consumed_samples: int
    losses: Mapping[str, torch.Tensor | float]
    learning_rate: float | None
    global_batch_size: int
    skipped: bool = False
    loss_scale: Value | None = None
    grad_norm: Value | None = None
    params_norm: Value | None = None
    num_zeros: Value | None = None
    computed: bool = True
    skipped_samples: int = 0
    """Since the beginning of the run: samples that are counted and that nobody trained on."""


class StepFigures(NamedTuple):
    """What the device gave of one step, of this rank."""

    loss_scale: float | None
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    losses: dict[str, SumAndCount]


class PendingStep(NamedTuple):
    """A step whose numbers are on their way. `has`: which of the figures it has. `losses`: names, and how many numbers each."""

    numbers: StepNumbers
    has: tuple[bool, ...]
    losses: tuple[tuple[str, int], ...]
    memory: Mapping[str, float] = MappingProxyType({})

    def read(self, row: Sequence[float]) -> StepFigures:
        """What the copied numbers say, in the order in which they were handed to `LateScalars`."""
        values = iter(row)
        loss_scale, grad_norm, num_zeros, params_norm = [next(values) if has else None for has in self.has]
        losses = {name: (next(values), next(values) if size == 2 else 1.0) for name, size in self.losses}
        return StepFigures(loss_scale, grad_norm, num_zeros, params_norm, losses)

    def record(self, figures: StepFigures, losses: Mapping[str, float], maxima: Sequence[float | None]) -> StepRecord:
        """The step over all ranks. `losses`: means; `maxima`: learning rate, gradient norm, zeros, norm of the parameters."""
        numbers, (learning_rate, grad_norm, num_zeros, params_norm) = self.numbers, maxima
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
        )
