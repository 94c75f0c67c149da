"""Writes the numbers of a training into the store: a series is a curve that goes on over restarts, of bounded length.

A rank that goes back (a resume, an in-process restart) tells iterations again: what the series had from there on is what no
longer holds, and goes. So a run that was interrupted has the same curve as one that was not. Of a series that has grown beyond
`MAX_POINTS` neighbours are put together (`wire.thinned`), so that a day and a year of training take equal room.

Everything written is absolute, so that a transaction may be done again. What is remembered between transactions (where each
series ends) counts once they are committed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select

from rsup.supervisor.records import MetricsSaved
from rsup.supervisor.tables import metric_points, metric_series
from rsup.supervisor.wire import MAX_METRIC_NAME_BYTES, MAX_METRICS_A_KIND, MetricBin, thinned

MAX_POINTS = 2000
"""Of a series."""
MAX_THINNED_AT_ONCE = 2
"""Series, in one transaction: the loop must not wait for hundreds. A series may be longer for so many transactions."""
MAX_JOBS_REMEMBERED = 1024
LARGEST = 1e200
"""What is larger is shown as not finite."""

POINT = tuple(metric_points.c[name] for name in MetricBin.__struct_fields__)
"""The columns of a point."""

Key = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a series."""

    attempt: int
    rank: int
    iteration: int
    num_points: int
    total: float = 0.0


class MetricWriter:
    """Of one store. Call `begin`, then `write` for each record of a transaction, then `committed` if it was."""

    def __init__(self, insert_of: Callable[[Table], Any]) -> None:
        """`insert_of`: the dialect's insert, which knows conflicts."""
        self._tails: dict[int, dict[Key, _Tail]] = {}
        self._new: dict[int, dict[Key, _Tail]] = {}
        self._num_thinned = 0
        self._put_points = _upsert(insert_of, metric_points)
        self._put_series = _upsert(insert_of, metric_series)

    def begin(self) -> None:
        """A transaction begins; what the one before found counts only if `committed` was called."""
        self._new = {}
        self._num_thinned = 0

    def committed(self) -> None:
        """The transaction is on disk."""
        for job, tails in self._new.items():
            self._tails.pop(job, None)  # the one written last is forgotten last
            self._tails[job] = tails
        while len(self._tails) > MAX_JOBS_REMEMBERED:
            del self._tails[next(iter(self._tails))]
        self._new = {}

    def write(self, connection: Connection, job: int, record: MetricsSaved) -> None:
        """Add the record's points to the series of that job (its number in `jobs`)."""
        tails = self._tails_of(connection, job)
        points: list[dict[str, Any]] = []
        ends: list[dict[str, Any]] = []
        num_of_kind = sum(kind == record.kind for kind, _ in tails)
        for name, bins in record.series.items():
            key = (record.kind, name)
            bins = in_order(bins)
            if not bins or not 0 < len(name.encode("utf-8", "replace")) <= MAX_METRIC_NAME_BYTES:
                continue
            if key not in tails:
                if num_of_kind >= MAX_METRICS_A_KIND:
                    continue
                num_of_kind += 1
            where = {"job": job, "kind": record.kind, "name": name}
            num = self._make_room(connection, where, tails.get(key), record, bins)
            points += [{**where, **_row(one)} for one in bins]
            last = bins[-1]
            total = (tails[key].total if key in tails else 0.0) + _sum(bins)
            tails[key] = _Tail(record.attempt, record.rank, last.iteration, num + len(bins), total)
            ends.append({**where, **_end(tails[key], last)})
        if points:
            connection.execute(self._put_points, points)
            connection.execute(self._put_series, ends)
            self._thin(connection, job, record.kind, record.series)

    def _tails_of(self, connection: Connection, job: int) -> dict[Key, _Tail]:
        if job not in self._new:
            known = self._tails.get(job)
            if known is None:
                known = {}
                of = metric_series.c
                tail_of = (of.attempt, of.rank, of.iteration, of.num_points, of.total)
                query = select(of.kind, of.name, *tail_of).where(of.job == job)
                for kind, name, *tail in connection.execute(query):
                    known[kind, name] = _Tail(*tail)
            self._new[job] = dict(known)
        return self._new[job]

    def _make_room(
        self, connection: Connection, where: dict[str, Any], tail: _Tail | None, record: MetricsSaved, bins: Sequence[MetricBin]
    ) -> int:
        """Take away what these points stand in place of; return how many the series then has."""
        if tail is None or bins[0].first > tail.iteration:
            return 0 if tail is None else tail.num_points
        if tail.attempt == record.attempt and tail.rank != record.rank:
            return tail.num_points  # two ranks tell one series: neither goes back
        connection.execute(delete(metric_points).where(*_is(where), metric_points.c.iteration >= bins[0].first))
        return _count(connection, where)

    def _thin(self, connection: Connection, job: int, kind: str, names: Sequence[str] | dict[str, Any]) -> None:
        tails = self._new[job]
        for name in names:
            tail = tails.get((kind, name))
            if tail is None or tail.num_points <= MAX_POINTS or self._num_thinned >= MAX_THINNED_AT_ONCE:
                continue
            self._num_thinned += 1
            where = {"job": job, "kind": kind, "name": name}
            query = select(*POINT).where(*_is(where)).order_by(metric_points.c.iteration)
            kept = thinned([bin_of(row) for row in connection.execute(query)], MAX_POINTS // 2)
            connection.execute(delete(metric_points).where(*_is(where)))
            connection.execute(insert(metric_points), [{**where, **_row(one)} for one in kept])
            tails[kind, name] = replace(tail, num_points=len(kept))
            num = {**where, **_end(tails[kind, name], kept[-1])}
            connection.execute(self._put_series, [num])


def in_order(bins: Sequence[MetricBin]) -> list[MetricBin]:
    """Those of a message, each behind the one before: who goes back within it takes what lies there away."""
    kept: list[MetricBin] = []
    for one in bins:
        while kept and kept[-1].iteration >= one.first:
            kept.pop()
        kept.append(one)
    return kept


def bin_of(row: Sequence[Any]) -> MetricBin:
    """The point of a row of `POINT`."""
    first, iteration, at_us, consumed_samples, *values, count, num_non_finite = row
    if None in values:
        values = [math.nan if value is None else value for value in values]
    value, low, high, last = values
    return MetricBin(first, iteration, at_us, consumed_samples, value, low, high, last, count, num_non_finite)


def finite(value: float) -> float | None:
    """What a column holds of it: databases and JSON differ over NaN and infinities, and over sums that become infinite."""
    return value if abs(value) <= LARGEST else None


def _row(one: MetricBin) -> dict[str, Any]:
    return {
        "first": one.first,
        "iteration": one.iteration,
        "at_us": one.at_us,
        "consumed_samples": one.consumed_samples,
        "value": finite(one.value),
        "low": finite(one.low),
        "high": finite(one.high),
        "last": finite(one.last),
        "count": one.count,
        "num_non_finite": one.num_non_finite,
    }


def _end(tail: _Tail, last: MetricBin) -> dict[str, Any]:
    return {
        "attempt": tail.attempt,
        "rank": tail.rank,
        "iteration": tail.iteration,
        "at_us": last.at_us,
        "consumed_samples": last.consumed_samples,
        "value": finite(last.last),
        "total": tail.total,
        "num_points": tail.num_points,
    }


def _sum(bins: Sequence[MetricBin]) -> float:
    total = sum(one.value * (one.count - one.num_non_finite) for one in bins if one.count > one.num_non_finite)
    return total if math.isfinite(total) else 0.0


def _is(where: dict[str, Any]) -> list[Any]:
    return [metric_points.c[name] == value for name, value in where.items()]


def _count(connection: Connection, where: dict[str, Any]) -> int:
    return int(connection.execute(select(func.count()).select_from(metric_points).where(*_is(where))).scalar() or 0)


def _upsert(insert_of: Callable[[Table], Any], table: Table) -> Any:
    statement = insert_of(table)
    keys = [column.name for column in table.primary_key]
    values = {column.name: statement.excluded[column.name] for column in table.c if column.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=values)
