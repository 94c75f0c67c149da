"""Sends the end-to-end metrics of the rank that logs: to OpenTelemetry, and to the supervisor's store."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import rsup.worker
from rsup.worker.observe.contract import Writer
from rsup.worker.observe.end_to_end import EndToEnd

KIND = "end_to_end"


@runtime_checkable
class TakesEndToEnd(Protocol):
    """A writer that has a place for these, besides the curves."""

    def write_end_to_end(self, metrics: Mapping[str, float | str]) -> None:
        """Take the newest values; words are names and kinds of the run."""
        ...


class EndToEndReport:
    """`writers`: those of this rank; the ones that take end-to-end metrics get them."""

    def __init__(self, end_to_end: EndToEnd, writers: Sequence[Writer], *, clock: Callable[[], float] = time.time) -> None:
        self._end_to_end = end_to_end
        self._takers = [writer for writer in writers if isinstance(writer, TakesEndToEnd)]
        self._clock = clock

    def send(self) -> None:
        """Send what is known now. At each log point, after `EndToEnd.logged`, and at the end, after `app_finished`."""
        metrics = self._end_to_end.metrics(self._clock())
        for taker in self._takers:
            taker.write_end_to_end(metrics)
        numbers = {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}
        rsup.worker.report_metrics(self._end_to_end.iteration, numbers, kind=KIND)
