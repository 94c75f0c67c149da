"""The points of a curve, as REST and a status hand them on, and where one is to be cut. Pure.

A point is `[iteration, at_us, value, low, high, first, num_non_finite]`: what the series was from iteration `first` to
`iteration`. `value` is the mean of that stretch and belongs to its middle: drawn at the end it would bend the curve. A
supervisor of an older release leaves the last two away.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

HOLE_FACTOR = 3.0
"""A distance between two points is a hole where it is so many times the ones before and after it."""
MIN_HOLE_SHARE = 0.01
"""Of the whole curve: nobody sees less."""


class CurvePoint(NamedTuple):
    """The stretch of iterations from `first` to `iteration`; value, low and high are None where nothing was finite."""

    iteration: int
    at_us: int
    value: float | None
    low: float | None
    high: float | None
    first: int
    num_non_finite: int

    @property
    def middle(self) -> float:
        """Where its mean belongs."""
        return (self.first + self.iteration) / 2


def points_of(points: Sequence[Sequence[Any]]) -> list[CurvePoint]:
    """Those points, also of a supervisor that does not say where they begin."""
    found = []
    for iteration, at_us, value, low, high, *rest in points:
        first, bad = rest if len(rest) == 2 else (iteration, int(value is None))
        found.append(CurvePoint(iteration, at_us, value, low, high, first, bad))
    return found


def holes_of(points: Sequence[CurvePoint]) -> list[list[int]]:
    """The iterations that nobody told, each stretch from its first to its last: what was lost with a process, for example.

    Told by the distances: a hole is much longer than those beside it, so that a curve of every tenth iteration has none.
    """
    if len(points) < 3:
        return []
    steps = [after.first - before.iteration for before, after in itertools.pairwise(points)]
    least = (points[-1].iteration - points[0].first) * MIN_HOLE_SHARE
    found = []
    for place, step in enumerate(steps):
        beside = max(steps[max(0, place - 1) : place] + steps[place + 1 : place + 2])
        if step > max(least, HOLE_FACTOR * beside):
            found.append([points[place].iteration + 1, points[place + 1].first - 1])
    return found


def newest_of(series: Any) -> float | None:
    """The newest value of a curve, None where that is not finite. Of an older supervisor its last point's."""
    newest = series.get("newest")
    value = series["points"][-1][2] if newest is None else newest["value"]
    return None if value is None else float(value)
