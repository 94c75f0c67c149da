"""The training log: what a run says of itself, to people and to every writer.

    log = TrainingLog(TrainingLogOptions(train_iters=1000), group=group, writers=writers, say=say, warn=warn)
    for iteration in range(1, 1001):
        ...
        log.step(StepNumbers(iteration, consumed_samples, {"lm loss": loss}, lr, global_batch_size, grad_norm=norm))
    log.flush()
    log.close()

Three cadences: each step adds up; writers get every `writer_interval`-th step, under its own iteration; a line comes every
`log_interval` steps and after the first step of the process, which clears nothing. No step waits for its numbers: they are read
at the next log point, and losses of all steps since the last one are reduced over ranks at once. Fields, units and keys are
those of the seed's section 2.1.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from rsup.worker.observe.console_line import PPL_LIMIT, LineNumbers, evaluation_line, log_line
from rsup.worker.observe.contract import Point, Warn, Writer
from rsup.worker.observe.interval_counters import Interval, IntervalCounters
from rsup.worker.observe.late_scalars import LateScalars, Value
from rsup.worker.observe.log_points import StepRecord, interval_points, memory_points, step_points, validation_points
from rsup.worker.observe.step_numbers import PendingStep
from rsup.worker.observe.step_numbers import StepNumbers as StepNumbers
from rsup.worker.observe.step_reduction import StepReduction, SumAndCount
from rsup.worker.observe.timer_contract import NO_TIMERS, TimersLike

FLUSH_AFTER_STEPS = 1024
"""Steps whose numbers wait at most: with a long log interval they are reduced and written in between."""


@dataclass(frozen=True)
class TrainingLogOptions:
    """What is logged. An interval of 0: never. `flops_per_step`: of all ranks together, or a function of the global batch size.

    `log_timers`: times of parts go to the writers, too; `timer_option`: which are printed, see `timer_report`.
    `tokens_per_sample`: for tokens a second; 0: not said.
    """

    train_iters: int
    log_interval: int = 100
    writer_interval: int = 1
    log_throughput: bool = False
    log_energy: bool = False
    log_loss_scale: bool = True
    log_world_size: bool = False
    log_memory: bool = False
    log_timers: bool = False
    timer_option: str = "minmax"
    log_validation_ppl: bool = False
    flops_per_step: float | Callable[[int], float] | None = None
    tokens_per_sample: int = 0


class EnergyLike(Protocol):
    """See `rsup.worker.observe.energy.EnergyMeter`: of this rank, in joules; None where nobody can say."""

    def resume(self) -> None: ...
    def pause(self) -> None: ...
    def peek_j(self) -> float | None: ...
    def lap_j(self) -> float | None: ...


class LogPoint(NamedTuple):
    """A line was printed. `clears`: it ends an interval; false for the line after the first step."""

    iteration: int
    consumed_samples: int
    interval: Interval
    clears: bool
    tflops_per_rank: float | None


class TrainingLog:
    """The log of one rank; all calls on the training thread, in the same order on every rank of `group` (None: all ranks).

    `writers`, `say`: only on the rank that writes. `live_writers`: those that get each log point whatever the intervals of the
    others are (the supervisor, telemetry). `timers`, `energy`: see there. `timer_names`: those of the parts of a step; None:
    all. `on_point`: called on every rank after each line.
    """

    def __init__(
        self,
        options: TrainingLogOptions,
        *,
        group: dist.ProcessGroup | None = None,
        writers: Sequence[Writer] = (),
        live_writers: Sequence[Writer] = (),
        say: Callable[[str], None] = print,
        warn: Warn = print,
        timers: TimersLike = NO_TIMERS,
        timer_names: Sequence[str] | None = None,
        energy: EnergyLike | None = None,
    ) -> None:
        self.options = options
        self.on_point: list[Callable[[LogPoint], None]] = []
        self._say = say
        self._warn_people = warn
        self._warned: set[str] = set()
        self._writers = list(writers)
        self._live_writers = list(live_writers)
        self._timers = timers
        self._timer_names = timer_names
        self._energy = energy if options.log_energy else None
        self._reduction = StepReduction(group)
        self._counters = IntervalCounters()
        self._late = LateScalars()
        self._pending: list[PendingStep] = []
        self._known_losses: set[str] = set()
        """Of the last step that updated."""
        self._is_closed = False
        self._check()

    def _check(self) -> None:
        if self.options.log_interval <= 0:
            self._warn("the log interval is 0: only the line after the first step is printed")
        if self.options.writer_interval <= 0 and (self._writers or self._live_writers):
            self._warn("the writers' interval is 0: no single step is written")
        if self.options.log_throughput and self.options.flops_per_step is None:
            self._warn("throughput cannot be logged: nobody says how many floating-point operations a step has")
        if self.options.log_memory and not torch.cuda.is_available():
            self._warn("memory is not written: there is no CUDA allocator here that could be asked")

    def start(self) -> None:
        """The training begins: time and energy count from now."""
        self._counters.restart_clock()
        if self._energy is not None:
            self._energy.resume()
            self._energy.lap_j()

    # ------------------------------------------------------------------------------------------------------- each step

    def step(self, numbers: StepNumbers) -> None:
        """One step more; every step, on every rank. Waits, and meets the other ranks, at log points only (see `is_due`)."""
        computed = numbers.global_batch_size if numbers.computed else 0
        self._counters.add_step(numbers.skipped, self._flops(computed), computed)
        self._remember(numbers)
        if self.is_due(numbers.iteration):
            self._report(numbers)
        elif len(self._pending) >= FLUSH_AFTER_STEPS:
            self._write_pending()

    def is_due(self, iteration: int) -> bool:
        """Whether a line follows that step: it is a multiple of the log interval, or the first step of this process."""
        return self._counters.num_reports == 0 or self._ends_interval(iteration)

    def _ends_interval(self, iteration: int) -> bool:
        interval = self.options.log_interval
        return interval > 0 and iteration % interval == 0

    def _flops(self, global_batch_size: int) -> float:
        flops = self.options.flops_per_step
        if flops is None or not global_batch_size:
            return 0.0
        return flops(global_batch_size) if callable(flops) else flops

    def _remember(self, numbers: StepNumbers) -> None:
        figures = (numbers.loss_scale, numbers.grad_norm, numbers.num_zeros, numbers.params_norm)
        losses = {name: loss for name, loss in numbers.losses.items() if self._is_loss(name, loss)}
        sizes = tuple(loss.numel() if isinstance(loss, torch.Tensor) else 1 for loss in losses.values())
        self._late.put([*(figure for figure in figures if figure is not None), *losses.values()])
        memory: Mapping[str, float] = {}
        if self.options.log_memory and self._is_written(numbers.iteration):
            memory = memory_points()
        has = tuple(figure is not None for figure in figures)
        self._pending.append(PendingStep(numbers, has, tuple(zip(losses, sizes, strict=True)), memory))

    def _is_loss(self, name: str, loss: torch.Tensor | float) -> bool:
        if not isinstance(loss, torch.Tensor) or loss.numel() in (1, 2):
            return True
        self._warn(f"the loss {name!r} is not logged: it has the shape {list(loss.shape)}, not [] or [2], sum and count")
        return False

    def _is_written(self, iteration: int) -> bool:
        interval = self.options.writer_interval
        return interval > 0 and iteration % interval == 0

    # ------------------------------------------------------------------------------------------------------ log points

    def _report(self, numbers: StepNumbers) -> None:
        options, clears = self.options, self._ends_interval(numbers.iteration)
        joules = None
        if self._energy is not None:  # a lap that the first line took would be missing from the first whole interval
            joules = self._energy.lap_j() if clears else self._energy.peek_j()
        records, energy = self._reduced((0.0, 0.0) if joules is None else (joules, 1.0))
        interval = self._counters.report(clears)  # behind the collective: it includes the wait for the slowest rank
        last = records[-1]
        world_size = self._reduction.world_size
        tflops = None if options.flops_per_step is None else interval.tflops_per_rank(world_size)
        step_j = energy[0] / energy[1] / max(1, interval.num_steps) if energy[1] else None
        power_w = step_j / interval.step_s if step_j is not None and interval.step_s > 0 else None
        line = LineNumbers(
            last.iteration,
            options.train_iters,
            last.consumed_samples,
            last.global_batch_size,
            last.learning_rate,
            1.0 if last.loss_scale is None else last.loss_scale,
            last.grad_norm,
            last.num_zeros,
            last.params_norm,
            last.skipped_samples,
            tflops if options.log_throughput else None,
            step_j,
            power_w,
        )
        self._say(log_line(line, interval))
        self._write_steps(records, True)
        if clears:
            energy_points = [] if step_j is None else [Point("iter-energy/gpu", step_j), Point("power/gpu", power_w or 0.0)]
            self._write_interval(last, interval, tflops, energy_points)
        self._log_timers(last, interval, clears)
        point = LogPoint(last.iteration, last.consumed_samples, interval, clears, tflops)
        for callback in self.on_point:
            callback(point)

    def _reduced(self, extra: SumAndCount = (0.0, 0.0)) -> tuple[list[StepRecord], SumAndCount]:
        """All steps that were not reduced yet, over all ranks. Collective; waits for the newest step."""
        pending, self._pending = self._pending, []
        own = [step.read(row) for step, row in zip(pending, self._late.take(), strict=True)]
        maxima = [(s.numbers.learning_rate, f.grad_norm, f.num_zeros, f.params_norm) for s, f in zip(pending, own, strict=True)]
        reduced, extra = self._reduction.steps([figures.losses for figures in own], maxima, extra)
        records = []
        for step, figures, over_ranks in zip(pending, own, reduced, strict=True):
            self._counters.add_losses(over_ranks.losses, step.numbers.skipped)
            if step.numbers.computed and not step.numbers.skipped:
                self._miss(step.numbers.iteration, over_ranks.losses)
            records.append(step.record(figures, over_ranks.losses, over_ranks.maxima))
        return records, extra

    def _miss(self, iteration: int, losses: Mapping[str, float]) -> None:
        """Say of each loss once where it first was missing."""
        for name in sorted(self._known_losses - losses.keys()):
            self._warn(f"no rank has the loss {name!r} in iteration {iteration}: its mean is over the steps that have it")
        self._known_losses = set(losses)

    def _write_pending(self) -> None:
        records, _ = self._reduced()
        self._write_steps(records, False)

    def flush(self) -> None:
        """Write what is known of all steps so far, and have the writers make it visible: at saves and in an ordered end.
        Collective."""
        self._write_pending()
        for writer in (*self._writers, *self._live_writers):
            writer.flush()

    def _log_timers(self, last: StepRecord, interval: Interval, clears: bool) -> None:
        """Times of one step: also behind the first step, whose times go on adding up."""
        gathered = self._timers.gather(self._timer_names, max(1, interval.num_steps), clears)
        if self.options.log_timers and clears:
            points = [Point(f"{name}-time", seconds, True) for name, seconds in gathered.maxima().items()]
            self._write([*self._writers, *self._live_writers], last.iteration, last.consumed_samples, points)
        if text := gathered.text(self.options.timer_option):
            self._say(text)

    # ---------------------------------------------------------------------------------------------------------- writers

    def _write_steps(self, records: Sequence[StepRecord], is_log_point: bool) -> None:
        for number, record in enumerate(records, start=1):
            due = self._is_written(record.iteration)
            live = due or (is_log_point and number == len(records))
            writers = [*(self._writers if due else ()), *(self._live_writers if live else ())]
            if writers:
                points = step_points(record, self.options.log_loss_scale, self._world_size_said)
                self._write(writers, record.iteration, record.consumed_samples, points)

    @property
    def _world_size_said(self) -> int | None:
        return self._reduction.world_size if self.options.log_world_size else None

    def _write_interval(
        self, last: StepRecord, interval: Interval, tflops: float | None, energy_points: Sequence[Point]
    ) -> None:
        options, at = self.options, (last.iteration, last.consumed_samples)
        times = interval_points(interval, tflops, options.tokens_per_sample)
        memory = [] if options.log_memory else [Point(name, value) for name, value in memory_points().items()]
        self._write(self._live_writers, *at, [*times, *energy_points, *memory])
        shown = ("iteration-time", *(("throughput",) if options.log_throughput else ())) if options.log_timers else ()
        self._write(self._writers, *at, [*(point for point in times if point.key in shown), *energy_points])

    def _write(self, writers: Sequence[Writer], iteration: int, consumed_samples: int, points: Sequence[Point]) -> None:
        for writer in writers if points else ():
            writer.write(iteration, consumed_samples, points)

    # ------------------------------------------------------------------------------------------------- beside the steps

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation, saves: what is inside counts neither as time nor as energy of the steps. May be nested. Behind the
        outermost one ranks meet, so that nobody's step pays for another's save; after an exception they do not."""
        is_outermost = self._counters.pause()
        if is_outermost and self._energy is not None:
            self._energy.pause()
        try:
            yield
            if is_outermost and not self._is_closed:
                self._reduction.barrier()
        finally:
            if self._counters.resume() and self._energy is not None:
                self._energy.resume()

    def evaluation(
        self, iteration: int, consumed_samples: int, losses: Mapping[str, tuple[Value, Value]], suffix: str = ""
    ) -> None:
        """An evaluation after `iteration`. `losses`: sum and count of this rank. `suffix`: `-held-out`, for one of several
        sets. Collective; counts as no step's time."""
        self._counters.pause()
        try:
            self._write_pending()
            own = {name: (float(total), float(count)) for name, (total, count) in losses.items()}
            (reduced,), _ = self._reduction.steps([own], [()])
            ppls = {name: math.exp(min(PPL_LIMIT, loss)) for name, loss in reduced.losses.items()}
            self._say(evaluation_line(iteration, reduced.losses, ppls, suffix))
            points = validation_points(reduced.losses, ppls if self.options.log_validation_ppl else {}, suffix)
            for writer in (*self._writers, *self._live_writers):
                writer.write(iteration, consumed_samples, points)
                writer.flush()
        finally:
            self._counters.resume()

    @property
    def train_s(self) -> float:
        """Time of this process's steps since `start`, without what was paused."""
        return self._counters.active_s()

    @property
    def flops(self) -> float:
        """Floating-point operations of this process's steps, of all ranks; 0 where nobody says."""
        return self._counters.total_flops

    def close(self) -> None:
        """Every way out: writers are flushed and closed. May be repeated; nothing is collective: after an exception the other
        ranks may be gone. Steps that were not reduced yet are then written where there is one rank, and lost with several: in
        an ordered end call `flush` before."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._pending and self._reduction.world_size == 1:
                self._write_pending()
        finally:
            for writer in (*self._writers, *self._live_writers):
                writer.close()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn_people(text)
