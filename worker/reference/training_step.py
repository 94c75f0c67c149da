"""One iteration: forward and backward passes as often as the rerun machine asks for them, then the optimizer's step."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.corruption import Corruption
from rsup.worker.faults import FaultPlan
from rsup.worker.observe.dump_plan import NO_DUMPS, Dumps
from rsup.worker.reference.hooks import Sections
from rsup.worker.reference.mixed_precision import ScaledGradients, compute_dtype
from rsup.worker.reference.model import microbatch_loss
from rsup.worker.reference.observed import Observed, StepTimers
from rsup.worker.reference.options import Options
from rsup.worker.rerun.contract import Exit
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine
from rsup.worker.unused_memory import empty_unused_memory


class StepResult(NamedTuple):
    """What became of an iteration. `loss` and `grad_norm`: [], float32, this rank's, on its device; None where the iteration's
    numbers are not used. `overflowed`: the loss scale was too high for float16, and the step is skipped."""

    exit: Exit
    loss: torch.Tensor | None = None
    grad_norm: torch.Tensor | None = None
    overflowed: bool = False


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
        num_microbatches: Callable[[int], int] | None = None,
        scaling: ScaledGradients | None = None,
        dumps: Dumps = NO_DUMPS,
        times: StepTimers | None = None,
    ) -> None:
        """`num_microbatches`: of an iteration, where it is not the same for all. `scaling`: the loss scale in use."""
        self._options = options
        self._ddp = ddp
        self._optimizer = optimizer
        self._device = device
        self._data = data
        self._rerun = rerun
        self._corruption = corruption
        self._faults = faults
        self._sections = sections
        self._num_microbatches = num_microbatches or (lambda iteration: options.num_microbatches)
        self._scaling = scaling
        self._dumps = dumps
        self._times = StepTimers(Observed()) if times is None else times
        self.balance: torch.Tensor | None = None
        """Load balancing loss of the last pass, mean over micro-batches and blocks: [], float32; None where there is none."""
        self._compute = compute_dtype(options)

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
            with self._times.forward_backward:
                total = self.forward_backward(iteration)
        empty_unused_memory(self._options.empty_unused_memory_level, 1, self._device)
        leave = self._rerun.should_checkpoint_and_exit()
        if leave.should_exit or self._rerun.skip_step:
            self._optimizer.zero_grad()
            return StepResult(leave)
        with self._times.optimizer:
            grad_norm = self._update()
        if grad_norm is None:
            self._optimizer.zero_grad()
            return StepResult(leave, total, overflowed=True)
        self._dumps.updated()
        empty_unused_memory(self._options.empty_unused_memory_level, 2, self._device)
        return StepResult(leave, total, grad_norm)

    def _update(self) -> torch.Tensor | None:
        """Clip the gradients and step; their norm, [], float32, or None where the loss scale was too high."""
        overflowed = False
        if self._scaling is not None:
            with self._times.unscale:
                overflowed = self._scaling.take_out()
        self._dumps.gradients()
        if overflowed:
            return None
        with self._times.clip:
            limit = self._options.clip_grad or float("inf")
            grad_norm = torch.nn.utils.clip_grad_norm_(self._ddp.module.parameters(), limit)
        with self._times.inner_step:
            self._optimizer.step()
        return grad_norm

    def forward_backward(self, iteration: int) -> torch.Tensor:
        """One pass of the iteration, its gradients left in the parameters: the loss, [], float32."""
        self._optimizer.zero_grad()
        self._corruption.begin_pass(iteration)
        self._dumps.begin_pass()
        total, self.balance = torch.zeros((), device=self._device), None
        num_microbatches = self._num_microbatches(iteration)
        for micro in range(num_microbatches):
            is_last = micro == num_microbatches - 1
            with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                with self._times.batch_generator:
                    batch = next(self._data)
                self._corruption.takes(batch)
                self._dumps.micro_batch(micro, num_microbatches)
                with self._times.forward:
                    loss = microbatch_loss(self._ddp, batch, self._compute, self._device)
                self._corruption.damage_loss(loss)
                self._rerun.validate_loss(loss)
                loss = loss / num_microbatches
                scaled = loss if self._scaling is None else self._scaling.scaled(loss)
                with self._times.backward:
                    scaled.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            if (balance := self._ddp.module.balance) is not None:
                self.balance = balance / num_microbatches + (0.0 if self.balance is None else self.balance)
        return total

    def skip(self, iteration: int) -> None:
        """Take an iteration's data and compute nothing."""
        self._rerun.drop_pending(iteration)
        self._data.advance()
        for _ in range(self._num_microbatches(iteration)):
            next(self._data)
