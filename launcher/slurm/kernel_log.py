"""The kernel's log (`/dev/kmsg`) as numbered lines. The numbers grow by one and begin anew with each boot, whatever clocks do.
A regular file with lines of the same form stands for it in tests. Standard library only: the prolog imports this.
"""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

MAX_RECORD_BYTES = 16384
FAST_S = 0.05
"""What the prolog spends on it at most."""
NOT_READ = -1


def records(path: Path, within_s: float) -> Iterator[tuple[int, str]]:
    """Number and text of what is in the log now, oldest first; stops after that time. Nothing where it cannot be read."""
    deadline_s = time.monotonic() + within_s
    for record in _raw(path):
        head, _, text = record.partition(b";")
        words = head.split(b",", 2)
        if len(words) == 3 and words[1].isdigit():
            yield int(words[1]), text.split(b"\n", 1)[0].decode("utf-8", "replace")
        if time.monotonic() > deadline_s:
            return


def last_sequence(path: Path) -> int:
    """The number of the newest line, `NOT_READ` where that is not to be had in time: Xids of the job are then those that nobody
    has told before."""
    deadline_s = time.monotonic() + FAST_S
    last = b""
    for record in _raw(path):
        last = record
        if time.monotonic() > deadline_s:
            return NOT_READ
    words = last.split(b",", 2)
    return int(words[1]) if len(words) == 3 and words[1].isdigit() else NOT_READ


def _raw(path: Path) -> Iterator[bytes]:
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    with os.fdopen(log, "rb", buffering=0) as file:
        if stat.S_ISREG(os.fstat(log).st_mode):
            yield from (line for line in file.read().split(b"\n") if line)
            return
        while True:
            try:
                record = os.read(log, MAX_RECORD_BYTES)
            except BrokenPipeError:  # lines were written over before we read them
                continue
            except OSError:  # EAGAIN: that is all; EINVAL: a record longer than any
                return
            if not record:
                return
            yield record
