"""The lease of a store in PostgreSQL: an advisory lock of the writer's own session, and the holder's row in `meta`.

The session that holds the lock is the one that commits: when it breaks, the lock and the right to commit go together, and a
lost lease cannot be overlooked. So the connection must be the server's own session; a pooler in transaction mode gives none.

A holder may live and hear nothing: stopped, or cut off from the server, which keeps its session. So the holder asks the
server for something every `BEAT_S`, in that session, from a thread. `FRESH_S` after the last question that was answered it
says nothing more to its agents. Others end a session that has asked for nothing for `STALE_S` by the server's clock
(`lease_watch`). The question reached the server after it was asked, so the holder is silent for a second before another
can begin; clocks of hosts are never compared. A session that the server ends is noticed at once, by its socket.

A holder whose session ended may find the lease free again although another has led and gone meanwhile: what it knows of the
jobs is old then. The holder's row tells, and it has lost the lease as if the other were still there.

A commit that hangs keeps its caller from saying anything. After `CUT_S` its connection is cut, so that it ends, unless the
server says that it is at work for it.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, replace
from select import POLLIN, poll
from typing import Any

from sqlalchemy import Connection, Engine, inspect, select, text
from sqlalchemy.exc import DBAPIError

from rsup.supervisor import tables
from rsup.supervisor.lease import LeaseHolder, LeaseRecord, decode_record, held_error, record_of
from rsup.supervisor.record_rows import save_meta
from rsup.supervisor.store import StoreError, StoreHeld

LOCK_SPACE = 0x72737570
"""First half of the advisory lock's number ("rsup"); the second is made of the schema's name."""
BEAT_S = 0.8
FRESH_S = 2.5
STALE_S = 3.5
UNANSWERED_S = 1.0
"""A question that is out for so long keeps others from using the session; they are told so rather than made to wait."""
CUT_S = 4.0
"""Longer than `STALE_S`: by then another has ended a session that the server is not at work for."""
_DOUBT_WAIT_S = 0.3

_LOCK = f"{LOCK_SPACE}, hashtext(current_schema())"
HELD_LOCKS = (
    f"locktype = 'advisory' AND objsubid = 2 AND granted AND classid = {LOCK_SPACE}"
    " AND objid::bigint = (hashtext(current_schema())::bigint & 4294967295)"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""Condition on `pg_locks`: the row of the lock, if a session holds it."""

SEEN = (
    "a.state, a.wait_event_type,"
    " extract(epoch FROM clock_timestamp() - greatest(a.state_change, a.query_start))::float8 AS silent_s"
)
"""Columns of `pg_stat_activity a`: what a session does, and for how long (seconds) it has asked for nothing."""

_log = logging.getLogger(__name__)


class PostgresLease:
    """A lease that is held by the session of a connection. As a context it is the right to use that session."""

    def __init__(self, database: str, holder: LeaseHolder) -> None:
        self._database = database
        self._record = record_of(holder, term=1)
        self._connection: Connection | None = None
        self._session: Any = None
        """The driver's connection: errors in the thread must not make SQLAlchemy connect anew, without the lock."""
        self._engine: Engine | None = None
        self._server_pid = 0
        self._has_led = False
        """Whether the holder's row has been ours, so that it stays so unless another leads."""
        self._said_hang = False
        self._has_agents = False
        """Whether somebody waits for our word; a command may take its time for a transaction."""
        self._mutex = threading.RLock()
        self._used_s = 0.0
        self._asked_s: float | None = None
        self._confirmed_s = 0.0
        self._stop = threading.Event()
        self._wake_fd = -1
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, engine: Engine) -> Connection:
        """Open the session that holds the lease; the caller commits through it. Raise `StoreHeld` or a database error."""
        began_s = _clock_s()
        connection = engine.connect()
        try:
            _prepare(connection)
            self._lock(connection)
            session = connection.connection.driver_connection
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        with self._mutex:
            self._connection, self._session, self._confirmed_s = connection, session, began_s
            self._engine, self._server_pid = engine, int(session.info.backend_pid) if session is not None else 0
        if self._thread is None:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._beat_on, name="rsup-lease", daemon=True)
            self._thread.start()
        return connection

    def _lock(self, connection: Connection) -> None:
        locked = connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar()
        if not locked:
            record = read_holder(connection)
            if record is not None and record.instance == self._record.instance:
                connection.exec_driver_sql(  # a session of our own that the server has not yet found broken
                    f"SELECT pg_terminate_backend(pid) FROM pg_locks WHERE {HELD_LOCKS}"
                )
                connection.execute(text("SELECT pg_sleep(0.2)"))
                locked = connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar()
                if not locked:
                    raise StoreError(
                        f"the database {self._database} does not end an earlier session of this supervisor, which holds the "
                        "lease: is that process of the server stopped, or its disk stuck?"
                    )
            if not locked:
                raise held_error(self._database, record)
        connection.commit()
        if self._has_led:
            self._check_row(connection)

    def _check_row(self, connection: Connection) -> None:
        """Nobody else has led since we did: asked under the lock, so that nobody begins meanwhile. Raise `StoreHeld`."""
        record = read_holder(connection)
        connection.commit()
        if record is not None and record.instance == self._record.instance:
            return
        connection.exec_driver_sql("SELECT pg_advisory_unlock_all()")
        connection.commit()
        who = f"the supervisor with pid {record.pid} on {record.host}" if record is not None else "somebody it does not name"
        raise StoreHeld(
            f"the store {self._database} was held by {who} while this supervisor had lost its connection: what this one knows "
            "of the jobs is old",
            address=record.rpc if record is not None else "",
            rest=record.rest if record is not None else "",
        )

    def __enter__(self) -> "PostgresLease":
        self._mutex.acquire()
        self._used_s = _clock_s()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._confirmed_s = max(self._confirmed_s, self._used_s)
        self._mutex.release()

    def check(self) -> None:
        """The session that commits holds the lock. Raise `StoreError` where using it would mean waiting for the server."""
        asked_s = self._asked_s
        if asked_s is not None and _clock_s() - asked_s > UNANSWERED_S:
            raise StoreError(self._unanswered())

    def doubt(self) -> str:
        """Why it cannot be told now that the lease is ours; empty: nobody else can have it yet. Waits a moment at most."""
        if self._is_fresh():
            return ""
        if self.is_broken:
            return f"the connection to the database {self._database} broke: another supervisor may have taken over"
        asked_s = self._asked_s
        if self._wake_fd < 0:
            return self._unanswered()
        if asked_s is None or _clock_s() - asked_s < _DOUBT_WAIT_S:
            self._answered.clear()
            os.eventfd_write(self._wake_fd, 1)
            self._answered.wait(_DOUBT_WAIT_S)
        return "" if self._is_fresh() else self._unanswered()

    @property
    def is_broken(self) -> bool:
        """Whether the session is known to have ended."""
        return self._session is None

    def announce(self, rpc: str, rest: str) -> None:
        """Say where the holder answers. Raise a database error."""
        self._record = replace(self._record, rpc=rpc, rest=rest)
        self._has_agents = True
        self.write_holder()

    def write_holder(self) -> None:
        """Write the holder's row, once the schema is there, and that this holder beats."""
        assert self._connection is not None
        with self, self._connection.begin():
            save_meta(self._connection, "holder", json.dumps(asdict(self._record)))
            save_meta(self._connection, "holder_beats", self._record.instance)
        self._has_led = True

    def give_up(self) -> None:
        """Unlock, while the server answers, and leave the session to whoever closes it: the server ends a session some time
        after it was closed, and until then the next one would find the lease held."""
        self._stop.set()
        if self._thread is not None:
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join(timeout=1)
        self.leave_session()

    def leave_session(self) -> None:
        """Unlock, while the server answers; whoever has the connection closes it."""
        session, self._session = self._session, None
        if session is None or session.closed or self._asked_s is not None:
            return
        with contextlib.suppress(Exception):  # of the driver; then the session's end unlocks
            session.rollback()
            session.execute("SELECT pg_advisory_unlock_all()")
            session.commit()

    def release(self) -> None:
        """End the session, and with it the lease."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # ------------------------------------------------------------------------------------------------------- the beat

    def _beat_on(self) -> None:
        asked_s = _clock_s()
        while not self._stop.is_set():
            session = self._session
            mine = [self._wake_fd] if session is None or session.closed else [self._wake_fd, session.fileno()]
            ready = _readable(mine, max(0.0, asked_s + BEAT_S - _clock_s()))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._stop.is_set():
                return
            only_readable = bool(ready) and self._wake_fd not in ready  # an answer for whoever uses it, or the session's end
            if not only_readable:
                asked_s = _clock_s()
            self._beat(only_readable)
            self._answered.set()

    def _beat(self, only_if_readable: bool) -> None:
        if not self._mutex.acquire(timeout=BEAT_S):
            self._used_for_long()
            return
        try:
            self._said_hang = False
            session = self._session
            if session is None:
                return
            if session.closed:
                self._session = None
                return
            if only_if_readable and not _readable([session.fileno()], 0.0):
                return
            began_s = self._asked_s = _clock_s()
            try:
                session.execute("SELECT 1")
                session.rollback()
                self._confirmed_s = max(self._confirmed_s, began_s)
            except Exception as error:  # of the driver, which we import nowhere; whoever commits next finds it broken too
                _log.warning("the session at %s that holds the lease is broken: %s", self._database, _one_line(error))
                self._session = None
            finally:
                self._asked_s = None
        finally:
            self._mutex.release()

    def _used_for_long(self) -> None:
        """The loop sits in a commit, and can neither log nor answer."""
        session = self._session
        if session is None or self._is_fresh() or not self._has_agents:
            return
        if not self._said_hang:
            self._said_hang = True
            _log.error("%s", self._unanswered())
        if _clock_s() - self._confirmed_s < CUT_S or self._is_worked_for():
            return
        with contextlib.suppress(Exception):  # of the driver, where the session has ended by now
            wire = socket.socket(fileno=os.dup(session.fileno()))
            wire.shutdown(socket.SHUT_RDWR)
            wire.close()

    def _is_worked_for(self) -> bool:
        """Whether the server says that it hears our session or is at work for it: it may be slow, and has to be waited for."""
        assert self._engine is not None
        with contextlib.suppress(Exception), self._engine.connect() as connection:
            found = connection.exec_driver_sql(
                f"SELECT {SEEN} FROM pg_stat_activity a WHERE a.pid = {self._server_pid}"
            ).first()
            at_work = found is not None and found.state == "active" and found.wait_event_type != "Client"
            return at_work or (found is not None and (found.silent_s is None or found.silent_s < STALE_S))
        return False

    def _is_fresh(self) -> bool:
        return self._session is not None and _clock_s() - self._confirmed_s < FRESH_S

    def _unanswered(self) -> str:
        age_s = _clock_s() - self._confirmed_s
        return f"the database {self._database} has not answered for {age_s:.1f} s: another supervisor may have taken over"


def _prepare(connection: Connection) -> None:
    """Settings of the session. Without keepalives a server keeps the session, and so the lease, of a host that lost power for
    two hours; and what is committed must be on the server's disk, whatever its default."""
    for name, value in (("keepalives_idle", "10"), ("keepalives_interval", "5"), ("keepalives_count", "3")):
        connection.exec_driver_sql(f"SET tcp_{name} = {value}")
    connection.exec_driver_sql("SET tcp_user_timeout = 10000")
    if connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "off":
        connection.exec_driver_sql("SET synchronous_commit = on")
    connection.commit()


def _readable(descriptors: list[int], within_s: float) -> list[int]:
    """Which of them can be read, or have ended. Not select(2): a supervisor has more than 1024 open."""
    poller = poll()
    for descriptor in descriptors:
        poller.register(descriptor, POLLIN)
    return [descriptor for descriptor, _ in poller.poll(within_s * 1000)]


def _clock_s() -> float:
    """Goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_holder(connection: Connection) -> LeaseRecord | None:
    """The last holder's row, None where there is none that can be read: the lock says who leads, not the row. Fields of a newer
    release are ignored."""
    try:
        return decode_record(read_meta(connection, "holder").encode())
    except (ValueError, TypeError, AttributeError):
        return None


def read_meta(connection: Connection, key: str) -> str:
    """A value of `meta`, empty where there is none, or no schema yet."""
    if not inspect(connection).has_table(tables.meta.name):
        return ""
    return connection.execute(select(tables.meta.c.value).where(tables.meta.c.key == key)).scalar() or ""


def is_held(connection: Connection) -> bool:
    """Whether a session holds the lease now."""
    try:
        return bool(connection.exec_driver_sql(f"SELECT count(*) FROM pg_locks WHERE {HELD_LOCKS}").scalar())
    except DBAPIError:
        return False
