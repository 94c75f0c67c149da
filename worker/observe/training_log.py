"""The training log: what a run says of itself, to people and to every writer.

    log = TrainingLog(TrainingLogOptions(train_iters=1000), group=group, writers=writers, say=say, warn=warn)
    for iteration in range(1, 1001):
        ...
        log.step(
            StepNumbers(
                iteration=iteration,
                consumed_samples=consumed_samples,
                losses={"lm loss": loss},
                learning_rate=lr,
                global_batch_size=global_batch_size,
            )
        )
    log.flush()
    log.close()

Three cadences: each step adds up; writers get every `writer_interval`-th step, under its own iteration; a line comes every
`log_interval` steps and after the first step of the process, which clears nothing. No step waits for its numbers: they are read
at the next log point, and losses of all steps since the last one are reduced over ranks at once. Fields, units and keys are
those of the seed's section 2.1.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from rsup.worker.observe.closing import close_writers, each_in_turn
from rsup.worker.observe.console_line import LineNumbers, evaluation_line, log_line, perplexity
from rsup.worker.observe.contract import CLOSE_WITHIN_S, Point, Warn, Writer, takes_each_point
from rsup.worker.observe.error_text import one_line
from rsup.worker.observe.interval_counters import Interval, IntervalCounters
from rsup.worker.observe.late_scalars import LateScalars, Value, read_now
from rsup.worker.observe.log_points import StepRecord, interval_points, memory_points, step_points, validation_points
from rsup.worker.observe.step_numbers import FIGURES, Loss, PendingStep, loss_values, number_of
from rsup.worker.observe.step_numbers import StepNumbers as StepNumbers
from rsup.worker.observe.step_reduction import StepReduction, SumAndCount
from rsup.worker.observe.timer_contract import NO_TIMERS, TimersLike
from rsup.worker.observe.timer_report import OPTIONS

FLUSH_AFTER_STEPS = 1024
"""Steps whose numbers wait at most: with a long log interval they are reduced and written in between."""
FLUSH_AFTER_S = 60.0
"""About as long they wait at most; in steps, by the time of the slowest rank's, so that all ranks agree."""
DEVICE_WITHIN_S = 5.0
"""How long a way out waits for the newest numbers of a device: a kernel that waits for a rank that is gone never ends."""


@dataclass(frozen=True)
class TrainingLogOptions:
    """What is logged. An interval of 0: never. `flops_per_step`: of all ranks together, or a function of the global batch size.

    `log_timers`: times of parts go to the writers, too; `timer_option`: which are printed, see `timer_report`; None: as the
    timers themselves say.
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
    timer_option: str | None = None
    log_validation_ppl: bool = False
    flops_per_step: float | Callable[[int], float] | None = None
    tokens_per_sample: int = 0


class Pausable(Protocol):
    """What measures steps, too, and leaves out what is between `pause` and `resume`."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class EnergyLike(Pausable, Protocol):
    """See `rsup.worker.observe.energy.EnergyMeter`: of this rank, in joules; None where nobody can say."""

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

    `writers`, `say`: only on the rank that writes; writers that say `takes_each_point` (the supervisor's, telemetry's) get each
    log point whatever the intervals are. `timers`, `energy`: see there. `timer_names`: those of the parts of a step; None: all.
    `pausable`: leave out what the log leaves out (a straggler detector). `on_point`: called on every rank after each line; what
    one raises is a warning, once.
    """

    def __init__(
        self,
        options: TrainingLogOptions,
        *,
        group: dist.ProcessGroup | None = None,
        writers: Sequence[Writer] = (),
        say: Callable[[str], None] = print,
        warn: Warn = print,
        timers: TimersLike = NO_TIMERS,
        timer_names: Sequence[str] | None = None,
        energy: EnergyLike | None = None,
        pausable: Sequence[Pausable] = (),
    ) -> None:
        self.options = options
        self.on_point: list[Callable[[LogPoint], None]] = []
        self._say = say
        self._warn_people = warn
        self._warned: set[str] = set()
        self._writers = [writer for writer in writers if not takes_each_point(writer)]
        self._live_writers = [writer for writer in writers if takes_each_point(writer)]
        self._flops_per_step = options.flops_per_step
        self._timers = timers
        self._timer_names = timer_names
        self._energy = energy if options.log_energy else None
        self._pausable = [*pausable, *([] if self._energy is None else [self._energy])]
        self._reduction = StepReduction(group)
        self._counters = IntervalCounters()
        self._late = LateScalars()
        self._pending: list[PendingStep] = []
        self._flush_after = FLUSH_AFTER_STEPS
        self._reduced_at_s = 0.0
        """By the clock of the steps."""
        self._given_up: list[Writer] = []
        self._known_losses: set[str] = set()
        """Of the last step that updated."""
        self._missed_losses: set[str] = set()
        self._is_closed = False
        self._check()

    def _check(self) -> None:
        if self.options.log_interval <= 0:
            self._warn(f"the log interval is {self.options.log_interval}: only the line after the first step is printed")
        if self.options.writer_interval <= 0 and (self._writers or self._live_writers):
            self._warn(f"the writers' interval is {self.options.writer_interval}: no single step is written")
        if self.options.log_throughput and self.options.flops_per_step is None:
            self._warn("throughput cannot be logged: nobody says how many floating-point operations a step has")
        if self.options.log_energy and self._energy is None:
            self._warn("energy cannot be logged: nobody measures it, see TrainingLog(energy=...)")
        if self.options.timer_option not in (None, *OPTIONS):
            self._warn(f"the timers' option {self.options.timer_option!r} is none of {', '.join(OPTIONS)}: their own holds")
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
        """One step more; every step, on every rank. Waits, and meets the other ranks, only where `waits_at` says so."""
        computed = numbers.global_batch_size if numbers.computed else 0
        self._counters.add_step(numbers.skipped, self._flops(computed), computed)
        self._remember(numbers)
        if self.is_due(numbers.iteration):
            self._report(numbers)
        elif len(self._pending) >= self._flush_after:
            self._write_pending()

    def is_due(self, iteration: int) -> bool:
        """Whether a line follows that step: it is a multiple of the log interval, or the first step of this process."""
        return self._counters.num_reports == 0 or self._ends_interval(iteration)

    def waits_at(self, iteration: int) -> bool:
        """Whether the call of `step` for that iteration, the next one, will wait: for a line, or about once in
        `FLUSH_AFTER_S` between lines."""
        return self.is_due(iteration) or len(self._pending) + 1 >= self._flush_after

    def _ends_interval(self, iteration: int) -> bool:
        interval = self.options.log_interval
        return interval > 0 and iteration % interval == 0

    def _flops(self, global_batch_size: int) -> float:
        flops = self._flops_per_step
        if flops is None or not global_batch_size:
            return 0.0
        try:
            return float(flops(global_batch_size) if callable(flops) else flops)
        except Exception as error:  # of a caller's own function
            self._flops_per_step = None
            self._warn(f"throughput is not logged any more: flops_per_step failed: {type(error).__name__}: {one_line(error)}")
            return 0.0

    def _remember(self, numbers: StepNumbers) -> None:
        norms = (numbers.grad_norm, numbers.num_zeros, numbers.params_norm, numbers.max_attention_logit)
        given = (numbers.learning_rate, numbers.loss_scale, *norms)
        figures = [one if one is None or type(one) is float else self._figure(at, one) for at, one in enumerate(given)]
        values = [figure for figure in figures if figure is not None]
        losses: list[tuple[str, int]] = []
        for name, parts, size in self._losses_of(numbers.losses):
            values.extend(parts)
            losses.append((name, size))
        self._late.put(values)
        memory: Mapping[str, float] = {}
        if self.options.log_memory and self._is_written(numbers.iteration):
            memory = memory_points()
        has = tuple([figure is not None for figure in figures])
        self._pending.append(PendingStep(numbers, has, tuple(losses), time.time(), memory))

    def _figure(self, at: int, value: Value) -> Value | None:
        """None for what is no number, which is said once: one rank's bad value must leave it in step with the others."""
        try:
            return number_of(value)
        except Exception as error:  # of any object's conversion
            self._warn(f"the {FIGURES[at]} is not logged: {one_line(error)}", about=FIGURES[at])
            return None

    def _losses_of(self, losses: Mapping[str, Loss], what: str = "loss") -> list[tuple[str, Sequence[Value], int]]:
        """Names, what is to be read, and how many numbers that is. See `_figure`."""
        found: list[tuple[str, Sequence[Value], int]] = []
        try:
            pairs = losses.items()
        except AttributeError:
            self._warn(f"no {what} is logged: what is given is a {type(losses).__name__}, not a mapping of names")
            return found
        for name, loss in pairs:
            try:
                parts, size = loss_values(loss)
            except Exception as error:  # see _figure
                self._warn(f"the {what} {str(name)!r} is not logged: {one_line(error)}", about=f"{what} {name}")
                continue
            if size:
                found.append((str(name), parts, size))
        return found

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
        tflops = None if self._flops_per_step is None else interval.tflops_per_rank(world_size)
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
            try:
                callback(point)
            except Exception as error:  # it is called again: it may well meet other ranks
                text = f"{type(error).__name__}: {one_line(error)}"
                self._warn(f"a function of on_point failed: {text}", about=f"on_point {id(callback)}")

    def _reduced(self, extra: SumAndCount = (0.0, 0.0), of_all_ranks: bool = True) -> tuple[list[StepRecord], SumAndCount]:
        """All steps that were not reduced yet, over all ranks. Collective; waits for the newest step. Else of this rank."""
        pending, self._pending = self._pending, []
        own = [step.read(row) for step, row in zip(pending, self._late.take(), strict=True)]
        maxima: list[Sequence[float | None]] = [
            (of.learning_rate, of.grad_norm, of.num_zeros, of.params_norm, of.max_attention_logit) for of in own
        ]
        losses = [figures.losses for figures in own]
        if of_all_ranks:
            (*reduced, pace), extra = self._reduction.steps([*losses, {}], [*maxima, (self._pace_s(len(pending)),)], extra)
            if pending:
                steps = FLUSH_AFTER_S / max(pace.maxima[0] or 0.0, 1e-9)
                self._flush_after = max(1, int(min(steps, FLUSH_AFTER_STEPS)))
        else:
            reduced = self._reduction.alone(losses, maxima)
        records = []
        for step, figures, over_ranks in zip(pending, own, reduced, strict=True):
            self._counters.add_losses(over_ranks.losses, step.numbers.skipped)
            if step.numbers.computed and not step.numbers.skipped:
                self._miss(step.numbers.iteration, over_ranks.losses)
            records.append(step.record(figures, over_ranks.losses, over_ranks.maxima))
        return records, extra

    def _pace_s(self, num_steps: int) -> float:
        """Seconds that each of the newest steps took."""
        before_s, self._reduced_at_s = self._reduced_at_s, self._counters.active_s()
        return max(0.0, self._reduced_at_s - before_s) / max(1, num_steps)

    def _miss(self, iteration: int, losses: Mapping[str, float]) -> None:
        """Say of each loss once where it first was missing."""
        for name in sorted(self._known_losses - losses.keys() - self._missed_losses):
            self._missed_losses.add(name)
            self._warn(f"no rank has the loss {name!r} in iteration {iteration}: its mean is over the steps that have it")
        self._known_losses = set(losses)

    def _write_pending(self) -> None:
        records, _ = self._reduced()
        self._write_steps(records, False)

    def flush(self) -> None:
        """Write what is known of all steps so far, and have the writers make it visible: at saves and in an ordered end.
        Collective; counts as no step's time."""
        with self.paused():
            self._write_pending()
            self._flush_writers()

    def _flush_writers(self) -> None:
        for writer in (*self._writers, *self._live_writers):
            try:
                writer.flush()
            except Exception as error:  # see _write
                self._give_up(writer, error)

    def _log_timers(self, last: StepRecord, interval: Interval, clears: bool) -> None:
        """Times of one step: also behind the first step, whose times go on adding up."""
        option = self.options.timer_option
        gathered = self._timers.gather(self._timer_names, max(1, interval.num_steps), clears)
        if self.options.log_timers and clears:
            points = [Point(f"{name}-time", seconds, True) for name, seconds in gathered.maxima().items()]
            self._write([*self._writers, *self._live_writers], last.iteration, last.consumed_samples, points)
        if text := gathered.text(self._timers.log_option if option not in OPTIONS else option):
            self._say(text)

    # ---------------------------------------------------------------------------------------------------------- writers

    def _write_steps(self, records: Sequence[StepRecord], is_log_point: bool) -> None:
        for number, record in enumerate(records, start=1):
            due = self._is_written(record.iteration)
            live = due or (is_log_point and number == len(records))
            writers = [*(self._writers if due else ()), *(self._live_writers if live else ())]
            if writers:
                points = step_points(record, self.options.log_loss_scale, self._world_size_said)
                self._write(writers, record.iteration, record.consumed_samples, points, record.at_s)

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

    def _write(
        self,
        writers: Sequence[Writer],
        iteration: int,
        consumed_samples: int,
        points: Sequence[Point],
        at_s: float | None = None,
    ) -> None:
        for writer in writers if points else ():
            try:
                writer.write(iteration, consumed_samples, points, at_s=at_s)
            except Exception as error:  # of a caller's own writer: no reason to end a training
                self._give_up(writer, error)

    def _give_up(self, writer: Writer, error: Exception) -> None:
        """It gets nothing more, and is closed at the end."""
        if writer in self._given_up:
            return
        self._given_up.append(writer)
        self._writers = [other for other in self._writers if other is not writer]
        self._live_writers = [other for other in self._live_writers if other is not writer]
        self._warn(
            f"{writer.name} failed, nothing more goes there: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )

    # ------------------------------------------------------------------------------------------------- beside the steps

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation, saves: what is inside counts neither as time nor as energy of the steps. May be nested.

        Before and behind the outermost one ranks meet, so that nobody's step pays for another's save, nor another's step is
        nobody's time; after an exception, and after `close`, they do not. Before it the device ends the steps that it was
        given: their time is theirs. Collective."""
        if not self._counters.is_paused and not self._is_closed:
            _wait_for_device()
            self._reduction.barrier()
        is_outermost = self._counters.pause()
        for one in self._pausable if is_outermost else ():
            one.pause()
        try:
            yield
            if is_outermost and not self._is_closed:
                self._reduction.barrier()
        finally:
            for one in self._pausable if self._counters.resume() else ():
                one.resume()

    def evaluation(self, iteration: int, consumed_samples: int, losses: Mapping[str, Loss], suffix: str = "") -> None:
        """An evaluation after `iteration`. `losses`: sum and count of this rank, or what else a step may have. `suffix`:
        `-held-out`, for one of several sets. Collective; counts as no step's time."""
        with self.paused():
            self._write_pending()
            own: dict[str, SumAndCount] = {}
            for name, parts, size in self._losses_of(losses, "validation loss"):
                total, *count = [number for part in parts for number in read_now(part)]
                own[name] = (total, count[0] if size == 2 else 1.0)
            (reduced,), _ = self._reduction.steps([own], [()])
            ppls = {name: perplexity(loss) for name, loss in reduced.losses.items()}
            self._say(evaluation_line(iteration, reduced.losses, ppls, suffix))
            points = validation_points(reduced.losses, ppls if self.options.log_validation_ppl else {}, suffix)
            self._write([*self._writers, *self._live_writers], iteration, consumed_samples, points)
            self._flush_writers()

    @property
    def train_s(self) -> float:
        """Time of this process's steps since `start`, without what was paused."""
        return self._counters.active_s()

    @property
    def flops(self) -> float:
        """Floating-point operations of this process's steps, of all ranks; 0 where nobody says."""
        return self._counters.total_flops

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """Every way out: writers are flushed and closed, all within `within_s`. May be repeated; nothing is collective: after
        an exception the other ranks may be gone. Steps that were not reduced yet are then written with the numbers of this
        rank alone, which is said: in an ordered end call `flush` before. What fails is a warning: it replaces no error of
        the training's."""
        if self._is_closed:
            return
        self._is_closed = True
        writers = [*self._writers, *self._live_writers, *self._given_up]
        steps: list[tuple[str, Callable[[], object]]] = [
            ("the writers are not closed", lambda: close_writers(writers, self._warn, within_s))
        ]
        if self._pending and (self._writers or self._live_writers):
            steps.insert(0, ("the newest steps are not written", self._write_own))
        each_in_turn(steps, self._warn)

    def _write_own(self) -> None:
        """What this rank knows of the newest steps; nothing where a device may never end them."""
        first, last = self._pending[0].numbers.iteration, self._pending[-1].numbers.iteration
        if not self._late.are_there(DEVICE_WITHIN_S):
            self._warn(f"iterations {first} to {last} are not written: the device has not ended them")
            return
        if self._reduction.world_size > 1:
            self._warn(
                f"iterations {first} to {last} are written with the losses of this rank alone: the ranks did not end together"
            )
        self._write_steps(self._reduced(of_all_ranks=False)[0], False)

    def _warn(self, text: str, about: str = "") -> None:
        """Once a text, or once `about` what differs in its text."""
        if (key := about or text) not in self._warned:
            self._warned.add(key)
            self._warn_people(text)


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
