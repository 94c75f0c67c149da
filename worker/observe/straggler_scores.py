"""Who is slow, compared with whom, and why: from the times of all ranks in an interval. Pure; no torch.

Scores are NVRx's: *relative* is the fastest rank's time over this one's, *individual* this rank's own best time over its time
now. A section that waits for other ranks (a whole step, a backward pass that reduces gradients) lasts equally long everywhere,
so only its individual score says anything. A rank counts as a straggler when it is slower than `THRESHOLD` allows both against
the fastest and the median of the others, and its excess is a share of the step that matters: one rank with a lucky clock
makes nobody slow, nor does a section of a few microseconds.
"""

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rsup.supervisor.wire import MAX_STRAGGLER_RANKS, DeviceSensors, RankScore, SectionScore, Straggler, StragglerReport

THRESHOLD = 0.75
"""Relative scores below it are those of stragglers, as in NVRx."""
MIN_EXCESS_SHARE = 0.01
"""Of the time of an iteration: what a rank must cost the others to be named."""
LOW_CLOCK = 0.9
"""Of the median of the others' clocks: below it a clock is called low."""
BUSY_POWER = 0.5
"""Of the median of the others' power: with less a device has nothing to do, and a low clock says nothing of it."""
DATA_SECTIONS = frozenset({"batch-generator"})
"""Where a rank waits for its data rather than computes."""
SHARED_SECTIONS = frozenset({"step", "setup", "checkpointing", "forward-backward", "all-grads-sync"})
"""Sections of our own that wait for other ranks."""
MAX_SINGLE_CURVES = 8
"""Ranks that have a curve each; of more the slowest and the fastest have one."""
KERNELS = "gpu kernels"
"""The section under which NVRx's scores of kernels stand; it has no time."""

_REASONS = {
    "hw-thermal": "thermal",
    "sw-thermal": "thermal",
    "hw-power-brake": "power",
    "sw-power-cap": "power",
    "hw-slowdown": "hardware",
}
"""Causes of throttle reasons, the strongest first."""
_SAID = {
    "thermal": "thermal throttling",
    "power": "short of power",
    "hardware": "slowed down by its hardware",
    "clocks": "low clock",
}


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured in an interval.

    `times`: seconds an iteration, by section. `best`: its lowest ones in earlier intervals. `host_wait_s`: for how much of an
    iteration its training thread waited for a processor.
    """

    rank: int
    device: str
    node: str
    times: Mapping[str, float]
    best: Mapping[str, float] = field(default_factory=dict)
    sensors: DeviceSensors | None = None
    host_wait_s: float = 0.0


@dataclass(frozen=True)
class Interval:
    """The iterations of a report, both included, and what one of them took. `shared`: sections that wait for other ranks."""

    first: int
    iteration: int
    step_s: float
    shared: frozenset[str] = SHARED_SECTIONS


def make_report(
    interval: Interval,
    ranks: Sequence[RankTimes],
    num_listed: int = 3,
    threshold: float = THRESHOLD,
    kernels: Mapping[int, tuple[float, float]] | None = None,
) -> StragglerReport:
    """What is said of the interval; the same on every rank that is given the same times.

    `kernels`: NVRx's relative and individual score of each rank's kernels, where it measures them.
    """
    kernels = kernels or {}
    compared = _compared(interval, ranks)
    by_work = sorted(ranks, key=lambda of_rank: _work_s(interval, of_rank))
    slow = [one for mine in ranks if (one := _slowness(interval, mine, compared, threshold, kernels.get(mine.rank)))]
    slow.sort(key=lambda one: -one.slowdown)
    return StragglerReport(
        interval.first,
        interval.iteration,
        len(ranks),
        slowest=[_score(of_rank, compared, kernels) for of_rank in reversed(by_work[-num_listed:])],
        fastest=[_score(of_rank, compared, kernels) for of_rank in by_work[:num_listed]],
        stragglers=[_told(one, ranks, kernels) for one in slow[:MAX_STRAGGLER_RANKS]],
    )


def line(report: StragglerReport, shared: frozenset[str] = SHARED_SECTIONS) -> str:
    """The report in a line for the console; times are what a rank needed for an iteration without the `shared` sections."""
    text = f"stragglers, iterations {report.first} to {report.iteration}: "
    text += "; ".join(one.text for one in report.stragglers) if report.stragglers else "none"
    for what, listed in (("slowest", report.slowest), ("fastest", report.fastest)):
        if listed:
            text += f" | {what}: " + ", ".join(f"rank {one.rank} ({_own_ms(one, shared):.1f} ms)" for one in listed)
    return text


def metrics(report: StragglerReport, shared: frozenset[str] = SHARED_SECTIONS) -> dict[str, float]:
    """The report as numbers for curves: times in milliseconds an iteration, as in `line`. Where it lists all ranks, and these
    are few, each has its own."""
    values = {"stragglers": float(len(report.stragglers))}
    for what, ends in (("slowest", report.slowest), ("fastest", report.fastest)):
        for one in ends[:1]:
            values |= {f"{what}-rank": float(one.rank), f"{what}-rank-ms": _own_ms(one, shared)}
    listed = {one.rank: one for one in (*report.slowest, *report.fastest)}
    if len(listed) == report.num_ranks <= MAX_SINGLE_CURVES:
        values |= {f"rank-{rank}-ms": _own_ms(one, shared) for rank, one in sorted(listed.items())}
    if report.stragglers:
        values["straggler-slowdown"] = report.stragglers[0].slowdown
    return values


def _own_ms(score: RankScore, shared: frozenset[str]) -> float:
    return sum(section.time_s for section in score.sections if section.section not in shared) * 1e3


def _work_s(interval: Interval, of_rank: RankTimes) -> float:
    return sum(time_s for name, time_s in of_rank.times.items() if name not in interval.shared)


def _compared(interval: Interval, ranks: Sequence[RankTimes]) -> dict[str, list[float]]:
    """The times of each section that is compared, the shortest first: of those that at least two ranks have."""
    names = {name for of_rank in ranks for name in of_rank.times} - interval.shared
    measured = {name: sorted(r.times[name] for r in ranks if r.times.get(name, 0.0) > 0) for name in names}
    return {name: times for name, times in measured.items() if len(times) > 1}


def _score(
    of_rank: RankTimes, compared: Mapping[str, Sequence[float]], kernels: Mapping[int, tuple[float, float]]
) -> RankScore:
    sections = [
        SectionScore(name, time_s, compared[name][0] / time_s if name in compared else 1.0, _individual(of_rank, name))
        for name, time_s in sorted(of_rank.times.items())
        if time_s > 0
    ]
    if of_rank.rank in kernels:
        sections.append(SectionScore(KERNELS, 0.0, *kernels[of_rank.rank]))
    return RankScore(of_rank.rank, of_rank.device, of_rank.node, sections, of_rank.sensors)


def _individual(of_rank: RankTimes, name: str) -> float:
    time_s = of_rank.times[name]
    return min(1.0, of_rank.best.get(name, time_s) / time_s)


class _Slowness(NamedTuple):
    """What is wrong with a rank. `excess_s`: over the median of the others, an iteration; None: of kernels, whose scores alone
    are known."""

    mine: RankTimes
    section: str
    slowdown: float
    individual: float
    excess_s: float | None = None


def _slowness(
    interval: Interval,
    mine: RankTimes,
    compared: Mapping[str, Sequence[float]],
    threshold: float,
    of_kernels: tuple[float, float] | None,
) -> _Slowness | None:
    """What holds the others up most on that rank, if anything does."""
    worst: _Slowness | None = None
    for name, times in compared.items():
        time_s = mine.times.get(name, 0.0)
        if time_s <= 0:
            continue
        usual_s = _median_of_others(times, time_s)
        excess_s = time_s - usual_s
        is_slow = times[0] < threshold * time_s and usual_s < threshold * time_s
        if is_slow and excess_s >= max(MIN_EXCESS_SHARE * interval.step_s, (worst and worst.excess_s) or 0.0):
            worst = _Slowness(mine, name, time_s / times[0], _individual(mine, name), excess_s)
    if worst is None and of_kernels is not None and 0 < of_kernels[0] < threshold:
        return _Slowness(mine, KERNELS, 1 / of_kernels[0], of_kernels[1])
    return worst


def _median_of_others(times: Sequence[float], mine: float) -> float:
    """`times`: sorted, with mine among them."""
    place, count = bisect.bisect_left(times, mine), len(times) - 1
    low, high = ((count - 1) // 2, count // 2)
    return (times[low + (low >= place)] + times[high + (high >= place)]) / 2


def _told(one: _Slowness, ranks: Sequence[RankTimes], kernels: Mapping[int, tuple[float, float]]) -> Straggler:
    mine, name = one.mine, one.section
    others = [other for other in ranks if other.rank != mine.rank]
    figures = ""
    if one.excess_s is not None:
        time_s = mine.times[name]
        usual_ms = (time_s - one.excess_s) * 1e3
        figures = f" ({time_s * 1e3:.1f} ms an iteration, median of the others {usual_ms:.1f})"
    cause, why = _cause(mine, others, name, one.excess_s)
    device = "CPU" if mine.device.startswith("CPU-") else mine.device  # a stand-in's long name says nothing to people
    text = f"rank {mine.rank} ({device}, {mine.node}) {one.slowdown:.1f}x slower in {name}{figures}: {why}"
    return Straggler(
        mine.rank, mine.device, mine.node, name, one.slowdown, one.individual, cause, text, _usual(name, ranks, kernels)
    )


def _usual(name: str, ranks: Sequence[RankTimes], kernels: Mapping[int, tuple[float, float]]) -> float:
    """The median of all ranks' individual scores in that section: below 1 all have become slower, as when the batch grows."""
    if name == KERNELS:
        scores = [individual for _, individual in kernels.values()]
    else:
        scores = [_individual(of_rank, name) for of_rank in ranks if of_rank.times.get(name, 0.0) > 0]
    return statistics.median(scores)


def _cause(mine: RankTimes, others: Sequence[RankTimes], name: str, excess_s: float | None) -> tuple[str, str]:
    """One of `wire.STRAGGLER_CAUSES`, and its figures in words."""
    if name in DATA_SECTIONS:
        return "data", "it waits for its data"
    usual_wait_s = statistics.median([other.host_wait_s for other in others])
    if excess_s is not None and mine.host_wait_s - usual_wait_s >= excess_s / 2:  # first: its GPU idles, whatever that shows
        return "host", f"its host's processors are busy: it waited {mine.host_wait_s * 1e3:.1f} ms an iteration for one"
    cause = _device_cause(mine.sensors, others)
    if cause and mine.sensors is not None:
        return cause, _said(cause, mine.sensors)
    return "", "no sensor shows why" if mine.sensors is not None else "no sensors"


def _device_cause(sensors: DeviceSensors | None, others: Sequence[RankTimes]) -> str:
    if sensors is None:
        return ""
    clocks = [other.sensors.sm_clock_mhz for other in others if other.sensors is not None]
    known = [clock for clock in clocks if clock is not None]
    mine = sensors.sm_clock_mhz
    is_low = mine is not None and bool(known) and mine < LOW_CLOCK * statistics.median(known)
    for reason, cause in _REASONS.items():
        is_usual = reason == "sw-power-cap" and bool(
            known
        )  # busy GPUs are at their cap: it has to cost this one more than others
        if reason in sensors.throttle_reasons and (is_low or not is_usual):
            return cause
    return "clocks" if is_low and _is_busy(sensors, others) else ""


def _is_busy(sensors: DeviceSensors, others: Sequence[RankTimes]) -> bool:
    """Whether the device draws power as one that computes; one that waits for its host lowers its clock, too."""
    powers = [power for other in others if other.sensors is not None and (power := other.sensors.power_w) is not None]
    return sensors.power_w is not None and bool(powers) and sensors.power_w >= BUSY_POWER * statistics.median(powers)


def _said(cause: str, sensors: DeviceSensors) -> str:
    figures = [_SAID[cause]]
    if sensors.sm_clock_mhz is not None:
        most = f" of {sensors.max_sm_clock_mhz:,}" if sensors.max_sm_clock_mhz else ""
        figures.append(f"{sensors.sm_clock_mhz:,}{most} MHz")
    if sensors.temperature_c is not None:
        figures.append(f"{sensors.temperature_c} C")
    if sensors.power_w is not None:
        figures.append(f"{sensors.power_w:.0f} W")
    return ", ".join(figures)
