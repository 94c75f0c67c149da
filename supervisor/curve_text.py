"""Curves and shares as a terminal draws them: one line each, in block characters."""

from collections.abc import Mapping, Sequence
from typing import Any

from rsup.supervisor.curve_points import CurvePoint, newest_of, points_of
from rsup.supervisor.goodput import PARTS
from rsup.supervisor.metric_views import span_of
from rsup.supervisor.render import PLAIN, Paint, clean, width_of

Json = Mapping[str, Any]

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "·"
"""Where a value was not finite."""
NOTHING = " "
"""Where nobody told anything."""
FLAT = 1e-9
"""What differs by less of its size is the same: means of equal values differ in their last digits."""
CURVE_COLUMNS = 40
BAR_COLUMNS = 60
SHARES = {
    "productive": ("█", "green"),
    "lost": ("▓", "red"),
    "hang": ("▓", "red"),
    "restart": ("▒", "red"),
    "in_process_restart": ("▒", "yellow"),
    "rerun": ("▒", "yellow"),
    "checkpoint": ("▒", ""),
    "startup": ("░", ""),
    "waiting": ("░", "dim"),
    "ending": ("░", "dim"),
    "uncounted": ("-", "dim"),
}
"""How each of `goodput.PARTS` is drawn."""


def curve_lines(curves: Sequence[Json], paint: Paint = PLAIN) -> list[str]:
    """A line for each curve: name, newest value, the curve over the iterations of all of them, and its range."""
    shown = [(one, points_of(one["points"])) for one in curves if one["points"]]
    names = [clean(one["name"]) for one, _ in shown]
    widest = max(map(width_of, names), default=0)
    columns = max((min(CURVE_COLUMNS, len(points)) for _, points in shown), default=0)
    stretch = (min((points[0].first for _, points in shown), default=0), max((p[-1].iteration for _, p in shown), default=0))
    lines = []
    for name, (one, points) in zip(names, shown, strict=True):
        last, span = newest_of(one), span_of(points)
        newest = paint("not finite", "yellow") if last is None else paint(f"{last:.4g}", "bold")
        told = "" if span is None or _is_flat(*span) else f", {span[0]:.4g} to {span[1]:.4g}"
        first, end = points[0].first, points[-1].iteration
        where = f" in iterations {first} to {end}" if first < end else f" in iteration {end}"
        odd = one.get("num_non_finite") and first < end
        bad = paint(f", {one['num_non_finite']} not finite", "yellow") if odd else ""
        drawn = paint(sparkline(points, one.get("holes", ()), columns, stretch), "green")
        lines.append(f"{name}{' ' * (widest - width_of(name))}  {drawn}  {newest}{told}{where}{bad}")
    return lines


def sparkline(
    points: Sequence[CurvePoint],
    holes: Sequence[Sequence[int]] = (),
    columns: int = CURVE_COLUMNS,
    stretch: tuple[int, int] = (0, 0),
) -> str:
    """The curve as block characters from the lowest to the highest, each for an equal part of the iterations of `stretch`, both
    included (0, 0: the curve's own). `holes`: iterations that nobody told, which stay empty, as does what lies outside."""
    first, end = stretch if stretch != (0, 0) or not points else (points[0].first, points[-1].iteration)
    width = (end + 1 - first) / max(1, columns)
    parts = [_part(points, holes, first + i * width, first + (i + 1) * width) for i in range(columns if points else 0)]
    values = [part for part in parts if isinstance(part, float)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    height = 0.0 if _is_flat(low, high) else high - low
    drawn = (part if isinstance(part, str) else min(7, int((part - low) / height * 8)) if height else 3 for part in parts)
    return "".join(one if isinstance(one, str) else BLOCKS[one] for one in drawn)


def _is_flat(low: float, high: float) -> bool:
    return high - low <= FLAT * max(abs(low), abs(high))


def _part(points: Sequence[CurvePoint], holes: Sequence[Sequence[int]], begin: float, end: float) -> float | str:
    """What a column shows: the mean of the points in it, what lies between its neighbours where it has none, or a character."""
    if any(point.num_non_finite and point.first < end and point.iteration + 1 > begin for point in points):
        return GAP
    inside = [point.value for point in points if begin <= point.middle < end and point.value is not None]
    if inside:
        return sum(inside) / len(inside)
    at = (begin + end) / 2
    if not points[0].first < end or not points[-1].iteration + 1 > begin or any(hole[0] <= at < hole[1] + 1 for hole in holes):
        return NOTHING
    known = [point for point in points if point.value is not None]
    before = max((point for point in known if point.middle <= at), key=lambda point: point.middle, default=None)
    after = min((point for point in known if point.middle > at), key=lambda point: point.middle, default=None)
    if before is None or after is None:
        alone = before or after
        return NOTHING if alone is None or alone.value is None else alone.value
    assert before.value is not None and after.value is not None
    share = (at - before.middle) / (after.middle - before.middle)
    return before.value + (after.value - before.value) * share


def time_bar(goodput: Json, paint: Paint = PLAIN, columns: int = BAR_COLUMNS) -> str:
    """Where the time went, as one bar: each part that took some has at least a column. Empty where nothing is known."""
    wall_s, parts = goodput["wall_s"], goodput["parts"]
    known = [(name, parts[name]) for name in PARTS if wall_s and parts[name]]
    if not known:
        return ""
    widths = {name: max(1, round(took_s / wall_s * columns)) for name, took_s in known}
    while sum(widths.values()) > max(columns, len(widths)):
        widths[max(widths, key=lambda name: widths[name])] -= 1
    return "".join(paint(SHARES[name][0] * widths[name], SHARES[name][1]) for name, _ in known)


def mark_of(part: str) -> str:
    """The character that draws it."""
    return SHARES[part][0]
