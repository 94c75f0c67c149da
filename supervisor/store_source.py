"""Answers read from a store, where no supervisor runs.

Imports of the database are inside functions: a command that asks the supervisor, or only for `--help`, does without.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rsup.supervisor import places
from rsup.supervisor.history_questions import Question
from rsup.supervisor.job_name import JobName
from rsup.supervisor.principals import owner_name
from rsup.supervisor.query_source import Json, QueryError, name_of
from rsup.supervisor.wire import RsupError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from rsup.supervisor.database import Target
    from rsup.supervisor.job_selector import FoundJob


class StoreSource:
    """The store of a state directory. Where there is none yet, it has no jobs. Where it cannot be read, the newest that was
    used in its place is; `note` is told."""

    def __init__(self, state: Path, note: Callable[[str], None]) -> None:
        self._state = state
        self._note = note

    def is_there(self) -> bool:
        """Whether there is a store, or one that was used in its place."""
        with self._reading() as connection:
            return connection is not None

    def jobs(self, limit: int, state: str = "", owner: str = "") -> list[Json]:
        """The newest jobs."""
        from rsup.supervisor.views import list_jobs

        with self._reading() as connection:
            return [] if connection is None else list_jobs(connection, limit=limit, state=state, owner=owner)[0]

    def newest(self) -> JobName:
        """The newest job, one's own if there is any."""
        found = self.jobs(1, owner=owner_name()) or self.jobs(1)
        if not found:
            raise QueryError(f"no jobs yet in {self._state}: start one with `rsup launch`")
        return name_of(found[0])

    def status(self, job: JobName, stacks: bool) -> Json:
        """The job's status, with the last beats that were stored."""
        from rsup.supervisor.views import job_status

        with self._filled(job) as connection:
            found = self._find(connection, job)
            return job_status(connection, found, now_us=time.time_ns() // 1000, with_stacks=stacks)

    def events(self, job: JobName, after: int, limit: int) -> list[Json]:
        """Events after a number."""
        from rsup.supervisor.story_views import list_events

        with self._filled(job) as connection:
            found = self._find(connection, job)
            return list_events(connection, found, after=after, limit=limit)[0]

    def newest_events(self, job: JobName, count: int) -> list[Json]:
        """The last `count` events, in order."""
        from rsup.supervisor.story_views import list_events

        with self._filled(job) as connection:
            return list_events(connection, self._find(connection, job), last=count)[0]

    def stacks(self, job: JobName, rank: int | None) -> Json:
        """Stacks of the newest incident that has some."""
        from rsup.supervisor.story_views import job_stacks

        with self._filled(job) as connection:
            return job_stacks(connection, self._find(connection, job), rank=rank)

    def metrics(self, job: JobName, names: Sequence[str], kind: str, points: int) -> Json:
        """The job's curves, and the newest values."""
        from rsup.supervisor.metric_views import latest_of, series_of

        with self._filled(job) as connection:
            found = self._find(connection, job)
            series = series_of(connection, found.id, names or None, kind or None, points)
            return {"series": series, "latest": latest_of(connection, found.id)}

    def answer(self, question: Question) -> Json:
        """The answer to a question about devices or nodes."""
        with self._reading() as connection:
            if connection is None:
                raise QueryError(f"{self._state} has no history yet: nothing was launched with it{self._of_slurm_jobs()}")
            return question.read(connection)

    def cases(self, job: JobName | None, limit: int, verdict: str) -> list[Json]:
        """The newest cases, of that job if given."""
        from rsup.supervisor.case_views import list_cases

        if job is not None:
            with self._filled(job) as connection:
                return list_cases(connection, job=self._find(connection, job), limit=limit, verdict=verdict)[0]
        with self._reading() as reader:
            return [] if reader is None else list_cases(reader, limit=limit, verdict=verdict)[0]

    def case(self, case_id: str) -> list[Json]:
        """Cases of that id."""
        from rsup.supervisor.case_views import AmbiguousCase, UnknownCase, find_cases

        with self._reading() as connection:
            if connection is None:
                raise QueryError(f"no case {case_id[:200]!r}: {self._state} has no jobs yet")
            try:
                return find_cases(connection, case_id)
            except (UnknownCase, AmbiguousCase) as error:
                raise QueryError(str(error)) from None

    def _of_slurm_jobs(self) -> str:
        there = (self._state / "slurm").is_dir()
        return f"; what SLURM jobs found is in {self._state}/slurm/CLUSTER-JOB, see `rsup db merge`" if there else ""

    def _find(self, connection: "Connection", job: JobName) -> "FoundJob":
        from rsup.supervisor.job_selector import find_job

        return find_job(connection, job.name, owner=job.owner, cluster=job.cluster, prefer_owner=owner_name())

    @contextlib.contextmanager
    def _filled(self, job: JobName) -> "Iterator[Connection]":
        with self._reading() as connection:
            if connection is None:
                raise QueryError(f"no job {job.name[:200]!r}: {self._state} has no jobs yet; `rsup jobs` lists them")
            yield connection

    @contextlib.contextmanager
    def _reading(self) -> "Iterator[Connection | None]":
        """A connection to the store, None where there is none yet."""
        from rsup.supervisor.database import describe, find_database

        try:
            usual = find_database(self._state)
        except PermissionError as error:
            text = f"cannot look into {self._state}: {error.strerror}; ask a supervisor, or set RSUP_STATE_DIR"
            raise QueryError(text) from None
        with contextlib.ExitStack() as stack:
            trouble: RsupError | None = None
            try:
                connection = stack.enter_context(_connected(usual))
            except RsupError as error:
                connection, trouble = None, error
            if connection is None and (fallback := next(iter(places.fallback_stores(self._state)), None)):
                self._note(f"{trouble or f'there is nothing in {describe(usual)}'}; reading {fallback} in its place")
                connection, trouble = stack.enter_context(_connected(fallback)), None
            if trouble is not None:
                raise trouble
            yield connection


@contextlib.contextmanager
def _connected(target: "Target") -> "Iterator[Connection | None]":
    """A connection to that store, None where it has no tables yet. Raise `RsupError` where it cannot be read."""
    from rsup.supervisor.database import describe, reader_engine, split_target
    from rsup.supervisor.schema import check_revision, read_revision

    place = split_target(target)
    try:
        is_missing = isinstance(place, Path) and not place.exists()
    except OSError as error:
        raise QueryError(f"the store {describe(target)} cannot be read: {error.strerror}") from None
    if is_missing:
        yield None
        return
    engine = reader_engine(target)
    try:
        with _told(target), engine.connect() as connection:
            revision = read_revision(connection)
            if revision is not None:
                check_revision(revision, describe(target))
            yield connection if revision is not None else None
    finally:
        engine.dispose()


@contextlib.contextmanager
def _told(target: "Target") -> Iterator[None]:
    """Make one line of the database's errors."""
    from sqlalchemy.exc import SQLAlchemyError

    from rsup.supervisor.database import describe

    try:
        yield
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise QueryError(f"the store {describe(target)} cannot be read ({cause}); run `rsup db check`") from None
