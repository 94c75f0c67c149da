"""A job's numbers for readers: its curves, the newest values, and what a status shows of them. Plain dicts from the store."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from rsup.supervisor.tables import metric_points, metric_series
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import METRIC_KINDS

MAX_POINTS = 2000
STATUS_POINTS = 120
"""Of each curve in a status."""
LOSS, STEP_TIME, LEARNING_RATE, GRAD_NORM = "lm loss", "iteration-time", "learning-rate", "grad-norm"
"""Series that people look for first, by the names that the training log gives them."""
NO_LOSSES = ("loss-scale",)
MAX_LOSSES = 3

Series = dict[str, Any]


def series_of(
    connection: Connection, job_id: int, names: Collection[str] | None = None, kind: str | None = None, max_points: int = 400
) -> dict[str, Series]:
    """The curves of a job (its `jobs.id`) by name: `{"kind", "points", "num_non_finite"}`.

    `points`: at most `max_points` of `[iteration, at_us, value, min, max]` in order, where neighbours may be put together
    (`value` is then their mean); value, min and max are None where nothing was finite. Of names that several kinds have those
    of the kind that comes first in `wire.METRIC_KINDS` are given; name the `kind` for another.
    """
    wanted = [metric_series.c.job == job_id]
    wanted += [metric_series.c.kind == kind] if kind is not None else []
    wanted += [metric_series.c.name.in_(list(names))] if names is not None else []
    known = (metric_series.c.kind, metric_series.c.name, metric_series.c.iteration, metric_series.c.num_points)
    series: dict[str, Series] = {}
    max_points = max(1, min(max_points, MAX_POINTS))
    for row in sorted(connection.execute(select(*known).where(*wanted)), key=lambda row: (row.name, _order(row.kind))):
        if row.name not in series and row.num_points:
            series[row.name] = _read(connection, job_id, row._mapping, max_points)
    return series


def _order(kind: str) -> int:
    return METRIC_KINDS.index(kind) if kind in METRIC_KINDS else len(METRIC_KINDS)


def _read(connection: Connection, job_id: int, row: RowMapping, max_points: int) -> Series:
    """A curve; the database puts together what is too fine: that is many rows for every reader of a page."""
    of = metric_points.c
    where = (of.job == job_id, of.kind == row["kind"], of.name == row["name"])
    first = int(connection.execute(select(func.min(of.iteration)).where(*where)).scalar() or 0)
    width = grid_width(first, row["iteration"], max_points) if row["num_points"] > max_points else 1
    num = of.count - of.num_non_finite
    mean = func.sum(of.value * num) / func.nullif(func.sum(num), 0)
    columns = (func.max(of.iteration), func.max(of.at_us), mean, func.min(of.low), func.max(of.high))
    cell = of.iteration // width
    query = select(*columns, func.sum(of.num_non_finite)).where(*where).group_by(cell).order_by(cell)
    points, num_non_finite = [], 0
    for *point, bad in connection.execute(query):
        points.append(point)
        num_non_finite += int(bad)
    return {"kind": row["kind"], "points": points, "num_non_finite": num_non_finite}


def grid_width(first: int, last: int, most: int) -> int:
    """The smallest power of two by which the iterations from `first` to `last` fall into at most `most` cells."""
    width = 1
    while last // width - first // width + 1 > most:
        width *= 2
    return width


def latest_of(connection: Connection, job_id: int) -> dict[str, dict[str, dict[str, Any]]]:
    """The newest value of every series, by kind and name: `{"value", "iteration", "at"}`; value is None where it was not
    finite."""
    of = metric_series.c
    query = select(of.kind, of.name, of.value, of.iteration, of.at_us).where(of.job == job_id).order_by(of.kind, of.name)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, name, value, iteration, at_us in connection.execute(query):
        found.setdefault(kind, {})[name] = {"value": value, "iteration": iteration, "at": iso(at_us)}
    return found


def curves_of(connection: Connection, job_id: int, latest: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What a status draws: the losses, the time of an iteration, then learning rate and gradient norm, where there are some.
    Each with `name`, `kind` and the `points` of `series_of`."""
    known = list(latest.get("training", {}))
    names = [*losses_of(known), *(name for name in (STEP_TIME, LEARNING_RATE, GRAD_NORM) if name in known)]
    if not names:
        return []
    found = series_of(connection, job_id, names, "training", STATUS_POINTS)
    return [{"name": name, **found[name]} for name in names if name in found]


def losses_of(names: Collection[str]) -> list[str]:
    """Those of these series that are losses, `lm loss` first."""
    losses = sorted(name for name in names if "loss" in name and name not in NO_LOSSES and not name.endswith("-time"))
    return sorted(losses, key=lambda name: name != LOSS)[:MAX_LOSSES]


def live_values(connection: Connection, ids: Sequence[int]) -> dict[int, list[RowMapping]]:
    """The newest values of jobs, by `jobs.id`: rows of `metric_series`."""
    query = select(metric_series).where(metric_series.c.job.in_(ids)).order_by(metric_series.c.kind, metric_series.c.name)
    found: dict[int, list[RowMapping]] = {}
    for row in connection.execute(query).mappings():
        found.setdefault(row["job"], []).append(row)
    return found


def span_of(points: Sequence[Sequence[Any]]) -> tuple[float, float] | None:
    """The lowest and the highest of a curve's points, None where nothing is finite."""
    lows = [point[3] for point in points if point[3] is not None]
    highs = [point[4] for point in points if point[4] is not None]
    return (min(lows), max(highs)) if lows and all(map(math.isfinite, (*lows, *highs))) else None
