"""The copy of a live store in a state directory on a network file system, which readers and a next holder start from.

It is made online (SQLite's backup interface, one moment of the store), on node-local disk first, without a write-ahead log,
and then put in place by rename: readers see a whole copy or the one before.
"""

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("rsup.store")


def copy_database(source: Path, target: Path) -> None:
    """Put a copy of the live SQLite file `source` at `target`, in place of what is there. Raise `sqlite3.Error`, `OSError`."""
    local = source.with_name(f".{source.name}.copy-{os.getpid()}-{threading.get_ident()}")
    arriving = target.with_name(f".{target.name}.arriving-{source.parent.name[:16]}-{os.getpid()}")
    try:
        _snapshot(source, local)
        with open(local, "rb") as read, open(arriving, "wb", opener=_private) as write:
            shutil.copyfileobj(read, write, 1 << 20)
            write.flush()
            os.fsync(write.fileno())
        os.replace(arriving, target)
        _sync_directory(target.parent)
    finally:
        for path in (local, arriving):
            path.unlink(missing_ok=True)


def _snapshot(source: Path, target: Path) -> None:
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(source, timeout=10)) as read, contextlib.closing(sqlite3.connect(target)) as write:
        read.backup(write)
        write.execute("PRAGMA journal_mode = DELETE")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # not every network file system can
        os.fsync(fd)
    os.close(fd)


class CopyThread:
    """Renews the copy every `every_s` while the store changes, and once more at `close`.

    `may_copy` raises if the lease is not ours any more: then the copy is another holder's and stays as it is.
    """

    def __init__(self, live: Path, target: Path, every_s: float, may_copy: Callable[[], None]) -> None:
        self._live = live
        self._target = target
        self._every_s = every_s
        self._may_copy = may_copy
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="rsup-store-copy", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """A transaction was committed."""
        self._changed.set()

    def _run(self) -> None:
        self._changed.set()  # the first copy at once: the one that is there may be an old one
        self._copy()
        while not self._stop.wait(self._every_s):
            self._copy()

    def _copy(self) -> None:
        if not self._changed.is_set():
            return
        self._changed.clear()
        try:
            self._may_copy()
            copy_database(self._live, self._target)
            self._failure = ""
        except Exception as error:
            self._changed.set()
            if str(error) != self._failure:
                self._failure = str(error)
                log.warning("cannot leave a copy of the store at %s: %s; trying again", self._target, error)

    def close(self) -> None:
        """Make the last copy and end the thread."""
        self._stop.set()
        self._thread.join()
        self._copy()
