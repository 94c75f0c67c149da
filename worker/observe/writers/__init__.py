"""Where the numbers of a run go: TensorBoard, Weights & Biases, OpenTelemetry, and the supervisor. See `contract.Writer`."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rsup.worker
from rsup.worker.observe.closing import close_writers
from rsup.worker.observe.contract import RESTART_WITHIN_S, Warn, Writer
from rsup.worker.observe.writers.background import BackgroundWriter
from rsup.worker.observe.writers.credentials import without_credentials
from rsup.worker.observe.writers.opentelemetry import OpenTelemetryWriter
from rsup.worker.observe.writers.supervisor import SupervisorWriter
from rsup.worker.observe.writers.tensorboard import EVENT_MODULE, RECORD_MODULE, TensorBoardFiles
from rsup.worker.observe.writers.wandb import RunOptions, WandbRun
from rsup.worker.observe.writers.wandb_journal import Journal, JournaledRun

WANDB = "Weights & Biases"


@dataclass(frozen=True)
class WriterOptions:
    """Which writers are wanted; none by default but the supervisor's. Names are Megatron-LM's where it has them."""

    tensorboard_dir: Path | None = None
    tensorboard_queue_size: int = 1000
    """Calls of `write`, which is one a step or two, after which they go to the file at once, not within the second."""
    wandb_project: str = ""
    wandb_exp_name: str = ""
    wandb_entity: str = ""
    wandb_save_dir: Path | None = None
    """W&B makes a folder `wandb` in it. None: in `save_dir`, else in the working directory."""
    save_dir: Path | None = None
    """Where checkpoints go: the id of the run lies beside them."""
    otel: bool = False
    """OpenTelemetry, as its environment variables or the application's own meter provider say."""
    otel_endpoint: str = ""
    """OTLP over HTTP, `http://HOST:4318`; turns it on, too."""
    losses: tuple[str, ...] = ("lm loss",)
    """Keys of losses, for OpenTelemetry's gauge `loss`."""


def make_writers(
    options: WriterOptions,
    *,
    warn: Warn,
    run_name: str,
    config: Mapping[str, Any],
    resumed_at: int,
    resumed_samples: int = 0,
) -> list[Writer]:
    """The writers that are wanted and can be had. Make them on one rank, and close them on every way out.

    `config`: what W&B shows as the run's configuration, without passwords in addresses. `resumed_at`, `resumed_samples`:
    iterations and samples that are done; what was written behind them by an earlier attempt is superseded. One that cannot be
    had costs a warning that says why.
    """
    made: list[Writer] = [SupervisorWriter(warn)]

    def keep(writer: Writer | None) -> None:
        if writer is not None:
            made.append(writer)

    try:
        if options.tensorboard_dir is not None:
            keep(_tensorboard(options, options.tensorboard_dir, warn, resumed_at, resumed_samples))
        if options.wandb_project:
            keep(_wandb(options, warn, run_name, config, resumed_at))
        if options.otel or options.otel_endpoint:
            keep(_opentelemetry(options, warn, run_name))
    except BaseException:  # an in-process restart interrupts anywhere: nobody else knows of their threads
        close_writers(made, warn, RESTART_WITHIN_S)
        raise
    return made


def _tensorboard(options: WriterOptions, folder: Path, warn: Warn, resumed_at: int, resumed_samples: int) -> Writer | None:
    if not _can_import("TensorBoard", "tensorboard", warn, EVENT_MODULE, RECORD_MODULE):
        return None
    if any(part.endswith(":") for part in folder.parts):  # gs://, s3://
        address = str(folder).replace(":/", "://", 1)  # a path has no two slashes
        warn(f"TensorBoard is not written to: {address} is no folder of this host; write to one, and copy or mount it")
        return None
    files = TensorBoardFiles(folder, resumed_at, resumed_samples)
    return BackgroundWriter("TensorBoard", files, warn, put_at=options.tensorboard_queue_size)


def _wandb(options: WriterOptions, warn: Warn, run_name: str, config: Mapping[str, Any], resumed_at: int) -> Writer | None:
    if not _can_import(WANDB, "wandb", warn, "wandb"):
        return None
    folder = options.wandb_save_dir or options.save_dir
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"{WANDB} is not written to: {folder} cannot be made: {error.strerror}")
        return None
    id_folder = options.save_dir or options.wandb_save_dir
    named = RunOptions(
        options.wandb_project,
        options.wandb_exp_name or run_name,
        options.wandb_entity,
        folder,
        id_folder,
        rsup.worker.job_key(),
    )
    run = WandbRun(named, config, resumed_at)
    if id_folder is None:
        return BackgroundWriter(WANDB, run, warn, waits_at_flush=False)
    return BackgroundWriter(WANDB, JournaledRun(WANDB, Journal(id_folder, options.wandb_project, resumed_at), run), warn)


def _opentelemetry(options: WriterOptions, warn: Warn, run_name: str) -> Writer | None:
    try:
        return OpenTelemetryWriter(warn, run_name, options.losses, options.otel_endpoint)
    except ImportError as error:
        warn(f"OpenTelemetry is not written to: {error}; pip install 'rsup[otel]'")
    except ValueError as error:
        warn(f"OpenTelemetry is not written to: {error}")
    except Exception as error:  # of the package, its exporters, what an environment variable makes it load
        warn(f"OpenTelemetry is not written to: {type(error).__name__}: {without_credentials(str(error))[:300]}")
    return None


def _can_import(name: str, extra: str, warn: Warn, *modules: str) -> bool:
    """Whether a writer's modules can be had, else it is said. On this thread, before loaders start their workers: a process
    that is forked while another thread imports a module can never import it."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        warn(f"{name} is not written to: {error}; pip install 'rsup[{extra}]'")
    except Exception as error:  # protobuf's, of a package that was made for another release of it, say
        warn(f"{name} is not written to: its package cannot be imported: {type(error).__name__}: {error}")
    else:
        return True
    return False


__all__ = ["WriterOptions", "make_writers"]
