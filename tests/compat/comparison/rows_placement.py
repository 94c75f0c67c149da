"""Where ranks run: NUMA binding (66), and a rejected result that has to be computed again on another device (49)."""

import os
from pathlib import Path

from tests.compat.comparison.row import Peer, Row, Seen

SHOWS_CORES = """
import os, sys
cores = os.sched_getaffinity(0)
imports = sorted({len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")})
print("cores of rank", os.environ["RANK"], *sorted(cores), "threads", *imports, flush=True)
"""

REJECTS = """
import os, sys, time
rank, ordinal, tracker, out = os.environ["RANK"], os.environ["LOCAL_RANK"], sys.argv[2], sys.argv[3]
node, before = os.uname().nodename, os.path.join(out, "suspect")
def track(status):
    with open(tracker, "a") as file:
        file.write(f"ts=now node={node} device={ordinal} jobID=N/A rank=0 iteration=7 "
                   f"status=RerunValidationStatus.{status} result=nan message='found NaN in local forward loss'\\n")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == "0":
        open(before, "w").write(ordinal)
        track("FIRST_RERUN_REPRODUCIBLE")
        open(before + ".done", "w").close()
    while not os.path.exists(before + ".done"): time.sleep(0.01)
    sys.exit(16)
if rank == "0":
    again = open(before).read() == ordinal
    if not again:
        track("SECOND_RERUN_NOT_REPRODUCIBLE")
    open(before + ".verdict", "w").write("16" if again else "17")
while not os.path.exists(before + ".verdict") or not open(before + ".verdict").read(): time.sleep(0.01)
sys.exit(int(open(before + ".verdict").read()))
"""


def _script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def numa_without_gpus(peer: Peer, folder: Path) -> Seen:
    """The same command line on a machine without GPUs, where it is tried out."""
    options = ("--nproc-per-node", "2", "--numa-binding", "exclusive")
    done = peer.run(folder, *options, _script(folder, SHOWS_CORES), env={"CUDA_VISIBLE_DEVICES": ""})
    cores = {line for line in done.stdout.splitlines() if line.startswith("cores of rank")}
    right = done.returncode == 0 and len(cores) == 2
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "not bound" in line]
    return Seen(
        right, "; ".join(sorted(cores)) if right else f"exit code {done.returncode}: {errors[-1] if errors else '?'}"[:120]
    )


def numa_outside_the_mask(peer: Peer, folder: Path) -> Seen:
    """Started under taskset on one core: ranks must stay on it."""
    core = min(os.sched_getaffinity(0))
    bound = Peer(peer.name, ("taskset", "-c", str(core), *peer.program))
    done = bound.run(folder, "--nproc-per-node", "1", "--numa-binding", "node", _script(folder, SHOWS_CORES))
    right = done.returncode == 0 and f"cores of rank 0 {core} threads" in done.stdout
    return Seen(right, done.stdout.strip() if right else f"exit code {done.returncode}")


def rerun_elsewhere(peer: Peer, folder: Path) -> Seen:
    """A script that leaves with 16 as Megatron-LM does, and on the next start says whether it sits elsewhere."""
    words = [_script(folder, REJECTS), "--result-rejected-tracker-filename", str(folder / "tracker"), str(folder)]
    done = peer.run(folder, "--nproc-per-node", "2", "--max-restarts", "1", *words)
    statuses = (folder / "tracker").read_text()
    right = done.returncode == 17 and "SECOND_RERUN_NOT_REPRODUCIBLE" in statuses
    verdict = (
        "verdict reached on another device" if "SECOND_RERUN" in statuses else "started on the same device again, no verdict"
    )
    return Seen(right, f"{verdict}, exit code {done.returncode}")


def only_the_number(peer: Peer, folder: Path) -> Seen:
    """16 of a script that has nothing to do with it."""
    done = peer.run(folder, "--nproc-per-node", "1", _script(folder, "raise SystemExit(16)"))
    return Seen(done.returncode == 1, f"exit code {done.returncode}")


ROWS: tuple[Row, ...] = (
    Row("66", "NUMA binding on a machine without GPUs", numa_without_gpus, True, "ranks spread over nodes and cores"),
    Row("66+", "NUMA binding under taskset", numa_outside_the_mask, True, "the launcher's own cores only"),
    Row(
        "49",
        "exit 16: run the iteration again on another device",
        rerun_elsewhere,
        True,
        "another device, then the verdict's 17",
    ),
    Row("49+", "exit 16 by chance", only_the_number, False, "exit code 1"),
)
