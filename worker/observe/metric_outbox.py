"""Numbers of the training on their way to the supervisor: at most one message a second and kind, whatever the loop reports.

A run begins finely: its first `FINE_POINTS` of a series go out as they come, each second. Then a curve is long enough that
nobody sees the difference, and two points every `LATER_S` are sent, which costs this process and the store next to nothing.

The training thread appends (`take`), the session's thread sends (`due`). What comes faster than it goes is put together with
its neighbours (mean, lowest, highest, newest: `wire.MetricBin`), so that nothing is lost but resolution, also while the agent
does not read.
"""

import collections
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rsup.supervisor import wire
from rsup.supervisor.wire import MetricBin
from rsup.worker.warned import warn_safely

EVERY_S = 1.0
LATER_S = 5.0
FINE_POINTS = 500
LATER_BINS = 2
MAX_TAKEN = 8192
"""Calls of `report_metrics` between two turns of the session's thread. Beyond it the oldest are lost: the thread stands."""
MAX_BINS = 512
"""In one message, over all its series: with names of full length that is well below `wire.MAX_RANK_MESSAGE_BYTES`."""

LARGEST = 2**62 - 1

COLLECT_FROM = 1024
"""So many calls are sorted in though nothing is due: memory stays small."""

MAX_OVER = 64
"""Messages of earlier entries that wait: an agent that does not read for so many restarts gets the newest."""

_Taken = tuple[str, int, int, int, dict[str, float], int]
"""Kind, iteration, time, consumed samples, values, entry."""


def _bounded(number: int) -> int:
    """What a message and a column hold, whatever kind of integer it came as."""
    return max(0, min(int(number), LARGEST))


class MetricOutbox:
    """What one rank has reported and not sent."""

    def __init__(self) -> None:
        self.entry = 0
        """The rank's present entry into its training function, by the training thread; 0: without in-process restart."""
        self._waiting_entry = 0
        self._over: collections.deque[wire.RankMetrics] = collections.deque(maxlen=MAX_OVER)
        """What waited when another entry began: it is told as of its own."""
        self._taken: collections.deque[_Taken] = collections.deque(maxlen=MAX_TAKEN)
        self._waiting: dict[str, dict[str, list[MetricBin]]] = {}
        self._names: dict[str, set[str]] = {}
        self._sent_s: dict[str, float] = {}
        self._num_sent: dict[str, int] = {}
        """By kind: points of its longest series."""
        self._warned: set[str] = set()

    def take(
        self,
        iteration: int,
        values: Mapping[str, float],
        consumed_samples: int,
        kind: str,
        at_s: float | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """By the training thread. Raise ValueError for an unknown `kind`; bad names and values are left out with a warning.

        `at_s`: when the numbers were true, in seconds since the epoch (None: now). `warn`: says a line (None: a warning of
        Python's, which is none of the training's errors).
        """
        if kind not in wire.METRIC_KINDS:
            raise ValueError(f"unknown kind of metrics {kind!r}; use one of {wire.METRIC_KINDS}")
        names = self._names.setdefault(kind, set())
        good = {name: value for name, value in values.items() if type(value) is float and name in names}
        if len(good) < len(values):
            good = dict(self._checked(values, kind, names, warn))
        if good:
            at_us = time.time_ns() // 1000 if at_s is None else int(at_s * 1e6)
            where = (_bounded(iteration), at_us, _bounded(consumed_samples))
            self._taken.append((kind, *where, good, self.entry))

    def _checked(
        self, values: Mapping[str, float], kind: str, names: set[str], warn: Callable[[str], None] | None
    ) -> Iterator[tuple[str, float]]:
        for key, value in values.items():
            name = str(key)
            if name not in names:
                if not name.isprintable() or not 0 < len(name.encode()) <= wire.MAX_METRIC_NAME_BYTES:
                    most = wire.MAX_METRIC_NAME_BYTES
                    self._say(
                        f"the metric {name[:80]!r} is left out: a name has 1 to {most} bytes, all of them printable", warn
                    )
                    continue
                if len(names) >= wire.MAX_METRICS_A_KIND:
                    most = wire.MAX_METRICS_A_KIND
                    self._say(f"there are more than {most} {kind} metrics: {name!r} and further ones are left out", warn, kind)
                    continue
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is a tensor's of several numbers
                self._say(f"the metric {name!r} is left out: {type(value).__name__} is no number", warn)
                continue
            names.add(name)
            yield name, number

    def _say(self, text: str, warn: Callable[[str], None] | None, once: str = "") -> None:
        if (once or text) in self._warned:
            return
        self._warned.add(once or text)
        if warn is None:
            warn_safely(text, 6)
        else:
            warn(text)

    # ------------------------------------------------------------------------------------------- by the session's thread

    def due(self, now_s: float, *, all_of_it: bool = False) -> list[wire.RankMetrics]:
        """What is to be sent now. `now_s`: monotonic; `all_of_it`: also what was to wait for its second."""
        is_due = all_of_it or any(self._is_due(kind, now_s) for kind in tuple(self._names))  # the training thread adds to it
        if self._taken and (is_due or len(self._taken) >= COLLECT_FROM):
            self._collect()
        messages = list(self._over)
        self._over.clear()
        for kind in list(self._waiting):
            if all_of_it or self._is_due(kind, now_s):
                series = self._waiting.pop(kind)
                self._sent_s[kind] = now_s
                self._num_sent[kind] = self._num_sent.get(kind, 0) + max(map(len, series.values()))
                messages.append(wire.RankMetrics(kind, series, self._waiting_entry))
        return messages

    @property
    def is_empty(self) -> bool:
        """Nothing waits. From any thread."""
        return not (self._taken or self._waiting or self._over)

    def _is_fine(self, kind: str) -> bool:
        return self._num_sent.get(kind, 0) < FINE_POINTS

    def _is_due(self, kind: str, now_s: float) -> bool:
        return now_s - self._sent_s.get(kind, -math.inf) >= (EVERY_S if self._is_fine(kind) else LATER_S)

    def _collect(self) -> None:
        """Sort what was taken into series, and keep each kind small enough for one message."""
        columns: dict[str, dict[str, tuple[list[_Taken], list[float]]]] = {}
        for _ in range(len(self._taken)):
            one = self._taken.popleft()
            if one[5] != self._waiting_entry:
                self._sort_in(columns)
                columns = {}
                self._over.extend(wire.RankMetrics(*waits, self._waiting_entry) for waits in self._waiting.items())
                self._waiting = {}
                self._waiting_entry = one[5]
            of_kind = columns.setdefault(one[0], {})
            for name, value in one[4].items():
                column = of_kind.get(name)
                if column is None:
                    column = of_kind[name] = ([], [])
                column[0].append(one)
                column[1].append(value)
        self._sort_in(columns)

    def _sort_in(self, columns: Mapping[str, Mapping[str, tuple[list[_Taken], list[float]]]]) -> None:
        for kind, of_kind in columns.items():
            series = self._waiting.setdefault(kind, {})
            num = len(series.keys() | of_kind.keys())
            most = max(1, MAX_BINS // num) if self._is_fine(kind) else min(LATER_BINS, max(1, MAX_BINS // num))
            for name, (told, values) in of_kind.items():
                series[name] = _joined(series.get(name, []), told, values, most)
            for name, bins in series.items():
                if len(bins) > most:
                    series[name] = wire.thinned(bins, most)


def _joined(bins: list[MetricBin], told: Sequence[_Taken], values: Sequence[float], most: int) -> list[MetricBin]:
    """The series with these values at its end; where that goes back, what lay there counts no more."""
    steps = [one[1] for one in told]
    goes_on = all(map(operator.lt, steps, steps[1:])) and (not bins or bins[-1].iteration < steps[0])
    if goes_on and len(values) > most:
        size = -(-len(values) // most)
        return bins + [_bin(told[i : i + size], values[i : i + size]) for i in range(0, len(values), size)]
    bins = list(bins)
    for one, value in zip(told, values, strict=True):
        while bins and one[1] <= bins[-1].first:
            bins.pop()
        if bins and one[1] <= bins[-1].iteration:  # in the middle of several: they go as a whole
            bins.pop()
        bins.append(MetricBin.of(one[1], one[2], one[3], value))
    return bins


def _bin(told: Sequence[_Taken], values: Sequence[float]) -> MetricBin:
    """One for a stretch of iterations."""
    total = sum(values)
    if not math.isfinite(total):
        whole = MetricBin.of(*told[0][1:4], values[0])
        for one, value in zip(told[1:], values[1:], strict=True):
            whole = whole.joined(MetricBin.of(*one[1:4], value))
        return whole
    iteration, at_us, consumed_samples = told[-1][1:4]
    mean, last = total / len(values), values[-1]
    return MetricBin(told[0][1], iteration, at_us, consumed_samples, mean, min(values), max(values), last, len(values))
