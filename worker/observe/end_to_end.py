"""Where the time of a run went, under the names that NVIDIA's one-logger gives these numbers.

It owns stamps, counts and extremes, and knows no way out: counters are asked for (`Counters`, of the training log), and
`metrics` is read by whoever sends it (`EndToEndReport`). What a save will have made productive is kept aside until that save is
known to be durable.

In what comes out times are milliseconds since the epoch, durations seconds unless the name says `msecs`, flags 0 or 1. What is
not known is left out. `docs/end_to_end.md` explains every name.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rsup.supervisor.wire import RELEASE
from rsup.worker.observe.end_to_end_facts import STAGES, Counters, Listener, RunFacts
from rsup.worker.observe.end_to_end_saves import SaveRecord

TFLOP = 1e12
SCHEMA_VERSION = "1.0.0"
NUMBERS_VERSION = f"{RELEASE}-rsup"
"""Of the code that forms the numbers: in its place Megatron-LM has the version of its own."""
WARMUP_ITERATIONS = 5
Metrics = dict[str, float | str]


@dataclass
class _Least:
    """The least mean time over windows, in milliseconds; `of_s` and `of_count` are totals at the end of the last window."""

    of_s: float = 0.0
    of_count: int = 0
    least_ms: float | None = None

    def window(self, total_s: float, count: int) -> None:
        if count <= self.of_count:
            return
        mean_ms = (total_s - self.of_s) / (count - self.of_count) * 1e3
        self.least_ms = mean_ms if self.least_ms is None else min(self.least_ms, mean_ms)
        self.of_s, self.of_count = total_s, count


class EndToEnd:
    """The record of one run of one process, on its training thread. Every rank may have one; one rank's is sent.

    `app_started_s`: when the program started, the earliest over the ranks, in seconds since the epoch like all moments here;
    those that are not given are read from `clock`. `counters` may be set later, but before `train_started`; without them
    nothing is told of what was trained.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        app_started_s: float,
        counters: Callable[[], Counters] | None = None,
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.facts = facts
        self.counters = counters
        self._listeners = tuple(listeners)
        self._clock = clock
        self._stamps_s: dict[str, float] = {"app_start_time": app_started_s}
        self._loading_s = 0.0
        self._start: Counters | None = None
        self._now: Counters | None = None
        self._train_least, self._eval_least = _Least(), _Least()
        self._most_tflops = 0.0
        self._saves = SaveRecord()

    @property
    def iteration(self) -> int:
        """The one that `metrics` speaks of; 0 before training."""
        return self._now.iteration if self._now is not None else 0

    # ------------------------------------------------------------------------------------------------------------ stages

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of `STAGES`; of one that comes several times the first begin and the last end count. Raise ValueError for
        another name."""
        if name not in STAGES:
            raise ValueError(f"no stage {name!r}: there are {', '.join(STAGES)}")
        began, finished = STAGES[name]
        began_s = self._clock()
        self._stamps_s.setdefault(began, began_s)
        self._tell(lambda to: to.stage_began(name, began_s))
        try:
            yield
        finally:
            finished_s = self._stamps_s[finished] = self._clock()
            self._loading_s += finished_s - began_s if name == "load_checkpoint" else 0.0
            self._tell(lambda to: to.stage_finished(name, finished_s))

    def train_started(self, at_s: float | None = None) -> None:
        """The loop begins, from where `counters` says."""
        at_s = self._at(at_s)
        start = self._start = self._now = self._count()
        self._train_least, self._eval_least = (
            _Least(start.train_s, start.iteration),
            _Least(start.eval_s, start.eval_iterations),
        )
        self._stamps_s["app_train_loop_start_time"] = at_s
        self._tell(lambda to: to.train_started(at_s, start))

    def stepped(self) -> None:
        """An iteration is over. Only listeners want to know: without them it costs nothing."""
        if self._listeners:
            at_s = self._clock()
            self._tell(lambda to: to.stepped(at_s))

    def logged(self, at_s: float | None = None) -> None:
        """A log point, right after ranks have met: a window ends, over which the least and greatest values are formed."""
        if self._start is None or self._now is None:
            return
        before, now = self._now, self._count()
        self._now = now
        if now.iteration > self._start.iteration:
            at_s = self._at(at_s)
            self._stamps_s.setdefault("first_logged_train_iterations_finish_time", at_s)
            self._stamps_s["last_logged_train_iterations_finish_time"] = at_s
        self._train_least.window(now.train_s, now.iteration)
        self._eval_least.window(now.eval_s, now.eval_iterations)
        if now.train_s > before.train_s:
            tflops = (now.flops - before.flops) / (now.train_s - before.train_s) / TFLOP
            self._most_tflops = max(self._most_tflops, tflops / self.facts.world_size)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation, for listeners; its time and iterations come with the counters."""
        began_s = self._clock()
        self._tell(lambda to: to.evaluation_began(began_s))
        try:
            yield
        finally:
            finished_s = self._clock()
            self._tell(lambda to: to.evaluation_finished(finished_s))

    def train_finished(self, at_s: float | None = None) -> None:
        """The loop is over, for whatever reason. The first call counts."""
        if self._start is None or "app_train_loop_finish_time" in self._stamps_s:
            return
        at_s = self._stamps_s["app_train_loop_finish_time"] = self._at(at_s)
        self.logged(at_s)
        self._tell(lambda to: to.train_finished(at_s))

    def app_finished(self, at_s: float | None = None) -> None:
        """The program ends; nothing follows but a last reading. The first call counts."""
        at_s = self._at(at_s)
        self.train_finished(at_s)
        if "app_finish_time" not in self._stamps_s:
            self._stamps_s["app_finish_time"] = at_s
            self._tell(lambda to: to.app_finished(at_s))

    # ------------------------------------------------------------------------------------------------------------- saves

    def save_began(self, iteration: int, at_s: float | None = None) -> None:
        """A checkpoint of `iteration` is begun: what has been done by now becomes productive once it is durable."""
        at_s = self._at(at_s)
        self._saves.began(iteration, at_s, self._count())
        self._tell(lambda to: to.save_began(iteration, at_s))

    def save_returned(self, iteration: int, at_s: float | None = None) -> None:
        """Training goes on; an asynchronous save may still be on its way. Not needed where it is durable or failed by then."""
        at_s = self._at(at_s)
        if self._saves.returned(iteration, at_s):
            self._tell(lambda to: to.save_returned(iteration, at_s))

    def save_durable(self, iteration: int, at_s: float | None = None) -> None:
        """The checkpoint of `iteration` is durable. The first call counts."""
        at_s = self._at(at_s)
        self.save_returned(iteration, at_s)
        if self._saves.durable(iteration, at_s):
            self._tell(lambda to: to.save_durable(iteration, at_s))

    def save_failed(self, iteration: int, at_s: float | None = None) -> None:
        """The checkpoint of `iteration` will never be durable."""
        at_s = self._at(at_s)
        self.save_returned(iteration, at_s)
        if self._saves.failed(iteration, at_s):
            self._tell(lambda to: to.save_failed(iteration, at_s))

    # ----------------------------------------------------------------------------------------------------- what is known

    def metrics(self, now: float) -> Metrics:
        """All that is known, by one-logger's names, and `lost_time`: training that no durable checkpoint holds. `now`: seconds
        since the epoch. Nothing changes by it."""
        found: dict[str, float | str | None] = {name: at_s * 1e3 for name, at_s in self._stamps_s.items()}
        found["app_wall_time"] = self._stamps_s.get("app_finish_time", now) - self._stamps_s["app_start_time"]
        found |= self._of_facts()
        if "load_checkpoint_finish_time" in self._stamps_s:
            found["load_checkpoint_time"] = self._loading_s
        if self.counters is not None and self._start is not None and self._now is not None:
            found |= self._of_training(self._start, self._now)
        if self._saves.num_begun:
            found |= self._of_saves()
        return {name: value for name, value in found.items() if value is not None}

    def _of_facts(self) -> dict[str, float | str | None]:
        facts = self.facts
        target = facts.samples_target
        batch_size = (self._now.global_batch_size if self._now is not None else None) or facts.global_batch_size
        return {
            "world_size": facts.world_size,
            "data_parallel_size": facts.data_parallel_size,
            "context_parallel_size": facts.context_parallel_size,
            "tensor_model_parallel_size": facts.tensor_model_parallel_size,
            "pipeline_model_parallel_size": facts.pipeline_model_parallel_size,
            "expert_model_parallel_size": facts.expert_model_parallel_size,
            "global_batch_size": facts.global_batch_size,
            "micro_batch_size": facts.micro_batch_size,
            "model_seq_length": facts.seq_length,
            "train_iterations_target": facts.train_iterations_target,
            "train_samples_target": target,
            "train_tokens_target": target * facts.seq_length,
            "train_iterations_warmup": WARMUP_ITERATIONS,
            "is_train_iterations_enabled": 1,
            "is_validation_iterations_enabled": int(facts.evaluates),
            "is_test_iterations_enabled": int(facts.tests),
            "is_save_checkpoint_enabled": int(facts.saves),
            "is_log_throughput_enabled": int(facts.flops_before is not None),
            "save_checkpoint_strategy": ("async" if facts.saves_async else "sync") if facts.saves else None,
            "app_run_type": "training",
            "app_tag": f"{facts.run_name}_{facts.run_version}_{batch_size}_{facts.world_size}_{facts.seq_length}",
            "app_tag_run_name": facts.run_name,
            "app_tag_run_version": facts.run_version,
            "summary_data_schema_version": SCHEMA_VERSION,
            "app_metrics_feature_tags": "full",
            "one_logger_utils_version": NUMBERS_VERSION,
        }

    def _of_training(self, start: Counters, now: Counters) -> dict[str, float | str | None]:
        iterations, samples = now.iteration - start.iteration, now.consumed_samples - start.consumed_samples
        train_s, eval_s = now.train_s - start.train_s, now.eval_s - start.eval_s
        eval_iterations = now.eval_iterations - start.eval_iterations
        found: dict[str, float | str | None] = {
            "train_iterations_start": start.iteration,
            "train_samples_start": start.consumed_samples,
            "train_iterations_end": now.iteration,
            "train_samples_end": now.consumed_samples,
            "train_iterations": iterations,
            "train_samples": samples,
            "train_tokens": samples * self.facts.seq_length,
            "train_iterations_time_total": train_s,
            "train_iterations_time_msecs_avg": train_s / iterations * 1e3 if iterations else None,
            "train_iterations_time_msecs_min": self._train_least.least_ms,
            "validation_iterations_time_total": eval_s,
            "validation_iterations_time_msecs_avg": eval_s / eval_iterations * 1e3 if eval_iterations else None,
            "validation_iterations_time_msecs_min": self._eval_least.least_ms,
        }
        kept = self._saves.productive or start
        found["lost_time"] = now.train_s - kept.train_s if now.iteration > kept.iteration else 0.0
        if (before := self.facts.flops_before) is not None:
            tflop = (now.flops - start.flops) / TFLOP
            found["train_tflop_start"] = before / TFLOP
            found["train_tflop_end"] = before / TFLOP + tflop
            found["train_tflop"] = tflop
            found["train_throughput_per_gpu"] = tflop / train_s / self.facts.world_size if train_s > 0 else None
            found["train_throughput_per_gpu_max"] = self._most_tflops or None
        return found

    def _of_saves(self) -> dict[str, float | str | None]:
        saves = self._saves
        found: dict[str, float | str | None] = {
            "save_checkpoint_count": saves.num_begun,
            "train_iterations_save_checkpoint_end": saves.last_iteration,
            "save_checkpoint_failed_count": saves.num_failed or None,
            "save_checkpoint_async_count": (saves.num_durable or None) if self.facts.saves_async else None,
            "first_saved_train_iterations_start_time": _ms(
                self._stamps_s.get("app_train_loop_start_time") if saves.num_durable else None
            ),
            "first_successful_save_checkpoint_sync_finish_time": _ms(saves.first_durable_returned_s),
        }
        if saves.num_returned:
            found["save_checkpoint_sync_count"] = saves.num_returned
            found["save_checkpoint_sync_time_total"] = saves.sync_total_s
            found["save_checkpoint_sync_time_min"] = saves.sync_min_s
            found["save_checkpoint_sync_time_max"] = saves.sync_max_s
        if self.counters is not None and (productive := saves.productive) is not None:
            start = self._start or productive
            found["train_iterations_productive_end"] = productive.iteration
            found["train_samples_productive_end"] = productive.consumed_samples
            found["train_iterations_time_total_productive"] = productive.train_s - start.train_s
            found["validation_iterations_time_total_productive"] = productive.eval_s - start.eval_s
            found["save_checkpoint_sync_time_total_productive"] = saves.productive_sync_total_s
            found["last_successful_save_checkpoint_sync_finish_time"] = saves.productive_returned_s * 1e3
            if (before := self.facts.flops_before) is not None:
                found["train_tflop_productive_end"] = (before + productive.flops - start.flops) / TFLOP
        return found

    def _count(self) -> Counters:
        return self.counters() if self.counters is not None else Counters(0, 0, 0.0)

    def _at(self, at_s: float | None) -> float:
        return self._clock() if at_s is None else at_s

    def _tell(self, tell: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            tell(listener)


def _ms(at_s: float | None) -> float | None:
    return None if at_s is None else at_s * 1e3
