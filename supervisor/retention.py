"""What the store forgets: events, curves and beats of ended jobs, when they are old or take too much room, in small batches.

Jobs, attempts, incidents with their text, checkpoints, the newest value of each series and devices stay; of an incident only
the stacks go with the events.
Nothing of a job that has not ended is touched. A job's events go from its first one on, so that what is left has no gaps.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, Text, bindparam, cast, delete, exists, func, select, update

from rsup.supervisor.tables import beats, events, incidents, jobs, metric_points, metric_series

DAY_US = 24 * 3600 * 1_000_000

ROW_BYTES = 120
"""What a row of `events` takes beside its texts, about."""


POINT_BYTES = 150
"""What a point of a curve takes, about."""


@dataclass(frozen=True)
class Limits:
    """How long and how much is kept of jobs that have ended; a batch is what one call may drop."""

    age_us: int = 30 * DAY_US
    size_bytes: int = 512 * 1024 * 1024
    batch_events: int = 2000
    batch_series: int = 4


def prune(connection: Connection, now_us: int, limits: Limits = Limits()) -> bool:
    """Drop one batch in the open transaction; return whether there may be more to drop. Takes a few milliseconds."""
    cutoff_us = now_us - limits.age_us
    job = connection.execute(_job_with_old_events, {"cutoff_us": cutoff_us}).scalar()
    if job is not None:
        _drop_events(connection, job, limits.batch_events, cutoff_us)
        return True
    if _drop_old_rest(connection, cutoff_us):
        return True
    job = connection.execute(_job_with_old_curves, {"cutoff_us": cutoff_us}).scalar()
    if job is not None:
        _drop_curves(connection, job, limits.batch_series)
        return True
    if _used_bytes(connection) > limits.size_bytes:
        sizes = connection.execute(_sizes).all()
        if sum(size for _, size in sizes) > limits.size_bytes:
            oldest = sizes[0][0]
            dropped = _drop_events(connection, oldest, limits.batch_events)
            if not dropped and not _drop_curves(connection, oldest, limits.batch_series):
                _drop_rest(connection, oldest)
            return True
    return _shrink_file(connection)


_ended = jobs.c.phase == "ended"
_its_events = events.c.job == jobs.c.id
_first_recorded_us = (
    select(events.c.recorded_us).where(_its_events).order_by(events.c.number).limit(1).correlate(jobs).scalar_subquery()
)
_job_with_old_events = (
    select(jobs.c.id)
    .where(_ended, jobs.c.created_us < bindparam("cutoff_us"), _first_recorded_us < bindparam("cutoff_us"))
    .limit(1)
)

_stack_bytes = func.length(cast(incidents.c.stacks, Text)) - 2
_recent = (
    select((func.length(events.c.text) + func.length(cast(events.c.data, Text)) + ROW_BYTES).label("size"))
    .where(_its_events)
    .order_by(events.c.number.desc())
    .limit(8)
    .correlate(jobs)
    .subquery()
)
_num_events = (
    select(func.coalesce(func.max(events.c.number), 0)).where(_its_events).correlate(jobs).scalar_subquery()
    - select(func.coalesce(func.min(events.c.number) - 1, 0)).where(_its_events).correlate(jobs).scalar_subquery()
)
_size = _num_events * select(func.coalesce(func.avg(_recent.c.size), 0)).scalar_subquery() + (
    select(func.coalesce(func.sum(_stack_bytes), 0)).where(incidents.c.job == jobs.c.id).correlate(jobs).scalar_subquery()
)
_num_points = (
    select(func.coalesce(func.sum(metric_series.c.num_points), 0))
    .where(metric_series.c.job == jobs.c.id)
    .correlate(jobs)
    .scalar_subquery()
)
_size = _size + _num_points * POINT_BYTES
_has_points = exists().where(metric_points.c.job == jobs.c.id).correlate(jobs)
_job_with_old_curves = select(jobs.c.id).where(_ended, jobs.c.ended_us < bindparam("cutoff_us"), _has_points).limit(1)
_sizes = select(jobs.c.id, _size).where(_ended, _size > 0).order_by(jobs.c.ended_us, jobs.c.id)
"""About how many bytes each ended job's events, stacks and curves take, oldest first; from a sample, so it costs little."""

_old_beats = delete(beats).where(
    beats.c.job.in_(select(jobs.c.id).where(_ended, jobs.c.ended_us < bindparam("cutoff_us")).scalar_subquery())
)
_old_stacks = (
    select(incidents.c.job, incidents.c.incident)
    .join(jobs, jobs.c.id == incidents.c.job)
    .where(_ended, incidents.c.at_us < bindparam("cutoff_us"), _stack_bytes > 0)
    .limit(20)
)


def _drop_events(connection: Connection, job: int, num: int, before_us: int | None = None) -> int:
    """Drop up to `num` of the job's first events, with `before_us` only those recorded before; return how many."""
    first = select(events.c.number, events.c.recorded_us).where(events.c.job == job).order_by(events.c.number).limit(num)
    last, dropped = None, 0
    for number, recorded_us in connection.execute(first):
        if before_us is not None and recorded_us >= before_us:
            break
        last, dropped = number, dropped + 1
    if last is not None:
        connection.execute(delete(events).where(events.c.job == job, events.c.number <= last))
    return dropped


def _drop_curves(connection: Connection, job: int, num: int) -> int:
    """Drop the points of up to `num` of the job's series; return how many series had some."""
    of = metric_series.c
    found = connection.execute(select(of.kind, of.name).where(of.job == job, of.num_points > 0).limit(num)).all()
    for kind, name in found:
        points = metric_points.c
        connection.execute(delete(metric_points).where(points.job == job, points.kind == kind, points.name == name))
        one = update(metric_series).where(of.job == job, of.kind == kind, of.name == name)
        connection.execute(one.values(num_points=0))
    return len(found)


def _drop_old_rest(connection: Connection, cutoff_us: int) -> bool:
    found = connection.execute(_old_stacks, {"cutoff_us": cutoff_us}).all()
    for job, incident in found:
        one = update(incidents).where(incidents.c.job == job, incidents.c.incident == incident)
        connection.execute(one.values(stacks=[]))
    return connection.execute(_old_beats, {"cutoff_us": cutoff_us}).rowcount > 0 or bool(found)


def _drop_rest(connection: Connection, job: int) -> None:
    connection.execute(update(incidents).where(incidents.c.job == job).values(stacks=[]))
    connection.execute(delete(beats).where(beats.c.job == job))


def _used_bytes(connection: Connection) -> int:
    """What the whole database takes at most: a quick look before the jobs are measured."""
    if connection.dialect.name != "sqlite":
        return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar() or 0)
    pages, free, page_bytes = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * page_bytes


def _shrink_file(connection: Connection) -> bool:
    """Give a part of many free pages back to the file system; PostgreSQL sees to that itself."""
    if connection.dialect.name != "sqlite" or int(connection.exec_driver_sql("PRAGMA freelist_count").scalar() or 0) < 2048:
        return False
    for _ in range(256):  # one page each: Python's driver takes only the first step of this statement
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
    return True
