"""One optimizer step of a framework that hands its micro-batches in one by one, under the rerun machine.

The framework calls for each micro-batch; the replays of all of them happen inside its last call, before the optimizer's step.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

import rsup.worker
from rsup.worker.device import this_device
from rsup.worker.rerun.agreement import Agreement
from rsup.worker.rerun.batches import is_same_batch
from rsup.worker.rerun.contract import Drawn, RerunConfig
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.default_generators import DrawWatch
from rsup.worker.rerun.state_machine import RerunStateMachine

NoSync = Callable[[], contextlib.AbstractContextManager[Any]]
Run = Callable[[Any], tuple[Any, torch.Tensor | None]]
"""Forward and backward of a micro-batch: the framework's result, and this rank's loss."""


class MicroBatches:
    """The rerun machine of one rank's training, and the micro-batches of its current iteration."""

    def __init__(
        self,
        config: RerunConfig,
        device: torch.device,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        save: Callable[[], object],
        scaler: Any = None,
        **options: Any,
    ) -> None:
        """Collective. `module`: as it is called, DDP outside. `save`: write a checkpoint of the completed iterations, with this
        object's `state_dict()`. `options`: of `RerunStateMachine`.
        """
        rank_device = options.pop("device", None) or this_device(device)
        self.agreement = Agreement()
        self.machine = RerunStateMachine(config, device=rank_device, torch_device=device, group=self.agreement.group, **options)
        self.machine.attach(module, optimizer, scaler=scaler)
        rsup.worker.device_used(rank_device.uuid)
        self._module = module
        self._save = save
        self._scaler = scaler
        self._handed: deque[Any] = deque()
        self._data = RerunDataIterator(_Handed(self._handed), follows_progress=True)
        self._runs: list[Run] = []
        self._kept: list[Any] = []
        self._pending_rng: bytes = b""
        self._between: DrawWatch | None = None
        """What is drawn between two micro-batches of an iteration: the framework draws them itself."""

    def run(self, batch: Any, iteration: int, is_last: bool, run: Run, zero_grad: Callable[[], object], no_sync: NoSync) -> Any:
        """Run a micro-batch of `iteration` (1-based); with the last one also what replays the machine asks for. Collective.

        The framework has zeroed the gradients before the first one and calls inside `no_sync` itself; both are used in replays.
        Return the framework's result of the pass that counts. Raises `SystemExit` where the job has to end, after a save if
        one is asked for.
        """
        if not self._runs:
            self._begin(iteration)
        if not self._is_kept(batch):
            states = self._between.changed() if self._between is not None else b""
            self._handed.append(Drawn(batch, states) if states else batch)
        result = self._run(run)
        self._between = DrawWatch() if self._data.keeps_batches and not is_last else None
        self._runs.append(run)
        if is_last:
            while self.machine.should_run_forward_backward(self._data, iteration):
                zero_grad()
                result = self._replay(no_sync)
            self._leave_if_asked()
            if self.machine.skip_step:
                self._drop_gradients()
            self._runs = []
        return result

    @property
    def num_batches(self) -> int:
        """Micro-batches that were run in the current iteration."""
        return len(self._runs)

    def _begin(self, iteration: int) -> None:
        if self._pending_rng:
            self.machine.replay_state.restore_rng_bytes(self._pending_rng)
            self._pending_rng = b""
        self._kept = []
        if not self.machine.should_run_forward_backward(self._data, iteration):
            self._leave_if_asked()
        self._kept = self._data.not_consumed()  # of a replay from a checkpoint; else nothing has been taken yet

    def _is_kept(self, batch: Any) -> bool:
        """Whether a framework that resumes hands in what the replay takes from the checkpoint; else it is further on in its
        data, and what it hands in now is for the next iteration.
        """
        place = len(self._runs)
        return place < len(self._kept) and is_same_batch(self._kept[place], batch)

    def _run(self, run: Run) -> Any:
        result, loss = run(next(self._data))
        if loss is not None:
            self.machine.validate_loss(loss.detach())
        return result

    def _replay(self, no_sync: NoSync) -> Any:
        result = None
        for i, run in enumerate(self._runs):
            with no_sync() if i < len(self._runs) - 1 else contextlib.nullcontext():
                result = self._run(run)
        return result

    def _leave_if_asked(self) -> None:
        found = self.machine.should_checkpoint_and_exit()
        if found.should_checkpoint:
            self._save()
        if found.should_exit:
            rsup.worker.declare_exit(found.exit_code, "the rerun machine asks to leave: see rsup cases")
            rsup.worker.shutdown()
            raise SystemExit(found.exit_code)

    def _drop_gradients(self) -> None:
        """The optimizer leaves parameters without gradients alone; a scaler has to see an overflow instead."""
        for parameter in self._module.parameters():
            if parameter.grad is not None and self._scaler is not None and self._scaler.is_enabled():
                parameter.grad.fill_(torch.inf)
            else:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint: plain values and tensors."""
        machine = self.machine.state_dict()
        replay = self.machine.replay_state
        return {"machine": machine, "rng": replay.rng_bytes(replay.capture()) if machine["pending"] is not None else b""}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on from it; return why a rerun that it asks for is ignored, or an empty string."""
        ignored = self.machine.load_state_dict(state["machine"])
        self._pending_rng = b"" if ignored else bytes(state["rng"])
        return ignored


class _Handed:
    """What the framework has handed in, as an iterator."""

    def __init__(self, batches: deque[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> "_Handed":
        return self

    def __next__(self) -> Any:
        if not self._batches:
            raise StopIteration
        return self._batches.popleft()
