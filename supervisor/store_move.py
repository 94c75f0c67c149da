"""A whole store moves: into a database, a file or a state directory that holds none; state directories say where it went."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL

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


def move_store(source_text: str, target_text: str, holder: Callable[[], LeaseHolder]) -> Moved:
    """Copy the store that is named (a file, a state directory or a URL) into one that holds nothing, or into the directory
    that it had moved out of. Takes both leases. Raise `StoreError`, `UsageError`; then all is as it was."""
    source, target = _source(source_text), _target(target_text)
    names = describe(source), describe(target)
    if names[0] == names[1]:
        raise UsageError(f"{names[0]} and {names[1]} are the same store")
    place = split_target(source)
    if isinstance(place, Path) and not place.exists():
        raise UsageError(f"there is no store at {place}")
    held = SqlStore.open(source, holder=holder(), alone_may_migrate=False)
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
    return Moved(*names, copied, aside, _leave_note(place, target))


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
    if not elsewhere or split_target(elsewhere) != split_target(source):
        return None
    SqlStore.open(target, holder=holder(), alone_may_migrate=False).close()  # nobody holds it, and all is in the one file
    return target.rename(target.with_name(f"{target.name}.before-copy-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"))


def _leave_note(source: Path | URL, target: Target) -> str:
    """Have state directories say where their store is now."""
    try:
        if isinstance(target, Path) and target.name == DATABASE_NAME:
            note_elsewhere(target.parent, "")
        elif not isinstance(target, Path) and isinstance(source, Path) and source.name == DATABASE_NAME:
            note_elsewhere(source.parent, str(target))
            return f"commands that are given {source.parent} find it there"
    except OSError as error:
        return f"no note of it could be left in the state directory ({error.strerror}): name the store to every command"
    return ""


def _source(text: str) -> Target:
    if "://" in text:
        return text
    return store_of(Path(os.path.abspath(text))) if Path(text).is_dir() else Path(os.path.abspath(text))


def _target(text: str) -> Target:
    """A missing one is a state directory, which is made, unless its name is that of a file."""
    if "://" in text:
        return text
    path = Path(os.path.abspath(text))
    if not path.exists() and not text.endswith(FILE_SUFFIXES):
        split_target(text + FILE_SUFFIXES[0])  # refuses what is meant as connection parameters
        path.mkdir(mode=0o700, parents=True)
    return path / DATABASE_NAME if path.is_dir() else path
