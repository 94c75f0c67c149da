"""SIGKILL of one of two ranks to every rank having stepped again (gloo, DDP); peers: torchrun, ft_launcher.

The killed rank writes the time just before it dies; in the next attempt each rank writes the time after its first step.
torchrun 2.13 reuses its store between attempts, so some of its restarts hang or need a second one: those that did not
recover within the time limit are counted in the note, not in the median.
"""

import os
import sys
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


def measure(name: str, command: list[str], runs: int) -> Row:
    """Run `command SCRIPT` that many times."""
    samples, lost = [], 0
    for _ in range(runs):
        with Workplace() as place:
            place.run([*command, place.script("dies.py", DIES)], timeout_s=60)
            elapsed = recovery_s(place.folder)
            if elapsed is None:
                lost += 1
                if os.environ.get("RSUP_BENCH_DEBUG"):
                    print(place.log_tail())
            else:
                samples.append(elapsed)
    goal = "" if name != "rsup" else "<= 0.3 s with a standby (not built yet)"
    return Row("SIGKILL to all ranks stepped", name, samples, "s", goal, f"{lost} of {runs} did not recover" if lost else "")


def main(runs: int = RUNS) -> list[Row]:
    """Rows in seconds."""
    two = ["--nproc-per-node", "2", "--max-restarts", "3"]
    rows = [measure("rsup", [*RSUP, "launch", *two], runs)]
    if torchrun := peer("torchrun"):
        rows.append(measure("torchrun", [torchrun, *two], runs))
    if ft_launcher := peer("ft_launcher"):
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--ft-rank-section-timeouts", "step:60"]
        rows.append(measure("ft_launcher", [ft_launcher, *two, *rendezvous], runs))
    return rows


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
