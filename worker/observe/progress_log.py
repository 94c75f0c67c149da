"""`progress.txt` beside the checkpoints: a line for each start of the job and each checkpoint, in Megatron-LM's format, which
people's scripts read: time, job, number of GPUs, what happened, separated by tabs.

The cumulative throughput counts from the first start with today's number of ranks that no start with another number follows.
What is said when an asynchronous save begins holds from the line on that says that it is saved; the figures stand in the first
of the two lines, where Megatron-LM's reader takes them, and are of that moment.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import rsup.worker
from rsup.worker.observe.contract import Warn

PROGRESS_FILE = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_FLOPS = re.compile(r"Floating-point operations: ([0-9.eE+-]+|inf|nan)")
_SAVE = re.compile(r"\t(Saved|Saving)(?: async)? checkpoint\tIteration: (\d+)")
_RANKS = re.compile(r"# GPUs: (\d+)")


@dataclass(frozen=True)
class _Start:
    """A start that throughput is counted from."""

    at: datetime
    flops: float


class ProgressLog:
    """Appends to `progress.txt` in `folder`. On one rank; trouble with the file is warned of once, and ends the log.

    `job`: its id; None: SLURM's, else that of `rsup launch`.
    """

    def __init__(self, folder: Path, world_size: int, warn: Warn, job: str | None = None) -> None:
        self._path = folder / PROGRESS_FILE
        self._world_size = world_size
        self._warn = warn
        self._job = (os.environ.get("SLURM_JOB_ID") or rsup.worker.job_key()) if job is None else job
        self._is_broken = False
        self._started = _Start(datetime.now(), 0.0)
        self._first: _Start | None = None

    def started(self, flops_so_far: float = 0.0) -> None:
        """The job starts (again); `flops_so_far`: floating-point operations that its checkpoint has behind it."""
        self._started = _Start(datetime.now(), flops_so_far)
        self._append("Starting job")
        self._first = self._first_start()

    def saving(self, iteration: int, flops_so_far: float, num_tokens: int) -> None:
        """An asynchronous save of that iteration has begun. `flops_so_far`, `num_tokens`: since the training's beginning."""
        self._tell("Saving async checkpoint", iteration, flops_so_far, num_tokens)

    def saved_async(self, iteration: int) -> None:
        """The checkpoint of that iteration, of which `saving` spoke, is durable."""
        self._append(f"Saved async checkpoint\tIteration: {iteration}")

    def saved(self, iteration: int, flops_so_far: float, num_tokens: int) -> None:
        """The checkpoint of that iteration was saved while training stood still. See `saving`."""
        self._tell("Saved checkpoint", iteration, flops_so_far, num_tokens)

    def _tell(self, what: str, iteration: int, flops_so_far: float, num_tokens: int) -> None:
        now = datetime.now()
        own = self._rate(self._started, now, flops_so_far)
        overall = self._rate(self._first or self._started, now, flops_so_far)
        self._append(
            f"{what}\tIteration: {iteration}"
            f"\tJob throughput: {own:.1f} TFLOP/s/GPU\tCumulative throughput: {overall:.1f} TFLOP/s/GPU"
            f"\tFloating-point operations: {flops_so_far:.2e}\tTokens (in billions): {num_tokens / 1e9:.2f}",
            now,
        )

    def _rate(self, since: _Start, now: datetime, flops: float) -> float:
        spent_s = (now - since.at).total_seconds()
        return (flops - since.flops) / (spent_s * 1e12 * self._world_size) if spent_s > 0 else 0.0

    def _append(self, message: str, now: datetime | None = None) -> None:
        if self._is_broken:
            return
        line = f"{now or datetime.now():{_TIME}}\tJob ID: {self._job}\t# GPUs: {self._world_size}\t{message}\n"
        try:
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            self._is_broken = True
            self._warn(f"the progress log ends here: {self._path}: {error.strerror}")

    def _first_start(self) -> _Start | None:
        try:
            return first_start(self._path.read_text(errors="replace").splitlines(), self._world_size)
        except OSError:
            return None


def first_start(lines: Iterable[str], world_size: int) -> _Start | None:
    """The first start with that many ranks behind the last one with another number, and what had been computed before it: by
    the newest checkpoint that is durable. Figures of an asynchronous one that is not are in `not_yet`, by its iteration."""
    found: _Start | None = None
    flops, not_yet = 0.0, dict[str, float]()
    for line in lines:
        ranks, at = _RANKS.search(line), _time_of(line)
        if ranks is None or at is None:
            continue
        if int(ranks[1]) != world_size:
            found = None
        elif found is None and "Starting job" in line:
            found = _Start(at, flops)
        if (event := _SAVE.search(line)) is None:
            continue
        what, iteration = event.groups()
        if told := _FLOPS.search(line):
            not_yet[iteration] = float(told[1])
        if what == "Saved":
            flops = not_yet.pop(iteration, flops)
    return found


def _time_of(line: str) -> datetime | None:
    try:
        return datetime.strptime(line.partition("\t")[0], _TIME)
    except ValueError:
        return None
