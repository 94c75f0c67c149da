"""The supervisor's durable store: SQLite by default, PostgreSQL for a cluster.

`SqlStore.open` takes the lease, makes or (if allowed) migrates the schema, and from then on each `commit` is one transaction
that is on disk when it returns. Everything runs in the caller's thread but for the two helpers of a state directory on a
network file system: one renews the lease (`shared_lease`), one the copy (`network_copy`).
"""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, select
from sqlalchemy.exc import DBAPIError

from rsup.supervisor import retention, schema, tables
from rsup.supervisor.database import Target, describe, postgres_writer, reconnect_quickly, split_target, sqlite_writer
from rsup.supervisor.database_errors import READ_ONLY_STATE, translated
from rsup.supervisor.hardware import hardware_rows
from rsup.supervisor.lease import FileLease, Lease, LeaseHolder, Timing
from rsup.supervisor.network_copy import CopyThread
from rsup.supervisor.postgres_lease import PostgresLease
from rsup.supervisor.record_rows import RecordWriter, save_meta
from rsup.supervisor.records import EvidenceSaved, JobKey, Record, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.shared_lease import SharedLease
from rsup.supervisor.sqlite_file import Migrated, check_place, choose_live, mark_term, prepare
from rsup.supervisor.state_disk import is_network_file_system, live_database, make_live_dir
from rsup.supervisor.store import StoreError

_Result = TypeVar("_Result")

PROBE_BYTES = 65536

_jobs = tables.jobs.c
_key_and_state = select(_jobs.cluster, _jobs.owner, _jobs.job_id, _jobs.run, _jobs.state)
_live_jobs = _key_and_state.where(_jobs.phase != "ended").order_by(_jobs.created_us, _jobs.id)


class SqlStore:
    """A `store.Store` in a database, under a lease. Not for several threads; a fork must not use it."""

    def __init__(
        self,
        database: str,
        lease: Lease,
        connect: Callable[[], Connection],
        *,
        copy: CopyThread | None = None,
        migrated: Migrated | None = None,
        guard: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        """`guard` is held while the connection is used: its lease may use it too."""
        self.database = database
        """What a person calls it (no password)."""
        self.lease = lease
        self.migrated = migrated
        """What was done to an older schema."""
        self._connect = connect
        self._connection: Connection | None = connect()
        self._writer = RecordWriter(self._connection.dialect.name)
        self._copy = copy
        self._guard = guard or contextlib.nullcontext()
        self._closed = False

    @classmethod
    def open(
        cls,
        target: Target,
        *,
        holder: LeaseHolder,
        alone_may_migrate: bool,
        timing: Timing = Timing(),  # noqa: B008
        to_leave: bool = False,
    ) -> "SqlStore":
        """Take the lease and open the store, a fresh one where there is none.

        With `alone_may_migrate` an older schema of a SQLite file is migrated after a backup; otherwise `StoreTooOld`. Raise
        `StoreError`. With `to_leave` a server's database may have any encoding: it is to be copied elsewhere. Blocks up to
        `timing.stale_s` where the holder of another host must be watched.
        """
        place = split_target(target)
        with translated(describe(target)):
            if not isinstance(place, Path):
                return _open_postgres(place, holder, to_leave=to_leave)
            check_place(place)
            if is_network_file_system(place.parent):
                return _open_shared(place, holder, alone_may_migrate, timing)
            return _open_local(place, holder, alone_may_migrate)

    def live_jobs(self) -> list[tuple[JobKey, bytes]]:
        """See `store.Store`."""
        return self._run(lambda connection: [(JobKey(*row[:4]), bytes(row[4])) for row in connection.execute(_live_jobs)])

    def last_run(self, cluster: str, owner: str, job_id: str) -> tuple[JobKey, bytes] | None:
        """See `store.Store`."""
        of_job = _key_and_state.where(_jobs.cluster == cluster, _jobs.owner == owner, _jobs.job_id == job_id)
        row = self._run(lambda connection: connection.execute(of_job.order_by(_jobs.run.desc()).limit(1)).first())
        return None if row is None else (JobKey(*row[:4]), bytes(row[4]))

    def open_subjects(self) -> list[SubjectSaved]:
        """See `store.Store`."""
        return self._run(hardware_rows.open_subjects)

    def subjects_named(self, kind: str, names: Sequence[str], serials: Sequence[str]) -> list[SubjectSaved]:
        """See `store.Store`."""
        return self._run(lambda connection: hardware_rows.subjects_named(connection, kind, names, serials))

    def evidence_about(self, kind: str, subject: str) -> list[EvidenceSaved]:
        """See `store.Store`."""
        return self._run(lambda connection: hardware_rows.evidence_about(connection, kind, subject))

    def last_transition(self, kind: str, subject: str) -> TransitionSaved | None:
        """See `store.Store`."""
        return self._run(lambda connection: hardware_rows.last_transition(connection, kind, subject))

    def open_seats(self) -> list[SeatSaved]:
        """See `store.Store`."""
        return self._run(hardware_rows.open_seats)

    def last_node(self, uuid: str) -> str:
        """See `store.Store`."""
        return self._run(lambda connection: hardware_rows.node_of(connection, uuid))

    def commit(self, records: Sequence[Record]) -> None:
        """See `store.Store`. Costs about as much as the disk's sync."""
        if records:
            self._writer.remember(self.change(lambda connection: self._writer.write(connection, records)))

    def probe(self) -> None:
        """See `store.Store`. Several new pages, since a full disk may well have room for one, and for what is written over.
        What a server could compress would need none."""
        for text in (secrets.token_hex(PROBE_BYTES // 2), ""):
            self.change(lambda connection, text=text: save_meta(connection, "probe", text))  # type: ignore[misc]

    def prune(self, now_us: int, limits: retention.Limits = retention.Limits()) -> bool:  # noqa: B008
        """Drop one small batch of what is older or more than `limits` allow; return whether there may be more."""
        return self.change(lambda connection: retention.prune(connection, now_us, limits))

    def announce(self, rpc: str, rest: str) -> None:
        """Tell those who find the lease held where its holder answers. Raise `StoreError`."""
        with translated(self.database):
            self.lease.announce(rpc, rest)

    def identity(self) -> str:
        """The store's random id, which goes with it into a copy."""
        of_store = select(tables.meta.c.value).where(tables.meta.c.key == "store")
        return str(self._run(lambda connection: connection.execute(of_store).scalar()) or "")

    def lease_doubt(self) -> str:
        """Why another supervisor may have the lease by now, empty if none can: before anything is said that only its holder
        may say. Waits a moment at most."""
        return self.lease.doubt() if isinstance(self.lease, PostgresLease) else ""

    def close(self) -> None:
        """Leave the last copy where there is one, give the lease back and close. Again: nothing."""
        if self._closed:
            return
        self._closed = True
        if self._copy is not None:
            self._copy.close()
        if isinstance(self.lease, PostgresLease):
            is_broken = self.lease.is_broken
            self.lease.give_up()
            if is_broken and self._connection is not None:
                self._connection.invalidate()
        if self._connection is not None:
            with contextlib.suppress(DBAPIError):
                self._connection.close()
                self._connection.engine.dispose()
            self._connection = None
        self.lease.release()

    def change(self, work: Callable[[Connection], _Result]) -> _Result:
        """Do `work` in one transaction under the lease; it may be done twice. Raise `StoreError`."""
        self.lease.check()
        result = self._run(work)
        if self._copy is not None:
            self._copy.changed()
        return result

    def _run(self, work: Callable[[Connection], _Result]) -> _Result:
        """Do `work` in one transaction, and once more if the connection broke: all of it can be repeated.

        A new connection is made by `connect`, which takes the lease again where the connection holds it.
        """
        with translated(self.database):
            try:
                return self._run_once(work)
            except DBAPIError as error:
                if not error.connection_invalidated or self._connection is None:
                    raise
                self._connection.close()
                self._connection = None
            return self._run_once(work)

    def _leave_session(self) -> None:
        """A session that may only read stays so, whatever becomes of the database: the next attempt is to have another."""
        assert self._connection is not None
        if isinstance(self.lease, PostgresLease):
            self.lease.leave_session()
        self._connection.invalidate()
        self._connection.close()
        self._connection = None

    def _run_once(self, work: Callable[[Connection], _Result]) -> _Result:
        assert not self._closed, "the store is closed"
        if self._connection is None:
            self._connection = self._connect()
        try:
            with self._guard, self._connection.begin():
                return work(self._connection)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == READ_ONLY_STATE:
                self._leave_session()
            raise


def _open_local(path: Path, holder: LeaseHolder, may_migrate: bool) -> SqlStore:
    lease = FileLease.take(path, holder)
    try:
        migrated = prepare(path, path, may_migrate)
        return SqlStore(str(path), lease, sqlite_writer(path).connect, migrated=migrated)
    except BaseException:
        lease.release()
        raise


def _open_shared(path: Path, holder: LeaseHolder, may_migrate: bool, timing: Timing) -> SqlStore:
    live = live_database(path)
    make_live_dir(live)
    lease = SharedLease.take(path, live, holder, timing)
    try:
        choose_live(path, live, lease.previous, holder.host)
        migrated = prepare(live, path, may_migrate)
        mark_term(live, lease.record.term)
        copy = CopyThread(live, path, timing.copy_s, lease.check)
        return SqlStore(str(path), lease, sqlite_writer(live).connect, copy=copy, migrated=migrated)
    except BaseException:
        lease.release()
        raise


def _open_postgres(url: URL, holder: LeaseHolder, *, may_migrate: bool = False, to_leave: bool = False) -> SqlStore:
    engine = postgres_writer(url)
    name = describe(url)
    lease = PostgresLease(name, holder)
    store = SqlStore(name, lease, lambda: lease.take(engine), guard=lease)
    reconnect_quickly(engine)
    try:
        if not to_leave and (problem := store.change(lambda connection: schema.encoding_problem(connection, name))):
            raise StoreError(problem)
        revision = store.change(schema.read_revision)
        if may_migrate and revision is not None and revision in tables.REVISIONS[:-1]:
            schema.migrate(engine)
            store.migrated = Migrated(revision, None)
        store.change(lambda connection: schema.prepare(connection, name))
        lease.write_holder()
    except BaseException:
        store.close()
        raise
    return store


def upgrade_store(target: Target, holder: LeaseHolder) -> Migrated | None:
    """Migrate a store under its lease; return what was done, None if there was nothing to do. Raise `StoreError`.

    A SQLite file is backed up before. A server's store is migrated in one transaction; its backup is the administrator's.
    """
    place = split_target(target)
    with translated(describe(target)):
        if isinstance(place, Path):
            if not place.exists():
                raise StoreError(f"there is no store at {place}; check --state-dir")
            store = SqlStore.open(place, holder=holder, alone_may_migrate=True)
        else:
            store = _open_postgres(place, holder, may_migrate=True, to_leave=True)
    store.close()
    return store.migrated
