"""Where log bytes end: files and consoles, each behind a thread with a bounded buffer, so that none can hold up a rank.

A sink that makes progress may slow its writers down for a moment (`patience_s` at a full buffer); one that does not loses
what no longer fits, counted and said once.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

BUFFER_BYTES = 8 * 1024 * 1024
WRITE_BYTES = 1024 * 1024


class Target(Protocol):
    """Something that takes bytes, in order. `name` is for people."""

    name: str

    def write(self, data: bytes) -> int:
        """Write some of `data`, blocking as long as that takes; return how many bytes. Raises OSError."""
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

    def write(self, data: bytes) -> int:
        """Append."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
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

    def write(self, data: bytes) -> int:
        """Write; waits where somebody else made the descriptor non-blocking."""
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:
                select.select([], [self._fd], [], 1.0)

    def close(self) -> None:
        """Close our copy."""
        os.close(self._fd)


class TextTarget:
    """A replaced sys.stdout without a descriptor (`contextlib.redirect_stdout`)."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self.name = name
        self._stream = stream

    def write(self, data: bytes) -> int:
        """Write as text."""
        try:
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
        except ValueError as error:  # closed
            raise OSError(errno.EPIPE, str(error)) from None
        return len(data)

    def close(self) -> None:
        """Nothing."""


class Sink:
    """One writer thread for one or several targets. `say` gets one line per target that fails; called from the thread."""

    def __init__(self, name: str, patience_s: float, say: Callable[[str], None], buffer_bytes: int = BUFFER_BYTES) -> None:
        self.name = name
        self.lost_bytes = 0
        self._patience_s = patience_s
        self._say = say
        self._buffer_bytes = buffer_bytes
        self._queue: deque[tuple[Target, bytes]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._stalled = False
        self._lost_while_stalled = 0
        self._failed: set[str] = set()
        self._closing = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"log {name}", daemon=True)
        self._thread.start()

    def put(self, target: Target, data: bytes) -> None:
        """Queue `data`; waits at most `patience_s`, and not at all while the sink is known to be stuck."""
        with self._changed:
            if not self._has_room(len(data)) and not self._stalled:
                self._stalled = not self._changed.wait_for(lambda: self._has_room(len(data)), self._patience_s)
                said = self._stalled and not self._lost_while_stalled
            else:
                said = False
            if self._stalled:
                self.lost_bytes += len(data)
                self._lost_while_stalled += len(data)
            else:
                self._queue.append((target, data))
                self._queued_bytes += len(data)
                self._changed.notify_all()
        if said:
            self._say_once(target, f"{target.name} does not take any more output; what does not fit is dropped")

    def flush(self, deadline: float) -> bool:
        """Wait until all is written; False if it is not by `deadline` (monotonic seconds), at once if the sink is stuck."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued_bytes or self._stalled, max(0.0, deadline - time.monotonic()))
            return not self._queued_bytes

    def close(self, deadline: float) -> bool:
        """Flush and end the thread; False if it is stuck in a write (a daemon thread, which goes with the process)."""
        flushed = self.flush(deadline)
        with self._changed:
            self._closing = True
            if not flushed:
                self._abandoned = True
                self.lost_bytes += self._queued_bytes
                self._queue.clear()
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()) if flushed else 0.0)
        return not self._thread.is_alive()

    def release(self, target: Target) -> None:
        """Close a target once what is queued for it is written."""
        with self._changed:
            self._queue.append((target, b""))
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + size_bytes <= self._buffer_bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                target, data = self._take()
            if data:
                self._write(target, data)
            else:
                target.close()
            self._written(target, len(data))

    def _take(self) -> tuple[Target, bytes]:
        """The next bytes for one target, small pieces joined."""
        target, data = self._queue.popleft()
        if not data:
            return target, data
        pieces, size_bytes = [data], len(data)
        while self._queue and size_bytes < WRITE_BYTES and self._queue[0][0] is target and self._queue[0][1]:
            pieces.append(self._queue.popleft()[1])
            size_bytes += len(pieces[-1])
        return target, b"".join(pieces)

    def _write(self, target: Target, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._abandoned:
            try:
                view = view[target.write(bytes(view[:WRITE_BYTES])) :]
            except OSError as error:
                with self._changed:
                    self.lost_bytes += len(view)
                self._say_once(target, f"cannot write to {target.name}: {error.strerror}; output is lost, training goes on")
                return

    def _written(self, target: Target, size_bytes: int) -> None:
        with self._changed:
            self._queued_bytes -= size_bytes
            if self._stalled and self._queued_bytes <= self._buffer_bytes // 2:
                gap = f"\n[rsup: {self._lost_while_stalled} bytes of output were lost here]\n".encode()
                self._stalled, self._lost_while_stalled = False, 0
                self._queue.append((target, gap))
                self._queued_bytes += len(gap)
            self._changed.notify_all()

    def _say_once(self, target: Target, text: str) -> None:
        if target.name not in self._failed:
            self._failed.add(target.name)
            self._say(text)


class Console:
    """The console behind a sink: whole lines, and never one rank's text in the middle of another's line.

    An unfinished line stays open for its owner alone. When somebody else writes, it is ended with `BROKEN_LINE`.
    """

    BROKEN_LINE = b" [...]\n"

    def __init__(self, sink: Sink, target: Target) -> None:
        self._sink = sink
        self._target = target
        self._lock = threading.Lock()
        self._open: object = None

    def put(self, owner: object, data: bytes, prefix: bytes = b"") -> None:
        """Write `data`: lines, the last of which may be unfinished. Each line gets `prefix`."""
        with self._lock:
            before = b"" if self._open in (None, owner) else self.BROKEN_LINE
            continues = self._open is owner
            self._open = None if data.endswith(b"\n") else owner
            if prefix:
                lines = data.splitlines(keepends=True) if b"\r" not in data else _split_newlines(data)
                data = (b"" if continues else prefix) + prefix.join(lines)
            self._sink.put(self._target, before + data)

    def close(self) -> None:
        """Nothing more is written."""
        self._sink.release(self._target)

    def finish(self, owner: object) -> None:
        """The owner writes no more: end its line, if one is open."""
        with self._lock:
            if self._open is owner:
                self._open = None
                self._sink.put(self._target, b"\n")


def _split_newlines(data: bytes) -> list[bytes]:
    """Lines by newline alone: carriage returns are a progress bar's."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


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
