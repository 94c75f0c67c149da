"""The step without a graph: DistributedDataParallel, and each iteration settled before its call returns."""

import torch
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.corruption import Corruption
from rsup.worker.deterministic import rank_order_hook
from rsup.worker.reference.model import mean_loss
from rsup.worker.reference.stepper import Settled, StepParts, StepReport
from rsup.worker.reference.training_step import TrainingStep
from rsup.worker.rerun.machine import GO_ON


class EagerSteps:
    """A `Stepper`. Attaches the module to the rerun machine. Collective."""

    def __init__(self, parts: StepParts) -> None:
        options, device = parts.options, parts.ranks.device
        self._parts = parts
        ddp = DistributedDataParallel(parts.module, device_ids=[device.index] if device.type == "cuda" else None)
        corruption = Corruption(options.fault, parts.ranks.rank, parts.device, parts.marks, parts.module)
        parts.rerun.attach(ddp, parts.optimizer, hook=rank_order_hook if parts.deterministic else None)
        self._step = TrainingStep(
            options, ddp, parts.optimizer, device, parts.data, parts.rerun, corruption, parts.faults, parts.sections
        )

    def run(self, iteration: int, lr: float) -> StepReport:
        """Compute the iteration, as often as the rerun machine asks for it."""
        leave, loss, grad_norm = self._step.run(iteration, lr)
        return StepReport(leave, () if leave.should_exit else (Settled(iteration, loss, grad_norm),))

    def settle(self) -> StepReport:
        """Nothing is ever open."""
        return StepReport()

    def skip(self, iteration: int) -> StepReport:
        """Take an iteration's data and compute nothing."""
        self._step.skip(iteration)
        return StepReport(GO_ON, (Settled(iteration),))

    def evaluated(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of validation samples."""
        return mean_loss(self._parts.module, text.to(self._parts.ranks.device), self._parts.options.bf16)

    def optimizer_moves(self) -> None:
        """Nothing here keeps addresses."""
