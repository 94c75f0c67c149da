"""A job's numbers for readers: its curves, the newest values, and what a status shows of them. Plain dicts from the store."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, case, func, select

from rsup.supervisor.curve_points import holes_of, points_of
from rsup.supervisor.tables import metric_points, metric_series
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import METRIC_KINDS

MAX_POINTS = 2000
MAX_POINTS_IN_ALL = 100_000
"""Of all curves in one answer: of many each has fewer."""
STATUS_POINTS = 120
"""Of each curve in a status."""
LOSS, STEP_TIME, LEARNING_RATE, GRAD_NORM = "lm loss", "iteration-time", "learning-rate", "grad-norm"
"""Series that people look for first, by the names that the training log gives them."""
COUNTED = ("skipped-iterations", "nan-iterations")
"""Series of which each value counts what was new since the one before."""
MAX_VALUES = 20_000
"""Newest values of all live jobs in one answer of `/metrics`, and its number of samples."""
NO_LOSSES = ("loss-scale",)
MAX_LOSSES = 3

Series = dict[str, Any]


def series_of(
    connection: Connection, job_id: int, names: Collection[str] | None = None, kind: str | None = None, max_points: int = 400
) -> dict[str, Series]:
    """The curves of a job (its `jobs.id`) by name: `{"kind", "points", "num_non_finite", "newest", "holes"}`.

    `points`: at most `max_points`, of many series an equal share of `MAX_POINTS_IN_ALL`, of `[iteration, at_us, value, min,
    max, first, num_non_finite]` in order, where neighbours from iteration `first` on may be put together (`value` is then
    their mean); value, min and max are None where nothing was finite. `newest`: the newest `value`, None where it was not
    finite, and its `iteration`. `holes`: first and last of iterations that nobody told (`curve_points.holes_of`). Of names that
    several kinds have those of the kind that comes first in `wire.METRIC_KINDS` are given; name the `kind` for another.
    """
    wanted = [metric_series.c.job == job_id]
    wanted += [metric_series.c.kind == kind] if kind is not None else []
    wanted += [metric_series.c.name.in_(list(names))] if names is not None else []
    of = metric_series.c
    known = (of.kind, of.name, of.iteration, of.num_points, of.value)
    chosen: dict[str, RowMapping] = {}
    for row in sorted(connection.execute(select(*known).where(*wanted)), key=lambda row: (row.name, _order(row.kind))):
        if row.name not in chosen and row.num_points:
            chosen[row.name] = row._mapping
    series: dict[str, Series] = {
        name: {
            "kind": row["kind"],
            "points": [],
            "num_non_finite": 0,
            "newest": {"value": row["value"], "iteration": row["iteration"]},
        }
        for name, row in chosen.items()
    }
    max_points = max(1, min(max_points, MAX_POINTS, MAX_POINTS_IN_ALL // max(1, len(chosen))))
    for (of_kind, width), of_width in _by_width(connection, job_id, chosen, max_points).items():
        _read(connection, job_id, of_kind, width, {name: series[name] for name in of_width})
    for one in series.values():
        one["holes"] = holes_of(points_of(one["points"]))
    return {name: one for name, one in series.items() if one["points"]}


def _order(kind: str) -> int:
    return METRIC_KINDS.index(kind) if kind in METRIC_KINDS else len(METRIC_KINDS)


def _by_width(
    connection: Connection, job_id: int, chosen: Mapping[str, RowMapping], max_points: int
) -> dict[tuple[str, int], list[str]]:
    """Names of series by kind and by how many iterations a point of theirs is to have: one query reads all of those."""
    of = metric_points.c
    firsts: dict[str, int] = {}
    longer: dict[str, list[str]] = {}
    for name, row in chosen.items():
        if row["num_points"] > max_points:
            longer.setdefault(row["kind"], []).append(name)
    for kind, names in longer.items():
        query = select(of.name, func.min(of.iteration)).where(of.job == job_id, of.kind == kind, of.name.in_(names))
        firsts.update((name, first) for name, first in connection.execute(query.group_by(of.name)))
    found: dict[tuple[str, int], list[str]] = {}
    for name, row in chosen.items():
        width = grid_width(firsts[name], row["iteration"], max_points) if name in firsts else 1
        found.setdefault((row["kind"], width), []).append(name)
    return found


def _read(connection: Connection, job_id: int, kind: str, width: int, series: Mapping[str, Series]) -> None:
    """Fill in curves; the database puts together what is too fine: that is many rows for every reader of a page."""
    of = metric_points.c
    num = of.count - of.num_non_finite
    mean = func.sum(of.value * num) / func.nullif(func.sum(num), 0)
    columns = (func.max(of.iteration), func.max(of.at_us), mean, func.min(of.low), func.max(of.high), func.min(of.first))
    cell = of.iteration // width
    query = select(of.name, func.sum(of.num_non_finite), *columns).where(of.job == job_id, of.kind == kind)
    query = query.where(of.name.in_(list(series))).group_by(of.name, cell).order_by(of.name, cell)
    for name, bad, *point in connection.execute(query):
        series[name]["points"].append([*point, int(bad)])
        series[name]["num_non_finite"] += int(bad)


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


def live_values(connection: Connection, ids: Sequence[int]) -> tuple[dict[int, list[RowMapping]], dict[int, int]]:
    """The newest values of jobs, by `jobs.id`: rows of `metric_series`, of many jobs with many series an equal share of
    `MAX_VALUES`; and how many series of a job are left out."""
    if not ids:
        return {}, {}
    of = metric_series.c
    nth = func.row_number().over(partition_by=of.job, order_by=(of.name.not_in(COUNTED), _kind_order(), of.name))
    ranked = select(metric_series, nth.label("nth")).where(of.job.in_(ids)).subquery()
    share = max(1, MAX_VALUES // len(ids))
    query = select(ranked).where(ranked.c.nth <= share).order_by(ranked.c.job, ranked.c.nth)
    found: dict[int, list[RowMapping]] = {}
    for row in connection.execute(query).mappings():
        found.setdefault(row["job"], []).append(row)
    counted = select(of.job, func.count()).where(of.job.in_(ids)).group_by(of.job).having(func.count() > share)
    return found, {job: int(num) - share for job, num in connection.execute(counted)}


def _kind_order() -> Any:
    return case({kind: place for place, kind in enumerate(METRIC_KINDS)}, value=metric_series.c.kind, else_=len(METRIC_KINDS))


def span_of(points: Sequence[Sequence[Any]]) -> tuple[float, float] | None:
    """The lowest and the highest of a curve's points, None where nothing is finite."""
    lows = [point[3] for point in points if point[3] is not None]
    highs = [point[4] for point in points if point[4] is not None]
    return (min(lows), max(highs)) if lows and all(map(math.isfinite, (*lows, *highs))) else None
