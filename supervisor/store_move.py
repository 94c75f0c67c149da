"""A whole store moves: into a database, a file or a state directory that holds none; state directories say where it went."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL

from rsup.supervisor import schema
from rsup.supervisor.database import (
    DATABASE_NAME,
    FILE_SUFFIXES,
    Target,
    describe,
    note_elsewhere,
    noted_elsewhere,
    reader_engine,
    split_target,
    store_of,
)
from rsup.supervisor.database_errors import translated
from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import StoreError
from rsup.supervisor.store_copy import Copied, copy_store
from rsup.supervisor.wire import UsageError


@dataclass(frozen=True)
class Moved:
    """`source` and `target` as people call them. `aside`: the store that stood at the target before, under its new name.
    `note`: where commands will look, or why not there."""

    source: str
    target: str
    copied: Copied
    aside: Path | None
    note: str


def move_store(source_text: str, target_text: str, holder: Callable[[], LeaseHolder], state: Path | None = None) -> Moved:
    """Copy the store that is named (a file, a state directory or a URL) into one that holds nothing, or into the directory
    that it had moved out of. Takes both leases. `state`: a state directory which may be that of `source_text`. Raise
    `StoreError`, `UsageError`; then all is as it was."""
    source, target = _source(source_text), _target(target_text)
    names = describe(source), describe(target)
    if is_same(source, target):
        raise UsageError(f"{names[0]} and {names[1]} are the same store")
    place = split_target(source)
    if isinstance(place, Path) and not place.exists():
        raise UsageError(f"there is no store at {place}")
    check_filled(source, "check FROM")
    _make_dir(target)
    held = SqlStore.open(source, holder=holder(), alone_may_migrate=False, to_leave=True)
    try:
        aside = _put_aside(target, source, holder)
        try:
            copied = _copy(source, target, holder)
        except BaseException:
            if aside is not None and isinstance(target, Path):
                aside.replace(target)
            raise
    finally:
        held.close()
    folders = _state_dirs(source_text, place, state)
    return Moved(*names, copied, aside, _leave_note(folders, target))


def is_same(one: Target, other: Target) -> bool:
    """Whether both name one database, in whatever spelling; False where that cannot be told. The store's id would not tell:
    its copies and backups have it too. Raise `UsageError`."""
    if describe(one) == describe(other):
        return True
    first, second = split_target(one), split_target(other)
    if isinstance(first, Path) and isinstance(second, Path):
        return first.exists() and second.exists() and first.samefile(second)
    if isinstance(first, Path) or isinstance(second, Path):
        return False
    try:
        return _server_identity(first) == _server_identity(second)
    except StoreError:
        return False


def _server_identity(url: URL) -> tuple[object, ...]:
    """Which run of which server that is, and which of its databases: a clone of a server has started at another time."""
    engine = reader_engine(url)
    try:
        with translated(describe(url)), engine.connect() as connection:
            return tuple(connection.exec_driver_sql(_IDENTITY).one())
    finally:
        engine.dispose()


_IDENTITY = "SELECT pg_postmaster_start_time(), oid FROM pg_database WHERE datname = current_database()"


def check_filled(target: Target, hint: str, *, of_this_release: bool = False) -> None:
    """There is a store at `target`: opening one to write would make it, also where a name was mistyped. Raise `UsageError`,
    which ends in `hint`, or `StoreError`."""
    name, place = describe(target), split_target(target)
    if isinstance(place, Path) and not place.exists():
        return  # whoever opens it says so
    engine = reader_engine(target)
    try:
        with translated(name), engine.connect() as connection:
            revision = schema.read_revision(connection)
    finally:
        engine.dispose()
    if revision is None:
        raise UsageError(f"there is no store in {name} yet; {hint}")
    if of_this_release:
        schema.check_revision(revision, name)


def _copy(source: Target, target: Target, holder: Callable[[], LeaseHolder]) -> Copied:
    engine = reader_engine(source)
    try:
        store = SqlStore.open(target, holder=holder(), alone_may_migrate=False)
        try:
            with translated(describe(source)), engine.connect() as read:
                return store.change(lambda write: copy_store(read, write, target=describe(target)))
        finally:
            store.close()
    finally:
        engine.dispose()


def _put_aside(target: Target, source: Target, holder: Callable[[], LeaseHolder]) -> Path | None:
    """The store that was left in a state directory when it moved to `source`, which now comes back, gets another name."""
    if not isinstance(target, Path) or target.name != DATABASE_NAME or not target.exists():
        return None
    elsewhere = noted_elsewhere(target.parent)
    if not elsewhere or not is_same(elsewhere, source):
        return None
    SqlStore.open(target, holder=holder(), alone_may_migrate=False).close()  # nobody holds it, and all is in the one file
    return target.rename(target.with_name(f"{target.name}.before-copy-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"))


def _state_dirs(source_text: str, place: Path | URL, state: Path | None) -> list[Path]:
    """The state directories whose store `place` was, also where a note had them say so."""
    found = [place.parent] if isinstance(place, Path) and place.name == DATABASE_NAME else []
    if "://" not in source_text and os.path.isdir(source_text):
        found.append(Path(os.path.abspath(source_text)))
    with contextlib.suppress(UsageError):  # of a directory that is not ours to look into
        if state is not None and (noted := noted_elsewhere(state)) and is_same(noted, place):
            found.append(state)
    return list(dict.fromkeys(found))


def _leave_note(folders: Sequence[Path], target: Target) -> str:
    """Have state directories say where their store is now. `folders`: those which it has left."""
    try:
        if isinstance(target, Path) and target.name == DATABASE_NAME:
            note_elsewhere(target.parent, "")
        elif not isinstance(target, Path) and folders:
            for folder in folders:
                note_elsewhere(folder, str(target))
            return f"commands that are given {', '.join(map(str, folders))} find it there"
    except OSError as error:
        return f"no note of it could be left in the state directory ({error.strerror}): name the store to every command"
    return ""


def _source(text: str) -> Target:
    if "://" in text:
        return text
    if not text:
        raise UsageError("FROM is empty: name a file, a state directory or a database URL")
    return store_of(Path(os.path.abspath(text))) if Path(text).is_dir() else Path(os.path.abspath(text))


def _target(text: str) -> Target:
    """A missing one is a state directory, unless its name is that of a file."""
    if "://" in text:
        split_target(text)  # refuses what is no URL of ours
        return text
    if not text:
        raise UsageError("TO is empty: name a database URL, a state directory or a file")
    path = Path(os.path.abspath(text))
    if not path.exists() and not text.endswith(FILE_SUFFIXES):
        split_target(text + FILE_SUFFIXES[0])  # refuses what is meant as connection parameters
        if "/" not in text:  # the name of a database, more likely than that of a directory right here
            raise UsageError(
                f"there is nothing called {text} here: write postgresql://user@host/{text} for a database, ./{text} for a "
                "state directory that is to be made"
            )
        return path / DATABASE_NAME
    return path / DATABASE_NAME if path.is_dir() else path


def _make_dir(target: Target) -> None:
    """Make a state directory that is not there."""
    if not isinstance(target, Path) or target.name != DATABASE_NAME:
        return
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        folder = target.parent
        raise UsageError(f"cannot make the state directory {folder}: {error.strerror}; name one that you can write") from None
