"""The rerun machine of a training loop: checks an iteration's numbers, replays it where they are wrong, says whose fault it is.

    rerun = RerunStateMachine(config)
    rerun.attach(ddp_model, optimizer)                                   # gradients are checked before they are reduced
    for iteration in range(start, end):
        while rerun.should_run_forward_backward(data, iteration):        # data: a RerunDataIterator
            optimizer.zero_grad()
            loss = model(next(data))
            rerun.validate_loss(loss)
            loss.backward()
        if rerun.should_checkpoint_and_exit().should_exit: ...           # before the optimizer's step
        optimizer.step()

Values stay on the device until the pass is over; then one copy and one small all-reduce tell all ranks whether to go on. The
transitions are in `machine`, without torch; the way from a rejected value to a verdict is in `attribution`.
Sources: the seed's section 1.1, reliability.md section 1 and its faults, DESIGN.md section 6.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rsup.supervisor.wire import CaseReport
from rsup.worker.rerun.attribution import Attribution
from rsup.worker.rerun.audit import Audit
from rsup.worker.rerun.audit_run import AuditRun
from rsup.worker.rerun.contract import (
    Checked,
    Compare,
    Exit,
    RankDevice,
    Rejection,
    RerunConfig,
    RerunError,
    RerunMode,
    RerunState,
)
from rsup.worker.rerun.data_iterator import RerunDataIterator, as_iterators
from rsup.worker.rerun.determinism_run import DeterminismRun
from rsup.worker.rerun.gradient_checks import GradientChecks
from rsup.worker.rerun.large_values import LargeValues
from rsup.worker.rerun.machine import Severity, Step, after_first_pass, first_severity
from rsup.worker.rerun.parts import Parts
from rsup.worker.rerun.passes import Judged, PassLog, Rule
from rsup.worker.rerun.pending import Pending, from_plain, to_plain
from rsup.worker.rerun.replay_state import ReplayState
from rsup.worker.rerun.replica_axis import ReplicaAxis
from rsup.worker.rerun.rotation import Rotation
from rsup.worker.rerun.step_keeper import StepKeeper


class RerunStateMachine:
    """One rank's end of it. Made on all ranks alike, after `init_process_group`. Collective, with all that it says is.

    `device`: what this rank computes on; the verdicts are about that. `ledger_folder`: where checkpoints are kept. `group`: a
    gloo group of all ranks, made if absent. `injected`: a fault injector is armed, so no verdict counts against a real device.
    """

    def __init__(
        self,
        config: RerunConfig | None = None,
        *,
        device: RankDevice | None = None,
        torch_device: torch.device | str = "cpu",
        group: Any = None,
        ledger_folder: Path | None = None,
        seed: int = 0,
        injected: bool = False,
    ) -> None:
        self.config = config or RerunConfig()
        self._parts = Parts(self.config, device, torch.device(torch_device), group, ledger_folder, seed, injected)
        self._iteration = self._parts.iteration
        self._attribution = Attribution(self._parts, StepKeeper(self._parts, ledger_folder))
        self._audit: AuditRun | None = None
        self._gradients: GradientChecks | None = None
        self._determinism = DeterminismRun(self._parts)
        self._modules: list[nn.Module] = []
        self._is_first_pass = True
        self._state_learned = False
        self._evaluating = False
        self._pending: Pending | None = None

    # -------------------------------------------------------------------------------------------------------- set-up

    def attach(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        axis: ReplicaAxis | None = None,
        hook: Callable[[Any, Any], Any] | None = None,
        hook_state: object = None,
        scaler: Any = None,
        measures_gradients: bool = True,
    ) -> None:
        """Check `module`'s gradients before they are reduced, and let its iterations be rotated along `axis` (default: all
        ranks). `hook`: the DDP communication hook to use, which is wrapped. `scaler`: a `torch.amp.GradScaler` in use: NaN and
        Inf then are skipped steps and no cases. `measures_gradients`: False where the loop hands in the norms itself, by
        `validate_gradient` (a CUDA graph computes them). Collective.
        """
        parts, mode = self._parts, self.config.mode
        parts.rules.loss_scaling = scaler is not None and scaler.is_enabled()
        self._modules.append(module)
        if mode is RerunMode.DISABLED:
            if hook is not None:
                module.register_comm_hook(hook_state, hook)  # type: ignore[operator]
            return
        parts.replay_state.register_buffers(f"buffers of module {len(self._modules)}", module)
        if measures_gradients:
            self._gradients = self._gradients or GradientChecks(scaler)
            self._gradients.attach(module, hook=hook, state=hook_state)
        parts.named_state = lambda: self._named_state(optimizer)
        parts.named_parameters = lambda: self.named_parameters
        if not self.config.rotate:
            return
        axis = axis or ReplicaAxis.of_world(parts.agreement.world_size)
        group, device = parts.agreement.group, parts.torch_device
        parts.rotation = Rotation(axis, group, parts.device, parts.named_state, torch_device=device)
        if mode is RerunMode.AUDIT:
            audit = Audit(axis, group, self.config.audit_interval, device)
            self._audit = AuditRun(parts, self._attribution, audit)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, nothing is replayed and no training iteration is marked; an exception leaves the machine as it was."""
        large = self._parts.large
        before = self._evaluating, large.evaluating
        self._evaluating = large.evaluating = True
        try:
            yield
        finally:
            self._evaluating, large.evaluating = before

    @property
    def replay_state(self) -> ReplayState:
        """Register here what forward or backward change besides gradients and the buffers of attached modules."""
        return self._parts.replay_state

    @property
    def last_report(self) -> CaseReport | None:
        """What the supervisor was told last of a case; the same on all ranks. None: there was none."""
        return self._parts.work.last_report

    @property
    def data_position(self) -> dict[str, int]:
        """Told with a case: where its data is. The loop fills it, as with `consumed_samples`."""
        return self._parts.data_position

    # ------------------------------------------------------------------------------------------------------ the loop

    @property
    def state(self) -> RerunState:
        """Where the iteration is."""
        return self._iteration.state

    @property
    def skip_step(self) -> bool:
        """The iteration's result must not be used: call no optimizer step, go on to the next iteration."""
        return self._iteration.skip_step

    def should_run_forward_backward(
        self, data: RerunDataIterator | Sequence[RerunDataIterator | None] | None, iteration: int
    ) -> bool:
        """Whether to run forward and backward of `iteration` (1-based, global), for the first time or again. Collective."""
        state = self._iteration.state
        if state is not RerunState.NOT_RUNNING_YET and iteration != self._iteration.number:
            self._abandon()
            state = RerunState.NOT_RUNNING_YET
        is_new = state is RerunState.NOT_RUNNING_YET
        if is_new:
            again = self._begin(data, iteration)
        elif self.config.mode is RerunMode.DISABLED:
            again = self._parts.finish()
        else:
            again = self._end_of_pass(state, self._read_pass())
        if again and self._gradients is not None:
            self._gradients.begin(is_new)
        return again

    def should_checkpoint_and_exit(self) -> Exit:
        """Ask once after each iteration, before the optimizer's step: whether to checkpoint the completed iterations, to exit,
        and with which code."""
        return self._iteration.exit

    def validate_result(
        self,
        result: object,
        rejection_func: Callable[[float], bool],
        message: str,
        comparison_func: Compare | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Have a scalar of this pass checked at its end. `rejection_func` gets it as a float and says whether it is wrong;
        `message` names the check and must be the same in every pass. Two results are the same if `comparison_func` (default:
        relative difference) gives at most `tolerance`. Raise `RerunError` for what is no floating scalar.
        """
        self._check(message, result, (Rule(message, rejection_func, fatal),), tolerance, comparison_func)

    def validate_loss(self, loss: torch.Tensor, context: str = "loss") -> None:
        """The built-in checks of a micro-batch's loss: NaN, Inf, and (`check_for_spiky_loss`) unexpectedly large ones."""
        if rules := self._parts.rules.of_loss(context):
            self._check(context, loss, rules, self.config.loss_tolerance, None)

    def validate_gradient(self, message: str, norm: torch.Tensor | float) -> None:
        """The built-in checks of a gradient norm that the loop has taken itself, before the reduction; for a module that was
        attached with `measures_gradients=False`."""
        if rules := self._parts.rules.of_gradients(message):
            self._check(message, norm, rules, self.config.grad_tolerance, None)

    # ---------------------------------------------------------------------------------------------- judged on the device

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next iteration's numbers may be looked at after the iteration behind it has begun: only where nothing but
        the built-in checks is asked of it, which a CUDA graph makes on the device. The same on all ranks."""
        if self.config.mode is RerunMode.DISABLED:
            return True
        is_plain = self.config.mode is RerunMode.VALIDATE_RESULTS and not self._parts.injector.is_armed
        return is_plain and not self._is_first_pass and self._pending is None and not self._iteration.loaded

    def accept(self, iteration: int, losses: Sequence[float], norms: Mapping[str, float]) -> None:
        """Iteration `iteration` was judged on the device and found healthy on all ranks: learn its values. Not collective."""
        self._iteration.start(iteration, [])
        if self.config.mode is RerunMode.DISABLED:
            for loss in losses:  # large values, which the device does not look at then, are warned of
                self.validate_loss(torch.tensor(loss))
            for message, norm in norms.items():
                self.validate_gradient(message, norm)
        else:
            for loss in losses:
                _ask(self._parts.rules.of_loss("loss"), loss)
            for message, norm in norms.items():
                _ask(self._parts.rules.of_gradients(message), norm)
        self._parts.finish()

    @property
    def large_values(self) -> LargeValues:
        """The baselines of this rank."""
        return self._parts.large

    def is_unexpectedly_large(
        self, value: float, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """See `LargeValues`: for a `rejection_func`."""
        return self._parts.large.is_unexpectedly_large(value, threshold, context, num_samples, resample)

    def _check(self, message: str, result: object, rules: tuple[Rule, ...], tolerance: float, compare: Compare | None) -> None:
        if self._evaluating or self.config.mode is RerunMode.DISABLED:
            log = PassLog()
            log.add(message, result, rules, tolerance, compare)
            self._judge_at_once(log.read()[0])
        elif self._iteration.state is RerunState.NOT_RUNNING_YET:
            raise RerunError(
                f"{message!r} is validated outside of an iteration: call it in the loop of should_run_forward_backward"
            )
        else:
            self._iteration.log.add(message, result, rules, tolerance, compare)

    def _judge_at_once(self, one: Judged) -> None:
        """Without replays: an error where the check is fatal, else a warning. In an evaluation always a warning."""
        if not one.checked.rejected:
            return
        where = f"iteration {self._iteration.number} on rank {self._parts.agreement.rank}"
        text = f"unexpected result: {', '.join(one.labels)} at {where}: {one.checked.value!r}"
        self._parts.track(Rejection.RERUN_DISABLED, one.checked, self._evaluating)
        if one.checked.fatal and not self._evaluating:
            raise RuntimeError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    # ----------------------------------------------------------------------------------------------------- the passes

    def _begin(self, data: Any, iteration: int) -> bool:
        is_disabled = self.config.mode is RerunMode.DISABLED
        self._iteration.start(iteration, [] if is_disabled else as_iterators(data))
        self._iteration.state = RerunState.INITIAL_RUN
        if is_disabled:
            return True
        if self._is_first_pass:
            for module in self._modules:
                self.replay_state.watch(module)
        pending, self._pending = self._pending, None
        if pending is not None and (decided := self._attribution.begin_pending(pending)) is not None:
            return decided
        self._iteration.begin_data()
        self._iteration.capture()
        return True

    def give_up(self) -> None:
        """The loop breaks the iteration off, because of an exception: state and data are as before it. Between iterations there
        is nothing to give up."""
        if self._iteration.state is not RerunState.NOT_RUNNING_YET:
            self._abandon()
            self._iteration.give_up()

    def _abandon(self) -> None:
        """The loop left an iteration in the middle (its data ended, an exception was caught): nothing of it is kept."""
        self._parts.large.rollback()
        self._parts.injector.clear()
        self._parts.work.case = None

    def _read_pass(self) -> list[Judged]:
        """The pass is over: its values, with those of the gradients."""
        if self._gradients is not None:
            for message, value in self._gradients.take_numbers():
                if rules := self._parts.rules.of_gradients(message):
                    self._iteration.log.add(message, value, rules, self.config.grad_tolerance)
        judged = self._iteration.read_log()
        if self._is_first_pass:
            self._is_first_pass = False
            self._require_registered()
        return judged

    def _require_registered(self) -> None:
        names = [name for module in self._modules for name in self.replay_state.unregistered(module)]
        if names:
            text = f"forward or backward change {', '.join(names[:5])}, which a replay cannot roll back"
            raise RerunError(f"{text}: register it with rerun.replay_state.register()")

    def _end_of_pass(self, state: RerunState, judged: list[Judged]) -> bool:
        if self.config.mode is RerunMode.REPORT_DETERMINISM_STATS:
            return self._determinism.end_pass(judged)
        if state is RerunState.INITIAL_RUN:
            return self._end_initial(judged)
        if self._iteration.is_audit:
            assert self._audit is not None
            return self._audit.end_rotated(judged) if state is RerunState.RERUNNING_ROTATED else self._audit.end_replay(judged)
        ends = {
            RerunState.RERUNNING_IN_PLACE: self._attribution.end_replay,
            RerunState.RERUNNING_ROTATED: self._attribution.end_rotated,
            RerunState.RERUNNING_TO_CONFIRM: self._attribution.end_confirmation,
            RerunState.RERUNNING_FROM_CHECKPOINT: self._attribution.end_from_checkpoint,
        }
        if state not in ends:
            raise RerunError(
                f"the iteration must not go on: should_checkpoint_and_exit() said to exit with {self._iteration.exit}"
            )
        return ends[state](judged)

    def _end_initial(self, judged: list[Judged]) -> bool:
        parts = self._parts
        first = self._iteration.first = [self._as_injected(one) for one in judged]
        jumped = self._audit is not None and self._audit.has_jumped(first)
        agreed = parts.agreement.worst(2 * int(first_severity(first)) + int(jumped))
        next_ = after_first_pass(Severity(agreed // 2))
        if next_.step is Step.REPLAY:
            for one in first:
                if one.checked.rejected:
                    parts.track(Rejection.INITIAL_RUN, one.checked)
            return self._iteration.replay(next_.state)
        self._learn_state()
        return self._audit.begin(jumped=bool(agreed % 2)) if self._audit is not None else parts.finish()

    def _as_injected(self, one: Judged) -> Judged:
        """The value as rejected, where the error injector strikes."""
        checked = one.checked
        if checked.rejected or not self._parts.injector.fires(self._iteration.number, checked.check):
            return one
        struck = Checked(checked.check, checked.value, True, checked.fatal, checked.tolerance, checked.compare)
        return Judged(struck, (f"injected {self.config.error_injection_type}",))

    def _learn_state(self) -> None:
        """After the first healthy iteration: buffers that are each rank's own (running statistics) are no corruption later."""
        rotation = self._parts.rotation
        if not self._state_learned and rotation is not None and not rotation.why_impossible():
            rotation.learn_state([one for one in rotation.compare_state() if one.name.startswith("buffer ")])
        self._state_learned = True

    def _named_state(self, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
        """What must be equal on all replicas: parameters, buffers and the optimizer's tensors, by name."""
        parameters = self.named_parameters
        names = {parameter: name for name, parameter in parameters.items()}
        found: dict[str, torch.Tensor] = {}
        for number, module in enumerate(self._modules):
            found |= {f"buffer {name}{_of(number)}": buffer for name, buffer in module.named_buffers()}
        found |= {name: parameter.detach() for name, parameter in parameters.items()}
        for parameter, values in optimizer.state.items() if optimizer is not None else ():
            kept = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
            found |= {f"optimizer {names.get(parameter, '?')}.{key}": value for key, value in kept.items()}
        return found

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters of all attached modules."""
        named = [(f"{name}{_of(i)}", p) for i, module in enumerate(self._modules) for name, p in module.named_parameters()]
        found: dict[str, torch.Tensor] = dict(named)
        return found

    # ------------------------------------------------------------------------------------------------- a kept step

    @property
    def torch_device(self) -> torch.device:
        """What this rank computes on."""
        return self._parts.torch_device

    @property
    def program(self) -> dict[str, Any]:
        """Kept with a failing step, so that whoever repeats it can build the model: plain values. The loop fills it."""
        return self._parts.program

    def run_kept(
        self, iteration: int, iterators: Sequence[RerunDataIterator], forward_backward: Callable[[], Any]
    ) -> list[Judged]:
        """One pass of an iteration from elsewhere, and what the checks say to it. Not collective; see `replay_case`."""
        self._iteration.start(iteration, list(iterators))
        self._iteration.state = RerunState.INITIAL_RUN
        if self._gradients is not None:
            self._gradients.begin(is_new=False)
        try:
            forward_backward()
            return self._read_pass()
        finally:
            self._parts.large.rollback()
            self._iteration.state = RerunState.NOT_RUNNING_YET

    def report_statistics(self) -> None:
        """Print the determinism statistics of all ranks since the last report, on rank 0. Collective."""
        self._determinism.report()

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, of the same form whatever has happened: plain values and tensors."""
        parts, iteration = self._parts, self._iteration
        state: dict[str, Any] = {
            "world_size": parts.agreement.world_size,
            "rank": parts.agreement.rank,
            "skips_in_row": parts.skips_in_row,
            "large_values": parts.large.state_dict(),
            "pending": None,
            "iterators": list(iteration.kept),
            "injector": parts.injector.state_dict(),
        }
        case = parts.work.case
        if iteration.state is RerunState.WILL_RERUN_FROM_CHECKPOINT and case is not None:
            registered = parts.replay_state.state_dict(iteration.snapshot)
            rng = parts.replay_state.rng_bytes(iteration.snapshot).hex()
            likeness = iteration.found_on or parts.device.likeness
            found = {one.checked.check for one in iteration.confirmed}
            others = iteration.others or [one for one in iteration.first if not one.checked.rejected]
            others = [one for one in others if one.checked.check not in found]
            pending = Pending(case, iteration.confirmed, others, likeness, rng, registered, iteration.iterator_states())
            state["pending"] = to_plain(pending)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Go on from a checkpoint's state; return why a rerun that it asks for is ignored, empty if none is."""
        try:
            self._parts.large.load_state_dict(state.get("large_values") or {})
        except RerunError as error:
            self._parts.work.say(str(error))
        pending = state.get("pending")
        if state.get("world_size") != self._parts.agreement.world_size:
            return "job sharding has changed: the rerun state is ignored" if pending else ""
        if state.get("rank", self._parts.agreement.rank) != self._parts.agreement.rank:
            return "the rerun state is another rank's: each rank has to load its own; it is ignored"
        if self.config.mode is RerunMode.DISABLED:
            return "rerun mode is disabled: the rerun state is ignored" if pending else ""
        self._iteration.loaded = list(state.get("iterators") or ())
        self._parts.skips_in_row = int(state.get("skips_in_row") or 0)
        if pending is not None:
            try:
                self._pending = from_plain(pending)
            except ValueError as error:
                return f"the rerun state is ignored: {error}"
            self._parts.injector.load_state_dict(state.get("injector") or {})
        return ""

    def drop_pending(self, iteration: int) -> None:
        """That iteration is skipped: a rerun that asks for it is over, and its data is used up."""
        if self._pending is not None and self._pending.case.iteration == iteration:
            self._pending = None
        self._iteration.loaded = ()


def _ask(rules: tuple[Rule, ...], value: float) -> None:
    """Let the rules see a value that is known to be healthy: those with a baseline learn from it."""
    for rule in rules:
        rule.reject(value)


def _of(module: int) -> str:
    return f" of module {module}" if module else ""
