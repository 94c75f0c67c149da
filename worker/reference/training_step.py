"""One iteration: forward and backward passes as often as the rerun machine asks for them, then the optimizer's step."""

import contextlib
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.corruption import Corruption
from rsup.worker.faults import FaultPlan
from rsup.worker.reference.hooks import Sections
from rsup.worker.reference.model import microbatch_loss
from rsup.worker.reference.options import Options
from rsup.worker.rerun.contract import Exit
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine
from rsup.worker.unused_memory import empty_unused_memory


class StepResult(NamedTuple):
    """What became of an iteration. `loss` and `grad_norm`: [], float32, this rank's, on its device; None where the iteration's
    numbers are not used."""

    exit: Exit
    loss: torch.Tensor | None = None
    grad_norm: torch.Tensor | None = None


class TrainingStep:
    """Runs the iterations of one rank."""

    def __init__(
        self,
        options: Options,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        data: RerunDataIterator,
        rerun: RerunStateMachine,
        corruption: Corruption,
        faults: FaultPlan,
        sections: Sections,
    ) -> None:
        self._options = options
        self._ddp = ddp
        self._optimizer = optimizer
        self._device = device
        self._data = data
        self._rerun = rerun
        self._corruption = corruption
        self._faults = faults
        self._sections = sections

    def run(self, iteration: int, lr: float) -> StepResult:
        """Compute iteration `iteration`. When it asks to exit, or its numbers are not used, parameters are as they were."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        total, num_passes = torch.zeros((), device=self._device), 0
        while self._rerun.should_run_forward_backward(self._data, iteration):
            num_passes += 1
            if num_passes > 1:
                self._sections.on_replay()
            self._faults.at_step(iteration, num_passes)
            total = self.forward_backward(iteration)
        empty_unused_memory(self._options.empty_unused_memory_level, 1, self._device)
        leave = self._rerun.should_checkpoint_and_exit()
        if leave.should_exit or self._rerun.skip_step:
            self._optimizer.zero_grad()
            return StepResult(leave)
        limit = self._options.clip_grad or float("inf")
        grad_norm = torch.nn.utils.clip_grad_norm_(self._ddp.module.parameters(), limit)
        self._optimizer.step()
        empty_unused_memory(self._options.empty_unused_memory_level, 2, self._device)
        return StepResult(leave, total, grad_norm)

    def forward_backward(self, iteration: int) -> torch.Tensor:
        """One pass of the iteration, its gradients left in the parameters: the loss, [], float32."""
        options = self._options
        self._optimizer.zero_grad()
        self._corruption.begin_pass(iteration)
        total = torch.zeros((), device=self._device)
        for micro in range(options.num_microbatches):
            is_last = micro == options.num_microbatches - 1
            with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                batch = next(self._data)
                self._corruption.takes(batch)
                loss = microbatch_loss(self._ddp, batch, options.bf16, self._device)
                self._corruption.damage_loss(loss)
                self._rerun.validate_loss(loss)
                loss = loss / options.num_microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def skip(self, iteration: int) -> None:
        """Take an iteration's data and compute nothing."""
        self._rerun.drop_pending(iteration)
        self._data.advance()
        for _ in range(self._options.num_microbatches):
            next(self._data)
