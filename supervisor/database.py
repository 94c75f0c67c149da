"""Opens databases: the writer's connection, engines that only read, and where the store of a state directory is.

A *target* is a path of a SQLite file or a SQLAlchemy URL (`sqlite:///...`, `postgresql://...`).
"""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool, StaticPool

from rsup.supervisor.lease import read_record
from rsup.supervisor.places import boot_id, this_host
from rsup.supervisor.record_rows import to_json
from rsup.supervisor.state_disk import is_network_file_system, live_database
from rsup.supervisor.store import StoreError
from rsup.supervisor.wire import UsageError

Target = str | Path | URL

DATABASE_NAME = "rsup.db"
BUSY_TIMEOUT_S = 5.0


def split_target(target: Target) -> Path | URL:
    """A path for SQLite, a URL (with the psycopg driver unless it names one) for a server. Raise `UsageError` for others."""
    if not isinstance(target, URL) and "://" not in os.fspath(target):
        return Path(os.path.abspath(target))
    try:
        url = target if isinstance(target, URL) else make_url(os.fspath(target))
    except ArgumentError:
        raise UsageError("--database-url is no URL; write postgresql://user@host/database or sqlite:////path") from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        if not url.database or url.database == ":memory:":
            raise UsageError(f"--database-url {url} names no file; write sqlite:////path/to/{DATABASE_NAME}")
        return Path(os.path.abspath(url.database))
    if backend not in ("postgresql", "postgres"):
        raise UsageError(f"--database-url: {backend} is no database of ours; use postgresql:// or a SQLite path")
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def describe(target: Target) -> str:
    """What a person calls that database: the path, or the URL without its password."""
    place = split_target(target)
    return str(place) if isinstance(place, Path) else place.render_as_string(hide_password=True)


def find_database(state: Path, database_url: str | None = None) -> Target:
    """The database a command reads: `database_url`, else `RSUP_DATABASE_URL`, else the store of the state directory."""
    return database_url or os.environ.get("RSUP_DATABASE_URL") or newest_file(state / DATABASE_NAME)


def newest_file(path: Path) -> Path:
    """The file to read a SQLite store from: on a network file system this node's live one if its holder runs here."""
    if path.parent.is_dir() and is_network_file_system(path.parent):
        record, live = read_record(path), live_database(path)
        if record is not None and record.is_of(this_host(), boot_id()) and live.is_file():
            return live
    return path


# --------------------------------------------------------------------------------------------------------------- SQLite


def sqlite_writer(path: Path, *, foreign_keys: bool = True) -> Engine:
    """An engine of one connection to that file, in WAL mode; each transaction is durable when it has been committed."""

    def connect() -> sqlite3.Connection:
        connection = _connect(path, "rw")
        for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(f"PRAGMA foreign_keys = {int(foreign_keys)}")
        connection.execute("PRAGMA journal_size_limit = 16777216")
        return connection

    return _sqlite_engine(connect, "BEGIN IMMEDIATE", poolclass=StaticPool)


def sqlite_reader(path: Path) -> Engine:
    """An engine that only reads that file, also while somebody writes, and where nothing at all may be written."""
    if not path.is_file():
        raise StoreError(f"there is no store at {path} yet: nothing was launched with this --state-dir")
    if is_network_file_system(path.parent):  # a copy, which never changes but is replaced by its successor
        return _sqlite_engine(lambda: _connect_to_unchanging(path), "BEGIN", poolclass=NullPool)
    return _sqlite_engine(lambda: _connect_reading(path), "BEGIN")


def _sqlite_engine(connect: Callable[[], sqlite3.Connection], begin: str, **pool: Any) -> Engine:
    engine = create_engine("sqlite+pysqlite:///file", creator=connect, json_serializer=to_json, **pool)

    def begin_it(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "begin", begin_it)
    return engine


def _connect(path: Path, mode: str, extra: str = "") -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path))}?mode={mode}{extra}"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False, cached_statements=256
    )
    return connection


def _connect_reading(path: Path) -> sqlite3.Connection:
    """Read-only; where WAL's companion files can neither be found nor made, as a file that nobody changes."""
    connection = _connect(path, "ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError as error:
        connection.close()
        if not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
            raise
        connection = _connect_to_unchanging(path)
    return connection


def _connect_to_unchanging(path: Path) -> sqlite3.Connection:
    """A file that nobody writes now, without locks or companion files; with what a dead writer left in its log."""
    log = path.with_name(path.name + "-wal")
    if not log.exists() or not log.stat().st_size:
        return _connect(path, "ro", "&immutable=1")
    with tempfile.TemporaryDirectory(prefix="rsup-read-") as folder:  # unlinked while open: it lives as long as we read
        copy = Path(folder, path.name)
        shutil.copyfile(path, copy)
        shutil.copyfile(log, copy.with_name(log.name))
        connection = _connect(copy, "rw")
        connection.execute("SELECT count(*) FROM sqlite_master")
        connection.execute("PRAGMA query_only = ON")
    return connection


# ----------------------------------------------------------------------------------------------------------- PostgreSQL


def postgres_writer(url: URL) -> Engine:
    """An engine of one connection; one that breaks is noticed within seconds."""
    return _postgres_engine(url, poolclass=NullPool)


def _postgres_engine(url: URL, **pool: Any) -> Engine:
    limits = {"connect_timeout": 10, "keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3}
    limits = {**limits, "tcp_user_timeout": 20000}
    given = {name: value for name, value in limits.items() if name not in url.query}
    try:
        return create_engine(url, connect_args=given, json_serializer=to_json, **pool)
    except (ImportError, NoSuchModuleError):
        raise StoreError("PostgreSQL needs psycopg: `pip install 'rsup[postgres]'`") from None


# ------------------------------------------------------------------------------------------------------------- readers


def reader_engine(target: Target) -> Engine:
    """An engine that can only read, for REST and commands; each of its transactions sees one moment. Threads may share it.

    Works while the supervisor writes and when it is gone. Raise `StoreError` where there is no store.
    """
    place = split_target(target)
    if isinstance(place, Path):
        return sqlite_reader(newest_file(place))
    engine = _postgres_engine(place, pool_size=4, pool_pre_ping=True)
    return engine.execution_options(postgresql_readonly=True, isolation_level="REPEATABLE READ")
