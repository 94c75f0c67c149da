"""Start to every rank's first step, and SIGKILL of one rank to every rank having stepped again (DDP; gloo, or NCCL).

`python -m tests.bench.bench_restart [RUNS] [rsup|torchrun|ft_launcher]...`, two ranks; `several_gpus` runs it with more.

Peers: torchrun, ft_launcher, and rsup without its standbys. Each rank notes the time after its first step of the next attempt;
the killed rank notes the time just before it dies, once every rank has stepped and any standbys are ready, as they
are a few seconds into any training. torchrun 2.13 reuses its store between attempts, so some of its restarts hang or need a
second one: those that did not recover within the time limit are counted in the note, not in the median.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench.table import RSUP, Row, Workplace, peer

RUNS = 5
JOB = "bench"
RECOVERS_WITHIN_S = 60.0
READY_WITHIN_S = 120.0
DIES = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
out, rank = os.environ["OUT"], os.environ["RANK"]
again = os.path.exists(out + "/killed")
cuda = torch.cuda.is_available()
device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
model = DDP(torch.nn.Linear(64, 64).to(device))

def step():
    model(torch.ones(8, 64, device=device)).sum().backward()
    if cuda:
        torch.cuda.synchronize()

step()
open(f"{out}/{'again' if again else 'stepped'}-{rank}", "w").write(repr(time.time()))
while not again:
    step()
    time.sleep(0.01)
    if rank == "1" and os.path.exists(out + "/go"):
        with open(out + "/killed.tmp", "w") as file:
            file.write(repr(time.time()))
        os.rename(out + "/killed.tmp", out + "/killed")
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


class Run(NamedTuple):
    """Seconds of one run; None for what never came. `first_step_s`: from the start of the launcher until the last rank had
    stepped; `recovery_s`: from the kill until the last rank had stepped again."""

    first_step_s: float | None
    recovery_s: float | None


def one_run(command: list[str], *, has_standby: bool, num_ranks: int = 2) -> Run:
    """Start, let rank 1 die once everything is ready, and wait for the others."""
    with Workplace() as place:
        began, process = time.time(), place.start([*command, place.script("dies.py", DIES)])
        first = again = None
        try:
            first = _last_moment(place.folder, "stepped", num_ranks, READY_WITHIN_S)
            if first is None or (
                has_standby and not _until(lambda: _standbys_are_ready(place, num_ranks), READY_WITHIN_S, 0.5)
            ):
                return Run(None, None)
            (place.folder / "go").touch()
            again = _last_moment(place.folder, "again", num_ranks, RECOVERS_WITHIN_S)
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        finally:
            place.kill(process)
        if first is None or again is None:
            if os.environ.get("RSUP_BENCH_DEBUG"):
                print(place.log_tail())
            return Run(None if first is None else first - began, None)
        return Run(first - began, again - float((place.folder / "killed").read_text()))


def _last_moment(folder: Path, what: str, num_ranks: int, within_s: float) -> float | None:
    """When the last rank noted that, in seconds since 1970."""

    def noted() -> list[str]:
        return [text for path in folder.glob(f"{what}-*") if (text := path.read_text())]

    return max(map(float, noted())) if _until(lambda: len(noted()) == num_ranks, within_s) else None


def _until(condition: Callable[[], bool], within_s: float, every_s: float = 0.02) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every_s)
    return False


def _standbys_are_ready(place: Workplace, num_ranks: int) -> bool:
    events = subprocess.run([*RSUP, "events", JOB], env=place.environment, capture_output=True, text=True)
    return f"{num_ranks} warm standbys are ready" in events.stdout


def commands(num_ranks: int = 2) -> dict[str, list[str]]:
    """Launcher -> command line in front of the script."""
    ranks = ["--nproc-per-node", str(num_ranks), "--max-restarts", "3"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--ft-rank-section-timeouts", "step:60"]
    rsup = [*RSUP, "launch", "--job-id", JOB, *ranks]
    found = {"rsup": rsup, "rsup --no-standby": [*rsup, "--no-standby"]}
    if torchrun := peer("torchrun"):
        found["torchrun"] = [torchrun, *ranks]
    if ft_launcher := peer("ft_launcher"):
        found["ft_launcher"] = [ft_launcher, *ranks, *rendezvous]
    return found


def main(runs: int = RUNS, only: Sequence[str] = (), num_ranks: int = 2) -> list[Row]:
    """Rows in seconds. The launchers take turns, so that a machine that warms up favours none."""
    launchers = {name: command for name, command in commands(num_ranks).items() if not only or name.split()[0] in only}
    samples: dict[str, list[Run]] = {name: [] for name in launchers}
    for _ in range(runs):
        for name, command in launchers.items():
            samples[name].append(one_run(command, has_standby=name == "rsup", num_ranks=num_ranks))
    rows = [_row("start to all ranks stepped", name, [run.first_step_s for run in found]) for name, found in samples.items()]
    what = "SIGKILL to all ranks stepped"
    return rows + [_row(what, name, [run.recovery_s for run in found]) for name, found in samples.items()]


def _row(what: str, name: str, found: list[float | None]) -> Row:
    seen = [elapsed for elapsed in found if elapsed is not None]
    lost = len(found) - len(seen)
    goal = "<= 0.3 s on CPU, <= 2 s on 2 H200" if name == "rsup" and what.startswith("SIGKILL") else ""
    return Row(what, name, seen, "s", goal, f"{lost} of {len(found)} did not get there" if lost else "")


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS, sys.argv[2:]))
