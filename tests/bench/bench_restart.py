"""SIGKILL of one of two ranks to every rank having stepped again (DDP; gloo, or NCCL where there are GPUs).

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


def recovery_s(folder: Path) -> float | None:
    """Seconds from the kill to the last rank's first step, None if some rank never got there."""
    stepped = list(folder.glob("again-*"))
    if len(stepped) < 2 or not all(path.read_text() for path in stepped):
        return None
    return max(float(path.read_text()) for path in stepped) - float((folder / "killed").read_text())


def one_run(command: list[str], *, has_standby: bool) -> float | None:
    """Seconds from the kill to the last rank's first step of one run."""
    with Workplace() as place:
        process = place.start([*command, place.script("dies.py", DIES)])
        try:
            if not _until(lambda: len(list(place.folder.glob("stepped-*"))) == 2, READY_WITHIN_S):
                return None
            if has_standby and not _until(lambda: _standbys_are_ready(place), READY_WITHIN_S, 0.5):
                return None
            (place.folder / "go").touch()
            _until(lambda: recovery_s(place.folder) is not None, RECOVERS_WITHIN_S)
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        finally:
            place.kill(process)
        elapsed = recovery_s(place.folder)
        if elapsed is None and os.environ.get("RSUP_BENCH_DEBUG"):
            print(place.log_tail())
        return elapsed


def _until(condition: Callable[[], bool], within_s: float, every_s: float = 0.02) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every_s)
    return False


def _standbys_are_ready(place: Workplace) -> bool:
    events = subprocess.run([*RSUP, "events", JOB], env=place.environment, capture_output=True, text=True)
    return "2 warm standbys are ready" in events.stdout


def commands() -> dict[str, list[str]]:
    """Launcher -> command line in front of the script."""
    two = ["--nproc-per-node", "2", "--max-restarts", "3"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--ft-rank-section-timeouts", "step:60"]
    rsup = [*RSUP, "launch", "--job-id", JOB, *two]
    found = {"rsup": rsup, "rsup --no-standby": [*rsup, "--no-standby"]}
    if torchrun := peer("torchrun"):
        found["torchrun"] = [torchrun, *two]
    if ft_launcher := peer("ft_launcher"):
        found["ft_launcher"] = [ft_launcher, *two, *rendezvous]
    return found


def main(runs: int = RUNS, only: Sequence[str] = ()) -> list[Row]:
    """Rows in seconds. The launchers take turns, so that a machine that warms up favours none."""
    launchers = {name: command for name, command in commands().items() if not only or name.split()[0] in only}
    samples: dict[str, list[float | None]] = {name: [] for name in launchers}
    for _ in range(runs):
        for name, command in launchers.items():
            samples[name].append(one_run(command, has_standby=name == "rsup"))
    return [_row(name, found) for name, found in samples.items()]


def _row(name: str, found: list[float | None]) -> Row:
    recovered = [elapsed for elapsed in found if elapsed is not None]
    lost = len(found) - len(recovered)
    goal = "<= 0.3 s on CPU, <= 2 s on 2 H200" if name == "rsup" else ""
    return Row(
        "SIGKILL to all ranks stepped", name, recovered, "s", goal, f"{lost} of {len(found)} did not recover" if lost else ""
    )


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS, sys.argv[2:]))
