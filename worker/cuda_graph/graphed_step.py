"""One training step after the other, each launched before the numbers of the one before are looked at.

    step = GraphedStep(graph, optimizer, checks, rerun, data, take_batches)
    for iteration in range(start, end):
        report = step.run(iteration, lr)          # launches it; settles the iteration before
        ...                                       # only what is in report.settled is done
    report = step.settle()                        # before a save, an evaluation, an exit

The graph judges its own numbers: a bad one closes the gate on the device, so that neither that iteration nor the one launched
behind it changes a parameter. The host learns of it one step late, rewinds data, generators and registered buffers, and gives
the iteration to the rerun machine, with the recorded numbers as its first pass. What the machine asks for is run by replaying
the graph with the gate closed; once it says go on, the gate is opened and the optimizer uses the replay's gradients.

Where the machine has more to ask than the graph's own checks (audits, statistics, injected errors, a case from a checkpoint,
the first pass of a run), an iteration runs to its end before the next is launched. Source: DESIGN.md section 7.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from rsup.worker.cuda_graph.contract import Batches, Code, GraphError
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.late_reader import LateReader, Ticket
from rsup.worker.cuda_graph.optimizer_graph import OptimizerGraph
from rsup.worker.observe.timer_contract import OFF, TimerLike
from rsup.worker.rerun.contract import Exit, RerunMode
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.machine import GO_ON
from rsup.worker.rerun.state_machine import RerunStateMachine


class Settled(NamedTuple):
    """An iteration that is done. `loss`, `grad_norm`: this rank's, None where nothing was computed or it is not used."""

    iteration: int
    loss: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    """Its data is used up, and parameters are as they were before it."""
    figures: Mapping[str, float] = MappingProxyType({})
    """What `GraphedStep` was asked to measure behind the update, by name; empty where nothing was computed."""


class StepReport(NamedTuple):
    """What a call has settled, in order; and whether to leave: then the iteration behind the last settled one is the one that
    was rejected, and parameters are as they were before it."""

    exit: Exit = GO_ON
    settled: tuple[Settled, ...] = ()


class BeforePass(Protocol):
    """Called before each pass of an iteration, on the host: for injected faults. `number`: 1 for its first pass."""

    def __call__(self, iteration: int, number: int, batches: Batches) -> None: ...


@dataclass(frozen=True)
class _Launched:
    """An iteration whose kernels are queued. `snapshot`: the state before it."""

    iteration: int
    lr: float
    snapshot: Any
    verdict: Ticket
    figures: Ticket


@dataclass(frozen=True)
class _Rejected:
    """An iteration that has to be run again. `values`: what its checks found; data and state are as before it."""

    iteration: int
    lr: float
    values: Sequence[float]
    snapshot: Any


class GraphedStep:
    """The iterations of one rank. All calls on the training thread; all collective.

    `graph`: its forward_backward gets the batches, begins and judges `checks`, and returns the loss, `[]`, float32, leaving
    reduced gradients in place. `take_batches`: draws one iteration's batches from `data`. `norm_names`: the messages of the
    gradient checks, in their order. `schedule`: fills the device tensors that change with the iteration (a weight decay, a
    flag): called before each pass and each update of an iteration, so also when one runs again after the next was launched.
    `before_pass`: see `BeforePass`. `on_replay`: called before each further pass of an iteration. `around`: entered around all
    work on the device (the capture stream). `figures`: further numbers of a step by name, [], float32, made on the device
    behind the update of its parameters, gradients still in place. `eager`: says of an iteration that its passes run eagerly, as
    for a dump; alike on all ranks. `timed`: started and stopped around each pass and each update, outside of the graphs.
    `launched`: called behind each pass.
    """

    def __init__(
        self,
        graph: FullIterationGraph,
        optimizer: OptimizerGraph,
        checks: DeviceChecks,
        rerun: RerunStateMachine,
        data: RerunDataIterator,
        take_batches: Callable[[], Batches],
        norm_names: Sequence[str],
        *,
        schedule: Callable[[int], None] = lambda iteration: None,
        before_pass: BeforePass | None = None,
        on_replay: Callable[[], None] = lambda: None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        figures: Mapping[str, Callable[[], torch.Tensor]] = MappingProxyType({}),
        eager: Callable[[int], bool] = lambda iteration: False,
        timed: tuple[TimerLike, TimerLike] = (OFF, OFF),
        launched: Callable[[], None] = lambda: None,
    ) -> None:
        self._graph = graph
        self._optimizer = optimizer
        self._checks = checks
        self._rerun = rerun
        self._data = data
        self._take_batches = take_batches
        self._norm_names = norm_names
        self._schedule = schedule
        self._before_pass = before_pass
        self._on_replay = on_replay
        self._around = around
        self._is_checked = rerun.config.mode is not RerunMode.DISABLED
        data.keeps_batches = self._is_checked
        self._more_figures = figures
        self._is_eager = eager
        self._timed_pass, self._timed_update = timed
        self._launched_pass = launched
        self._figures = torch.zeros(2 + len(figures), device=checks.gate.device)
        """Loss and gradient norm of the step, then what else is asked for."""
        self._verdict_reader = LateReader(checks.result)
        self._figure_reader = LateReader(self._figures)
        self._done: list[Settled] = []
        self._pending: _Launched | None = None
        self._rejected: _Rejected | None = None
        self._is_undone = False
        """A launch has failed since the gate was known to be open."""
        self._is_updating = False
        self._broken = ""
        for number, generator in enumerate(graph.generators, start=1):
            rerun.replay_state.register_generator(f"generator {number} of the {graph.name} graph", generator)
        self._load_baselines()

    # ------------------------------------------------------------------------------------------------------ the steps

    def run(self, iteration: int, lr: float) -> StepReport:
        """Launch `iteration` and settle the one before; where that is rejected, rerun it first.

        An exception (the data end, inputs that the graph refuses) passes through; `iteration` has then not begun, its data come
        again, and the one before it waits for `settle`. Where only some ranks raise, the others wait in their collectives."""
        with self._around():
            return self._report(self._run(iteration, lr))

    def settle(self) -> StepReport:
        """Wait for what was launched, rerun it where it is rejected: afterwards parameters are those of whole iterations."""
        with self._around():
            return self._report(self._settle())

    def skip(self, iteration: int) -> StepReport:
        """Take an iteration's data and compute nothing."""
        with self._around():
            leave = self._settle()
            if not leave.should_exit:
                self._rerun.drop_pending(iteration)
                self._data.advance()
                self._take_batches()
                self._done.append(Settled(iteration, skipped=True))
            return self._report(leave)

    def reset(self) -> None:
        """Forget what was launched and give up the graphs: the process groups, or the parameters, are about to go."""
        self._pending = self._rejected = None
        self._graph.reset()
        self._optimizer.reset()

    def _report(self, leave: Exit) -> StepReport:
        """What was settled since the last report; an exception may have come between."""
        done, self._done = tuple(self._done), []
        return StepReport(leave, done)

    def _run(self, iteration: int, lr: float) -> Exit:
        if self._is_undone or self._broken or self._rejected is not None or not self._rerun.may_run_ahead:
            leave = self._settle()
            if leave.should_exit:
                return leave
        return self._run_ahead(iteration, lr) if self._rerun.may_run_ahead else self._run_to_end(iteration, lr)

    # ------------------------------------------------------------------------------------------------------ running ahead

    def _run_ahead(self, iteration: int, lr: float) -> Exit:
        if self._pending is None:
            self._open_after_undoing(1)
        launched = self._launch(iteration, lr)
        before, self._pending = self._pending, launched
        if before is None:
            return GO_ON
        leave = self._judge(before, num_launched=2)
        if self._pending is None and not leave.should_exit:  # rewound: what was launched behind it counts for nothing
            return self._run(iteration, lr)
        return leave

    def _settle(self) -> Exit:
        if self._broken:
            raise GraphError(self._broken)
        if self._rejected is not None:
            return self._run_again(self._rejected)
        pending, self._pending = self._pending, None
        return GO_ON if pending is None else self._judge(pending, num_launched=1)

    def _launch(self, iteration: int, lr: float) -> _Launched:
        self._data.advance(keeps_last=self._pending is not None)
        snapshot = self._rerun.replay_state.capture()
        verdict: Ticket | None = None
        try:
            batches = self._take_batches()
            self._forward_backward(iteration, 1, batches)
            verdict = self._verdict_reader.take()
            self._update(iteration, lr)
        except Exception:  # whatever it is, the iteration has not begun, and the one before it is still to be judged
            if verdict is not None:
                self._verdict_reader.give_back(verdict)
            self._data.undo_advance()
            self._rerun.replay_state.restore(snapshot)
            self._is_undone = True
            raise
        return _Launched(iteration, lr, snapshot, verdict, self._figure_reader.take())

    def _judge(self, launched: _Launched, num_launched: int) -> Exit:
        """Accept an iteration, or rewind to before it and run it to its end. `num_launched`: it and those behind it."""
        verdict = self._checks.parse(self._verdict_reader.read(launched.verdict))
        if verdict.agreed is Code.CLEAN:
            self._open_after_undoing(num_launched)
            loss, grad_norm, *more = self._figure_reader.read(launched.figures)
            losses, norms = self._parted(verdict.values)
            self._rerun.accept(launched.iteration, losses, norms)
            self._done.append(Settled(launched.iteration, loss, grad_norm, figures=self._named(more)))
            return GO_ON
        self._pending = None
        self._rerun.replay_state.restore(launched.snapshot)
        if self._is_checked:
            self._data.step_back(num_launched)
        self._rejected = _Rejected(launched.iteration, launched.lr, verdict.values, launched.snapshot)
        return self._run_again(self._rejected)

    def _run_again(self, rejected: _Rejected) -> Exit:
        """Rerun it; where that raises, it is still to be rerun."""
        leave = self._run_to_end(rejected.iteration, rejected.lr, rejected.values, rejected.snapshot)
        self._rejected = None
        return leave

    def _open_after_undoing(self, num_launched: int) -> None:
        """A launch that failed may have closed the gate; all that was launched before it is clean."""
        if self._is_undone and num_launched == 1:
            self._checks.open_gate()
            self._load_baselines()
            self._is_undone = False

    # -------------------------------------------------------------------------------------------------- one step to its end

    def _run_to_end(self, iteration: int, lr: float, recorded: Sequence[float] | None = None, snapshot: Any = None) -> Exit:
        """All passes that the rerun machine asks for, and the update. `recorded`: what the first pass found when it was
        launched, before the state went back to `snapshot`. An exception leaves all as before the iteration, but one of the
        update: then nothing goes on."""
        try:
            return self._passes(iteration, lr, recorded, snapshot)
        except Exception as error:
            self._is_undone = True
            if self._is_updating:
                what = f"the update of iteration {iteration} has failed ({type(error).__name__}: {error})"
                self._broken = f"{what}: parameters may be half updated; go on from a checkpoint"
            self._rerun.give_up()
            raise
        finally:
            self._is_updating = False

    def _passes(self, iteration: int, lr: float, recorded: Sequence[float] | None, snapshot: Any) -> Exit:
        batches: Batches = ()
        loss, number, is_computed = 0.0, 0, False
        while self._rerun.should_run_forward_backward(self._data, iteration):
            number += 1
            values, is_computed = recorded, recorded is None or number > 1
            if number > 1:
                self._on_replay()
            if self._is_checked or is_computed:
                batches = self._take_batches()
            if is_computed:
                loss, values = self._compute(iteration, number, batches)
            assert values is not None
            self._hand_in(values)
        leave = self._rerun.should_checkpoint_and_exit()
        if leave.should_exit:
            return leave
        self._checks.open_gate()
        self._load_baselines()
        self._is_undone = False
        if self._rerun.skip_step:
            self._done.append(Settled(iteration, skipped=True))
            return leave
        if not is_computed:  # the device's rule had rejected it, the host's did not, and the gradients are gone: once more
            self._rerun.replay_state.restore(snapshot)
            self._data.step_back(1)
            return self._run_to_end(iteration, lr)
        self._is_updating = True
        self._update(iteration, lr)
        _, grad_norm, *more = self._figure_reader.read(self._figure_reader.take())
        self._done.append(Settled(iteration, loss, grad_norm, figures=self._named(more)))
        return leave

    def _compute(self, iteration: int, number: int, batches: Batches) -> tuple[float, Sequence[float]]:
        """One pass, its loss, and the numbers of its checks; gradients stay in place."""
        self._forward_backward(iteration, number, batches)
        values = self._checks.parse(self._verdict_reader.read(self._verdict_reader.take())).values
        loss = self._figure_reader.read(self._figure_reader.take())[0]
        return loss, values

    def _hand_in(self, values: Sequence[float]) -> None:
        losses, norms = self._parted(values)
        for loss in losses:
            self._rerun.validate_loss(torch.tensor(loss))
        for name, norm in norms.items():
            self._rerun.validate_gradient(name, norm)

    def _parted(self, values: Sequence[float]) -> tuple[Sequence[float], dict[str, float]]:
        """Losses, and gradient norms by their check."""
        num_losses = self._checks.num_losses
        return values[:num_losses], dict(zip(self._norm_names, values[num_losses:], strict=True))

    # ---------------------------------------------------------------------------------------------------- on the device

    def _forward_backward(self, iteration: int, number: int, batches: Batches) -> None:
        self._schedule(iteration)
        if self._before_pass is not None:
            self._before_pass(iteration, number, batches)
        with self._timed_pass:
            loss = self._graph(batches, eager=self._is_eager(iteration), counts=number == 1).value
        self._launched_pass()
        self._figures[0].copy_(loss)

    def _update(self, iteration: int, lr: float) -> None:
        self._schedule(iteration)
        self._optimizer.set_lr(lr)
        with self._timed_update:
            grad_norm = self._optimizer.step()
        if grad_norm is not None:
            self._figures[1].copy_(grad_norm)
        for place, measure in enumerate(self._more_figures.values(), start=2):
            self._figures[place].copy_(measure())

    def _named(self, more: Sequence[float]) -> Mapping[str, float]:
        return dict(zip(self._more_figures, more, strict=True))

    def _load_baselines(self) -> None:
        num_losses = self._checks.num_losses
        self._checks.load_baselines(self._rerun.large_values, ["loss"] * num_losses, self._norm_names)
