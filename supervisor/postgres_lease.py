"""The lease of a store in PostgreSQL: an advisory lock of the writer's own session, and the holder's row in `meta`.

The session that holds the lock is the one that commits: when it breaks, the lock and the right to commit go together, and a
lost lease cannot be overlooked. So the connection must be the server's own session; a pooler in transaction mode gives none.
"""

import json
from dataclasses import asdict, replace

from sqlalchemy import Connection, Engine, inspect, select, text

from rsup.supervisor import tables
from rsup.supervisor.lease import LeaseHolder, LeaseRecord, held_error, record_of
from rsup.supervisor.record_rows import save_meta

LOCK_SPACE = 0x72737570
"""First half of the advisory lock's number ("rsup"); the second is made of the schema's name."""

_LOCK = f"{LOCK_SPACE}, hashtext(current_schema())"


class PostgresLease:
    """A lease that is held by the session of `connection`."""

    def __init__(self, database: str, holder: LeaseHolder) -> None:
        self._database = database
        self._record = record_of(holder, term=1)
        self._connection: Connection | None = None

    def take(self, engine: Engine) -> Connection:
        """Open the session that holds the lease; the caller commits through it. Raise `StoreHeld` or a database error."""
        connection = engine.connect()
        try:
            # without these a server keeps the session, and so the lease, of a host that lost power for two hours
            for name, value in (("idle", 10), ("interval", 5), ("count", 3)):
                connection.exec_driver_sql(f"SET tcp_keepalives_{name} = {value}")
            connection.commit()
            self._lock(connection)
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        self._connection = connection
        return connection

    def _lock(self, connection: Connection) -> None:
        locked = connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar()
        if not locked:
            record = read_holder(connection)
            if record is not None and record.instance == self._record.instance:
                connection.exec_driver_sql(  # a session of our own that the server has not yet found broken
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 "
                    f"AND classid = {LOCK_SPACE} AND objid::bigint = (hashtext(current_schema())::bigint & 4294967295)"
                    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
                connection.execute(text("SELECT pg_sleep(0.2)"))
                locked = connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar()
            if not locked:
                raise held_error(self._database, record)
        connection.commit()

    def check(self) -> None:
        """The session that commits holds the lock."""

    def announce(self, rpc: str, rest: str) -> None:
        """Say where the holder answers. Raise a database error."""
        self._record = replace(self._record, rpc=rpc, rest=rest)
        self.write_holder()

    def write_holder(self) -> None:
        """Write the holder's row, once the schema is there."""
        assert self._connection is not None
        with self._connection.begin():
            save_meta(self._connection, "holder", json.dumps(asdict(self._record)))

    def release(self) -> None:
        """End the session, and with it the lease."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def read_holder(connection: Connection) -> LeaseRecord | None:
    """The last holder's row, None where there is none."""
    if not inspect(connection).has_table(tables.meta.name):
        return None
    value = connection.execute(select(tables.meta.c.value).where(tables.meta.c.key == "holder")).scalar()
    return LeaseRecord(**json.loads(value)) if value else None
