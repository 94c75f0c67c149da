"""SIGKILL of one of two ranks to every rank having stepped again (gloo, DDP); peers: torchrun, ft_launcher.

The killed rank writes the time just before it dies; in the next attempt each rank writes the time after its first step.
torchrun 2.13 reuses its store between attempts, so some of its restarts hang or need a second one: those that did not
recover within the time limit are counted in the note, not in the median.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.table import RSUP, Row, Workplace, peer

RUNS = 5
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
for step in range(10):
    model(torch.ones(8, 64, device=device)).sum().backward()
    if cuda:
        torch.cuda.synchronize()
    if step == 0 and again:
        open(f"{out}/stepped-{rank}", "w").write(repr(time.time()))
    if step == 5 and rank == "1" and not again:
        with open(out + "/killed.tmp", "w") as file:
            file.write(repr(time.time()))
        os.rename(out + "/killed.tmp", out + "/killed")
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def recovery_s(folder: Path) -> float | None:
    """Seconds from the kill to the last rank's first step, None if some rank never got there."""
    stepped = list(folder.glob("stepped-*"))
    if len(stepped) < 2:
        return None
    return max(float(path.read_text()) for path in stepped) - float((folder / "killed").read_text())


def one_run(command: list[str]) -> float | None:
    """Seconds from the kill to the last rank's first step of one run."""
    with Workplace() as place:
        place.run([*command, place.script("dies.py", DIES)], timeout_s=60)
        elapsed = recovery_s(place.folder)
        if elapsed is None and os.environ.get("RSUP_BENCH_DEBUG"):
            print(place.log_tail())
        return elapsed


def commands() -> dict[str, list[str]]:
    """Launcher -> command line in front of the script."""
    two = ["--nproc-per-node", "2", "--max-restarts", "3"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--ft-rank-section-timeouts", "step:60"]
    found = {"rsup": [*RSUP, "launch", *two]}
    if torchrun := peer("torchrun"):
        found["torchrun"] = [torchrun, *two]
    if ft_launcher := peer("ft_launcher"):
        found["ft_launcher"] = [ft_launcher, *two, *rendezvous]
    return found


def main(runs: int = RUNS, only: Sequence[str] = ()) -> list[Row]:
    """Rows in seconds. The launchers take turns, so that a machine that warms up favours none."""
    launchers = {name: command for name, command in commands().items() if not only or name in only}
    samples: dict[str, list[float | None]] = {name: [] for name in launchers}
    for _ in range(runs):
        for name, command in launchers.items():
            samples[name].append(one_run(command))
    return [_row(name, found) for name, found in samples.items()]


def _row(name: str, found: list[float | None]) -> Row:
    recovered = [elapsed for elapsed in found if elapsed is not None]
    lost = len(found) - len(recovered)
    goal = "<= 0.3 s on CPU, by a standby that is not built yet" if name == "rsup" else ""
    return Row(
        "SIGKILL to all ranks stepped", name, recovered, "s", goal, f"{lost} of {len(found)} did not recover" if lost else ""
    )


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS, sys.argv[2:]))
