"""Opens databases: the writer's connection, engines that only read, and where the store of a state directory is.

A *target* is a path of a SQLite file or a SQLAlchemy URL (`sqlite:///...`, `postgresql://...`). Texts that name one may hold a
password: what is wrong with them is said without repeating them.
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
FILE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
"""How a text must end that names a SQLite file which is not there yet."""
ELSEWHERE_NAME = "database-url"
"""In a state directory: where its store is, if not there."""
BUSY_TIMEOUT_S = 5.0
RECONNECT_S = 3

_WRITE = "write postgresql://user@host/database, sqlite:////path, or a path that ends in .db"
_ESCAPED = "in a password write @ as %40, : as %3A, / as %2F"
_DUMP_MARK = b"PGDMP"


def split_target(target: Target) -> Path | URL:
    """A path for SQLite, a URL (with the psycopg driver) for a server. Raise `UsageError` for others, and for a text that is
    neither a URL nor names a file."""
    if isinstance(target, Path):
        return Path(os.path.abspath(target))
    if not isinstance(target, URL) and "://" not in target:
        if "=" in target or not (target.endswith(FILE_SUFFIXES) or os.path.isfile(target)):
            raise UsageError(f"--database-url is neither a URL nor the path of a file: {_WRITE}")
        return Path(os.path.abspath(target))
    url = target if isinstance(target, URL) else _url_of(target)
    backend = url.get_backend_name()
    if backend == "sqlite":
        if not url.database or url.database == ":memory:":
            raise UsageError(f"--database-url {url} names no file; write sqlite:////path/to/{DATABASE_NAME}")
        return Path(os.path.abspath(url.database))
    if backend not in ("postgresql", "postgres"):
        raise UsageError(f"--database-url: {backend} is no database of ours; use postgresql:// or a SQLite path")
    if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise UsageError(
            f"--database-url: rsup uses the driver psycopg and no other; write postgresql://, not {url.drivername}://"
        )
    return url.set(drivername="postgresql+psycopg")


def _url_of(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError:
        raise UsageError(f"--database-url is no URL: {_WRITE}") from None
    except ValueError:
        raise UsageError(f"--database-url: its port is no number: {_WRITE}; {_ESCAPED}") from None
    if "@" in (url.host or "") or (url.host is not None and "@" in (url.database or "")):
        raise UsageError(f"--database-url has more than one @: {_ESCAPED}")
    return url


def describe(target: Target) -> str:
    """What a person calls that database: the path, or the URL without passwords, which may stand among its options too."""
    place = split_target(target)
    if isinstance(place, Path):
        return str(place)
    shown = {name: value for name, value in place.query.items() if not is_secret(name)}
    return place.set(query=shown).render_as_string(hide_password=True)


def is_secret(option: str) -> bool:
    """Whether an option of a URL, as `password` or `sslpassword`, is nobody's to see."""
    return "password" in option.lower() or "secret" in option.lower()


def find_database(state: Path, database_url: str | None = None) -> Target:
    """The database a command reads: `database_url`, else `RSUP_DATABASE_URL`, else the store of that directory."""
    return database_url or os.environ.get("RSUP_DATABASE_URL") or store_of(state)


def store_of(state: Path) -> Target:
    """The store of a state directory: where a note in it says, else the file in it."""
    return noted_elsewhere(state) or newest_file(state / DATABASE_NAME)


def noted_elsewhere(state: Path) -> str:
    """Where the store of that state directory is (`note_elsewhere`), empty: in it, as far as anybody knows. Raise `UsageError`
    where it is kept from us."""
    path = state / ELSEWHERE_NAME
    try:
        return path.read_text().strip()
    except PermissionError:
        if not _can_look_into(state):
            return ""
        raise UsageError(f"cannot read {path}, which says where the store is: permission denied; ask as its owner") from None
    except (OSError, ValueError):
        return ""


def _can_look_into(folder: Path) -> bool:
    try:
        (folder / ELSEWHERE_NAME).stat()
    except PermissionError:
        return False
    return True


def note_elsewhere(state: Path, url: str) -> None:
    """Keep that the store of that state directory is at `url`, for commands that are told the directory only; mode 0600, since
    a password may be in it. Empty: it is in the directory again. Raise `OSError`."""
    path = state / ELSEWHERE_NAME
    if not url:
        path.unlink(missing_ok=True)
        return
    if noted_elsewhere(state) == url:
        return
    arriving = path.with_name(f".{path.name}.{os.getpid()}")
    with open(arriving, "w", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
        file.write(url + "\n")
    if os.geteuid() == 0:  # root copies for the user whose directory it is
        owner = state.stat()
        os.chown(arriving, owner.st_uid, owner.st_gid)
    os.replace(arriving, path)


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
    if _is_dump(path):
        raise UsageError(f"{path} is a dump, which only pg_restore reads: restore it into an empty database, and name that")
    if is_network_file_system(path.parent):  # a copy, which never changes but is replaced by its successor
        return _sqlite_engine(lambda: _connect_to_unchanging(path), "BEGIN", poolclass=NullPool)
    return _sqlite_engine(lambda: _connect_reading(path), "BEGIN")


def _is_dump(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_DUMP_MARK)) == _DUMP_MARK
    except OSError:
        return False  # which whoever reads it says


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
    given: dict[str, Any] = {name: value for name, value in limits.items() if name not in url.query}
    given["client_encoding"] = "utf8"  # whatever PGCLIENTENCODING or the role says: in SQL_ASCII text comes as bytes
    try:
        return create_engine(url, connect_args=given, json_serializer=to_json, **pool)
    except (ImportError, NoSuchModuleError):
        raise StoreError("PostgreSQL needs psycopg: `pip install 'rsup[postgres]'`") from None


def reconnect_quickly(engine: Engine) -> None:
    """From now on give up connecting sooner: whoever waits for it can answer nobody, and will try again."""
    if "connect_timeout" not in engine.url.query:
        event.listen(engine, "do_connect", lambda *given: given[3].update(connect_timeout=RECONNECT_S))


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
