"""Weights & Biases: one run for all attempts of a job, found again by an id that lies beside the checkpoints."""

import http.client
import importlib
import json
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsup.worker.checkpoint_directory import write_durably
from rsup.worker.observe.error_text import one_line
from rsup.worker.observe.writers.background import Row
from rsup.worker.observe.writers.credentials import without_credentials

ID_FILE = "wandb-run.json"
SAMPLES_KEY = "samples vs steps"
INIT_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 10.0


_PRIVATE = {"disable_git": True, "disable_code": True, "x_disable_meta": True, "x_save_requirements": False, "host": "-"}
"""Without these, wandb adds the command line, host and user name, working directory, git's remote and the packages."""


class _OpenRuns:
    """The ids of the runs that this process writes to. A run that is begun anew before its end is not joined but refused."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ids: list[str] = []

    def enter(self, run_id: str, within_s: float) -> None:
        """Wait until nobody writes to it, for a while."""
        with self._changed:
            self._changed.wait_for(lambda: run_id not in self._ids, within_s)
            self._ids.append(run_id)

    def leave(self, run_id: str) -> None:
        """May be repeated."""
        with self._changed:
            if run_id in self._ids:
                self._ids.remove(run_id)
            self._changed.notify_all()


_OPEN_RUNS = _OpenRuns()


def run_id_of(folder: Path | None, project: str, job_key: str, resumed_at: int) -> str:
    """The id in `folder`, where this run goes on with that one: it resumes a checkpoint, or is another attempt of the same job.

    Else a new id, which is left in `folder`. Raises `OSError` where it cannot be kept.
    """
    path = folder / ID_FILE if folder is not None else None
    if path is not None and (kept := _read(path)).get("project") == project:
        same_job = bool(job_key) and kept.get("job") == job_key
        if kept.get("id") and (resumed_at > 0 or same_job):
            return kept["id"]
    made = _new_id()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps({"id": made, "project": project, "job": job_key}) + "\n")
    return made


def _new_id() -> str:
    return secrets.token_hex(4)


def _read(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {key: str(value) for key, value in kept.items()} if isinstance(kept, dict) else {}


@dataclass(frozen=True)
class RunOptions:
    """What `wandb.init` is told. `folder`: where its files go; it is there. `id_folder`: where the id is kept, if anywhere."""

    project: str
    name: str
    entity: str = ""
    folder: Path | None = None
    id_folder: Path | None = None
    job_key: str = ""
    finish_within_s: float = 25.0


class WandbRun:
    """A sink. Where the server cannot be reached, or nobody is logged in, the run is kept in files, and that is said.

    Its own step is the iteration: what a resumed run does again is already known, and the server keeps the first.
    """

    def __init__(self, options: RunOptions, config: Mapping[str, Any], resumed_at: int) -> None:
        self._options = options
        self._config = {name: without_credentials(value) if isinstance(value, str) else value for name, value in config.items()}
        self._resumed_at = resumed_at
        self._run: Any = None
        self._step = 0
        self._stamped = (0, 0.0)
        """An iteration, and when it was."""
        self._run_id = ""

    def open(self, remark: Callable[[str], None]) -> None:
        """Join the run, or begin one; may take `INIT_TIMEOUT_S`, and before it as long as this process still ends the same one:
        after an in-process restart."""
        wandb = importlib.import_module("wandb")
        options = self._options
        try:
            run_id = run_id_of(options.id_folder, options.project, options.job_key, self._resumed_at)
        except OSError as error:
            remark(f"Weights & Biases: the run's id cannot be kept in {options.id_folder}: {error.strerror}")
            run_id = _new_id()
        self._run_id = run_id
        _OPEN_RUNS.enter(run_id, options.finish_within_s + PROBE_TIMEOUT_S)
        settings = wandb.setup().settings
        is_offline = settings.mode not in ("online", "run", "shared")
        problem = "" if is_offline else _problem_with(settings.base_url)
        try:
            self._run = self._begin(wandb, run_id, "offline" if problem else None)
        except (wandb.errors.CommError, wandb.errors.UsageError, TimeoutError) as error:
            problem = _short(error)
            self._run = self._begin(wandb, _new_id(), "offline")  # the process beside us holds the other id for this process
        if problem:
            folder = Path(self._run.dir).parent
            remark(
                f"Weights & Biases cannot be reached ({problem}): its files stay on this disk, upload them with"
                f" wandb sync --append --id {run_id} {folder}"
            )

    def _begin(self, wandb: Any, run_id: str, mode: str | None) -> Any:
        options = self._options
        return wandb.init(
            project=options.project,
            entity=options.entity or None,
            name=options.name or None,
            dir=options.folder,
            id=run_id,
            resume="allow",
            mode=mode,
            config=self._config,
            allow_val_change=True,
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=options.finish_within_s,
                **{name: value for name, value in _PRIVATE.items() if name in wandb.Settings.model_fields},
            ),
        )

    def put(self, rows: Sequence[Row]) -> None:
        """Log each row under its iteration."""
        for row in rows:
            self._step = max(self._step, row.iteration)
            values: dict[str, float] = {point.key: point.value for point in row.points}
            values |= {"iteration": row.iteration, SAMPLES_KEY: row.consumed_samples}
            if row.iteration != self._stamped[0]:  # what comes later of the same step must not make it later
                self._stamped = (row.iteration, row.at_s)
            self._run.log(values | {"_timestamp": self._stamped[1]}, step=self._step)

    def flush(self) -> None:
        """Nothing can be done: the process beside us writes its file by blocks, and dies with us (see `wandb_journal`)."""

    def close(self) -> None:
        """Upload what is left, for `finish_within_s` at most; the rest stays on the disk. Then the process beside us ends, but
        not where the application has runs of its own."""
        wandb = importlib.import_module("wandb")
        try:
            if self._run is not None:
                self._run.finish()
            if getattr(wandb.setup(), "most_recent_active_run", None) is None:
                wandb.teardown()
        finally:
            _OPEN_RUNS.leave(self._run_id)


def _problem_with(base_url: str) -> str:
    """Why the server does not answer, empty where it does, with whatever. `wandb.init` would wait for it for a minute."""
    try:
        urllib.request.urlopen(base_url, timeout=PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return _short(error)
    return ""


def _short(error: Exception) -> str:
    return without_credentials(one_line(error))
