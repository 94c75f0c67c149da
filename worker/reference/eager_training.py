"""The step without a graph: DistributedDataParallel, and each iteration settled before its call returns."""

import torch
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.corruption import Corruption
from rsup.worker.deterministic import rank_order_hook
from rsup.worker.reference.mixed_precision import compute_dtype, scaled_gradients
from rsup.worker.reference.model import mean_loss
from rsup.worker.reference.observed import StepTimers
from rsup.worker.reference.program import follow
from rsup.worker.reference.step_figures import logged_figures
from rsup.worker.reference.stepper import LOAD_BALANCING_LOSS, LOSS_SCALE, Scalar, Settled, StepParts, StepReport
from rsup.worker.reference.training_step import TrainingStep
from rsup.worker.rerun.machine import GO_ON


class EagerSteps:
    """A `Stepper`. Attaches the module to the rerun machine. Collective."""

    def __init__(self, parts: StepParts) -> None:
        options, device = parts.options, parts.ranks.device
        self._parts = parts
        ddp = DistributedDataParallel(parts.module, device_ids=[device.index] if device.type == "cuda" else None)
        corruption = Corruption(options.fault, parts.ranks.rank, parts.device, parts.marks, parts.module)
        scaling = scaled_gradients(parts.loss_scale, parts.module)
        parts.rerun.attach(
            ddp,
            parts.optimizer,
            hook=rank_order_hook if parts.deterministic else None,
            scaler=None if scaling is None else scaling.for_rerun,
        )
        self._step = TrainingStep(
            options,
            ddp,
            parts.optimizer,
            device,
            parts.data,
            parts.rerun,
            corruption,
            parts.faults,
            parts.sections,
            parts.num_microbatches,
            scaling,
            parts.observed.dumps,
            StepTimers(parts.observed),
        )
        self._figures = logged_figures(options, parts.module, parts.observed)

    def run(self, iteration: int, lr: float) -> StepReport:
        """Compute the iteration, as often as the rerun machine asks for it."""
        scale = self._parts.loss_scale
        follow(self._parts.rerun.program, self._parts.num_microbatches(iteration) * self._parts.options.samples_per_pass, scale)
        with self._parts.observed.dumps.iteration(iteration):
            leave, loss, grad_norm, overflowed = self._step.run(iteration, lr)
        if leave.should_exit:
            return StepReport(leave)
        figures: dict[str, Scalar] = {} if scale is None else {LOSS_SCALE: scale.value}
        if self._step.balance is not None:
            figures[LOAD_BALANCING_LOSS] = self._step.balance
        if loss is not None and not overflowed:
            figures |= {name: measure() for name, measure in self._figures.items()}
        return StepReport(leave, (Settled(iteration, loss, grad_norm, loss is None or overflowed, figures),))

    def settle(self) -> StepReport:
        """Nothing is ever open."""
        return StepReport()

    def skip(self, iteration: int) -> StepReport:
        """Take an iteration's data and compute nothing."""
        self._step.skip(iteration)
        return StepReport(GO_ON, (Settled(iteration, skipped=True),))

    def evaluated(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of validation samples."""
        return mean_loss(self._parts.module, text.to(self._parts.ranks.device), compute_dtype(self._parts.options))

    def optimizer_moves(self) -> None:
        """Nothing here keeps addresses."""
