"""The lease of a store in a directory that hosts share.

On a network file system locks of hosts cannot be trusted, nor can clocks of hosts be compared. There the record decides:

* Its holder bumps the record's `counter` every `Timing.bump_s`. Another host takes the lease for stale only after it has
  watched the counter stand still for `Timing.stale_s` on its own clock.
* Each holder has a higher `term`. Who takes over first makes `rsup.claim-TERM` by link(2), which on any network file system
  exactly one can do; the record then is replaced by rename, so that a late bump of the old holder falls on a file without
  a name. A holder that finds a higher term has lost the lease: it writes nothing more.
* A holder that could not bump for most of `stale_s` writes nothing until it could: by then another may have taken over.
* A bump overwrites bytes in place, since that works also on a full disk or over quota.
"""

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from rsup.supervisor.lease import (
    LeaseHolder,
    LeaseRecord,
    Timing,
    decode_record,
    encode_record,
    held_error,
    read_record,
    record_of,
    replace_record,
    take_lock,
)
from rsup.supervisor.store import StoreFull

log = logging.getLogger("rsup.store")


class SharedLease:
    """A lease by a counted record in a directory that hosts share, with a thread that bumps it."""

    def __init__(self, database: Path, record: LeaseRecord, lock: int, timing: Timing) -> None:
        self.record = record
        """As last written."""
        self.previous: LeaseRecord | None = None
        """The holder before us."""
        self._database = database
        self._path = database.with_suffix(".lease")
        self._lock = lock
        self._timing = timing
        self._bumped_s = _clock_s()
        self._lost_to: LeaseRecord | None = None
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rsup-lease", daemon=True)

    @classmethod
    def take(cls, database: Path, live: Path, holder: LeaseHolder, timing: Timing) -> "SharedLease":
        """Take the lease of `database`, whose live file on this node is `live`.

        Blocks up to `stale_s` while it watches another host's record. Raise `StoreHeld` if that one lives, or `OSError`.
        """
        lock = take_lock(live, database, holder, timeout_s=1.0)
        try:
            old = _wait_for_end(database, holder, timing)
            record = _claim(database, old, holder, timing)
        except BaseException:
            os.close(lock)
            raise
        lease = cls(database, record, lock, timing)
        lease.previous = old
        lease._thread.start()
        return lease

    def check(self) -> None:
        """See `Lease.check`."""
        if self._lost_to is not None:
            raise held_error(self._database, self._lost_to)
        silent_s = _clock_s() - self._bumped_s
        if silent_s > self._timing.stale_s * 0.7:
            raise StoreFull(
                f"the lease in {self._path.parent} could not be renewed for {silent_s:.0f} s, so nothing is written; "
                "is that file system reachable and writable?"
            )

    def announce(self, rpc: str, rest: str) -> None:
        """Say where the holder answers, with a bump."""
        with self._mutex:
            self.record = replace(self.record, rpc=rpc, rest=rest)
        self.bump()

    def bump(self) -> None:
        """Show that the holder lives; notice that another one took over. Raise `OSError`."""
        with self._mutex:
            started_s = _clock_s()
            record = replace(self.record, counter=self.record.counter + 1)
            with open(self._path, "r+b", buffering=0) as file:
                with contextlib.suppress(ValueError, TypeError):
                    found = decode_record(file.read())
                    if found.term > record.term:
                        self._lost_to = found
                        return
                file.seek(0)
                file.write(encode_record(record))
                os.fsync(file.fileno())
            self.record = record
            self._bumped_s = started_s

    def _run(self) -> None:
        failure = ""
        while not self._stop.wait(self._timing.bump_s):
            try:
                self.bump()
                failure = ""
            except FileNotFoundError:
                with contextlib.suppress(OSError):
                    replace_record(self._path, self.record)  # a person removed it
            except OSError as error:
                if str(error) != failure:
                    failure = str(error)
                    log.warning("cannot renew the lease %s: %s", self._path, error)
            if self._lost_to is not None:
                log.error("%s", held_error(self._database, self._lost_to))
                return

    def release(self) -> None:
        """Mark the record as free and unlock."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._timing.stale_s)
        self.record = replace(self.record, released=True)
        with contextlib.suppress(OSError):
            self.bump()
        os.close(self._lock)


def _wait_for_end(database: Path, holder: LeaseHolder, timing: Timing) -> LeaseRecord | None:
    """The record of a holder that is gone, None if there never was one. Raise `StoreHeld` if it lives."""
    record = read_record(database) or _read_again(database)
    if record is None or record.released:
        return record
    lives = record.process_lives(holder.host, holder.boot_id)
    if lives is None:
        return _watch(database, record, timing)
    if lives:
        raise held_error(database, record)
    return record


def _watch(database: Path, first: LeaseRecord, timing: Timing) -> LeaseRecord:
    """Watch the record until its counter moves (`StoreHeld`) or has stood still for `stale_s` of watching."""
    log.warning("is the supervisor on %s (pid %d) alive? watching its lease for %g s", first.host, first.pid, timing.stale_s)
    poll_s = min(0.5, timing.stale_s / 20)
    started_s = before_s = time.monotonic()
    while True:
        time.sleep(poll_s)
        record = read_record(database)
        now_s = time.monotonic()
        if record is not None and record.released:
            return record
        if record is not None and (record.term, record.counter) != (first.term, first.counter):
            raise held_error(database, record)
        if now_s - before_s > timing.stale_s / 2:
            started_s = now_s  # we were stopped ourselves, and perhaps the file system with us: watch anew
        before_s = now_s
        if now_s - started_s >= timing.stale_s:
            return first


def _claim(database: Path, old: LeaseRecord | None, holder: LeaseHolder, timing: Timing) -> LeaseRecord:
    """Become the holder after `old`: one of several that try. Raise `StoreHeld` if another was faster, or `old` is back."""
    term = old.term + 1 if old is not None else 1
    while not _make_claim(database, term, holder):
        _wait_for_claimant(database, old, timing)
        term += 1
    now = read_record(database)
    if now is not None and not now.released and (old is None or (now.term, now.counter) != (old.term, old.counter)):
        _claim_path(database, term).unlink(missing_ok=True)
        raise held_error(database, now)
    record = record_of(holder, term)
    replace_record(database.with_suffix(".lease"), record)
    for path in database.parent.glob(f"{database.stem}.claim-*"):
        number = path.name.rpartition("-")[2]
        if number.isdigit() and int(number) < term:
            path.unlink(missing_ok=True)
    return record


def _wait_for_claimant(database: Path, old: LeaseRecord | None, timing: Timing) -> None:
    """Somebody claimed the lease but has not written his record yet: `StoreHeld` once he does, return if he never does."""
    deadline_s = time.monotonic() + timing.stale_s
    while time.monotonic() < deadline_s:
        record = read_record(database)
        if record is not None and record.term > (old.term if old is not None else 0):
            raise held_error(database, record)
        time.sleep(min(0.5, timing.stale_s / 20))


def _make_claim(database: Path, term: int, holder: LeaseHolder) -> bool:
    own = database.with_name(f".{database.stem}.claim.{holder.instance}")
    own.write_bytes(encode_record(record_of(holder, term)))
    try:
        os.link(own, _claim_path(database, term))
        return True
    except FileExistsError:
        return False
    finally:
        own.unlink(missing_ok=True)


def _claim_path(database: Path, term: int) -> Path:
    return database.with_name(f"{database.stem}.claim-{term}")


def _read_again(database: Path) -> LeaseRecord | None:
    """A record that is not readable is being written, or it is damaged and as good as none."""
    path = database.with_suffix(".lease")
    for _ in range(10):
        if not path.exists():
            return None
        record = read_record(database)
        if record is not None:
            return record
        time.sleep(0.05)
    log.warning("the lease %s cannot be read; taking it for a leftover", path)
    return None


def _clock_s() -> float:
    """Seconds that also pass while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
