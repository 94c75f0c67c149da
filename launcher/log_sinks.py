"""What stands before files and consoles: a thread with a bounded buffer each, so that none can stop a rank for good.

A sink with a full buffer slows its writers down as long as it takes something now and then; one that has taken nothing for
`patience_s` loses what no longer fits, counted and said once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from rsup.launcher.log_targets import POLL_S, Target

BUFFER_BYTES = 8 * 1024 * 1024
WRITE_BYTES = 1024 * 1024
OWN_BYTES = 1024 * 1024
"""Room beyond a full buffer for the lines that must not wait: our own."""
LAST_MOMENT_S = 0.2
LAST_WRITE_S = 1.0


def gap_line(lost_bytes: int) -> bytes:
    """What stands where output is missing."""
    return f"\n[rsup: {lost_bytes} bytes of output were lost here]\n".encode()


class Sink:
    """One writer thread for one or several targets. `say` gets one line for each way of failing, also where it befalls many
    files; called from the thread. `gap` makes the line that stands where bytes were lost, from their number."""

    def __init__(
        self,
        name: str,
        patience_s: float,
        say: Callable[[str], None],
        buffer_bytes: int = BUFFER_BYTES,
        gap: Callable[[int], bytes] = gap_line,
    ) -> None:
        self.name = name
        self.lost_bytes = 0
        self.progress_s = time.monotonic()
        """When a target last took something."""
        self._patience_s = patience_s
        self._say = say
        self._buffer_bytes = buffer_bytes
        self._queue: deque[tuple[Target, bytes]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._stalled = False
        self._lost_while_stalled = 0
        self._lost_by: dict[Target, int] = {}
        self._gap = gap
        self._said: set[str] = set()
        self._closing = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"log {name}", daemon=True)
        self._thread.start()

    def put(self, target: Target, data: bytes, wait: bool = True) -> None:
        """Queue `data`, after `make_room`; without `wait` at once, if need be beyond the buffer's end."""
        if wait:
            self.make_room(target, len(data))
        with self._changed:
            fits = self._has_room(len(data) - OWN_BYTES) and not self._stalled and not self._abandoned
            if fits:
                self._queue.append((target, data))
                self._queued_bytes += len(data)
                self._changed.notify_all()
            else:
                self.lost_bytes += len(data)
                self._lost_while_stalled += len(data)

    def make_room(self, target: Target, size_bytes: int) -> None:
        """Wait until so much fits: until nothing has been taken for `patience_s`, and not at all while the sink is known to
        be stuck."""
        since_s = time.monotonic()
        with self._changed:
            while not (self._stalled or self._abandoned or self._has_room(size_bytes)):
                left_s = max(since_s, self.progress_s) + self._patience_s - time.monotonic()
                self._stalled = left_s <= 0
                self._changed.wait(max(0.0, left_s))
            stalled = self._stalled
        if stalled:
            self._say_once(target.name, f"{target.name} does not take any more output; what does not fit is dropped")

    def flush(self, deadline: float) -> bool:
        """Wait until all is written; False if it is not by `deadline` (monotonic seconds), at once if the sink is stuck."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued_bytes or self._stalled, max(0.0, deadline - time.monotonic()))
            return not self._queued_bytes

    def abandon_if_full(self) -> None:
        """Where somebody may wait for room, wait for nothing any more: what is queued, and what comes, is lost."""
        with self._changed:
            self._abandoned = self._abandoned or self._queued_bytes > self._buffer_bytes // 2
            self._changed.notify_all()

    def close(self, patience_s: float, give_up: Callable[[], bool]) -> bool:
        """Flush until nothing has been taken for `patience_s`, the reader has gone or `give_up` says so; end the thread. What
        is left is lost. False if it is stuck in a write (a daemon thread, which goes with the process)."""
        since_s = time.monotonic()
        with self._changed:
            while self._queued_bytes and not self._abandoned:
                taken_s = self.progress_s if self._stalled else max(since_s, self.progress_s)
                now_s = time.monotonic()
                self._abandoned = now_s - taken_s > patience_s or (give_up() and now_s - since_s > LAST_MOMENT_S)
                self._changed.wait(POLL_S)
            self._closing = True
            if self._abandoned:
                self._queue.clear()
            self._changed.notify_all()
        self._thread.join(LAST_WRITE_S)
        with self._changed:
            self.lost_bytes += self._queued_bytes
            self._queued_bytes = 0
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
        if lost_bytes := self._lost_by.pop(target, 0):  # of earlier writes
            view = memoryview(self._gap(lost_bytes) + data)
            with self._changed:
                self._queued_bytes += len(view) - len(data)
        while view and not self._abandoned:
            try:
                size_bytes = target.write(view[:WRITE_BYTES])
            except OSError as error:
                lost_now = min(len(view), len(data))
                self._lost_by[target] = lost_bytes + lost_now
                self._written(target, len(view), lost_now)
                why = error.strerror
                self._say_once(f"{why}", f"cannot write to {target.name}: {why}; output is lost, training goes on")
                return
            view = view[size_bytes:]
            if size_bytes:
                self._written(target, size_bytes)

    def _written(self, target: Target, size_bytes: int, lost_bytes: int = 0) -> None:
        with self._changed:
            self.progress_s = time.monotonic()
            self._queued_bytes -= size_bytes
            self.lost_bytes += lost_bytes
            if self._stalled and self._queued_bytes <= self._buffer_bytes // 2:
                gap = self._gap(self._lost_while_stalled)
                self._stalled, self._lost_while_stalled = False, 0
                self._queue.append((target, gap))
                self._queued_bytes += len(gap)
            self._changed.notify_all()

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(text)


class Console:
    """The console behind a sink: whole lines, and never one rank's text in the middle of another's line.

    An unfinished line stays open for its owner alone. When somebody else writes, it is ended with `BROKEN_LINE`; but not a
    progress bar (a line with carriage returns): another's bar is drawn over it, another's line begins below it.
    """

    BROKEN_LINE = b" [...]\n"

    def __init__(self, sink: Sink, target: Target) -> None:
        self.sink = sink
        self._target = target
        self._lock = threading.Lock()
        self._open: object = None
        self._open_is_bar = False

    def put(self, owner: object, data: bytes, prefix: bytes = b"", wait: bool = True) -> None:
        """Write `data`: lines, the last of which may be unfinished. Each line gets `prefix`. Without `wait`: whatever else
        waits for room."""
        if wait:
            self.sink.make_room(self._target, len(data))
        with self._lock:
            continues = self._open is owner
            text = data
            if prefix:
                lines = data.splitlines(keepends=True) if b"\r" not in data else _split_newlines(data)
                text = (b"" if continues else prefix) + prefix.join(lines)
            before = b"" if self._open is None or continues else self._before(data, text)
            last_line = data[data.rfind(b"\n") + 1 :]
            self._open_is_bar = b"\r" in last_line or (continues and self._open_is_bar and last_line == data)
            self._open = owner if last_line else None
            self.sink.put(self._target, before + text, wait=False)

    def _before(self, data: bytes, text: bytes) -> bytes:
        """What goes between somebody's unfinished line and another's text."""
        if not self._open_is_bar:
            return self.BROKEN_LINE
        if data == b"\n":  # the end of a bar that was drawn over
            return b""
        if b"\r" in data and b"\n" not in data:
            return b"" if text.startswith(b"\r") else b"\r"
        return b"\n"

    def close(self) -> None:
        """Nothing more is written."""
        self.sink.release(self._target)

    def finish(self, owner: object, ends_line: bool = True) -> None:
        """The owner writes no more: end its line, if one is open; without `ends_line` what looks open shows nothing."""
        with self._lock:
            if self._open is owner:
                self._open = None
                if ends_line:
                    self.sink.put(self._target, b"\n", wait=False)


def _split_newlines(data: bytes) -> list[bytes]:
    """Lines by newline alone: carriage returns are a progress bar's."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]
