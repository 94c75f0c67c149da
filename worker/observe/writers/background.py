"""A writer whose work is done by a thread of its own, so that no disk and no network ever holds up a step.

The training thread appends a row to a bounded queue. The thread opens the sink, which may import a large package and look for
a server, gives it the rows about once a second, and keeps what it had to say for the training thread, which alone warns.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rsup.worker.observe.contract import Point, Warn

MAX_PENDING = 10_000
"""Rows that wait for a slow sink; a run that writes each step of 70 ms fills it in 12 minutes."""
WRITE_EVERY_S = 1.0
FLUSH_WITHIN_S = 10.0
CLOSE_WITHIN_S = 30.0


class Row(NamedTuple):
    """What one call of `write` brought; `at_s` is when it did, in seconds since the epoch."""

    iteration: int
    consumed_samples: int
    at_s: float
    points: Sequence[Point]


class Sink(Protocol):
    """Where rows go. All calls are on one thread, `open` first and `close` last; what they raise ends the writer."""

    def open(self) -> None: ...

    def put(self, rows: Sequence[Row]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class BackgroundWriter:
    """A `Writer` around a sink.

    `put_at`: so many rows wake the thread before its second is over. A call costs the training thread about a microsecond.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        warn: Warn,
        *,
        put_at: int = 1000,
        max_pending: int = MAX_PENDING,
        close_within_s: float = CLOSE_WITHIN_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._sink = sink
        self._warn = warn
        self._put_at = put_at
        self._max_pending = max_pending
        self._close_within_s = close_within_s
        self._clock = clock
        self._rows: collections.deque[Row] = collections.deque()
        self._wake = threading.Event()
        self._flushed = threading.Event()
        self._is_flush_due = False
        self._is_closing = False
        self._is_closed = False
        self._num_left_out = 0
        self._failure = ""
        self._said: set[str] = set()
        self._remarks: collections.deque[str] = collections.deque()
        self._thread = threading.Thread(target=self._run, name=f"rsup-{name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- on the training thread

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point]) -> None:
        """See `Writer`."""
        if self._failure or self._remarks:
            self._say()
        if self._failure or self._is_closed:
            return
        if len(self._rows) >= self._max_pending:
            self._leave_out(iteration)
            return
        self._rows.append(Row(iteration, consumed_samples, self._clock(), points))
        if len(self._rows) == self._put_at:
            self._wake.set()

    def flush(self) -> None:
        """See `Writer`; waits `FLUSH_WITHIN_S` at most."""
        if not self._failure and not self._is_closed:
            self._flushed.clear()
            self._is_flush_due = True
            self._wake.set()
            self._flushed.wait(FLUSH_WITHIN_S)
        self._say()

    def close(self) -> None:
        """See `Writer`; waits as long as it was made to, at most."""
        if self._is_closed:
            return
        self._is_closed = self._is_closing = True
        self._wake.set()
        self._thread.join(self._close_within_s)
        self._say()
        if self._thread.is_alive():
            self._warn(f"{self.name} did not end within {self._close_within_s:.0f} s: its last points may be missing")
        elif self._num_left_out:
            self._warn(f"{self.name} lacks {self._num_left_out} rows, which it could not take in time")

    def _leave_out(self, iteration: int) -> None:
        if not self._num_left_out:
            self._warn(f"{self.name} is slower than the training: from iteration {iteration} on, what does not fit is left out")
        self._num_left_out += 1

    def _say(self) -> None:
        while self._remarks:
            self._say_once(self._remarks.popleft())
        if self._failure:
            self._rows.clear()
            self._say_once(self._failure)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._warn(text)

    # ----------------------------------------------------------------------------------------------- on its own thread

    def remark(self, text: str) -> None:
        """Have the training thread warn of something that does not end the writer. For the sink."""
        self._remarks.append(text)

    def _run(self) -> None:
        doing = "cannot be opened"
        try:
            self._sink.open()
            doing = "cannot be written"
            while not self._is_closing:
                self._wake.wait(WRITE_EVERY_S)
                self._wake.clear()
                self._put()
            self._put()
            self._sink.close()
        except Exception as error:  # the outermost frame of the thread: it becomes a warning
            self._failure = f"{self.name} {doing}, nothing more goes there: {_reason(error)}"
            self._rows.clear()
            with contextlib.suppress(Exception):  # what made it fail may well keep it from closing in order
                self._sink.close()
        finally:
            self._flushed.set()

    def _put(self) -> None:
        is_flush_due, self._is_flush_due = self._is_flush_due, False
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if rows:
            self._sink.put(rows)
        if is_flush_due:
            self._sink.flush()
            self._flushed.set()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:500] if text and isinstance(error, OSError) else f"{type(error).__name__}: {text[:500]}"
