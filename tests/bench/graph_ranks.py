"""Ranks of the graph benchmarks: processes of one machine, one a device, that a file brings together.

Rank 0 writes to our standard output; the others into a log, whose end is shown when they fail. On a machine without GPUs all of
it runs on the CPU, with gloo.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

COLLECTIVE_S = 60.0


@dataclass(frozen=True)
class World:
    """Where a rank is."""

    rank: int
    world_size: int
    device: torch.device
    gradients: dist.ProcessGroup | None
    """Reduces on the device; None with one rank."""
    control: dist.ProcessGroup | None
    """gloo; None with one rank."""

    def agree(self, is_fine: bool) -> bool:
        """Whether it is so on all ranks. Collective."""
        if self.control is None:
            return is_fine
        flag = torch.tensor([1.0 if is_fine else 0.0])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.control)
        return bool(flag.item())

    def wait(self) -> None:
        """Wait for this rank's device, then for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.control is not None:
            dist.barrier(group=self.control)

    def say(self, text: str) -> None:
        """A line of rank 0."""
        if self.rank == 0:
            print(text, flush=True)


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Join the ranks that `spawn` started. Leaves without the interpreter's end: a device that hangs must not hold it up."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(os.environ["RANKS_FILE"], world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_S),
        device_id=device if device.type == "cuda" else None,
    )
    control = None
    if world_size > 1:
        control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=4 * COLLECTIVE_S)))
    code = 1
    try:
        yield World(rank, world_size, device, dist.group.WORLD if world_size > 1 else None, control)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        print(f"rank {rank}: {first_line(error)}", file=sys.stderr, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def spawn(module: str, arguments: Sequence[str], num_ranks: int, within_s: float, quiet: bool = False) -> str:
    """Run `python -m MODULE ARGUMENTS` in so many ranks; return "" or what went wrong, in a line. `quiet`: rank 0's output goes
    into a log, too."""
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        logs = [Path(folder, f"log-{rank}") for rank in range(num_ranks)]
        processes = []
        for rank, log in enumerate(logs):
            environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "RANKS_FILE": f"{folder}/store"}
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", "-m", module, *arguments],
                        env=environment | {"LOCAL_RANK": str(rank), "TOKENIZERS_PARALLELISM": "false"},
                        stdin=subprocess.DEVNULL,
                        stdout=None if rank == 0 and not quiet else file,
                        stderr=file,
                        start_new_session=True,
                    )
                )
        deadline, problem = time.monotonic() + within_s, ""
        try:
            while any(process.poll() is None for process in processes) and not problem:
                if time.monotonic() > deadline:
                    problem = f"stopped after {within_s:.0f} s"
                failed = [rank for rank, process in enumerate(processes) if process.poll()]
                if failed:
                    problem = f"rank {failed[0]} ended with {processes[failed[0]].returncode}"
                time.sleep(0.05)
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            problem = problem or (f"rank {failed[0]} ended with {processes[failed[0]].returncode}" if failed else "")
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return problem and f"{problem}: {_complaint(logs)}"


def _complaint(logs: Sequence[Path]) -> str:
    """The line of the logs that says most."""
    lines = [line.strip() for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("rank ") and "Error" in line]
    return (named or [line for line in lines if "Error" in line][-1:] or lines[-1:] or ["no output"])[0][:400]
