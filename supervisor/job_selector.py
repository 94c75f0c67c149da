"""Which job of the store a person means, see `job_name`.

Without a run the newest is meant. An id that is written in full wins over a reading as `ID.RUN`.
"""

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from rsup.supervisor.job_name import JobName, readings
from rsup.supervisor.records import JobKey
from rsup.supervisor.tables import jobs
from rsup.supervisor.wire import RsupError


class UnknownJob(RsupError):
    """The store has no such job."""


class AmbiguousJob(RsupError):
    """Several owners or clusters have a job of that id."""


@dataclass(frozen=True)
class FoundJob:
    """A job of this store. `id` is `jobs.id`, by which the other tables refer to it."""

    id: int
    key: JobKey
    phase: str


def find_job(connection: Connection, selector: str, *, owner: str = "", cluster: str = "", prefer_owner: str = "") -> FoundJob:
    """The job that `selector` names, among those of `owner` and `cluster` if given; of several owners `prefer_owner`'s.
    Raise `UnknownJob` or `AmbiguousJob`."""
    found = next(filter(None, (_read_as(connection, name) for name in readings(JobName(cluster, owner, selector)))), [])
    if not found:
        raise UnknownJob(f"no job {selector[:200]!r} in this store; `rsup jobs` lists them")
    if len(found) > 1:
        found = [job for job in found if job.key.owner == prefer_owner] or found
    if len(found) > 1:
        names = ", ".join(f"{job.key.cluster}/{job.key.owner}/{selector[:200]}" for job in found[:5])
        raise AmbiguousJob(f"several jobs are called {selector[:200]!r}: {names}; write OWNER/ID or CLUSTER/OWNER/ID")
    return found[0]


def _read_as(connection: Connection, asked: JobName) -> list[FoundJob]:
    """Jobs of that name: as an id, else as an id with a run."""
    found = _newest(connection, asked.name, None, asked.owner, asked.cluster)
    numbered = re.fullmatch(r"(.+)\.([0-9]{1,9})", asked.name, re.DOTALL)
    if not found and numbered:
        found = _newest(connection, numbered[1], int(numbered[2]), asked.owner, asked.cluster)
    return found


def _newest(connection: Connection, job_id: str, run: int | None, owner: str, cluster: str) -> list[FoundJob]:
    query = select(jobs.c.id, jobs.c.cluster, jobs.c.owner, jobs.c.job_id, jobs.c.run, jobs.c.phase)
    query = query.where(jobs.c.job_id == job_id).order_by(jobs.c.run.desc())
    for column, value in ((jobs.c.run, run), (jobs.c.owner, owner or None), (jobs.c.cluster, cluster or None)):
        if value is not None:
            query = query.where(column == value)
    found: dict[tuple[str, str], FoundJob] = {}
    for row in connection.execute(query):
        found.setdefault((row.cluster, row.owner), _found(row))
    return sorted(found.values(), key=lambda job: job.key)


def _found(row: Any) -> FoundJob:
    return FoundJob(row.id, JobKey(row.cluster, row.owner, row.job_id, row.run), row.phase)
