"""What a database's error means to us: exceptions of SQLAlchemy, sqlite3 and psycopg become the `StoreError`s of `store`.

SQLite says "disk full" in several ways: SQLITE_FULL for ENOSPC, an I/O error of a write, a sync or the shared-memory file
for EDQUOT and EFBIG (https://www.sqlite.org/rescode.html); all of them are `StoreFull`, since writing may work again later.
"""

import contextlib
import errno
import sqlite3
from collections.abc import Iterator

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from rsup.supervisor.store import StoreDamaged, StoreError, StoreFull, StoreRefuses

_FULL_CODES = {"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_DIR_FSYNC", "SQLITE_IOERR_TRUNCATE"}
_FULL_CODES |= {"SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMOPEN", "SQLITE_IOERR_SHMMAP", "SQLITE_IOERR_DELETE"}
_FULL_STATES = ("53100", "53000", "53400")
"""PostgreSQL: disk_full, insufficient_resources, configuration_limit_exceeded."""
READ_ONLY_STATE = "25006"
"""PostgreSQL: read_only_sql_transaction, of a session that began so, or on a server that is a replica."""

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def translated(database: str) -> Iterator[None]:
    """Raise `StoreError` in place of the database's errors; `database` is what a person calls it (no password)."""
    try:
        yield
    except (DataError, IntegrityError, OverflowError, UnicodeError) as error:
        what = getattr(error, "orig", None) or error
        raise StoreRefuses(f"the database {database} does not take that: {' '.join(str(what).split())}") from error
    except DBAPIError as error:
        raise store_error(database, error.orig or error) from error
    except (sqlite3.Error, OSError) as error:
        raise store_error(database, error) from error


def store_error(database: str, error: BaseException) -> StoreError:
    """The `StoreError` for an error of the driver or the file system, in one line."""
    if isinstance(error, OSError):
        return _file_error(database, error)
    if isinstance(error, sqlite3.Error):
        return _sqlite_error(database, error)
    state = getattr(error, "sqlstate", None) or ""
    text = " ".join(str(error).split())
    if state in _FULL_STATES:
        return StoreFull(f"the database {database} takes no more data: {text}; free some space there")
    if state == READ_ONLY_STATE:
        return StoreFull(
            f"the database {database} may only be read now: {text}; is it a replica, or default_transaction_read_only on? "
            "(several hosts: target_session_attrs=read-write in the URL)"
        )
    if state in ("XX001", "XX002"):
        return StoreDamaged(f"the database {database} is damaged: {text}; restore a backup")
    if not state:
        return StoreError(f"cannot reach the database {database}: {text}; check --database-url and the server")
    return StoreError(f"the database {database} refuses: {text}")


def _file_error(database: str, error: OSError) -> StoreError:
    what = error.strerror or str(error)
    if error.errno in FULL_ERRNOS:
        return StoreFull(f"cannot write {error.filename or database}: {what}; free some space or choose another --state-dir")
    return StoreError(f"cannot use {error.filename or database}: {what}; choose another --state-dir")


def _sqlite_error(database: str, error: sqlite3.Error) -> StoreError:
    name: str = getattr(error, "sqlite_errorname", "") or ""
    if name in _FULL_CODES:
        why = "disk full" if name == "SQLITE_FULL" else "disk full, quota or file size limit reached"
        return StoreFull(f"cannot write the store {database}: {why} ({error}); free some space there")
    if name.startswith("SQLITE_READONLY"):
        return StoreFull(f"cannot write the store {database}: read-only; make it writable or choose another --state-dir")
    if name.startswith("SQLITE_CORRUPT"):
        return StoreDamaged(
            f"the store {database} is damaged ({error}); move it away, or restore a copy of it (`rsup db check`)"
        )
    if name == "SQLITE_NOTADB":
        return StoreDamaged(f"{database} is no rsup store ({error}); move it away or choose another --state-dir")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreError(f"the store {database} is locked by another program; end that program (`fuser {database}` names it)")
    if name.startswith("SQLITE_CANTOPEN"):
        return StoreError(f"cannot open the store {database}; check that its directory exists and is ours")
    return StoreError(f"the store {database} failed: {error} ({name or type(error).__name__})")
