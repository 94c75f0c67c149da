"""Takes over the jobs of another store, as when an embedded supervisor stood in for a shared one, and what it learned about
devices and nodes (`history_merge`).

By natural key, so that it can be done again: what is there already stays, or is written over where the other store knows
something newer. A job that has not ended stays out, for its own supervisor still decides about it. Two different jobs of one
name and run (made at different times) both stay: the other store's becomes the next free run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, Row, Table, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from rsup.supervisor import history_merge, tables

_BATCH = 1000

_STORY = (
    tables.attempts,
    tables.ranks,
    tables.incidents,
    tables.sections,
    tables.checkpoints,
    tables.resumes,
    tables.cases,
    tables.job_nodes,
    tables.placements,
    tables.beats,
    tables.stragglers,
)
"""Tables of a job other than its events."""

Change = Callable[[Callable[[Connection], Any]], Any]
"""Runs a function in one transaction of the target, as `SqlStore.change` does."""


@dataclass
class Merged:
    """What a merge did."""

    jobs: int = 0
    """Jobs looked at."""
    new_jobs: int = 0
    new_events: int = 0
    renumbered: int = 0
    """Jobs that got another run number."""
    still_live: int = 0
    """Jobs left out because they have not ended."""
    new_evidence: int = 0
    changed_subjects: int = 0
    """Devices and nodes whose state or its history is another now."""


def merge(source: Engine, change: Change, *, live_too: bool = False) -> Merged:
    """Import from `source`, one transaction a job; `live_too` makes a full copy. Raise database errors."""
    merged = Merged()
    with source.connect() as read:
        ids: dict[int, int] = {}
        for job in read.execute(select(tables.jobs).order_by(tables.jobs.c.created_us)).all():
            if job.phase != "ended" and not live_too:
                merged.still_live += 1
                continue
            ids[job.id] = change(partial(_merge_job, read, job, merged))
            merged.jobs += 1
        change(lambda write: history_merge.merge_sightings(read, write, ids))
        merged.new_evidence = change(partial(history_merge.merge_evidence, read, ids=ids, as_is=live_too))
        merged.changed_subjects = change(partial(history_merge.merge_subjects, read, ids=ids, as_is=live_too))
        change(partial(history_merge.merge_seats, read, as_is=live_too))
        if live_too:
            change(partial(history_merge.copy_drains, read))
    return merged


def _merge_job(read: Connection, job: Row[Any], merged: Merged, write: Connection) -> int:
    same, newer, run = _find(write, job)
    values = {**job._mapping, "run": run}
    del values["id"]
    if same is None:
        merged.new_jobs += 1
        merged.renumbered += run != job.run
        write.execute(insert(tables.jobs).values(values))
        same = _find(write, job)[0]
        assert same is not None
    elif newer:
        write.execute(update(tables.jobs).where(tables.jobs.c.id == same).values(values))
    for table in _STORY:
        _copy_rows(read, write, table, job.id, same, overwrite=newer)
    _copy_curves(read, write, job.id, same, newer)
    merged.new_events += _copy_rows(read, write, tables.events, job.id, same, overwrite=False)
    return same


def _copy_curves(read: Connection, write: Connection, job: int, new_job: int, newer: bool) -> None:
    """Of each series the newer store's curve, and from the other what lies before that: it may only hold a later attempt."""
    ours, theirs = _firsts(write, new_job), _firsts(read, job)
    points, series = tables.metric_points, tables.metric_series
    both = ours.keys() & theirs.keys()
    if newer:
        for kind, name in both:
            of_series = (points.c.job == new_job, points.c.kind == kind, points.c.name == name)
            write.execute(delete(points).where(*of_series, points.c.iteration >= theirs[kind, name]))
    rows = read.execute(select(points).where(points.c.job == job).execution_options(yield_per=_BATCH))
    for batch in rows.partitions(_BATCH):
        told = [
            {**row._mapping, "job": new_job}
            for row in batch
            if newer or (row.kind, row.name) not in both or row.iteration < ours[row.kind, row.name]
        ]
        if told:
            write.execute(upsert(write, points, overwrite=False), told)
    _copy_rows(read, write, series, job, new_job, overwrite=newer)
    lengths = select(func.count()).where(points.c.job == series.c.job, points.c.kind == series.c.kind)
    lengths = lengths.where(points.c.name == series.c.name)
    write.execute(update(series).where(series.c.job == new_job).values(num_points=lengths.scalar_subquery()))


def _firsts(connection: Connection, job: int) -> dict[tuple[str, str], int]:
    """Where each series begins, by kind and name; of those that have points."""
    of = tables.metric_points.c
    query = select(of.kind, of.name, func.min(of.first)).where(of.job == job).group_by(of.kind, of.name)
    return {(kind, name): first for kind, name, first in connection.execute(query)}


def _find(write: Connection, job: Row[Any]) -> tuple[int | None, bool, int]:
    """The same job in the target (id, or None), whether what we bring is newer, and the run it has there."""
    column = tables.jobs.c
    of_name = (column.cluster == job.cluster, column.owner == job.owner, column.job_id == job.job_id)
    found = select(column.id, column.updated_us, column.run).where(*of_name, column.created_us == job.created_us)
    row = write.execute(found.order_by(column.run != job.run).limit(1)).first()
    if row is not None:
        return int(row.id), job.updated_us > row.updated_us, int(row.run)
    runs = set(write.execute(select(column.run).where(*of_name)).scalars())
    return None, True, int(job.run) if job.run not in runs else max(runs) + 1


def _copy_rows(read: Connection, write: Connection, table: Table, job: int, new_job: int, *, overwrite: bool) -> int:
    before = _count(write, table, new_job)
    statement = upsert(write, table, overwrite=overwrite)
    rows = read.execute(select(table).where(table.c.job == job).execution_options(yield_per=_BATCH))
    for batch in rows.partitions(_BATCH):
        write.execute(statement, [{**row._mapping, "job": new_job} for row in batch])
    return _count(write, table, new_job) - before


def _count(connection: Connection, table: Table, job: int) -> int:
    return int(connection.execute(select(func.count()).select_from(table).where(table.c.job == job)).scalar() or 0)


def upsert(connection: Connection, table: Table, *, overwrite: bool) -> Any:
    """An insert that leaves a row of the same key alone, or writes over it."""
    statement = (sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert)(table)
    if not overwrite:
        return statement.on_conflict_do_nothing()
    keys = [column.name for column in table.primary_key]
    values = {column.name: statement.excluded[column.name] for column in table.c if column.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=values)
