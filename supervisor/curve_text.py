"""Curves and shares as a terminal draws them: one line each, in block characters."""

from collections.abc import Mapping, Sequence
from typing import Any

from rsup.supervisor.goodput import PARTS
from rsup.supervisor.metric_views import span_of
from rsup.supervisor.render import PLAIN, Paint, clean, width_of

Json = Mapping[str, Any]

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "·"
"""Where nothing was finite."""
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
    """A line for each curve: name, newest value, the curve from its first to its last iteration, and its range."""
    shown = [(one, span_of(one["points"])) for one in curves if one["points"]]
    names = [clean(one["name"]) for one, _ in shown]
    widest = max(map(width_of, names), default=0)
    columns = max((min(CURVE_COLUMNS, len(one["points"])) for one, _ in shown), default=0)
    lines = []
    for name, (one, span) in zip(names, shown, strict=True):
        points = one["points"]
        last = points[-1][2]
        newest = paint("not finite", "yellow") if last is None else paint(f"{last:.4g}", "bold")
        told = "" if span is None or span[0] == span[1] else f", {span[0]:.4g} to {span[1]:.4g}"
        first, end = points[0][0], points[-1][0]
        where = f" in iterations {first} to {end}" if first < end else f" in iteration {end}"
        odd = one.get("num_non_finite") and len(points) > 1
        bad = paint(f", {one['num_non_finite']} not finite", "yellow") if odd else ""
        drawn = paint(sparkline(_stretched([point[2] for point in points], columns)), "green")
        lines.append(f"{name}{' ' * (widest - width_of(name))}  {drawn}  {newest}{told}{where}{bad}")
    return lines


def _stretched(values: Sequence[float | None], columns: int) -> list[float | None]:
    """As many as there are columns at least, so that curves of one stretch of iterations lie below one another."""
    num = max(columns, len(values))
    return [values[i * len(values) // num] for i in range(num)]


def sparkline(values: Sequence[float | None], columns: int = CURVE_COLUMNS) -> str:
    """The values as block characters, from the lowest to the highest; a column is the mean of what falls into it."""
    columns = min(columns, len(values))
    parts = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(known) / len(known) if (known := [v for v in part if v is not None]) else None for part in parts]
    finite = [mean for mean in means if mean is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    height = (high - low) or 1.0
    return "".join(GAP if m is None else BLOCKS[min(7, int((m - low) / height * 8)) if high > low else 3] for m in means)


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
