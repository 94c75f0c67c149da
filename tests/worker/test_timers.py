"""Timers by the host's clock, their levels, and what is printed of them. Over real ranks: `observed_ranks.py`."""

import pytest
import torch

from rsup.worker.observe.timer_contract import NO_TIMERS, OFF, TimerError
from rsup.worker.observe.timer_report import NOTHING, merged, table
from rsup.worker.observe.timers import Timers, WallTimer


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += round(ms * 1e6)


def wall(clock: Clock, said: list[str]) -> WallTimer:
    return WallTimer("step", said.append, now_ns=clock)


def test_a_timer_counts_between_start_and_stop_and_resets_only_what_is_elapsed() -> None:
    clock, said = Clock(), list[str]()
    timer = wall(clock, said)
    for ms in (2, 3):
        with timer:
            clock.pass_ms(ms)
        clock.pass_ms(100)
    assert timer.elapsed_s(reset=False) == pytest.approx(0.005)
    assert timer.elapsed_s() == pytest.approx(0.005)
    assert timer.elapsed_s() == 0 and timer.active_s() == pytest.approx(0.005)
    timer.start()
    clock.pass_ms(4)
    assert timer.elapsed_s() == pytest.approx(0.004)
    clock.pass_ms(1)
    assert timer.active_s() == pytest.approx(0.010), "of one that runs, up to now"
    timer.stop()
    assert timer.elapsed_s() == pytest.approx(0.001), "it went on when it was read"
    timer.set_elapsed(7.5)
    assert timer.elapsed_s() == 7.5 and timer.active_s() == pytest.approx(0.010)
    assert not said


def test_started_twice_or_stopped_unstarted_is_a_warning_and_an_exception_counts_for_nothing() -> None:
    clock, said = Clock(), list[str]()
    timers = Timers(warn=said.append)
    timer = timers("step", 0)
    for _ in range(2):
        timer.start()
        timer.start()
        timer.stop()
        timer.stop()
    assert [text.partition(":")[0] for text in said] == [
        "timer 'step' was started twice",
        "timer 'step' was stopped before it was started",
    ], "each once"
    timer = wall(clock, said)
    with pytest.raises(KeyError), timer:
        clock.pass_ms(9)
        raise KeyError
    assert timer.elapsed_s() == 0
    timer.start()
    assert len(said) == 2, "it is not left running"


def test_levels_make_timers_that_are_off_one_object_that_does_nothing() -> None:
    said: list[str] = []
    timers = Timers(1, warn=said.append)
    assert timers("optimizer", 1) is timers("optimizer") is not OFF
    assert timers("forward-compute", 2) is OFF and timers("no level given") is OFF
    with timers("forward-compute") as entered:
        assert entered is None
    assert OFF.elapsed_s() == OFF.active_s() == 0.0
    assert timers("optimizer", 2) is timers("optimizer")
    assert said == ["timer 'optimizer' is of level 1, and is asked for as one of level 2: that is ignored"]
    for level, option, mode in ((3, "max", "sync"), (0, "mean", "sync"), (0, "max", "gpu")):
        with pytest.raises(ValueError, match="none of 0 to 2"):
            Timers(level, option, mode=mode, warn=said.append)
    with pytest.raises(ValueError, match="level 4"):
        timers("x", 4)
    assert NO_TIMERS("x") is OFF and NO_TIMERS.log() is None and NO_TIMERS.gather() is NOTHING and NO_TIMERS.maxima() == {}


def test_a_timer_that_waits_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    timers = Timers(2, device=torch.device("cuda", 0), warn=pytest.fail)
    with pytest.raises(TimerError, match=r'timer .forward-compute. waits for the device.*use mode="event"'):
        timers("forward-compute", 2).start()


def test_one_rank_alone_reports_by_step_and_clears_what_it_is_told_to() -> None:
    timers = Timers(2, "max", warn=pytest.fail)
    timers("optimizer", 1).set_elapsed(0.5)
    timers("forward-compute", 2).set_elapsed(2.0)
    timers("never run", 1)
    assert timers.maxima(normalizer=10) == {"optimizer": 0.05, "forward-compute": 0.2}
    text = timers.log(["optimizer", "elsewhere"], normalizer=10, reset=False)
    assert text == f"max time across ranks (ms):\n    {'optimizer '.ljust(48, '.')}: 50.00"
    assert timers.log([]) is None
    assert timers.log(normalizer=10) is not None and timers.log() is None


def test_what_is_printed_leaves_out_ranks_and_names_that_did_not_run() -> None:
    gathered = table(["a", "b", "c"], [[0.2, 0.0, 0.0], [0.4, -1.0, 0.006], [0.0, 0.0, 0.003]], normalizer=2)
    assert gathered.seconds == {"a": [0.1, 0.2, None], "c": [None, 0.003, 0.0015]}
    assert gathered.maxima() == {"a": 0.2, "c": 0.003} and gathered.minima() == {"a": 0.1, "c": 0.0015}
    a, c = ("    " + f"{name} ".ljust(48, ".") + ":" for name in "ac")
    assert gathered.text("max") == f"max time across ranks (ms):\n{a} 200.00\n{c} 3.00"
    assert gathered.text("minmax") == f"(min, max) time across ranks (ms):\n{a} (100.00, 200.00)\n{c} (1.50, 3.00)"
    every = ["times across ranks (ms):", a, "     rank    0: 100.00", "     rank    1: 200.00"]
    every += [c, "     rank    1: 3.00", "     rank    2: 1.50"]
    assert gathered.text("all") == "\n".join(every)
    assert table(["a"], [[0.0]], 1).text("max") is None
    assert table(["a"], [[3.0]], 0).maxima() == {"a": 3.0}, "an interval without a step"
    assert merged([{"x": 1.0}, {"y": 2.0}], 1).seconds == {"x": [1.0, None], "y": [None, 2.0]}
