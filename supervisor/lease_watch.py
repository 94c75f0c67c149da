"""Watches the lease of a PostgreSQL store for a supervisor that stands by, and ends the session of a holder that hears nothing.

The lock goes with its session. A holder that was killed has none any more; one that is stopped or cut off keeps it, and is
known by what the server has last been asked in that session (`pg_stat_activity`, by the server's own clock). Only a holder that
says it beats (`postgres_lease`, releases from 0.1 on) is judged so; one that the server itself is at work for never is.
Ending the session takes the right to commit away before another can have it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from rsup.supervisor.database import Target, describe, postgres_writer, split_target
from rsup.supervisor.database_errors import store_error
from rsup.supervisor.lease import LeaseRecord
from rsup.supervisor.postgres_lease import FRESH_S, HELD_LOCKS, SEEN, STALE_S, read_holder, read_meta

LOOK_EVERY_S = 0.25
RETRY_EVERY_S = 1.0
END_WITHIN_MS = 1000

_HOLDER = f"SELECT a.pid, {SEEN} FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid WHERE {HELD_LOCKS}"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sight:
    """What was seen last. `is_free`: nobody holds the lease. `problem`: why nothing can be seen, a sentence."""

    is_free: bool = False
    leader: LeaseRecord | None = None
    secrets: str = ""
    """What the leader wrote about its secrets (`shared_secrets`)."""
    problem: str = ""


class LeaseWatch:
    """A thread from `start` to `stop`. `on_free` is called on it whenever the lease is seen free."""

    def __init__(self, target: Target, on_free: Callable[[], None]) -> None:
        self.sight = Sight()
        self._database = describe(target)
        url = split_target(target)
        assert not isinstance(url, str)
        self._engine = postgres_writer(url).execution_options(isolation_level="AUTOCOMMIT")  # type: ignore[arg-type]
        self._on_free = on_free
        self._stop = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="rsup-standby", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """No more looks; does not wait for one that hangs."""
        self._stop.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._engine.connect() as connection:
                    self._look_on(connection)
            except SQLAlchemyError as error:
                problem = str(store_error(self._database, getattr(error, "orig", None) or error))
                if not self.sight.problem:
                    _log.warning("%s", problem)
                self.sight = Sight(leader=self.sight.leader, problem=problem)
                self._stop.wait(RETRY_EVERY_S)
            except Exception as error:  # without this thread nobody would ever take over
                _log.exception("the lease of %s cannot be watched; trying again", self._database)
                self.sight = Sight(leader=self.sight.leader, problem=f"{type(error).__name__}: {error}")
                self._stop.wait(RETRY_EVERY_S)

    def _look_on(self, connection: Connection) -> None:
        connected_s = time.monotonic()
        while not self._stop.is_set():
            self.sight = self._look(connection)
            # Just connected: the server may have failed over, and the leader, cut off from the old one, may not know yet
            if self.sight.is_free and time.monotonic() - connected_s >= FRESH_S:
                self._on_free()
            self._stop.wait(LOOK_EVERY_S)

    def _look(self, connection: Connection) -> Sight:
        row = connection.exec_driver_sql(_HOLDER).first()
        if row is None:
            return Sight(is_free=True)
        leader = read_holder(connection)
        beats = leader is not None and read_meta(connection, "holder_beats") == leader.instance
        at_work = row.state == "active" and row.wait_event_type != "Client"
        if beats and row.silent_s is None:
            self._say_once(
                "the server does not say what the leader's session does, so that a stopped leader cannot be found: have "
                "track_activities on, and one database role for both supervisors"
            )
        elif beats and not at_work and row.silent_s > STALE_S:
            assert leader is not None
            self._end(connection, row.pid, row.silent_s, leader)
        return Sight(leader=leader, secrets=read_meta(connection, "holder_secrets"))

    def _end(self, connection: Connection, pid: int, silent_s: float, leader: LeaseRecord) -> None:
        who = f"the leader (pid {leader.pid} on {leader.host})"
        try:
            ended = connection.exec_driver_sql(f"SELECT pg_terminate_backend({int(pid)}, {END_WITHIN_MS})").scalar()
        except SQLAlchemyError as error:
            why = str(error).splitlines()[0]
            self._say_once(f"{who} has asked the database for nothing, and its session cannot be ended: {why}")
            return
        if not ended:
            self._say_once(
                f"{who} has asked the database for nothing, and its session there (process {pid} of the server) does not end: "
                "nobody can lead until it does; is that process stopped, or the server's disk stuck?"
            )
            return
        self._said = ""
        _log.warning("%s has asked the database for nothing for %.1f s: its session was ended", who, silent_s)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _log.error("%s", text)
