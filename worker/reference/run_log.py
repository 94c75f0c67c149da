"""What the trainer says of its run: the training log, the progress log, and where the time went."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch

import rsup.worker
from rsup.worker.inprocess.entry import current_entry
from rsup.worker.observe import straggler_scores
from rsup.worker.observe.closing import close_writers, each_in_turn
from rsup.worker.observe.contract import CLOSE_WITHIN_S, RESTART_WITHIN_S, Writer
from rsup.worker.observe.end_to_end import EndToEnd
from rsup.worker.observe.end_to_end_facts import Counters
from rsup.worker.observe.end_to_end_report import EndToEndReport
from rsup.worker.observe.energy import EnergyMeter
from rsup.worker.observe.memory_report import MemoryReport
from rsup.worker.observe.progress_log import ProgressLog
from rsup.worker.observe.reference_memory import theory_of_reference
from rsup.worker.observe.training_log import LogPoint, StepNumbers, TrainingLog
from rsup.worker.reference.observed import Observed
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.reference.run_parts import LOSS, energy_meter, flops_of_sample, log_options, run_writers
from rsup.worker.reference.state import Progress
from rsup.worker.reference.stepper import LOSS_SCALE, NUM_ZEROS, PARAMS_NORM, SettledIteration
from rsup.worker.reference.watching import SHARED

STEP_TIMERS = (
    "forward-backward",
    "batch-generator",
    "forward-compute",
    "backward-compute",
    "optimizer",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
)
"""Megatron-LM's, of the parts of a step."""
_NO_LOSSES = (LOSS_SCALE, NUM_ZEROS, PARAMS_NORM)


class RunLog:
    """The logs of one rank's run, from where it begins or goes on (`progress`). All calls on the training thread, alike on all
    ranks. `writers`: on rank 0 only. `say`, `warn`: for people; they speak on rank 0."""

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        progress: Progress,
        end_to_end: EndToEnd,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        writers: Sequence[Writer],
        observed: Observed,
        energy: EnergyMeter | None,
    ) -> None:
        self._options = options
        self._reached = progress
        self._batch_size = options.batch_sizes.at(progress.consumed_samples)
        """Of the newest step."""
        self._eval_s, self._num_evaluated = 0.0, 0
        self._consumed_at: dict[int, int] = {}
        """Samples behind the checkpoints that are not durable yet."""
        self._is_closed = False
        self._say = say
        self._warn = warn
        self._rank = ranks.rank
        self._observed = observed
        self._energy = energy
        self._flops_of_sample = flops_of_sample(options)
        flops_before = progress.consumed_samples * self._flops_of_sample
        self._end_to_end = end_to_end
        end_to_end.facts = dataclasses.replace(end_to_end.facts, flops_before=flops_before)
        end_to_end.counters = self._count
        self._report = EndToEndReport(end_to_end, writers) if ranks.rank == 0 else None
        self.training = TrainingLog(
            log_options(options),
            group=ranks.control,
            writers=writers,
            say=say,
            warn=warn,
            timers=observed.timers,
            timer_names=STEP_TIMERS if options.timing_log_level else (),
            energy=energy,
            pausable=[observed.straggler],
        )
        self._points: list[LogPoint] = []
        """To be followed by what this log says besides: not in `on_point`, for a rank that fails in it must end."""
        self.training.on_point.append(self._points.append)
        self._memory = MemoryReport(
            ranks.device,
            ranks.rank,
            say=say,
            speaks=ranks.rank == 0,
            theory=lambda: theory_of_reference(options),
            interval=options.log_memory_interval,
            device_memory_used=options.log_device_memory_used,
        )
        if options.log_memory_interval == 0:
            warn("--log-memory-interval is 0: memory is reported at the beginning and around saves only")
        if not options.eval_interval and options.eval_iters:
            warn("--eval-interval is 0: only the end of the run is evaluated")
        self._progress_log: ProgressLog | None = None
        if options.log_progress and options.save_dir is None:
            warn("--log-progress keeps progress.txt beside the checkpoints: it needs --save")
        elif options.log_progress and options.save_dir is not None and ranks.rank == 0:
            self._progress_log = ProgressLog(options.save_dir, ranks.world_size, warn)
            self._progress_log.started(flops_before)

    def started(self) -> None:
        """The loop begins."""
        self.training.start()
        self._end_to_end.train_started()

    def step(
        self, done: SettledIteration, progress: Progress, batch_size: int, learning_rate: float, loss_scale: float | None
    ) -> None:
        """One iteration is settled, and `progress` behind it. `loss_scale`: where the iteration does not say its own."""
        losses: dict[str, torch.Tensor | float] = {}
        if done.loss is not None:
            losses[LOSS] = done.loss
            losses |= {name: value for name, value in done.figures.items() if name not in _NO_LOSSES}
        self._reached, self._batch_size = progress, batch_size
        self._end_to_end.stepped()
        self.training.step(
            StepNumbers(
                done.iteration,
                progress.consumed_samples,
                losses,
                learning_rate,
                batch_size,
                skipped=done.skipped,
                loss_scale=done.figures.get(LOSS_SCALE, loss_scale),
                grad_norm=done.grad_norm,
                params_norm=done.figures.get(PARAMS_NORM),
                num_zeros=done.figures.get(NUM_ZEROS),
                computed=done.loss is not None,
            )
        )
        while self._points:
            self._log_point(self._points.pop(0))
        self._memory.at_step(done.iteration)

    def _log_point(self, point: LogPoint) -> None:
        self._memory.at_log_point(point.iteration)
        self._report_stragglers(point.iteration)
        self._end_to_end.logged()
        if self._report is not None:
            self._report.send()

    def _report_stragglers(self, iteration: int) -> None:
        report = self._observed.straggler.report(iteration)
        if report is None:
            return
        self._say(f" {straggler_scores.line(report, SHARED)}")
        if self._rank == 0:
            rsup.worker.report_straggler(report)
            rsup.worker.report_metrics(iteration, straggler_scores.metrics(report, SHARED), kind="straggler")

    def phase(self, *names: str) -> None:
        """Say how long phases of the run took, by their timers. Collective."""
        if text := self._observed.timers.log(names):
            self._say(text)

    def _count(self) -> Counters:
        reached = self._reached
        spent = (self.training.train_s, self._eval_s, self._num_evaluated, self.training.flops)
        return Counters(reached.iteration, reached.consumed_samples, *spent, self._batch_size)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation."""
        began_s = time.perf_counter()
        with self.training.paused(), self._end_to_end.evaluation(), self._observed.timers("eval-time", 0):
            yield
        self._eval_s += time.perf_counter() - began_s
        self._num_evaluated += self._options.eval_iters

    def evaluated(self, sum_and_count: tuple[float, float]) -> None:
        """What the evaluation found, of this rank. Collective; no step's time."""
        with self.training.paused():
            self.training.evaluation(self._reached.iteration, self._reached.consumed_samples, {LOSS: sum_and_count})
            self.phase("eval-time")

    @contextlib.contextmanager
    def saving(self, is_durable: bool) -> Iterator[None]:
        """Around the beginning of a save; `is_durable`: it is meant to be. Collective."""
        iteration = self._reached.iteration
        with self.training.paused(), self._memory.around_save(iteration):
            if is_durable:
                self.training.flush()
                self._end_to_end.save_began(iteration)
                self._consumed_at[iteration] = self._reached.consumed_samples
                if self._progress_log is not None and self._options.async_save:
                    self._progress_log.saving(iteration, *self._figures_of(self._reached.consumed_samples))
            timer = "save-checkpoint" if is_durable else "save-checkpoint-non-persistent"
            with self._observed.timers(timer, 0):
                yield
            self.phase(timer)
            if is_durable:
                self._end_to_end.save_returned(iteration)

    def save_is_over(self, iteration: int, is_durable: bool) -> None:
        """A durable save has ended; older ones that nobody heard of again never will."""
        consumed = self._consumed_at.get(iteration)
        self._consumed_at = {other: samples for other, samples in self._consumed_at.items() if other > iteration}
        if not is_durable:
            self._end_to_end.save_failed(iteration)
            return
        self._end_to_end.save_durable(iteration)
        if self._progress_log is None or consumed is None:
            return
        if self._options.async_save:
            self._progress_log.saved_async(iteration)
        else:
            self._progress_log.saved(iteration, *self._figures_of(consumed))

    def _figures_of(self, consumed_samples: int) -> tuple[float, int]:
        """Floating-point operations and tokens since the beginning of the run."""
        return consumed_samples * self._flops_of_sample, consumed_samples * self._options.seq_length

    def close(self, ends: bool = True) -> None:
        """Every way out. May be repeated; what fails is a warning. `ends`: the program does, too; false: its training is
        entered again, and soon."""
        if self._is_closed:
            return
        self._is_closed = True
        within_s = CLOSE_WITHIN_S if ends else RESTART_WITHIN_S
        steps: list[tuple[str, Callable[[], object]]] = [
            ("the end of the training is not noted", self._end_to_end.train_finished),
            ("the training log is not closed", lambda: self.training.close(within_s)),
            ("the straggler detector is not closed", self._observed.straggler.close),
        ]
        if self._report is not None:
            steps.insert(1, ("where the time went is not reported", self._report.send))
        if ends:
            steps.insert(1, ("the end of the program is not noted", self._end_to_end.app_finished))
        if self._energy is not None:
            steps.append(("the energy meter is not closed", self._energy.close))
        each_in_turn(steps, self._warn)


def open_run_log(
    options: Options,
    ranks: Ranks,
    progress: Progress,
    end_to_end: EndToEnd,
    observed: Observed,
    device_uuid: str,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> RunLog:
    """The log of a run that goes on from `progress`; where it is entered again in this process, it is closed before."""
    with contextlib.ExitStack() as opened:  # what this leaves behind when it is interrupted nobody else would close
        writers = run_writers(options, ranks, progress, warn)
        opened.callback(close_writers, writers, warn, RESTART_WITHIN_S)
        if (energy := energy_meter(options, device_uuid, warn)) is not None:
            opened.callback(energy.close)
        log = RunLog(
            options, ranks, progress, end_to_end, say=say, warn=warn, writers=writers, observed=observed, energy=energy
        )
        if (entry := current_entry()) is not None:
            entry.at_restart(lambda: log.close(ends=False))
        opened.pop_all()
    return log
