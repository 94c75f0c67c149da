"""Where the time of a run went: names and meanings of one-logger's, and that only what is durable is productive."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import rsup.worker
from rsup.supervisor.wire import RELEASE
from rsup.worker.observe.contract import Point
from rsup.worker.observe.end_to_end import EndToEnd, Metrics
from rsup.worker.observe.end_to_end_facts import Counters, RunFacts
from rsup.worker.observe.end_to_end_report import EndToEndReport

FACTS = RunFacts(
    world_size=2,
    global_batch_size=8,
    micro_batch_size=2,
    seq_length=16,
    train_iterations_target=100,
    data_parallel_size=2,
    run_name="tiny",
    flops_before=10e12,
)
DOCUMENT = Path(__file__).parents[2] / "docs" / "end_to_end.md"


class Run:
    """A run at a clock of its own: an iteration takes 2 s and 4 TFLOP, unless said otherwise."""

    def __init__(self, facts: RunFacts = FACTS, start: int = 20) -> None:
        self.now_s = 1000.0
        self.counters = Counters(start, start * 8, 0.0)
        self.record = EndToEnd(facts, app_started_s=990.0, counters=lambda: self.counters, clock=lambda: self.now_s)

    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    def steps(self, count: int, step_s: float = 2.0) -> None:
        for _ in range(count):
            self.passes(step_s)
            done = self.counters
            self.counters = done._replace(
                iteration=done.iteration + 1,
                consumed_samples=done.consumed_samples + 8,
                train_s=done.train_s + step_s,
                flops=done.flops + 4e12,
            )
            self.record.stepped()

    def evaluates(self, iterations: int, seconds: float) -> None:
        with self.record.evaluation():
            self.passes(seconds)
        done = self.counters
        self.counters = done._replace(eval_s=done.eval_s + seconds, eval_iterations=done.eval_iterations + iterations)

    def saves(self, stall_s: float) -> int:
        iteration = self.counters.iteration
        self.record.save_began(iteration)
        self.passes(stall_s)
        self.record.save_returned(iteration)
        return iteration

    @property
    def metrics(self) -> Metrics:
        return self.record.metrics(self.now_s)


def test_without_counters_nothing_is_told_of_what_was_trained() -> None:
    record = EndToEnd(FACTS, app_started_s=990.0, clock=lambda: 1000.0)
    record.train_started()
    record.save_began(3)
    record.save_durable(3)
    record.train_finished()
    found = record.metrics(1001.0)
    assert found["save_checkpoint_count"] == 1 and found["app_train_loop_start_time"] == 1_000_000.0
    assert not {"train_iterations", "lost_time", "train_samples_end", "train_iterations_productive_end"} & set(found)


def test_a_stage_that_there_is_not_is_named() -> None:
    record = EndToEnd(FACTS, app_started_s=990.0)
    with pytest.raises(ValueError, match="no stage 'nonsense': there are model_init, "), record.stage("nonsense"):
        pass


def started(facts: RunFacts = FACTS) -> Run:
    run = Run(facts)
    for stage, seconds in (("model_init", 3), ("build_optimizer", 1), ("build_dataiters", 2), ("load_checkpoint", 4)):
        with run.record.stage(stage):
            run.passes(seconds)
    run.record.train_started()
    return run


def whole_run() -> Run:
    run = started()
    run.steps(5)
    run.record.logged()
    run.evaluates(4, 6.0)
    saved = run.saves(0.5)
    run.steps(5, step_s=1.0)
    run.record.save_durable(saved)
    run.evaluates(2, 2.0)
    run.record.logged()
    run.record.train_finished()
    run.passes(1)
    run.record.app_finished()
    return run


def test_a_whole_run_has_every_number() -> None:
    found = whole_run().metrics
    expected = {
        "app_start_time": 990e3,
        "app_model_init_start_time": 1000e3,
        "app_model_init_finish_time": 1003e3,
        "app_build_optimzer_finish_time": 1004e3,
        "app_build_dataiters_finish_time": 1006e3,
        "load_checkpoint_start_time": 1006e3,
        "load_checkpoint_finish_time": 1010e3,
        "load_checkpoint_time": 4.0,
        "app_train_loop_start_time": 1010e3,
        "first_logged_train_iterations_finish_time": 1020e3,
        "last_logged_train_iterations_finish_time": 1033.5e3,
        "app_train_loop_finish_time": 1033.5e3,
        "app_finish_time": 1034.5e3,
        "app_wall_time": 44.5,
        "train_iterations_start": 20,
        "train_iterations_end": 30,
        "train_iterations": 10,
        "train_samples_start": 160,
        "train_samples_end": 240,
        "train_samples": 80,
        "train_tokens": 1280,
        "train_samples_target": 800,
        "train_tokens_target": 12800,
        "train_iterations_time_total": 15.0,
        "train_iterations_time_msecs_avg": 1500.0,
        "train_iterations_time_msecs_min": 1000.0,
        "validation_iterations_time_total": 8.0,
        "validation_iterations_time_msecs_avg": pytest.approx(8000 / 6),
        "validation_iterations_time_msecs_min": pytest.approx(8000 / 6),
        "train_tflop_start": 10.0,
        "train_tflop_end": 50.0,
        "train_tflop": 40.0,
        "train_throughput_per_gpu": pytest.approx(40 / 15 / 2),
        "train_throughput_per_gpu_max": 2.0,
        "save_checkpoint_count": 1,
        "save_checkpoint_async_count": 1,
        "train_iterations_save_checkpoint_end": 25,
        "save_checkpoint_sync_count": 1,
        "save_checkpoint_sync_time_total": 0.5,
        "save_checkpoint_sync_time_min": 0.5,
        "save_checkpoint_sync_time_max": 0.5,
        "save_checkpoint_sync_time_total_productive": 0.5,
        "first_saved_train_iterations_start_time": 1010e3,
        "first_successful_save_checkpoint_sync_finish_time": 1026.5e3,
        "last_successful_save_checkpoint_sync_finish_time": 1026.5e3,
        "train_iterations_productive_end": 25,
        "train_samples_productive_end": 200,
        "train_iterations_time_total_productive": 10.0,
        "validation_iterations_time_total_productive": 6.0,
        "train_tflop_productive_end": 30.0,
        "lost_time": 5.0,
        "save_checkpoint_strategy": "async",
        "app_tag": "tiny_0.0.0_8_2_16",
        "app_metrics_feature_tags": "full",
        "one_logger_utils_version": f"{RELEASE}-rsup",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_every_name_is_in_the_document() -> None:
    run = whole_run()
    run.record.save_began(30)
    run.record.save_failed(30)
    documented = set(re.findall(r"^\| `([a-z_]+)`", DOCUMENT.read_text(), re.MULTILINE))
    assert set(run.metrics) == documented


def test_before_the_first_iteration_nothing_is_divided_by_none_of_them() -> None:
    run = Run()
    assert run.metrics["app_wall_time"] == 10.0 and "train_iterations" not in run.metrics
    run.record.logged()
    run.record.train_started()
    run.record.logged()
    saved = run.saves(1.0)
    run.record.save_durable(saved)
    found = run.metrics
    assert found["train_iterations"] == 0 and found["lost_time"] == 0
    absent = ("train_iterations_time_msecs_avg", "train_throughput_per_gpu", "first_logged_train_iterations_finish_time")
    assert not set(absent) & set(found)


def test_training_is_productive_once_its_checkpoint_is_durable_and_not_before() -> None:
    run = started()
    run.steps(5)
    first = run.saves(0.5)
    run.steps(5)
    run.record.logged()
    assert "train_iterations_productive_end" not in run.metrics and run.metrics["lost_time"] == 20.0
    unknown = {"save_checkpoint_async_count", "first_saved_train_iterations_start_time"}
    assert not unknown & set(run.metrics) and run.metrics["save_checkpoint_count"] == 1, "nothing is durable yet"
    second = run.saves(1.5)
    run.record.save_durable(second)
    run.record.logged()
    assert (run.metrics["train_iterations_productive_end"], run.metrics["lost_time"]) == (30, 0.0)
    assert run.metrics["save_checkpoint_sync_time_total_productive"] == 2.0
    run.counters = run.counters._replace(train_s=run.counters.train_s + 3.0)  # it waits for that save, and steps no more
    run.record.logged()
    assert run.metrics["lost_time"] == 0.0
    run.record.save_durable(first)  # it was overtaken
    run.record.save_durable(first)
    assert run.metrics["train_iterations_productive_end"] == 30
    assert run.metrics["last_successful_save_checkpoint_sync_finish_time"] == 1032e3
    assert (run.metrics["save_checkpoint_async_count"], run.metrics["save_checkpoint_count"]) == (2, 2)


def test_the_tag_follows_the_batch_size_of_the_newest_step() -> None:
    run = started()
    tags = []
    for size in (2, 4):
        run.counters = run.counters._replace(global_batch_size=size)
        run.record.logged()
        tags.append(run.metrics["app_tag"])
    assert tags == ["tiny_0.0.0_2_2_16", "tiny_0.0.0_4_2_16"] and run.metrics["global_batch_size"] == 8


def test_a_save_that_failed_or_was_never_heard_of_again_makes_nothing_productive() -> None:
    run = started(replace(FACTS, saves_async=False, flops_before=None))
    run.steps(5)
    failed = run.saves(0.5)
    run.record.save_failed(failed)
    run.record.save_durable(failed)
    for _ in range(50):
        run.steps(1)
        run.saves(0.5)
    run.record.logged()
    found = run.metrics
    assert found["save_checkpoint_failed_count"] == 1 and found["save_checkpoint_count"] == 51
    assert found["lost_time"] == found["train_iterations_time_total"] == 110.0
    absent = {"train_iterations_productive_end", "save_checkpoint_async_count", "train_tflop", "train_throughput_per_gpu_max"}
    assert not absent & set(found)
    assert found["save_checkpoint_strategy"] == "sync"


class Taker:
    """A writer that takes end-to-end metrics."""

    name = "taker"

    def __init__(self) -> None:
        self.taken: list[Mapping[str, float | str]] = []

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point], *, at_s: float | None = None) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def write_end_to_end(self, metrics: Mapping[str, float | str]) -> None:
        self.taken.append(metrics)


def test_numbers_go_to_the_store_and_all_of_it_to_writers_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, Mapping[str, float], str]] = []
    monkeypatch.setattr(rsup.worker, "report_metrics", lambda at, values, kind: sent.append((at, values, kind)))
    run, taker = whole_run(), Taker()
    EndToEndReport(run.record, [taker], clock=lambda: run.now_s).send()
    ((iteration, numbers, kind),) = sent
    assert (iteration, kind) == (30, "end_to_end")
    assert taker.taken == [run.metrics]
    assert numbers == {name: value for name, value in run.metrics.items() if not isinstance(value, str)}
    assert all(type(value) is float for value in numbers.values())
