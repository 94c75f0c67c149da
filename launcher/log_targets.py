"""Where log bytes end: files, and consoles, which take a piece at a time, so that a slow reader is seen to take something."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import Protocol, TextIO

PIECE_BYTES = select.PIPE_BUF
"""What a pipe or terminal that is ready takes without blocking; also what we see of a slow reader's progress."""
READY_WITHIN_MS = 200
POLL_S = 0.05


class Target(Protocol):
    """Something that takes bytes, in order. `name` is for people."""

    name: str

    def write(self, data: memoryview) -> int:
        """Write some of `data`; return how many bytes, 0 if it takes none for now. May block. Raises OSError."""
        ...

    def close(self) -> None:
        """Release it. Does not raise."""
        ...


class FileTarget:
    """A log file, made at its first byte."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._fd = -1

    def write(self, data: memoryview) -> int:
        """Append."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return os.write(self._fd, data)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FdTarget:
    """A console by its descriptor, which is not ours to make non-blocking: others write to the same terminal."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self._fd = os.dup(fd)  # a writer that was left stuck must not hit what gets the number next
        self._ready: select.poll | None = None
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self._ready = select.poll()
            self._ready.register(self._fd, select.POLLOUT)

    def write(self, data: memoryview) -> int:
        """Write a piece once the other side is ready for one; waits for that only for a moment."""
        if self._ready is None:
            return os.write(self._fd, data)
        if not self._ready.poll(READY_WITHIN_MS):
            return 0
        try:
            return os.write(self._fd, data[:PIECE_BYTES])
        except BlockingIOError:  # somebody else made it non-blocking, and was faster
            time.sleep(POLL_S)
            return 0

    def close(self) -> None:
        """Close our copy."""
        os.close(self._fd)


class TextTarget:
    """A replaced sys.stdout without a descriptor (`contextlib.redirect_stdout`)."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self.name = name
        self._stream = stream

    def write(self, data: memoryview) -> int:
        """Write as text."""
        try:
            self._stream.write(bytes(data).decode(errors="replace"))
            self._stream.flush()
        except ValueError as error:  # closed
            raise OSError(errno.EPIPE, str(error)) from None
        return len(data)

    def close(self) -> None:
        """Nothing."""


def console_target(name: str, stream: TextIO | None) -> Target | None:
    """The target of sys.stdout or what stands in its place; None where there is no console."""
    if stream is None:
        return None
    try:
        stream.flush()
        return FdTarget(name, stream.fileno())
    except (OSError, ValueError):
        return None if stream.closed else TextTarget(name, stream)


def same_file(a: TextIO | None, b: TextIO | None) -> bool:
    """Whether two consoles are one (a terminal, `2>&1`)."""
    if a is None or b is None:
        return False
    if a is b:
        return True
    try:
        first, second = os.fstat(a.fileno()), os.fstat(b.fileno())
    except (OSError, ValueError):
        return False
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)
