"""Numbers on their way from the training loop to the agent: bounded in rate and size, and nothing lost but resolution."""

import math
import warnings
from types import MappingProxyType
from typing import Any

import pytest
import torch

import rsup.worker
from rsup.supervisor import wire
from rsup.worker.observe.metric_outbox import EVERY_S, FINE_POINTS, LATER_S, MAX_TAKEN, MetricOutbox


def take(outbox: MetricOutbox, first: int, last: int, kind: str = "training", **values: Any) -> None:
    """Each iteration from `first` to `last` reports these functions of it."""
    for iteration in range(first, last + 1):
        outbox.take(iteration, {name: value(iteration) for name, value in values.items()}, 8 * iteration, kind)


def test_a_message_a_second_and_kind() -> None:
    outbox = MetricOutbox()
    take(outbox, 1, 3, x=float)
    (first,) = outbox.due(100.0)
    assert first.kind == "training" and [one.iteration for one in first.series["x"]] == [1, 2, 3]
    assert outbox.is_empty and not outbox.due(100.1)
    take(outbox, 4, 5, x=float)
    assert not outbox.due(100.0 + 0.99 * EVERY_S) and not outbox.is_empty
    take(outbox, 5, 5, kind="memory", used=float)
    (other,) = outbox.due(100.0 + 0.99 * EVERY_S)
    assert other.kind == "memory", "each kind has its own second"
    (second,) = outbox.due(100.0 + EVERY_S)
    assert [(one.iteration, one.consumed_samples) for one in second.series["x"]] == [(4, 32), (5, 40)]
    take(outbox, 6, 6, x=float)
    assert [one.kind for one in outbox.due(100.0 + EVERY_S, all_of_it=True)] == ["training"], "at the end nothing waits"


def test_what_waits_when_another_entry_begins_is_told_as_of_its_own() -> None:
    outbox = MetricOutbox()
    outbox.entry = 1
    take(outbox, 1, 2, x=float)
    assert [one.entry for one in outbox.due(100.0)] == [1]
    take(outbox, 3, 4, x=float)
    outbox.entry = 2
    take(outbox, 3, 3, x=lambda i: 30.0)
    assert not outbox.is_empty
    told = outbox.due(100.5, all_of_it=True)
    assert [(one.entry, [(b.iteration, b.value) for b in one.series["x"]]) for one in told] == [
        (1, [(3, 3.0), (4, 4.0)]), (2, [(3, 30.0)]),
    ]  # fmt: skip
    assert outbox.is_empty


def test_a_long_run_sends_two_points_every_few_seconds() -> None:
    outbox = MetricOutbox()
    take(outbox, 1, FINE_POINTS, x=float)
    (fine,) = outbox.due(100.0)
    assert len(fine.series["x"]) == FINE_POINTS
    take(outbox, 501, 1500, x=lambda i: math.inf if i == 1100 else float(i))
    assert not outbox.due(100.0 + EVERY_S) and not outbox.due(100.0 + 0.99 * LATER_S)
    (coarse,) = outbox.due(100.0 + LATER_S)
    one, two = coarse.series["x"]
    assert (one.first, one.iteration, one.count, one.low, one.high) == (501, 1000, 500, 501.0, 1000.0)
    assert one.value == pytest.approx(750.5) and one.last == 1000.0
    assert (two.iteration, two.count, two.num_non_finite, two.high) == (1500, 500, 1, 1500.0)
    take(outbox, 1501, 1504, x=float)
    (rest,) = outbox.due(101.0, all_of_it=True)
    assert sum(one.count for one in rest.series["x"]) == 4
    take(outbox, 700, 700, y=float)
    take(outbox, 690, 690, x=float, y=float)
    (back,) = outbox.due(200.0)
    assert {name: [one.iteration for one in bins] for name, bins in back.series.items()} == {"x": [690], "y": [690]}


def test_what_cannot_be_sent_is_put_together_and_fits_one_message() -> None:
    outbox = MetricOutbox()
    names: dict[str, Any] = {f"{'é' * 28}-{n:03}": float for n in range(wire.MAX_METRICS_A_KIND)}
    for start in range(1, 40, 10):
        take(outbox, start, start + 9, **names)
        if start == 21:
            outbox.take(30, {"é" * 28 + "-007": math.nan}, 0, "training")
        outbox._collect()  # the session's thread looks, and the agent takes nothing
    (message,) = outbox.due(100.0)
    assert len(wire.encode(message)) <= wire.MAX_RANK_MESSAGE_BYTES
    assert wire.decode_rank_to_agent(wire.encode(message)) is not None
    bins = message.series["é" * 28 + "-000"]
    assert sum(one.count for one in bins) == 40 and (bins[0].low, bins[-1].high, bins[-1].last) == (1.0, 40.0, 40.0)
    odd = message.series["é" * 28 + "-007"]
    assert sum(one.num_non_finite for one in odd) == 1 and sum(one.count for one in odd) == 40, "30 was told twice"


def test_going_back_takes_away_what_was_not_sent_yet() -> None:
    outbox = MetricOutbox()
    take(outbox, 1, 9, x=float)
    take(outbox, 5, 6, x=lambda i: -1.0)
    (message,) = outbox.due(1.0)
    assert [(one.iteration, one.value) for one in message.series["x"]] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, -1.0), (6, -1.0),
    ]  # fmt: skip


def test_bad_names_and_values_are_left_out_with_a_line_each_once() -> None:
    outbox = MetricOutbox()
    values: Any = {
        "": 1.0,
        "a\nb": 1.0,
        "x" * 65: 1.0,
        "text": "much",
        "none": None,
        "whole": 3,
        "odd": math.inf,
        "\ud800": 1.0,
    }
    with pytest.warns(RuntimeWarning) as told:
        outbox.take(1, values, 0, "training")
    assert len(told) == 6 and all("left out" in str(one.message) for one in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outbox.take(2, values, 0, "training")
    (message,) = outbox.due(1.0)
    assert set(message.series) == {"whole", "odd"} and message.series["odd"][-1].last == math.inf
    many = {f"n{i}": 1.0 for i in range(wire.MAX_METRICS_A_KIND)}
    with pytest.warns(RuntimeWarning, match="more than 256 training metrics"):
        outbox.take(3, many, 0, "training")
    assert len(outbox.due(9.0)[0].series) == wire.MAX_METRICS_A_KIND - 2
    with pytest.raises(ValueError, match="unknown kind"):
        outbox.take(1, {}, 0, "mine")


def test_a_kind_that_begins_while_the_sessions_thread_looks_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = MetricOutbox()
    take(outbox, 1, 1, x=float)
    take(outbox, 1, 1, kind="timers", x=float)

    def look(self: MetricOutbox, kind: str, now_s: float) -> bool:
        take(outbox, 2, 2, kind="memory", used=float)  # the training thread, at the worst moment
        return False

    with monkeypatch.context() as patch:
        patch.setattr(MetricOutbox, "_is_due", look)
        assert outbox.due(1.0) == []
    assert {message.kind for message in outbox.due(1.0)} == {"training", "timers", "memory"}


def test_whoever_reports_is_told_and_never_raised_at(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where warnings are errors: only the rank that reports would leave the training."""
    outbox, said = MetricOutbox(), list[str]()
    odd: Any = {"x" * 80: 1.0, 3: 2.0, "two": torch.ones(2)}
    outbox.take(1, odd, 8, "training", 12.5, said.append)
    assert (
        len(said) == 2
        and said[0].startswith("the metric 'xxx")
        and said[1] == "the metric 'two' is left out: Tensor is no number"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outbox.take(2, {"y" * 80: 1.0}, 16, "training")
    assert capsys.readouterr().err.startswith("warning: rsup: the metric 'yyy")
    (message,) = outbox.due(1.0)
    assert [(name, one.at_us, one.value) for name, (one,) in message.series.items()] == [("3", 12_500_000, 2.0)]


def test_whatever_integer_it_is_it_can_be_sent() -> None:
    class Whole:
        def __index__(self) -> int:
            return 7

        def __int__(self) -> int:
            return 7

    outbox = MetricOutbox()
    for number in (Whole(), -3, 2**70, 2.0):
        outbox.take(number, {"x": 1.0}, number, "training")  # type: ignore[arg-type]
        (message,) = outbox.due(1.0, all_of_it=True)
        assert wire.decode_rank_to_agent(wire.encode(message)) == message


def test_a_session_that_stands_still_bounds_what_waits() -> None:
    outbox = MetricOutbox()
    take(outbox, 1, MAX_TAKEN + 100, x=float)
    (message,) = outbox.due(1.0)
    assert message.series["x"][-1].iteration == MAX_TAKEN + 100
    assert sum(one.count for one in message.series["x"]) == MAX_TAKEN


def test_outside_a_launch_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RSUP_BOARD", raising=False)
    rsup.worker.report_metrics(1, {"x": 1.0}, 8, kind="energy")
    rsup.worker.report_straggler(wire.StragglerReport(1, 2, 4))
    assert rsup.worker.requested_switches() == {} and isinstance(rsup.worker.requested_switches(), MappingProxyType)


def test_a_report_with_many_ranks_fits_one_message() -> None:
    sections = [wire.SectionScore("s" * 32, 1.0 / 3, 0.123456, 0.654321)] * 24
    sensors = wire.DeviceSensors(1200, 1980, 650.5, 88, ["hw-thermal-slowdown", "sw-power-cap"])
    scores = [
        wire.RankScore(10_000 + n, "GPU-" + "0" * 36, "n" * 64, sections, sensors) for n in range(wire.MAX_STRAGGLER_RANKS)
    ]
    slow = [wire.Straggler(n, "GPU-" + "0" * 36, "n" * 64, "s" * 32, 1.8, 0.5, "thermal", "x" * 300) for n in range(16)]
    report = wire.StragglerReport(1, 10, 4096, scores, scores, slow)
    assert len(wire.encode(wire.RankStragglers(report))) <= wire.MAX_RANK_MESSAGE_BYTES
