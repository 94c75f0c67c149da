"""Injected faults, addressed by rank and iteration: `rank=1,iteration=25,kind=sigkill`. Those that change numbers instead of
ending or stopping a process are in `numeric_faults`.

A fault strikes once per job, also across attempts, unless `repeat` is added: before it strikes, a marker file is made
durable. Faults are a trainer's option, off by default; nothing here is reachable without one.

    sigkill, sigstop         the signal, to itself, in the step
    exception                raise InjectedFault in the step
    out-of-memory            ask for more memory than there is, in the step
    exit=N                   leave at once with that code
    hang                     sleep for ever in the step; signals and other threads still run
    busy-hang                the same in a loop of Python's
    hang-in-collective       wait in torch's communication for what no other rank sends
    gil-hang                 sleep while holding the interpreter lock: no Python thread runs
    hang-in-checkpoint       sleep for ever at the start of the save after that iteration
    sigkill-in-checkpoint    SIGKILL while the save after that iteration is being written
    hang-at-start            sleep for ever before the first step; takes no iteration

`pass=N` moves a kind of the step to the head of the N-th pass of the iteration: 2 is the replay in place of a rerun.
"""

import ctypes
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor.wire import UsageError
from rsup.worker.checkpoint_directory import sync_directory
from rsup.worker.numeric_faults import NUMERIC_KINDS, NumericFault, check_numeric_fault, parse_numeric_fault

STEP_KINDS = ("sigkill", "sigstop", "exception", "out-of-memory", "exit", "hang", "busy-hang", "hang-in-collective", "gil-hang")
CHECKPOINT_KINDS = ("hang-in-checkpoint", "sigkill-in-checkpoint")
START_KINDS = ("hang-at-start",)
KINDS = STEP_KINDS + CHECKPOINT_KINDS + START_KINDS


class InjectedFault(Exception):
    """The exception that `kind=exception` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault. `iteration` is 1-based and global, 0 for kinds that strike before the first one."""

    rank: int
    kind: str
    iteration: int = 0
    exit_code: int = 0
    repeat: bool = False
    pass_number: int = 1

    def __str__(self) -> str:
        kind = f"exit={self.exit_code}" if self.kind == "exit" else self.kind
        when = f"iteration={self.iteration}," if self.iteration else ""
        later = f",pass={self.pass_number}" if self.pass_number != 1 else ""
        return f"rank={self.rank},{when}kind={kind}{later}"


def parse_any_fault(text: str) -> Fault | NumericFault:
    """The fault that `text` describes, of either kind; raise `UsageError`."""
    kinds = [part.strip().removeprefix("kind=") for part in text.split(",") if part.strip().startswith("kind=")]
    return parse_numeric_fault(text) if any(kind in NUMERIC_KINDS for kind in kinds) else parse_fault(text)


def parse_fault(text: str) -> Fault:
    """The fault of a process that `text` describes; raise `UsageError` for an unknown key or kind, or a missing one."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key == "kind" and value.startswith("exit="):
            key, value = "exit", value.removeprefix("exit=")
        elif key not in ("rank", "iteration", "kind", "exit", "repeat", "pass"):
            raise UsageError(f"--fault {text}: unknown key {key!r}; use rank=R,iteration=I,kind=K[,pass=N][,repeat]")
        if key in values or (key != "repeat" and not value) or (key == "repeat" and value):
            raise UsageError(f"--fault {text}: {key!r} is given twice, or has no value, or takes none")
        values[key] = value
    kind = "exit" if "exit" in values else values.get("kind", "")
    if kind not in KINDS or ("exit" in values) == ("kind" in values):
        raise UsageError(f"--fault {text}: unknown kind; use one of {', '.join(KINDS + NUMERIC_KINDS)} (exit as exit=N)")
    rank, iteration = _number(text, values, "rank"), 0
    if kind in START_KINDS:
        if "iteration" in values:
            raise UsageError(f"--fault {text}: {kind} strikes before the first iteration; leave iteration out")
    else:
        iteration = _number(text, values, "iteration")
    exit_code = _number(text, values, "exit") if kind == "exit" else 0
    if exit_code > 255:
        raise UsageError(f"--fault {text}: an exit code is at most 255")
    pass_number = _number(text, values, "pass") if "pass" in values else 1
    if pass_number < 1 or (pass_number > 1 and kind not in STEP_KINDS):
        raise UsageError(f"--fault {text}: pass= is 1 or more, and of a fault in the step")
    return Fault(rank, kind, iteration, exit_code, "repeat" in values, pass_number)


def _number(text: str, values: dict[str, str], key: str) -> int:
    value = values.get(key, "")
    if not value.isascii() or not value.isdigit():
        raise UsageError(f"--fault {text}: {key}= must be a number, 0 or more")
    return int(value)


def check_fault(fault: Fault | NumericFault, world_size: int, last_iteration: int, may_save_at: Callable[[int], bool]) -> None:
    """Raise `UsageError` if that fault cannot happen in such a run."""
    if isinstance(fault, NumericFault):
        check_numeric_fault(fault, world_size, last_iteration)
        return
    if fault.rank >= world_size:
        raise UsageError(f"--fault {fault}: there is no rank {fault.rank} among {world_size}")
    if fault.kind in START_KINDS:
        return
    if not 1 <= fault.iteration <= last_iteration:
        raise UsageError(f"--fault {fault}: there is no iteration {fault.iteration} among 1 to {last_iteration}")
    if fault.kind in CHECKPOINT_KINDS and not may_save_at(fault.iteration):
        raise UsageError(f"--fault {fault}: nothing is saved after iteration {fault.iteration}; see --save and --save-interval")


class StrikeMarks:
    """Which faults have struck in the job `job_key`, across attempts: durable marker files in `folder`."""

    def __init__(self, folder: Path | None, job_key: str) -> None:
        self._folder = folder
        self._job_key = job_key

    def first_time(self, fault: Fault | NumericFault) -> bool:
        """Remember that this fault strikes now; False if it has struck before in this job."""
        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = hashlib.sha256(f"{self._job_key}\0{fault}".encode()).hexdigest()[:24]
        try:
            fd = os.open(self._folder / f"{digest}.struck", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(fd, f"{self._job_key} {fault}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self._folder)
        return True


class FaultPlan:
    """The faults of one rank's process. `marker_dir` is where those that have struck are remembered for the job `job_key`."""

    def __init__(self, faults: Sequence[Fault | NumericFault], rank: int, marker_dir: Path | None, job_key: str) -> None:
        self._armed = [fault for fault in faults if isinstance(fault, Fault) and fault.rank == rank]
        self._marks = StrikeMarks(marker_dir, job_key)

    def at_start(self) -> None:
        """Setup is nearly done; no step has run."""
        self._strike(START_KINDS, 0)

    def at_step(self, iteration: int, pass_number: int = 1) -> None:
        """Inside the step of that iteration, before its N-th pass computes."""
        self._strike(STEP_KINDS, iteration, pass_number)

    def at_save(self, iteration: int) -> None:
        """The save after that iteration begins, on the training thread."""
        self._strike(("hang-in-checkpoint",), iteration)

    def while_saving(self, point: str, iteration: int) -> None:
        """On the writing thread, when this rank's files are written but the checkpoint is not committed."""
        if point == "written":
            self._strike(("sigkill-in-checkpoint",), iteration)

    def _strike(self, kinds: Sequence[str], iteration: int, pass_number: int = 1) -> None:
        for fault in self._armed:
            is_now = fault.kind in kinds and fault.iteration == iteration and fault.pass_number == pass_number
            if is_now and (fault.repeat or self._marks.first_time(fault)):
                print(f"rank {fault.rank}: injected fault: {fault}", file=sys.stderr, flush=True)
                _perform(fault)


def _perform(fault: Fault) -> None:
    if fault.kind in ("sigkill", "sigkill-in-checkpoint"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "exception":
        raise InjectedFault(str(fault))
    elif fault.kind == "out-of-memory":
        _ask_for_too_much()
    elif fault.kind == "busy-hang":
        while True:
            time.sleep(0.01)
    elif fault.kind == "exit":
        os._exit(fault.exit_code)
    elif fault.kind == "hang-in-collective":
        _wait_for_nobody()
    elif fault.kind == "gil-hang":
        _hold_the_interpreter()
    else:
        while True:
            time.sleep(3600)


def _ask_for_too_much() -> None:
    """Have torch's allocator raise its own error, on the GPU where there is one."""
    import torch

    device = torch.device("cuda") if torch.cuda.is_initialized() else torch.device("cpu")  # type: ignore[no-untyped-call]
    torch.empty(1 << 48, dtype=torch.uint8, device=device)


def _wait_for_nobody() -> None:
    """As a rank that has run a collective more than the others, or one fewer: all stand in torch's communication."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda") if torch.cuda.is_initialized() else torch.device("cpu")  # type: ignore[no-untyped-call]
    found = torch.empty(1, device=device)
    dist.recv(found, src=(dist.get_rank() + 1) % dist.get_world_size())
    found.cpu()


def _hold_the_interpreter() -> None:
    """Sleep in C without giving up the interpreter lock, as a broken extension module does."""
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(3600)
