"""A writer whose work is done by a thread of its own, so that no disk and no network ever holds up a step.

The training thread appends a row to a bounded queue. The thread opens the sink, which may import a large package and look for
a server, gives it the rows about once a second, and keeps what it had to say for the training thread, which alone warns.

The thread knows the sink and the queue, and nobody else: one that never ends would keep the trainer alive whose `warn` it had,
and with it the model, through every restart in the same process.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rsup.worker.observe.contract import CLOSE_WITHIN_S, Point, Warn

MAX_PENDING = 10_000
"""Rows that wait for a slow sink; a run that writes each step of 70 ms fills it in 12 minutes."""
WRITE_EVERY_S = 1.0
FLUSH_WITHIN_S = 10.0


class Row(NamedTuple):
    """What one call of `write` brought; `at_s` is when it was true, in seconds since the epoch."""

    iteration: int
    consumed_samples: int
    at_s: float
    points: Sequence[Point]


class Sink(Protocol):
    """Where rows go. All calls are on one thread, `open` first and `close` last; what they raise ends the writer."""

    def open(self, remark: Callable[[str], None]) -> None:
        """Begin. `remark`: has the training thread warn of something that does not end the writer."""
        ...

    def put(self, rows: Sequence[Row]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class BackgroundWriter:
    """A `Writer` around a sink.

    `put_at`: so many rows wake the thread before its second is over. `waits_at_flush`: false for a sink whose `flush` makes
    nothing visible: then nobody waits for it. A call of `write` costs the training thread about a microsecond.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        warn: Warn,
        *,
        put_at: int = 1000,
        max_pending: int = MAX_PENDING,
        waits_at_flush: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._warn = warn
        self._put_at = put_at
        self._max_pending = max_pending
        self._waits_at_flush = waits_at_flush
        self._clock = clock
        self._is_closed = False
        self._num_left_out = 0
        self._said: set[str] = set()
        self._work = _Work(name, sink)
        self._thread = threading.Thread(target=self._work.run, name=f"rsup-{name}", daemon=True)
        self._thread.start()

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point], *, at_s: float | None = None) -> None:
        """See `Writer`."""
        work = self._work
        if work.failure or work.remarks:
            self._say()
        if work.failure or self._is_closed:
            return
        if len(work.rows) >= self._max_pending:
            self._leave_out(iteration)
            return
        work.rows.append(Row(iteration, consumed_samples, self._clock() if at_s is None else at_s, points))
        if len(work.rows) == self._put_at:
            work.wake.set()

    def flush(self) -> None:
        """See `Writer`; waits `FLUSH_WITHIN_S` at most, and never again once that was not enough."""
        if not self._work.failure and not self._is_closed:
            self._work.ask_for_flush()
            is_waited_for = self._waits_at_flush and not self._work.failure
            if is_waited_for and not self._work.flushed.wait(FLUSH_WITHIN_S):
                self._waits_at_flush = False
                self._say_once(
                    f"{self.name} was not flushed within {FLUSH_WITHIN_S:g} s: training waits for it no more,"
                    " and what is newest there may come late"
                )
        self._say()

    def begin_close(self) -> None:
        """See `ClosesLater`."""
        self._is_closed = self._work.is_closing = True
        self._work.wake.set()

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """See `Writer`; waits `within_s` at most."""
        if self._warn is _nobody:
            return
        self.begin_close()
        self._thread.join(max(0.0, within_s))
        self._say()
        if self._thread.is_alive():
            self._warn(f"{self.name} did not end in time ({within_s:.0f} s): its last points may be missing")
        elif self._num_left_out:
            self._warn(f"{self.name} lacks {self._num_left_out} rows, which it could not take in time")
        self._warn = _nobody

    @property
    def has_all(self) -> bool:
        """Whether it has ended in order, and its sink has all rows."""
        return not (self._thread.is_alive() or self._work.failure or self._num_left_out)

    def _leave_out(self, iteration: int) -> None:
        if not self._num_left_out:
            self._warn(f"{self.name} is slower than the training: from iteration {iteration} on, what does not fit is left out")
        self._num_left_out += 1

    def _say(self) -> None:
        while self._work.remarks:
            self._say_once(self._work.remarks.popleft())
        if self._work.failure:
            self._work.rows.clear()
            self._say_once(self._work.failure)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._warn(text)


class _Work:
    """What the two threads share, and what the one beside the training does."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.rows: collections.deque[Row] = collections.deque()
        self.remarks: collections.deque[str] = collections.deque()
        self.failure = ""
        self.wake = threading.Event()
        self.flushed = threading.Event()
        self.is_closing = False
        self._is_flush_due = False
        self._name = name
        self._sink = sink

    def ask_for_flush(self) -> None:
        """By the training thread."""
        self.flushed.clear()
        self._is_flush_due = True
        self.wake.set()

    def run(self) -> None:
        """The thread."""
        doing = "cannot be opened"
        try:
            self._sink.open(self.remarks.append)
            doing = "cannot be written"
            while not self.is_closing:
                self.wake.wait(WRITE_EVERY_S)
                self.wake.clear()
                self._put()
            self._put()
            self._sink.close()
        except Exception as error:  # the outermost frame of the thread: it becomes a warning
            self.failure = f"{self._name} {doing}, nothing more goes there: {_reason(error)}"
            self.rows.clear()
            with contextlib.suppress(Exception):  # what made it fail may well keep it from closing in order
                self._sink.close()
        finally:
            self.flushed.set()

    def _put(self) -> None:
        is_flush_due, self._is_flush_due = self._is_flush_due, False
        rows = [self.rows.popleft() for _ in range(len(self.rows))]
        if rows:
            self._sink.put(rows)
        if is_flush_due:
            self._sink.flush()
            self.flushed.set()


def _nobody(text: str, /) -> None:
    """Whom a closed writer warns: it must not keep a trainer alive."""


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:500] if text and isinstance(error, OSError) else f"{type(error).__name__}: {text[:500]}"
