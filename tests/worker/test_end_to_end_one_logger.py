"""The adapter to the one-logger packages: with a stand-in that is as strict about spans as they are, and with the real ones."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rsup.worker.observe.end_to_end import EndToEnd
from rsup.worker.observe.end_to_end_facts import Counters, RunFacts
from rsup.worker.observe.one_logger import OneLogger, OneLoggerOptions, connect

SPANS = {
    "app": "application",
    "model_init": "model_initialization",
    "dataloader_init": "data_loader_initialization",
    "optimizer_init": "optimizer_initialization",
    "load_checkpoint": "checkpoint_load",
    "train": "training_loop",
    "training_single_iteration": "training_single_iteration",
    "validation": "validation_loop",
    "save_checkpoint": "checkpoint_save",
}


def facts(saves_async: bool) -> RunFacts:
    return RunFacts(
        world_size=1,
        global_batch_size=8,
        micro_batch_size=2,
        seq_length=16,
        train_iterations_target=10,
        saves_async=saves_async,
    )


class StrictCalls:
    """one-logger's callbacks: a span is open once, and ends only while it is open."""

    def __init__(self, saves_async: bool) -> None:
        self.open: list[str] = []
        self.done: list[str] = []
        self.iterations_ms: list[tuple[float, float]] = []
        self._began_ms = 0.0
        self._saves_async = saves_async

    def get_active_spans_by_name(self, span: str) -> list[str]:
        return [name for name in self.open if name == span]

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name == "on_save_checkpoint_success":
            return self._success
        call, _, end = name.removeprefix("on_").rpartition("_")
        return lambda *given, **named: self._turn(SPANS[call], end, given)

    def _turn(self, span: str, end: str, given: tuple[Any, ...]) -> None:
        if end == "start":
            assert span not in self.open, f"{span} is open"
            self.open.append(span)
            self._began_ms = given[0] if given else 0.0
        else:
            self.open.remove(span)
            self.done.append(span)
            if span == "training_single_iteration":
                self.iterations_ms.append((self._began_ms, given[0]))

    def _success(self, iteration: int, at_ms: float) -> None:
        assert ("checkpoint_save" in self.open) is not self._saves_async
        self.done.append(f"durable {iteration}")


def play(record: EndToEnd, at: list[Counters], tick: Callable[[], object]) -> None:
    for stage in ("model_init", "build_optimizer", "build_dataiters", "load_checkpoint"):
        with record.stage(stage):
            tick()
    record.train_started()
    for iteration in range(1, 5):
        tick()
        at[0] = Counters(iteration, iteration * 8, float(iteration))
        record.stepped()
        if iteration % 2 == 0:
            record.logged()
            with record.evaluation():
                tick()
            record.save_began(iteration)
            tick()
            if record.facts.saves_async:
                record.save_returned(iteration)
        if iteration == 2 and not record.facts.saves_async:
            record.save_durable(iteration)
    if record.facts.saves_async:
        record.save_durable(2)
    record.save_failed(4)
    record.app_finished()


@pytest.mark.parametrize("saves_async", [True, False])
def test_spans_open_and_close_as_one_logger_demands(saves_async: bool) -> None:
    calls, said, at = StrictCalls(saves_async), list[str](), [Counters(0, 0, 0.0)]
    now_s = [time.time()]
    logger = OneLogger(calls, SimpleNamespace(recorder=calls), facts(saves_async), said.append)
    logger.begin(now_s[0])
    logger.begin(now_s[0])
    record = EndToEnd(
        facts(saves_async), app_started_s=now_s[0], counters=lambda: at[0], listeners=[logger], clock=lambda: now_s[0]
    )
    play(record, at, lambda: now_s.__setitem__(0, now_s[0] + 1.0))
    assert said == [] and calls.open == []
    assert [calls.done.count(name) for name in ("training_single_iteration", "durable 2", "checkpoint_save")] == [4, 1, 2]
    assert [round(end - begin) for begin, end in calls.iterations_ms] == [1000, 1000, 1000, 1000]  # no save, no evaluation


def test_what_one_logger_raises_is_said_once_and_training_goes_on() -> None:
    calls, said = StrictCalls(True), list[str]()
    logger = OneLogger(calls, SimpleNamespace(recorder=calls), facts(True), said.append)
    logger.evaluation_finished(1.0)  # it never began
    logger.stepped(2.0)
    logger.app_finished(3.0)
    assert len(said) == 1 and said[0].startswith("one-logger gets nothing more: ")
    assert calls.done == []


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nv_one_logger.training_telemetry.api.callbacks", None)
    monkeypatch.setitem(sys.modules, "nv_one_logger", None)
    said: list[str] = []
    options = OneLoggerOptions(tmp_path / "events.jsonl", "tiny", "job", 2)
    assert connect(options, facts(True), time.time(), said.append) is None
    assert len(said) == 1 and said[0].endswith("pip install nv-one-logger-training-telemetry")


def test_with_the_packages_themselves(tmp_path: Path) -> None:
    pytest.importorskip("nv_one_logger.training_telemetry", reason="nv-one-logger-training-telemetry is not installed")
    said, at = list[str](), [Counters(0, 0, 0.0)]
    options = OneLoggerOptions(tmp_path / "events.jsonl", "tiny", "job", 2, flops_per_sample=1000)
    began_s = time.time()
    logger = connect(options, facts(True), began_s, said.append)
    assert logger is not None, said
    record = EndToEnd(facts(True), app_started_s=began_s, counters=lambda: at[0], listeners=[logger])
    play(record, at, lambda: None)
    assert said == []
    lines = [json.loads(line) for line in options.file.read_text().splitlines()]
    text = options.file.read_text()
    assert len(lines) > 10
    for name in ("application", "training_loop", "validation_loop", "checkpoint_save_async", "save_checkpoint_success"):
        assert f'"{name}"' in text, name
