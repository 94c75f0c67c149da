"""Hands the events of a run to NVIDIA's public one-logger packages, where they are installed.

`nv-one-logger-training-telemetry` (and `-core`) 2.3 keep their own books: this adapter only makes their calls at the right
moments. A provider that the application has configured is used as it is; else one is configured that writes to a file. Both
packages have one provider a process, so after an in-process restart the adapter goes on with the same.
"""

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsup.worker.observe.contract import Warn
from rsup.worker.observe.end_to_end_facts import Counters, RunFacts
from rsup.worker.observe.error_text import one_line

OLDEST_S = 590.0
"""one-logger refuses moments more than ten minutes old; what is older gets the moment at which it is told."""
_API = "nv_one_logger.training_telemetry.api"
_STAGES = {
    "model_init": ("model_init", "model_initialization"),
    "build_dataiters": ("dataloader_init", "data_loader_initialization"),
    "build_optimizer": ("optimizer_init", "optimizer_initialization"),
    "load_checkpoint": ("load_checkpoint", "checkpoint_load"),
}
"""Our stages, and one-logger's names of their calls and spans."""


@dataclass(frozen=True)
class OneLoggerOptions:
    """`file`: where spans and events go, as lines of JSON, if the application has configured no provider. `session_tag`: what
    all attempts of a job have in common. `flops_per_sample`: None where it is not known."""

    file: Path
    application_name: str
    session_tag: str
    log_interval: int
    flops_per_sample: int | None = None


def connect(options: OneLoggerOptions, facts: RunFacts, app_started_s: float, warn: Warn) -> "OneLogger | None":
    """The adapter, as a listener of `EndToEnd`; None, with a warning, where the packages are missing or refuse to be set up."""
    try:
        calls = importlib.import_module(f"{_API}.callbacks")
        provider = importlib.import_module(f"{_API}.training_telemetry_provider").TrainingTelemetryProvider.instance()
    except ImportError as error:
        warn(f"one-logger is not written to: {error}; pip install nv-one-logger-training-telemetry")
        return None
    try:
        if not provider.one_logger_ready:
            _configure(provider, options, facts)
        adapter = OneLogger(calls, provider, facts, warn)
        adapter.begin(app_started_s)
        if provider.config.telemetry_config is None:
            provider.set_training_telemetry_config(_training_config(options, facts))
    except Exception as error:  # the packages' own, and pydantic's
        warn(f"one-logger is not written to: {one_line(error)}")
        return None
    return adapter


def _configure(provider: Any, options: OneLoggerOptions, facts: RunFacts) -> None:
    config = importlib.import_module("nv_one_logger.api.config")
    exporter = importlib.import_module("nv_one_logger.exporter.file_exporter").FileExporter(options.file)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    told = config.OneLoggerConfig(
        application_name=options.application_name,
        session_tag_or_fn=options.session_tag,
        world_size_or_fn=facts.world_size,
        error_handling_strategy=config.OneLoggerErrorHandlingStrategy.PROPAGATE_EXCEPTIONS,
        logger_config=config.LoggerConfig(log_file_path_for_info=os.devnull, log_file_path_for_err=os.devnull),
    )
    provider.with_base_config(told).with_exporter(exporter).configure_provider()


def _training_config(options: OneLoggerOptions, facts: RunFacts) -> Any:
    strategy = importlib.import_module(f"{_API}.checkpoint").CheckPointStrategy
    return importlib.import_module(f"{_API}.config").TrainingTelemetryConfig(
        perf_tag_or_fn=f"{options.application_name}_{facts.global_batch_size}_{facts.world_size}_{facts.seq_length}",
        global_batch_size_or_fn=facts.global_batch_size,
        micro_batch_size_or_fn=facts.micro_batch_size,
        seq_length_or_fn=facts.seq_length,
        flops_per_sample_or_fn=options.flops_per_sample,
        is_log_throughput_enabled_or_fn=bool(options.flops_per_sample),
        is_validation_iterations_enabled_or_fn=facts.evaluates,
        is_test_iterations_enabled_or_fn=facts.tests,
        is_save_checkpoint_enabled_or_fn=facts.saves,
        save_checkpoint_strategy=strategy.ASYNC if facts.saves_async else strategy.SYNC,
        train_iterations_target_or_fn=facts.train_iterations_target,
        train_samples_target_or_fn=facts.samples_target,
        log_every_n_train_iterations=options.log_interval,
    )


class OneLogger:
    """A `Listener`. What one-logger raises costs one warning, and ends it; training goes on."""

    def __init__(self, calls: Any, provider: Any, facts: RunFacts, warn: Warn) -> None:
        """`calls`: the module of callbacks."""
        self._calls = calls
        self._provider = provider
        self._facts = facts
        self._warn = warn
        self._is_over = False
        self._since_s: float | None = None
        """When the iteration that is under way began: after the last one, a save or an evaluation."""

    def begin(self, at_s: float) -> None:
        """The application started then; of no account where it is known already."""
        if not self._is_open("application"):
            self._calls.on_app_start(_ms(at_s))

    def stage_began(self, stage: str, at_s: float) -> None:
        """See `Listener`."""
        call, span = _STAGES[stage]
        self._try(lambda: None if self._is_open(span) else getattr(self._calls, f"on_{call}_start")(_ms(at_s)))

    def stage_finished(self, stage: str, at_s: float) -> None:
        """See `Listener`."""
        call, span = _STAGES[stage]
        self._try(lambda: getattr(self._calls, f"on_{call}_end")(_ms(at_s)) if self._is_open(span) else None)

    def train_started(self, at_s: float, counters: Counters) -> None:
        """See `Listener`."""
        self._since_s = at_s
        self._try(lambda: self._start_training(at_s, counters))

    def _start_training(self, at_s: float, counters: Counters) -> None:
        if self._is_open("training_loop"):  # of an entry that a fault ended
            self._calls.on_train_end()
        self._calls.on_train_start(
            train_iterations_start=counters.iteration,
            train_samples_start=counters.consumed_samples,
            train_iterations_target_or_fn=self._facts.train_iterations_target,
            train_samples_target_or_fn=self._facts.samples_target,
            start_time_msec=_ms(at_s),
        )

    def stepped(self, at_s: float) -> None:
        """See `Listener`. Costs one-logger 0.1 to 0.3 ms: it keeps a span for every iteration."""
        since_s, self._since_s = self._since_s, at_s
        if since_s is not None:
            self._try(lambda: self._step(since_s, at_s))

    def _step(self, since_s: float, at_s: float) -> None:
        self._calls.on_training_single_iteration_start(_ms(since_s))
        self._calls.on_training_single_iteration_end(_ms(at_s))

    def evaluation_began(self, at_s: float) -> None:
        """See `Listener`."""
        self._try(lambda: self._calls.on_validation_start(_ms(at_s)))

    def evaluation_finished(self, at_s: float) -> None:
        """See `Listener`."""
        self._since_s = at_s
        self._try(lambda: self._calls.on_validation_end(_ms(at_s)))

    def save_began(self, iteration: int, at_s: float) -> None:
        """See `Listener`."""
        self._try(lambda: self._calls.on_save_checkpoint_start(iteration, _ms(at_s)))

    def save_returned(self, iteration: int, at_s: float) -> None:
        """See `Listener`. A synchronous save ends with its success, which one-logger wants to hear before the end."""
        self._since_s = at_s
        if self._facts.saves_async:
            self._try(lambda: self._calls.on_save_checkpoint_end(_ms(at_s)))

    def save_durable(self, iteration: int, at_s: float) -> None:
        """See `Listener`."""
        self._try(lambda: self._calls.on_save_checkpoint_success(iteration, _ms(at_s)))
        self._end_sync(at_s)

    def save_failed(self, iteration: int, at_s: float) -> None:
        """See `Listener`."""
        self._end_sync(at_s)

    def _end_sync(self, at_s: float) -> None:
        if not self._facts.saves_async:
            self._try(lambda: self._calls.on_save_checkpoint_end(_ms(at_s)))

    def train_finished(self, at_s: float) -> None:
        """See `Listener`."""
        self._since_s = None
        self._try(lambda: self._calls.on_train_end(_ms(at_s)))

    def app_finished(self, at_s: float) -> None:
        """See `Listener`. It closes the exporters."""
        self._try(lambda: self._calls.on_app_end(_ms(at_s)))
        self._is_over = True

    def _is_open(self, span: str) -> bool:
        return bool(self._provider.recorder.get_active_spans_by_name(span))

    def _try(self, call: Callable[[], object]) -> None:
        if self._is_over:
            return
        try:
            call()
        except Exception as error:  # the packages' own, and whatever an application's exporter raises
            self._is_over = True
            self._warn(f"one-logger gets nothing more: {one_line(error)}")


def _ms(at_s: float) -> float | None:
    """For one-logger, for which None is now."""
    return at_s * 1e3 if time.time() - at_s < OLDEST_S else None
