"""Writes the numbers of a training into the store: a series is a curve that goes on over restarts, of bounded length.

A rank that goes back (a resume, an in-process restart) tells iterations again: what the series had from there on is what no
longer holds, and goes. So a run that was interrupted has the same curve as one that was not. Within an entry into the training
function a series has one teller: what another rank says of it is left out.

Of a series that has grown beyond `MAX_POINTS` neighbours are put together (`wire.thinned`), so that a day and a year of
training take equal room: the longest first, a few in a transaction, for the loop must not wait for hundreds. At twice that
length whatever comes is put together with the newest point, so that no flood makes a series longer.

Everything written is absolute, so that a transaction may be done again. What is remembered between transactions (where each
series ends) counts once they are committed.
"""

import functools
import heapq
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
"""Series, in one transaction."""
MAX_JOBS_REMEMBERED = 1024
LARGEST = 1e200
"""What is larger is shown as not finite."""
SMALLEST = 1e-300
"""What is nearer to zero is zero: nobody draws it, and ratios of such numbers overflow."""

POINT = tuple(metric_points.c[name] for name in MetricBin.__struct_fields__)
"""The columns of a point."""

Key = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a series."""

    attempt: int
    entry: int
    rank: int
    iteration: int = -1
    num_points: int = 0
    total: float = 0.0


class MetricWriter:
    """Of one store. Call `begin`, then `write` for each record of a transaction, `finish`, then `committed` if it was."""

    def __init__(self, insert_of: Callable[[Table], Any]) -> None:
        """`insert_of`: the dialect's insert, which knows conflicts."""
        self._tails: dict[int, dict[Key, _Tail]] = {}
        self._new: dict[int, dict[Key, _Tail]] = {}
        self._long: set[tuple[int, Key]] = set()
        """Series that may be beyond `MAX_POINTS`, by job; of a transaction that failed, too."""
        self._put_points = _upsert(insert_of, metric_points)
        self._put_series = _upsert(insert_of, metric_series)

    def begin(self) -> None:
        """A transaction begins; what the one before found counts only if `committed` was called."""
        self._new = {}

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
            tail = tails.get(key)
            if tail is None:
                if num_of_kind >= MAX_METRICS_A_KIND:
                    continue
                num_of_kind += 1
                tail = _Tail(record.attempt, record.entry, record.rank)
            elif _is_anothers(tail, record):
                continue
            where = {"job": job, "kind": record.kind, "name": name}
            num, last = self._make_room(connection, where, tail, bins), bins[-1]
            total = tail.total + _sum(bins)
            if num + len(bins) > 2 * MAX_POINTS:
                num, bins = _joined_to_last(connection, where, num, bins)
            points += [{**where, **_row(one)} for one in bins]
            num += len(bins)
            tails[key] = _Tail(record.attempt, record.entry, record.rank, last.iteration, num, total)
            ends.append({**where, **_end(tails[key], last)})
            if num > MAX_POINTS:
                self._long.add((job, key))
        if points:
            connection.execute(self._put_points, points)
        if ends:
            connection.execute(self._put_series, ends)

    def finish(self, connection: Connection) -> None:
        """Before the transaction ends: make the longest series shorter."""
        found = []
        for job, key in list(self._long):
            tail = (self._new.get(job) or self._tails.get(job) or {}).get(key)
            if tail is None or tail.num_points <= MAX_POINTS:
                self._long.discard((job, key))  # or nobody has told anything of that job for long
            else:
                found.append((tail.num_points, job, key))
        for _, job, key in heapq.nlargest(MAX_THINNED_AT_ONCE, found):
            self._thin(connection, job, key)

    def _tails_of(self, connection: Connection, job: int) -> dict[Key, _Tail]:
        if job not in self._new:
            known = self._tails.get(job)
            if known is None:
                known = {}
                of = metric_series.c
                tail_of = (of.attempt, of.entry, of.rank, of.iteration, of.num_points, of.total)
                query = select(of.kind, of.name, *tail_of).where(of.job == job)
                for kind, name, *tail in connection.execute(query):
                    known[kind, name] = _Tail(*tail)
            self._new[job] = dict(known)
        return self._new[job]

    def _make_room(self, connection: Connection, where: dict[str, Any], tail: _Tail, bins: Sequence[MetricBin]) -> int:
        """Take away what these points stand in place of; return how many the series then has."""
        start, of = bins[0], metric_points.c
        if start.first > tail.iteration:
            return tail.num_points
        around = select(*POINT).where(*_is(where), of.first < start.first, of.iteration >= start.first)
        cut = [_before(bin_of(row), start) for row in connection.execute(around)]
        connection.execute(delete(metric_points).where(*_is(where), of.iteration >= start.first))
        if cut:
            connection.execute(self._put_points, [{**where, **_row(one)} for one in cut])
        return _count(connection, where)

    def _thin(self, connection: Connection, job: int, key: Key) -> None:
        tails = self._tails_of(connection, job)
        where = {"job": job, "kind": key[0], "name": key[1]}
        query = select(*POINT).where(*_is(where)).order_by(metric_points.c.iteration)
        kept = thinned([bin_of(row) for row in connection.execute(query)], MAX_POINTS // 2)
        tails[key] = replace(tails[key], num_points=len(kept))
        if kept:  # else they have been forgotten since
            connection.execute(delete(metric_points).where(*_is(where)))
            connection.execute(insert(metric_points), [{**where, **_row(one)} for one in kept])
            connection.execute(self._put_series, [{**where, **_end(tails[key], kept[-1])}])


def _is_anothers(tail: _Tail, record: MetricsSaved) -> bool:
    """Whether that series is told by another rank, or has been told again from a later entry on."""
    then, now = (tail.attempt, tail.entry), (record.attempt, record.entry)
    return now < then or (now == then and record.rank != tail.rank)


def _joined_to_last(
    connection: Connection, where: dict[str, Any], num: int, bins: Sequence[MetricBin]
) -> tuple[int, list[MetricBin]]:
    """All of these points and the newest one of the series as one point, and how many the series has without it."""
    whole = functools.reduce(MetricBin.joined, bins)
    newest = select(*POINT).where(*_is(where)).order_by(metric_points.c.iteration.desc()).limit(1)
    row = connection.execute(newest).first()
    if row is None:
        return num, [whole]
    last = bin_of(row)
    if last.iteration >= whole.first:  # a transaction that is done twice
        return num, []
    connection.execute(delete(metric_points).where(*_is(where), metric_points.c.iteration == last.iteration))
    return num - 1, [last.joined(whole)]


def _before(one: MetricBin, start: MetricBin) -> MetricBin:
    """Of a stretch the part before `start`, which begins within it; what was in that part is taken to be as the whole was."""
    share = (start.first - one.first) / (one.iteration - one.first + 1)
    count = max(1, round(one.count * share))
    num_non_finite = min(round(one.num_non_finite * share), count - (one.num_non_finite < one.count))
    consumed_samples = min(one.consumed_samples, start.consumed_samples)
    return MetricBin(
        *(one.first, start.first - 1, one.at_us, consumed_samples, one.value, one.low, one.high, one.value),
        count=count,
        num_non_finite=num_non_finite,
    )


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
    if abs(value) < SMALLEST:
        return 0.0
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
        "entry": tail.entry,
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
    return total if abs(total) <= LARGEST else 0.0


def _is(where: dict[str, Any]) -> list[Any]:
    return [metric_points.c[name] == value for name, value in where.items()]


def _count(connection: Connection, where: dict[str, Any]) -> int:
    return int(connection.execute(select(func.count()).select_from(metric_points).where(*_is(where))).scalar() or 0)


def _upsert(insert_of: Callable[[Table], Any], table: Table) -> Any:
    statement = insert_of(table)
    keys = [column.name for column in table.primary_key]
    values = {column.name: statement.excluded[column.name] for column in table.c if column.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=values)
