"""Who may write to a store: one supervisor at a time, and the others learn where it answers.

Beside the SQLite file `rsup.db` are two small files. `rsup.lock` is locked (flock) by the holder; the kernel gives it up
with the process, so on a local file system the lock alone decides and what a dead holder left behind means nothing.
`rsup.lease` says who the holder is (`LeaseRecord`).

On a network file system the record decides: `shared_lease`. PostgreSQL has a lease of its own: `postgres_lease`.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.places import boot_id, this_host
from rsup.supervisor.store import StoreHeld

RECORD_BYTES = 2048
"""Size of a lease record on disk, padded, so that a bump needs no new block."""

COMMANDS = ("db-", "verb-")
"""How the instances of commands begin, which hold a lease while they change a store."""


@dataclass(frozen=True)
class LeaseHolder:
    """Who asks for a lease. `rpc` and `rest` are the addresses that others are told."""

    host: str
    boot_id: str
    pid: int
    start_ticks: int
    instance: str
    rpc: str = ""
    rest: str = ""

    @classmethod
    def this_process(cls, instance: str, rpc: str = "", rest: str = "") -> "LeaseHolder":
        """This process on this host."""
        return cls(this_host(), boot_id(), os.getpid(), process_start_ticks(os.getpid()), instance, rpc, rest)


@dataclass(frozen=True)
class Timing:
    """How a lease on a network file system is watched, and how often the copy is made; seconds."""

    bump_s: float = 5.0
    stale_s: float = 20.0
    copy_s: float = 60.0


@dataclass(frozen=True)
class LeaseRecord:
    """Contents of `rsup.lease`. `pid_ns` says in which pid namespace `pid` counts."""

    host: str
    boot_id: str
    pid: int
    start_ticks: int
    instance: str
    rpc: str = ""
    rest: str = ""
    pid_ns: str = ""
    term: int = 1
    counter: int = 0
    released: bool = False

    def is_of(self, host: str, boot: str) -> bool:
        """Whether the holder runs, or ran, on that host since that boot."""
        return self.host == host and self.boot_id == boot

    def process_lives(self, host: str, boot: str) -> bool | None:
        """Whether the holder's process lives, None if that cannot be seen from that host."""
        if not self.is_of(host, boot) or self.pid_ns != _pid_namespace():
            return None
        return process_start_ticks(self.pid) == self.start_ticks != 0


class Lease(Protocol):
    """A lease that is held."""

    def check(self) -> None:
        """Raise `StoreHeld` if it was lost, `StoreFull` if that cannot be told now. Never waits. Before each commit."""
        ...

    def announce(self, rpc: str, rest: str) -> None:
        """Say where the holder answers, once it knows."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


def read_record(database: Path) -> LeaseRecord | None:
    """The lease record beside that database, None if there is none or it is being written. It may be a dead one's."""
    try:
        return decode_record(database.with_suffix(".lease").read_bytes())
    except (OSError, ValueError, TypeError):
        return None


def held_error(database: Path | str, record: LeaseRecord | None) -> StoreHeld:
    """The error for a lease that `record` holds."""
    other = "another --database-url" if "://" in str(database) else "another --state-dir"
    if record is None:
        return StoreHeld(f"the store {database} is in use by another rsup process; wait for it or choose {other}")
    process = f"pid {record.pid} on {record.host}"
    if record.instance.startswith(COMMANDS):
        return StoreHeld(f"the store {database} is held by an rsup command that changes it ({process}); wait for it")
    where = f", answering at {record.rpc}" if record.rpc else ""
    return StoreHeld(
        f"the store {database} is held by the supervisor with {process}{where}; use that one, stop it, or choose {other}",
        address=record.rpc,
        rest=record.rest,
    )


class FileLease:
    """A lease by flock, for a database on a local file system."""

    def __init__(self, database: Path, holder: LeaseHolder, lock: int) -> None:
        self._database = database
        self._lock = lock
        self._record = record_of(holder, term=1)

    @classmethod
    def take(cls, database: Path, holder: LeaseHolder, *, timeout_s: float = 1.0) -> "FileLease":
        """Take the lease, also a dead holder's. Raise `StoreHeld` if it is held, `OSError` if the lock cannot be made."""
        lease = cls(database, holder, take_lock(database, database, holder, timeout_s))
        try:
            replace_record(database.with_suffix(".lease"), lease._record)
        except BaseException:
            os.close(lease._lock)
            raise
        return lease

    def check(self) -> None:
        """The kernel keeps the lock as long as we live."""

    def announce(self, rpc: str, rest: str) -> None:
        """Say where the holder answers. Raise `OSError`."""
        self._record = replace(self._record, rpc=rpc, rest=rest)
        replace_record(self._database.with_suffix(".lease"), self._record)

    def release(self) -> None:
        """Remove the record and unlock; the lock file stays, since removing it would let two hold "the" lock."""
        with contextlib.suppress(OSError):
            self._database.with_suffix(".lease").unlink(missing_ok=True)
        os.close(self._lock)


def take_lock(locked: Path, database: Path, holder: LeaseHolder, timeout_s: float) -> int:
    """Lock the lock file of `locked`; return its descriptor, to be closed for unlocking. Raise `StoreHeld` or `OSError`.

    It is tried for `timeout_s`: a holder that is just going is not held against us, one that just came has named itself.
    """
    lock = os.open(locked.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + timeout_s
    try:
        while not _try_lock(lock):
            record = read_record(database)
            lives = record is not None and record.process_lives(holder.host, holder.boot_id)
            if lives or time.monotonic() > deadline_s:
                raise held_error(database, record)
            time.sleep(0.02)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def record_of(holder: LeaseHolder, term: int) -> LeaseRecord:
    """The first record of that holder."""
    return LeaseRecord(**asdict(holder), pid_ns=_pid_namespace(), term=term)


def encode_record(record: LeaseRecord) -> bytes:
    """Exactly `RECORD_BYTES`, so that one record can be written over another."""
    return json.dumps(asdict(record)).encode().ljust(RECORD_BYTES - 1) + b"\n"


def decode_record(data: bytes) -> LeaseRecord:
    """The record in `data`; fields of a newer release are ignored. Raise `ValueError` or `TypeError`."""
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError("a lease record is an object")
    record = LeaseRecord(**{name: fields[name] for name in LeaseRecord.__dataclass_fields__ if name in fields})
    for name, kind in LeaseRecord.__annotations__.items():
        if not isinstance(getattr(record, name), kind):
            raise ValueError(f"{name} of a lease record is no {kind.__name__}")
    return record


def replace_record(path: Path, record: LeaseRecord) -> None:
    """Put `record` at `path` whole and synced, as a new file. Raise `OSError`."""
    temporary = path.with_name(f".{path.name}.{record.instance}")  # not the pid: another host may have the same
    with _removed_on_failure(temporary), open(temporary, "wb", opener=_private) as file:
        file.write(encode_record(record))
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary, path)


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
