"""Timers that never make the host wait: marks on the device's own time line, read after it has passed them.

A start and a stop each record a CUDA event on the current stream; times are taken from pairs that are over, whenever somebody
asks, and the events go back to a pool. Inside the capture of a graph the events become nodes of the graph (`external=True`), so
that each replay writes them anew: what is read is then the time of the last replay, times the number of replays.
"""

import collections
import contextlib
import statistics
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from rsup.worker.observe.current_stream import current_stream
from rsup.worker.observe.timer_contract import TimerError

_COLLECT_FROM = 256
"""Pairs that a timer lets wait before it looks, at a stop, whether they are over."""


class Mark(Protocol):
    """A moment of the device's time line: what is used of `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        """Whether the device has passed it; does not wait."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to `end`; both have passed."""
        ...


class Marks:
    """Gives marks, and takes those back that are read. `is_capturing`: whether a graph is being captured on this stream."""

    def __init__(
        self,
        make: Callable[[bool], Mark] | None = None,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        """`make(external)`: a new mark; None: CUDA's events."""
        self._make = _make_event if make is None else make
        self._stream: Callable[[], Any] = current_stream if make is None else _no_stream
        self._free: list[Mark] = []
        self.is_capturing = is_capturing

    def get(self) -> Mark:
        """A mark to be recorded."""
        return self._free.pop() if self._free else self._make(False)

    def get_external(self) -> Mark:
        """A mark that becomes a node of the graph that is captured. Raises `TimerError` where torch has none."""
        return self._make(True)

    def record(self, mark: Mark) -> None:
        """Put a mark behind what is queued on the current stream."""
        mark.record(self._stream())

    def give_back(self, *marks: Mark) -> None:
        """They have been read."""
        self._free.extend(marks)


def _no_stream() -> None:
    """For marks of others."""


def _make_event(external: bool) -> Mark:
    if not external:
        return cast(Mark, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    try:
        return cast(Mark, torch.cuda.Event(enable_timing=True, external=True))  # type: ignore[no-untyped-call]
    except TypeError:
        raise TimerError(
            "this torch has no events that a graph can hold: time around the graph, or call the step with eager=True"
        ) from None


class EventTimer:
    """A `TimerLike`, by events of one device. Never waits for it: what has not passed yet counts at a later reading.

    `warn`: takes a line. `num_kept`: the newest times that `take_calls` looks at. Barriers are left out.
    """

    def __init__(self, name: str, marks: Marks, warn: Callable[[str], None], num_kept: int = 0) -> None:
        self.name = name
        self._marks = marks
        self._warn = warn
        self._open: Mark | None = None
        self._is_open_in_graph = False
        self._waiting: collections.deque[tuple[Mark, Mark]] = collections.deque()
        self._in_graph: list[tuple[Mark, Mark]] = []
        self._num_replays = 0
        self._is_run = False
        self._elapsed_s = self._active_s = 0.0
        self._samples: collections.deque[float] | None = collections.deque(maxlen=num_kept) if num_kept else None

    def start(self, barrier: bool | None = None) -> None:
        """Mark the beginning on the current stream. One that runs begins anew, with a warning."""
        if self._open is not None:
            self._warn(f"timer {self.name!r} was started twice: it counts from the second start")
        self._is_open_in_graph = self._marks.is_capturing()
        self._open = mark = self._marks.get_external() if self._is_open_in_graph else self._marks.get()
        self._marks.record(mark)

    def stop(self, barrier: bool | None = None) -> None:
        """Mark the end on the current stream."""
        begin, self._open = self._open, None
        if begin is None:
            self._warn(f"timer {self.name!r} was stopped before it was started: that counts for nothing")
            return
        is_in_graph = self._is_open_in_graph
        end = self._marks.get_external() if is_in_graph else self._marks.get()
        self._marks.record(end)
        if is_in_graph:
            self._in_graph.append((begin, end))
            return
        self._waiting.append((begin, end))
        if len(self._waiting) >= _COLLECT_FROM and not self._marks.is_capturing():
            self.collect()

    def collect(self) -> None:
        """Count the pairs that the device has passed. Waits for nothing; not while a graph is captured."""
        waiting = self._waiting
        are_over = bool(waiting) and waiting[-1][1].query()  # what is behind them all says it for all
        while waiting and (are_over or waiting[0][1].query()):
            begin, end = waiting.popleft()
            self._add(begin.elapsed_time(end) / 1e3)
            self._marks.give_back(begin, end)

    def elapsed_s(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds on the device since the last reset, of what is over. Replays count once the last one is."""
        self.collect()
        replayed_s = self._last_replay_s() * self._num_replays
        elapsed_s = self._elapsed_s + replayed_s
        if reset:
            self._active_s += replayed_s
            self._elapsed_s = 0.0
            if replayed_s or not self._in_graph:
                self._num_replays = 0
        return elapsed_s

    def active_s(self) -> float:
        """Seconds on the device since it was made."""
        self.collect()
        return self._active_s + self._last_replay_s() * self._num_replays

    def set_elapsed(self, elapsed_s: float) -> None:
        """Count what was measured elsewhere."""
        self.collect()
        self._elapsed_s, self._num_replays = elapsed_s, 0

    def take_calls(self) -> tuple[float, int]:
        """The median time of a call since the last call of this, in seconds, and how many calls there were. Of a graph's
        calls those of its last replay are known; while that runs, nothing is told of these iterations: later they would be
        too many calls for the iterations that they are divided by."""
        self.collect()
        samples = list(self._samples or ())
        num_calls = len(samples)
        if self._samples is not None:
            self._samples.clear()
        num_in_graph, in_graph_s = self._num_replays * len(self._in_graph), self._last_replay_s()
        self._num_replays = 0
        if num_in_graph:
            if not in_graph_s:
                return 0.0, 0
            samples.append(in_graph_s / len(self._in_graph))
        return (statistics.median(samples), num_calls + num_in_graph) if samples else (0.0, 0)

    def cancel(self) -> None:
        """What runs does not count."""
        self._open = None

    def drop(self) -> None:
        """Forget what runs and what is not counted yet; the marks go."""
        self._open = None
        self._waiting.clear()
        self._num_replays = 0
        if self._samples is not None:
            self._samples.clear()

    def begin_pass(self) -> None:
        """A pass of the step begins on the host. Where it is captured, what an earlier capture has marked is no more; where it
        is run, no graph is launched in its place, and `replayed` counts nothing."""
        if self._marks.is_capturing():
            self._in_graph.clear()
        self._is_run = not self._marks.is_capturing()

    def replayed(self) -> None:
        """The step was launched: the graph, unless `begin_pass` has heard otherwise."""
        self._num_replays += bool(self._in_graph) and not self._is_run
        self._is_run = False

    def _add(self, elapsed_s: float) -> None:
        self._elapsed_s += elapsed_s
        self._active_s += elapsed_s
        if self._samples is not None:
            self._samples.append(elapsed_s)

    def _last_replay_s(self) -> float:
        """0 where none is over, or the next one writes over it just now."""
        total_ms = 0.0
        if not self._num_replays:
            return total_ms
        with contextlib.suppress(RuntimeError):  # CUDA's answer for marks that no replay has reached yet
            for begin, end in self._in_graph:
                elapsed_ms = begin.elapsed_time(end) if begin.query() and end.query() else -1.0
                if elapsed_ms < 0:
                    return 0.0
                total_ms += elapsed_ms
            return total_ms / 1e3
        return 0.0

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if kind is None:
            self.stop()
        else:
            self.cancel()
