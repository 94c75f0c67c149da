"""Axes of the report's charts: where ticks stand, how they are named, and the units that numbers are shown in. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOG_FROM_RATIO = 50.0
"""A curve that may be drawn over a logarithmic axis is, where its highest value is so many times its lowest."""
TIME_STEPS_S = (
    *(1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000, 5184000, 15552000, 31536000),
)
_LEAST_LOG = 1e-300
"""What is nearer to zero is zero: steps and ratios of such numbers are none."""


@dataclass(frozen=True)
class Unit:
    """What a number is shown in: it is divided by `size`."""

    name: str = ""
    size: float = 1.0


@dataclass(frozen=True)
class Axis:
    """From `low` to `high` in the numbers' own unit, with `ticks` in it; `is_log`: equal ratios are equally far."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value stands, from 0 at `low` to 1 at `high`; what lies outside stands at an end."""
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.log(max(value, _LEAST_LOG))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def value_axis(low: float, high: float, *, may_be_log: bool = False, from_zero: bool = False, num_ticks: int = 5) -> Axis:
    """The axis for values from `low` to `high`, both finite: its ends are ticks, and it has a length for a single value too."""
    low, high = (0.0 if abs(one) < _LEAST_LOG else one for one in (low, high))
    if may_be_log and low > 0 and high / low >= LOG_FROM_RATIO:
        return _log_axis(low, high, num_ticks)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if not high - low > max(_LEAST_LOG, 1e-12 * abs(high)):  # closer than that ticks have no room
        room = abs(high) / 2 or 1.0
        low, high = low - room, high + room
    step = nice_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def _log_axis(low: float, high: float, num_ticks: int) -> Axis:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / num_ticks))
    last = first + math.ceil((last - first) / every) * every
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return Axis(ticks[0], ticks[-1], ticks, is_log=True)


def iteration_axis(first: float, last: float, num_ticks: int = 4) -> Axis:
    """The axis for iterations: it begins and ends with the data; ticks are whole numbers, the first iteration among them."""
    if last <= first:
        return Axis(first - 1, first + 1, (first,))
    step = max(1.0, nice_step((last - first) / num_ticks))
    ticks = [number * step for number in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)]
    if not ticks or ticks[0] - first > (last - first) / 8:
        ticks.insert(0, first)
    return Axis(first, last, tuple(ticks))


def time_axis(span_s: float, num_ticks: int = 7) -> Axis:
    """Seconds since a beginning, with ticks that people count in."""
    span_s = max(span_s, 1e-3)
    step = next((one for one in TIME_STEPS_S if span_s / one <= num_ticks), nice_step(span_s / num_ticks))
    return Axis(0.0, span_s, tuple(number * step for number in range(math.floor(span_s / step + 1e-9) + 1)))


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(max(least, _LEAST_LOG)))
    return next((factor * power for factor in (1.0, 2.0, 2.5, 5.0) if factor * power >= least * (1 - 1e-9)), 10.0 * power)


def tick_labels(axis: Axis) -> list[str]:
    """The names of the ticks: all with as many decimals as tell them apart."""
    ticks = axis.ticks
    if axis.is_log:
        return [number(tick) for tick in ticks]
    largest = max(map(abs, ticks))
    step = abs(ticks[-1] - ticks[-2]) if len(ticks) > 1 else largest or 1.0
    if largest >= 1e6 or (largest and largest < 1e-3):
        return [number(tick) if abs(tick) > step / 2 else "0" for tick in ticks]
    decimals = next((d for d in range(10) if abs(round(step, d) - step) <= step * 1e-6), 10)
    return [f"{tick:,.{decimals}f}" for tick in (0.0 if abs(tick) < step * 1e-6 else tick for tick in ticks)]


def number(value: float | None) -> str:
    """For people: four digits that count, thousands with commas; `not finite` for None."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds_unit(largest_s: float) -> Unit:
    """In which to show times up to `largest_s` seconds."""
    if largest_s < 1e-3:
        return Unit("µs", 1e-6)
    return Unit("ms", 1e-3) if largest_s < 2 else Unit("s") if largest_s < 600 else Unit("min", 60.0)


def bytes_unit(largest: float) -> Unit:
    """In which to show sizes up to `largest` bytes."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024.0**power:
            return Unit(name, 1024.0**power)
    return Unit("bytes")


def unit_of(name: str, kind: str, largest: float) -> Unit:
    """The unit of a series, from its name as the training log gives it; none where the name says nothing."""
    if name.endswith("-bytes"):
        return bytes_unit(largest)
    if name.endswith("-time") or (kind == "timers" and not name.endswith("-ms")):
        return seconds_unit(largest)
    if name.endswith("-ms"):
        unit = seconds_unit(largest / 1e3)
        return Unit(unit.name, unit.size * 1e3)
    return Unit({"power/gpu": "W", "iter-energy/gpu": "J", "throughput": "TFLOP/s a GPU"}.get(name, ""))


def spread(count: int, most: int) -> Sequence[int]:
    """At most `most` indices of `count`, evenly, the first and the last among them."""
    if count <= most:
        return range(count)
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
