"""OpenTelemetry metrics: `rsup.training.*` as the training goes on, and `rsup.end_to_end.*` for where its time went.

A meter provider that the application has set up is used as it is. Else one is made that sends by OTLP over HTTP, to the
endpoint given or to what the `OTEL_*` variables say. Gauges are what is known last, so an iteration is never an attribute.
"""

import importlib
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rsup.worker.observe.contract import Point, Warn
from rsup.worker.observe.error_text import one_line, shortened
from rsup.worker.observe.writers.credentials import without_credentials

SCOPE = "rsup.training"
FLUSH_WITHIN_S = 1.0
CLOSE_WITHIN_S = 10.0
EXPORT_WITHIN_S = 5.0


class _Instrument(NamedTuple):
    name: str
    kind: str
    unit: str
    factor: float = 1.0
    """From the point's unit to this one."""


INSTRUMENTS = {
    "iteration-time": _Instrument("step_duration_ms", "histogram", "ms", 1e3),
    "throughput": _Instrument("throughput_tflops", "gauge", "TFLOP/s"),
    "tokens-per-second": _Instrument("tokens_per_sec", "gauge", "{token}/s"),
    "grad-norm": _Instrument("grad_norm", "gauge", "1"),
    "learning-rate": _Instrument("learning_rate", "gauge", "1"),
    "mem-allocated-bytes": _Instrument("memory_allocated_gb", "gauge", "GBy", 1e-9),
    "skipped-iterations": _Instrument("skipped_iters", "counter", "{iteration}"),
    "nan-iterations": _Instrument("nan_iters", "counter", "{iteration}"),
}
"""Points with a name of their own there. A counter takes what is new since the last point, and nothing where that is 0."""


class OpenTelemetryWriter:
    """A `Writer`. Recording a value takes microseconds; a reader's own thread sends.

    `losses`: keys of losses, which become one gauge `loss` with the key as its attribute. `provider`: None finds or makes one.
    """

    name = "OpenTelemetry"
    takes_each_point = True

    def __init__(self, warn: Warn, run_name: str, losses: Sequence[str] = (), endpoint: str = "", provider: Any = None) -> None:
        """Raises `ImportError` where the packages are missing, and `ValueError` for an endpoint that is none."""
        self._warn = warn
        self._losses = frozenset(losses)
        self._complaints = _Complaints()
        self._provider, self._is_mine = (provider, False) if provider is not None else self._find(run_name, endpoint)
        self._meter = self._provider.get_meter(SCOPE)
        self._made: dict[str, Callable[..., None] | None] = {}
        self._has_said = False
        self._is_closing = False
        self._caller: threading.Thread | None = None

    def _find(self, run_name: str, endpoint: str) -> tuple[Any, bool]:
        current = importlib.import_module("opentelemetry.metrics").get_meter_provider()
        sdk = importlib.import_module("opentelemetry.sdk.metrics")
        if isinstance(current, sdk.MeterProvider) and not endpoint:
            return current, False
        export = importlib.import_module("opentelemetry.sdk.metrics.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        resource = importlib.import_module("opentelemetry.sdk.resources").Resource.create({"service.name": run_name or "rsup"})
        exporter = otlp.OTLPMetricExporter(endpoint=_metrics_url(endpoint) if endpoint else None, timeout=EXPORT_WITHIN_S)
        self._complaints.begin()
        try:
            reader = export.PeriodicExportingMetricReader(exporter)
            return sdk.MeterProvider([reader], resource, shutdown_on_exit=False), True
        except BaseException:
            self._complaints.end()
            raise

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point], *, at_s: float | None = None) -> None:
        """See `Writer`. `at_s` is of no account: OpenTelemetry's values are those of the moment at which they are read."""
        self._say()
        self._record(f"{SCOPE}.iteration", "gauge", "{iteration}", iteration)
        self._record(f"{SCOPE}.consumed_samples", "gauge", "{sample}", consumed_samples)
        for point in points:
            if point.key in self._losses:
                self._record(f"{SCOPE}.loss", "gauge", "1", point.value, {"loss": point.key})
                continue
            known = INSTRUMENTS.get(point.key, _Instrument(_spelled(point.key), "gauge", ""))
            if known.kind != "counter" or point.value > 0:
                self._record(f"{SCOPE}.{known.name}", known.kind, known.unit, point.value * known.factor)

    def write_end_to_end(self, metrics: Mapping[str, float | str]) -> None:
        """Take where the time went: numbers as gauges, words as attributes of one gauge `info` that is always 1."""
        words = {key: value for key, value in metrics.items() if isinstance(value, str)}
        if words:
            self._record("rsup.end_to_end.info", "gauge", "1", 1, words)
        for key, value in metrics.items():
            if not isinstance(value, str):
                self._record(f"rsup.end_to_end.{key}", "gauge", "", value)

    def _record(self, name: str, kind: str, unit: str, value: float, attributes: Mapping[str, str] | None = None) -> None:
        if not math.isfinite(value):  # the package takes none, and says so each time
            return
        if name not in self._made:
            self._made[name] = self._make(name, kind, unit)
        if (record := self._made[name]) is not None:
            try:
                record(value, attributes)
            except Exception as error:  # see _make: of a view's aggregation, a reader of the application's
                self._made[name] = None
                self._warn(f"OpenTelemetry takes no more of {name}: {_text(error)}")

    def _make(self, name: str, kind: str, unit: str) -> Callable[..., None] | None:
        try:
            if kind == "histogram":
                record: Callable[..., None] = self._meter.create_histogram(name, unit).record
            elif kind == "counter":
                record = self._meter.create_counter(name, unit).add
            else:
                record = self._meter.create_gauge(name, unit).set
        except Exception as error:  # of a package that users replace and patch: its faults are no reason to stop a training
            self._warn(f"OpenTelemetry takes no instrument {name}: {_text(error)}")
            return None
        return record

    def _say(self) -> None:
        if self._complaints.first and not self._has_said:
            self._has_said = True
            self._warn(f"OpenTelemetry cannot export, and goes on trying: {self._complaints.first}")

    def flush(self) -> None:
        """See `Writer`; waits `FLUSH_WITHIN_S` at most, and not at all for a collector that has failed before."""
        if not self._complaints.first:
            self._within(FLUSH_WITHIN_S, self._provider.force_flush)
        self._say()

    def begin_close(self) -> None:
        """See `ClosesLater`."""
        if self._is_mine and not self._is_closing:
            self._is_closing = True
            self._begin(self._provider.shutdown)

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """See `Writer`; waits `within_s` at most, and `CLOSE_WITHIN_S`. A provider of the application's is only flushed."""
        if not self._is_mine:
            return self.flush()
        self.begin_close()
        self._is_mine = False
        if self._caller is not None:
            self._caller.join(min(within_s, FLUSH_WITHIN_S if self._complaints.first else CLOSE_WITHIN_S))
        self._complaints.end()
        self._say()

    def _within(self, wait_s: float, call: Callable[[], object]) -> None:
        """Wait for it for a while: the package waits for its network, whatever it is told."""
        if self._caller is not None:
            self._caller.join(wait_s)
            if self._caller.is_alive():
                return
        self._begin(call).join(wait_s)

    def _begin(self, call: Callable[[], object]) -> threading.Thread:
        """Call it on a thread of its own, behind what that does already. The thread must not know this writer: one that never
        ends would keep the trainer alive whose `warn` it has."""
        self._caller = threading.Thread(
            target=_call, args=(call, self._complaints, self._caller), name="rsup-otel", daemon=True
        )
        self._caller.start()
        return self._caller


def _call(call: Callable[[], object], complaints: "_Complaints", earlier: threading.Thread | None) -> None:
    if earlier is not None:
        earlier.join()
    try:
        call()
    except Exception as error:  # the thread's outermost frame; the package raises what its readers and exporters do
        complaints.first = complaints.first or _text(error)


def _text(error: Exception) -> str:
    return without_credentials(one_line(error))


def _metrics_url(endpoint: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"{without_credentials(endpoint)!r} is no http:// or https:// address")
    return endpoint if endpoint.rstrip("/").endswith("/v1/metrics") else f"{endpoint.rstrip('/')}/v1/metrics"


def _spelled(key: str) -> str:
    """A point's key as an instrument's name."""
    return re.sub(r"[^a-z0-9_]+", "_", key.lower()).strip("_")[:120] or "value"


class _Complaints(logging.Handler):
    """Keeps the exporter's complaints, which would come each minute, out of the log, and the first of them."""

    _LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk.metrics")
    _OF_EXPORTS = ("opentelemetry.exporter", "export")
    """Parts of the names of the loggers whose complaints are of exports."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""
        self._propagate: dict[str, bool] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if not any(
            part in record.name for part in self._OF_EXPORTS
        ):  # of a value that it takes not: nothing is wrong with exports
            return
        self.first = self.first or shortened(without_credentials(record.getMessage()))

    def begin(self) -> None:
        for name in self._LOGGERS:
            logger = logging.getLogger(name)
            self._propagate[name] = logger.propagate
            logger.propagate = False
            logger.addHandler(self)

    def end(self) -> None:
        for name, propagate in self._propagate.items():
            logger = logging.getLogger(name)
            logger.removeHandler(self)
            logger.propagate = propagate
        self._propagate.clear()
