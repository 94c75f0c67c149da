"""What happened on a node and the supervisor has not heard yet: a file for each event, so that prolog, epilog and healthcheck
may write at the same time and a crash loses at most the event being written. Standard library only.

A file's name begins with the boot clock, not with the wall clock, which may step; the order of an earlier boot's events is
kept, and theirs come first. An event's `key` says what it is about: the supervisor applies each key once, so that a delivery
whose answer was lost may be repeated.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 2000
"""Beyond it new events are lost, and counted: a supervisor that stays away must not fill a node's disk."""
MAX_EVENT_BYTES = 16 << 10
MAX_DETAIL_CHARS = 1000
_LOST = "lost"


class NodeEvent(NamedTuple):
    """`kind`: `prolog-refused`, `gate-unknown`, `gate-cap`, `xid`, `ecc`, `remap`, `recovery-action`, `missing`, `unreadable`
    or `job-end`. `time_us`: UTC by this node's clock."""

    key: str
    time_us: int
    kind: str
    device: str | None = None
    code: int | str | None = None
    detail: str = ""
    job: str | None = None
    seconds: float | None = None
    """Of a `job-end`: how long the gate had taken when the job began."""


def now_us() -> int:
    """UTC by this node's clock."""
    return time.time_ns() // 1000


class NodeSpool:
    """The folder `/var/spool/rsup` (0700). Raise OSError where it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, event: NodeEvent) -> bool:
        """Keep an event; False if there is no room. Not fsynced: it costs a disk's time in each prolog, and survives all but
        the host's crash."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(self._names()) >= MAX_FILES:
            self._count_lost()
            return False
        data = json.dumps(event._asdict() | {"detail": event.detail[:MAX_DETAIL_CHARS]}).encode()
        name = f"{_boot_number():020d}-{time.clock_gettime_ns(time.CLOCK_BOOTTIME):020d}-{os.getpid()}"
        temporary = self._folder / f".{name}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, self._folder / f"{name}.json")
        return True

    def pending(self, max_events: int) -> list[tuple[str, dict[str, object]]]:
        """File name and event, oldest first. A file that is no event is removed."""
        found: list[tuple[str, dict[str, object]]] = []
        for name in self._names():
            if len(found) >= max_events:
                break
            event = self._read(name)
            if event is not None:
                found.append((name, event))
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Forget what was delivered."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def take_lost(self) -> int:
        """How many events found no room since the last call."""
        try:
            path = self._folder / _LOST
            num = path.stat().st_size
            path.unlink()
        except OSError:
            return 0
        return num

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._folder) if name.endswith(".json"))
        except FileNotFoundError:
            return []

    def _read(self, name: str) -> dict[str, object] | None:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                event = json.loads(file.read(MAX_EVENT_BYTES))
        except FileNotFoundError:
            return None
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("key"), str):
            path.unlink(missing_ok=True)  # cut off by a full disk or a crash: it would be in the way for good
            return None
        return event

    def _count_lost(self) -> None:
        with (self._folder / _LOST).open("ab") as file:  # its length is the count: appends of several processes add up
            file.write(b".")


def _boot_number() -> int:
    """Grows from boot to boot: the wall clock's time of the boot in steps of ten minutes, against steps of the clock."""
    with open("/proc/stat", "rb") as file:
        for line in file:
            if line.startswith(b"btime "):
                return int(line.split()[1]) // 600
    return 0
