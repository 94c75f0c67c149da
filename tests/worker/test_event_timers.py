"""Timers on a device's own time line, with marks of a device that is told when it has passed them."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rsup.worker.observe.event_timers import EventTimer, Marks
from rsup.worker.observe.timer_contract import TimerError
from rsup.worker.observe.timers import Timers, WallTimer


@dataclass
class Device:
    """A device: its queue runs on as far as it is told; a graph records its marks, and writes their times at each replay."""

    now_ms: float = 0.0
    is_capturing: bool = False
    num_made: int = 0
    queue: "list[FakeMark]" = field(default_factory=list)

    def run(self, *durations_ms: float) -> None:
        """Pass the marks that wait, each after so many milliseconds of work."""
        for ms in durations_ms:
            self.now_ms += ms
            mark = self.queue.pop(0)
            mark.at_ms = self.now_ms

    def make(self, external: bool) -> "FakeMark":
        self.num_made += 1
        return FakeMark(self, external)


@dataclass
class FakeMark:
    device: Device
    external: bool
    at_ms: float | None = None

    def record(self, stream: object = None) -> None:
        assert self.external == self.device.is_capturing
        self.at_ms = None
        if not self.external:
            self.device.queue.append(self)

    def query(self) -> bool:
        assert not self.device.is_capturing, "a capture forbids to ask"
        return self.at_ms is not None

    def elapsed_time(self, end: Any) -> float:
        if self.at_ms is None or end.at_ms is None:
            raise RuntimeError("not recorded")
        return float(end.at_ms - self.at_ms)


def timer_on(device: Device, num_kept: int = 0) -> EventTimer:
    return EventTimer("forward", Marks(device.make, lambda: device.is_capturing), pytest.fail, num_kept)


def test_times_are_read_when_the_device_has_passed_and_marks_are_used_again() -> None:
    device = Device()
    timer = timer_on(device, num_kept=2)
    for _ in range(3):
        with timer:
            pass
    assert timer.elapsed_s() == 0, "nothing has passed, and nobody waits"
    device.run(1, 10, 1, 20, 1)
    assert timer.elapsed_s(reset=False) == pytest.approx(0.030)
    device.run(60)
    assert timer.elapsed_s() == pytest.approx(0.090) and timer.elapsed_s() == 0
    assert timer.active_s() == pytest.approx(0.090)
    assert timer.take_calls() == (pytest.approx(0.040), 2), "of the newest two"
    assert timer.take_calls() == (0.0, 0)
    with timer:
        pass
    assert device.num_made == 6
    device.run(0, 5)
    timer.drop()
    timer.set_elapsed(2.0)
    assert timer.elapsed_s() == 2.0, "what was dropped counts for nothing"


def test_a_timer_that_nobody_reads_collects_what_is_over() -> None:
    device = Device()
    timer = timer_on(device)
    for _ in range(1000):
        with timer:
            pass
        device.run(0, 1)
    assert device.num_made <= 2 * 256 + 2 and timer.elapsed_s() == pytest.approx(1.0)


def test_in_a_graph_the_last_replay_stands_for_all_of_them() -> None:
    device = Device()
    timer = timer_on(device, num_kept=8)
    timer.begin_pass()  # warm-up: it is run
    with timer:
        pass
    timer.replayed()
    device.run(0, 3)
    device.is_capturing = True
    timer.begin_pass()
    marks = []
    for _ in range(2):  # two micro-batches
        with timer:
            pass
    device.is_capturing = False
    marks = [mark for pair in timer._in_graph for mark in pair]
    assert len(marks) == 4 and all(isinstance(mark, FakeMark) and mark.external for mark in marks)
    timer.replayed()
    assert timer.elapsed_s(reset=False) == pytest.approx(0.003), "the replay is not over"
    for mark, at_ms in zip(marks, (0, 4, 5, 11), strict=True):
        assert isinstance(mark, FakeMark)
        mark.at_ms = at_ms
    timer.replayed()
    assert timer.elapsed_s(reset=False) == pytest.approx(0.003 + 2 * 0.010)
    timer.begin_pass()  # one that is run, as for a dump, is no replay
    timer.replayed()
    assert timer.elapsed_s() == pytest.approx(0.023) and timer.elapsed_s() == 0
    timer.replayed()
    assert timer.take_calls() == (pytest.approx(0.004), 3), "median of 3 and of the last replay's mean, 5"
    timer.replayed()
    assert isinstance(marks[0], FakeMark)
    marks[0].at_ms = 20  # the next replay writes just now
    assert timer.elapsed_s() == 0
    device.is_capturing = True
    timer.begin_pass()
    device.is_capturing = False
    timer.replayed()
    assert timer.elapsed_s() == 0, "the new graph has no such marks"


def test_replays_that_nobody_could_read_yet_count_in_the_next_interval() -> None:
    device = Device(is_capturing=True)
    timer = timer_on(device, num_kept=8)
    timer.begin_pass()
    with timer:
        pass
    device.is_capturing = False
    ((begin, end),) = timer._in_graph
    assert isinstance(begin, FakeMark) and isinstance(end, FakeMark)
    for _ in range(10):
        timer.replayed()
    begin.at_ms, end.at_ms = 100, 90  # the last one writes over the one before it just now
    assert timer.elapsed_s() == 0
    timer.replayed()
    end.at_ms = 104
    assert timer.elapsed_s(reset=False) == timer.active_s() == pytest.approx(11 * 0.004)
    assert timer.elapsed_s() == pytest.approx(11 * 0.004) and timer.elapsed_s() == 0
    assert timer.active_s() == pytest.approx(11 * 0.004)

    for _ in range(10):
        timer.replayed()
    begin.at_ms = 200
    timer._add(0.009)  # one that was run
    assert timer.take_calls() == (0.0, 0), "one call of eleven would look like a rank that is ten times as fast"
    timer.replayed()
    end.at_ms = 204
    assert timer.take_calls() == (pytest.approx(0.004), 1), "eleven in one iteration would look like one as slow"


def test_a_torch_without_events_for_graphs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldEvent:
        def __init__(self, enable_timing: bool) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", OldEvent)
    assert isinstance(Marks().get(), OldEvent)
    with pytest.raises(TimerError, match="time around the graph, or call the step with eager=True"):
        Marks().get_external()


def test_misuse_is_a_warning_and_an_exception_closes_the_timer() -> None:
    device, said = Device(), list[str]()
    timer = EventTimer("forward", Marks(device.make, lambda: False), said.append)
    timer.stop()
    timer.start()
    timer.start()
    with pytest.raises(KeyError), timer:
        raise KeyError
    assert [text.partition(":")[0].partition("was ")[2] for text in said] == [
        "stopped before it was started",
        "started twice",
        "started twice",
    ]
    timer.start()
    assert len(said) == 3


def test_event_mode_has_no_barriers_and_a_host_clock_for_what_the_host_does() -> None:
    device = Device()
    timers = Timers(2, mode="event", warn=pytest.fail, marks=Marks(device.make, lambda: False))
    with timers("optimizer", 1), timers("forward-compute", 2):
        pass
    device.run(0, 1, 2, 3)
    assert timers.maxima() == {"optimizer": pytest.approx(0.006), "forward-compute": pytest.approx(0.002)}
    assert isinstance(timers("save-checkpoint", 0), WallTimer)
    timers.begin_pass()
    timers.replayed()
    on_cpu = Timers(2, mode="event", device=torch.device("cpu"), warn=pytest.fail)
    assert isinstance(on_cpu("forward-compute", 2), WallTimer)
