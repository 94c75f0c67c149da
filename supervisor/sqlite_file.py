"""The store's SQLite file before it is opened for writing: where it may be, made fresh, migrated, or adopted from a copy."""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from rsup.supervisor import schema, tables
from rsup.supervisor.database import sqlite_reader, sqlite_writer
from rsup.supervisor.lease import LeaseRecord
from rsup.supervisor.network_copy import copy_database
from rsup.supervisor.record_rows import save_meta
from rsup.supervisor.store import StoreError, StoreTooOld

MAX_PATH_BYTES = 500
"""SQLite's own bound is 512 with the ending of its companion files (`MAX_PATHNAME` of os_unix.c)."""


@dataclass(frozen=True)
class Migrated:
    """An older schema was brought to this release's. `backup` is the file as it was, None on a server."""

    revision: str
    backup: Path | None


def check_place(path: Path) -> None:
    """Raise `StoreError` where no SQLite file can be: a missing directory, a name too long, something that is no file."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise StoreError(f"the path {path} is longer than {MAX_PATH_BYTES} bytes, too long for SQLite; use another --state-dir")
    if not path.parent.is_dir():
        raise StoreError(f"the directory {path.parent} does not exist; make it, or choose another --state-dir")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a file; move it away or choose another --state-dir")


def prepare(path: Path, place: Path, may_migrate: bool, scripts: Path | None = None) -> Migrated | None:
    """Make `path` a store of this release's schema; the caller holds its lease. Return what it did to an older one.

    `place` is where people know it, and where the backup before a migration goes. Raise `StoreTooNew`, `StoreTooOld` (not
    `may_migrate`) or `StoreDamaged`; then the file is as it was. `scripts`: see `schema.migrate`.
    """
    created = _create_private(path)
    try:
        revision = None if created or not path.stat().st_size else revision_of(path)
        if revision is None:
            make_fresh_file(path)
            return None
    except BaseException:
        if created:
            path.unlink(missing_ok=True)
        raise
    try:
        schema.check_revision(revision, str(place))
        return None
    except StoreTooOld:
        if not may_migrate:
            raise
    return _migrate(path, place, revision, scripts)


def _migrate(path: Path, place: Path, revision: str, scripts: Path | None) -> Migrated:
    backup = place.with_name(f"{place.name}.bak-{revision}")
    is_another = backup.exists()  # after an earlier upgrade somebody went back
    if is_another:
        backup = backup.with_name(f"{backup.name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    copy_database(path, backup)
    engine = sqlite_writer(path, foreign_keys=False)  # a table that is made anew must not take its rows' children along
    try:
        schema.migrate(engine, scripts)
    except BaseException:
        if is_another:  # each further try would leave one
            backup.unlink(missing_ok=True)
        raise
    finally:
        engine.dispose()
    return Migrated(revision, backup)


def choose_live(shared: Path, live: Path, previous: LeaseRecord | None, host: str) -> None:
    """Make the live file of this node the newest there is: its own if this node held the lease last, else the copy."""
    if live.exists() and previous is not None and previous.host == host and _term_of(live) == previous.term:
        return
    for path in (live, _companion(live, "-wal"), _companion(live, "-shm")):
        path.unlink(missing_ok=True)
    if not shared.exists():
        return
    if _companion(shared, "-wal").exists():  # it was a live file until this directory came to be shared
        shutil.copyfile(_companion(shared, "-wal"), _companion(live, "-wal"))
    arriving = _companion(live, ".arriving")
    _create_private(arriving)
    shutil.copyfile(shared, arriving)
    arriving.replace(live)
    for path in (_companion(shared, "-wal"), _companion(shared, "-shm")):
        path.unlink(missing_ok=True)


def mark_term(live: Path, term: int) -> None:
    """Note in the live file which holder of the lease writes it."""
    engine = sqlite_writer(live)
    with contextlib.closing(engine.connect()) as connection, connection.begin():
        save_meta(connection, "term", str(term))
    engine.dispose()


def _term_of(live: Path) -> int | None:
    try:
        with sqlite_reader(live).connect() as connection:
            value = connection.execute(select(tables.meta.c.value).where(tables.meta.c.key == "term")).scalar()
    except (SQLAlchemyError, StoreError):
        return None
    return int(value) if value and value.isdigit() else None


def revision_of(path: Path) -> str | None:
    """The schema of a file that is there, None for an empty database. Does not change it."""
    engine = sqlite_reader(path)
    try:
        with engine.connect() as connection:
            return schema.read_revision(connection)
    finally:
        engine.dispose()


def make_fresh_file(path: Path) -> None:
    """Make the tables in an empty or missing file, which then has mode 0600. Raise `OSError` or a database error."""
    _create_private(path)
    engine = sqlite_writer(path)
    try:
        with engine.begin() as connection:
            schema.make_fresh(connection)
    finally:
        engine.dispose()


def _create_private(path: Path) -> bool:
    """Create an empty file with mode 0600 where none is; return whether it was created. Raise `OSError`."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return True
    return False


def _companion(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
