"""TensorBoard's event files, written without torch and without TensorFlow.

Curves over consumed samples lie in a folder of their own below the others. The mark by which TensorBoard forgets what a resumed
run does again names a step and counts for a whole folder: one for iterations would wipe out all that lies further along an axis
of samples (torch's `SummaryWriter(purge_step=...)` does).
"""

import contextlib
import importlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsup.worker.observe.contract import Point
from rsup.worker.observe.writers.background import Row

if TYPE_CHECKING:
    from rsup.worker.observe.writers.record_file import RecordFile

SAMPLES_FOLDER = "vs-samples"
EVENT_MODULE = "tensorboard.compat.proto.event_pb2"
RECORD_MODULE = "rsup.worker.observe.writers.record_file"
"""Imported only when it is written: it needs numpy."""
_START_OF_SESSION = 1
"""tensorboard.SessionLog.START"""

Event = tuple[int, float, list[tuple[str, float]]]
"""Step, time in seconds since the epoch, tags and values."""


class TensorBoardFiles:
    """A sink: two event files, each made when its first value comes.

    `resumed_at`, `resumed_samples`: what earlier attempts wrote of later iterations and samples is forgotten: it is done again.
    """

    def __init__(self, folder: Path, resumed_at: int, resumed_samples: int) -> None:
        self._by_iteration = _EventFile(folder, resumed_at)
        self._by_samples = _EventFile(folder / SAMPLES_FOLDER, resumed_samples)

    def open(self, remark: Callable[[str], None]) -> None:
        """Make the first file, so that a folder that cannot be written is known at once."""
        self._by_iteration.open()

    def put(self, rows: Sequence[Row]) -> None:
        """Append, and hand it to the operating system: about once a second, whatever comes later."""
        self._by_iteration.append((row.iteration, row.at_s, _values(row.points)) for row in rows)
        over_samples = ((row, [point for point in row.points if point.vs_samples]) for row in rows)
        self._by_samples.append((row.consumed_samples, row.at_s, _values(of, " vs samples")) for row, of in over_samples if of)
        self.flush()

    def flush(self) -> None:
        """Hand to the operating system what is still here."""
        self._by_iteration.flush()
        self._by_samples.flush()

    def close(self) -> None:
        """Flush and close both, also where one of them raises: a disk may be full."""
        with contextlib.ExitStack() as both:
            both.callback(self._by_samples.close)
            both.callback(self._by_iteration.close)


def _values(points: Iterable[Point], suffix: str = "") -> list[tuple[str, float]]:
    return [(point.key + suffix, point.value) for point in points]


class _EventFile:
    """One file of one folder, made at the first need. `resumed_at`: the last step of earlier attempts that stays."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        self._folder = folder
        self._resumed_at = resumed_at
        self._records: RecordFile | None = None
        self._event: Any = None

    def open(self) -> "RecordFile":
        if self._records is not None:
            return self._records
        self._event = importlib.import_module(EVENT_MODULE).Event
        self._folder.mkdir(parents=True, exist_ok=True)
        records: RecordFile = importlib.import_module(RECORD_MODULE).RecordFile((self._folder / _file_name()).open("wb"))
        self._records = records
        records.write(self._event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        mark = self._event(wall_time=time.time(), step=self._resumed_at + 1)
        mark.session_log.status = _START_OF_SESSION
        records.write(mark.SerializeToString())
        records.flush()
        return records

    def append(self, events: Iterable[Event]) -> None:
        for step, at_s, values in events:
            records = self.open()
            event = self._event(wall_time=at_s, step=step)
            for tag, value in values:
                event.summary.value.add(tag=tag, simple_value=value)
            records.write(event.SerializeToString())

    def flush(self) -> None:
        if self._records is not None:
            self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()


_numbers = itertools.count()


def _file_name() -> str:
    """TensorBoard reads a folder's files in the order of their names, and by that must come to the newest last."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
