"""Who is named a straggler, and why. No torch."""

import random
import statistics

import pytest

from rsup.supervisor.wire import DEVICE_CAUSES, STRAGGLER_CAUSES, DeviceSensors
from rsup.worker.observe.straggler_scores import Interval, RankTimes, _median_of_others, line, make_report, metrics

INTERVAL = Interval(11, 20, step_s=0.1)
FORWARD = "forward-compute"


def rank(number: int, forward_s: float, **more: object) -> RankTimes:
    times = {FORWARD: forward_s, **more.pop("times", {})}  # type: ignore[dict-item]
    return RankTimes(number, f"GPU-{number}", f"n{number // 2}", times, **more)  # type: ignore[arg-type]


def sensors(clock: int | None, *reasons: str, temperature_c: int | None = 60, power_w: float | None = 650.4) -> DeviceSensors:
    return DeviceSensors(clock, 1980, power_w, temperature_c, list(reasons))


def test_scores_are_the_fastest_over_mine_and_my_best_over_now() -> None:
    ranks = [rank(0, 0.010, best={FORWARD: 0.010}), rank(1, 0.0125, best={FORWARD: 0.010}), rank(2, 0.011)]
    report = make_report(INTERVAL, ranks, num_listed=2)
    assert (report.first, report.iteration, report.num_ranks, report.stragglers) == (11, 20, 3, [])
    assert [one.rank for one in report.slowest] == [1, 2] and [one.rank for one in report.fastest] == [0, 2]
    score = report.slowest[0].sections[0]
    assert (score.section, score.time_s) == (FORWARD, 0.0125)
    assert score.relative == pytest.approx(0.8) and score.individual == pytest.approx(0.8)
    assert report.fastest[0].sections[0].relative == report.fastest[1].sections[0].individual == 1.0
    assert line(report) == (
        "stragglers, iterations 11 to 20: none | slowest: rank 1 (12.5 ms), rank 2 (11.0 ms)"
        " | fastest: rank 0 (10.0 ms), rank 2 (11.0 ms)"
    )
    assert metrics(report) == {
        "stragglers": 0.0,
        "slowest-rank": 1.0,
        "slowest-rank-ms": 12.5,
        "fastest-rank": 0.0,
        "fastest-rank-ms": 10.0,
        "rank-0-ms": 10.0,
        "rank-1-ms": 12.5,
        "rank-2-ms": 11.0,
    }
    only_ends = make_report(INTERVAL, ranks, num_listed=1)
    assert "rank-0-ms" not in metrics(only_ends), "where one of them is not listed none has a curve of its own"


def test_the_slow_rank_is_named_with_device_node_and_cause() -> None:
    usual = [rank(number, 0.010, sensors=sensors(1900, "sw-power-cap")) for number in range(3)]
    slow = rank(3, 0.018, sensors=sensors(1200, "sw-power-cap", "hw-thermal", temperature_c=91), best={FORWARD: 0.009})
    report = make_report(INTERVAL, [*usual, slow], num_listed=1)
    (found,) = report.stragglers
    assert (found.rank, found.device, found.node, found.section, found.cause) == (3, "GPU-3", "n1", FORWARD, "thermal")
    assert found.slowdown == pytest.approx(1.8) and found.individual == pytest.approx(0.5)
    assert found.usual == 1.0, "the others are as fast as ever"
    grown = [rank(number, 0.010, best={FORWARD: 0.005}) for number in range(3)]
    (of_all,) = make_report(INTERVAL, [*grown, slow]).stragglers
    assert of_all.usual == pytest.approx(0.5), "all have more to do"
    assert found.text == (
        "rank 3 (GPU-3, n1) 1.8x slower in forward-compute (18.0 ms an iteration, median of the others 10.0):"
        " thermal throttling, 1,200 of 1,980 MHz, 91 C, 650 W"
    )
    assert found.text in line(report) and metrics(report)["straggler-slowdown"] == pytest.approx(1.8)
    stand_in = RankTimes(1, "CPU-8c7ea331-1", "n0", {FORWARD: 0.03})
    (found,) = make_report(INTERVAL, [rank(0, 0.010), stand_in]).stragglers
    assert found.device == stand_in.device and found.text.startswith("rank 1 (CPU, n0) ")


@pytest.mark.parametrize(
    ("mine", "cause", "said"),
    [
        (sensors(1900, "sw-thermal"), "thermal", "thermal throttling"),
        (sensors(1900, "hw-power-brake"), "power", "short of power"),
        (sensors(1890, "sw-power-cap"), "", "no sensor shows why"),
        (sensors(1500, "sw-power-cap"), "power", "short of power"),
        (sensors(1900, "hw-slowdown"), "hardware", "slowed down by its hardware"),
        (sensors(1500), "clocks", "low clock, 1,500 of 1,980 MHz"),
        (sensors(345, power_w=120.0), "", "no sensor shows why"),
        (sensors(345, power_w=None), "", "no sensor shows why"),
        (sensors(None, temperature_c=None), "", "no sensor shows why"),
        (None, "", "no sensors"),
    ],
)
def test_sensors_name_the_cause(mine: DeviceSensors | None, cause: str, said: str) -> None:
    ranks = [rank(0, 0.010, sensors=sensors(1900)), rank(1, 0.011, sensors=sensors(1910)), rank(2, 0.020, sensors=mine)]
    (found,) = make_report(INTERVAL, ranks).stragglers
    assert found.cause == cause and said in found.text
    assert cause in STRAGGLER_CAUSES and (not cause or cause in DEVICE_CAUSES)


def test_data_and_a_busy_host_are_told_from_the_device() -> None:
    ranks = [rank(0, 0.010, times={"batch-generator": 0.001}), rank(1, 0.010, times={"batch-generator": 0.030})]
    (found,) = make_report(INTERVAL, ranks).stragglers
    assert (found.rank, found.section, found.cause) == (1, "batch-generator", "data")
    ranks = [rank(0, 0.010, host_wait_s=0.001), rank(1, 0.020, host_wait_s=0.009)]
    (found,) = make_report(INTERVAL, ranks).stragglers
    assert found.cause == "host" and "waited 9.0 ms an iteration" in found.text
    idle = sensors(345, "sw-thermal")  # its GPU waits with it
    ranks = [rank(0, 0.010, sensors=sensors(1900)), rank(1, 0.020, host_wait_s=0.009, sensors=idle)]
    (found,) = make_report(INTERVAL, ranks).stragglers
    assert found.cause == "host", "what its host does to it is no evidence against its device"


def test_nobody_is_accused_for_little_for_luck_or_for_waiting() -> None:
    few_us = [rank(0, 0.00010), rank(1, 0.00090)]
    assert make_report(INTERVAL, few_us).stragglers == [], "less than a hundredth of the step"
    lucky = [rank(0, 0.005), rank(1, 0.010), rank(2, 0.0101), rank(3, 0.0102)]
    report = make_report(INTERVAL, lucky)
    assert report.stragglers == [] and report.slowest[0].sections[0].relative < 0.5
    waits = [rank(0, 0.010, times={"step": 0.1}), rank(1, 0.010, times={"step": 0.2}, best={"step": 0.1})]
    report = make_report(INTERVAL, waits)
    assert report.stragglers == []
    by_name = {score.section: score for score in next(one for one in report.slowest if one.rank == 1).sections}
    assert by_name["step"].relative == 1.0 and by_name["step"].individual == 0.5
    own = [rank(0, 0.010), rank(1, 0.010, times={"only here": 0.5})]
    assert make_report(INTERVAL, own).stragglers == [], "nobody to compare with"
    assert make_report(INTERVAL, [rank(0, 0.010)]).stragglers == []
    assert make_report(INTERVAL, []).slowest == []


def test_the_median_of_the_others_is_that() -> None:
    draw = random.Random(4)
    for count in range(2, 40):
        times = sorted(draw.choice((0.5, 1.0, draw.random())) for _ in range(count))
        for place, mine in enumerate(times):
            assert _median_of_others(times, mine) == statistics.median(times[:place] + times[place + 1 :])


def test_the_worst_section_is_told_and_the_slowest_rank_first() -> None:
    ranks = [rank(number, 0.010, times={"optimizer-inner-step": 0.002}) for number in range(4)]
    ranks[1] = rank(1, 0.020, times={"optimizer-inner-step": 0.004})
    ranks[2] = rank(2, 0.030, times={"optimizer-inner-step": 0.002})
    found = make_report(INTERVAL, ranks).stragglers
    assert [(one.rank, one.section) for one in found] == [(2, FORWARD), (1, FORWARD)]


def test_kernels_that_nvrx_compares_stand_beside_the_sections() -> None:
    ranks = [rank(0, 0.010, sensors=sensors(1900)), rank(1, 0.010, sensors=sensors(1400))]
    report = make_report(INTERVAL, ranks, kernels={0: (1.0, 1.0), 1: (0.6, 0.7)})
    (found,) = report.stragglers
    assert (found.rank, found.section, found.cause, found.individual) == (1, "gpu kernels", "clocks", 0.7)
    assert found.slowdown == pytest.approx(1 / 0.6)
    assert next(one for one in report.slowest if one.rank == 1).sections[-1].relative == 0.6
