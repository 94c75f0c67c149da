"""What `rsup gate` and SLURM's prolog cost on a node: an empty environment, a signed snapshot of a large cluster, no network.

2,000 nodes, of which 50 and 400 GPUs are listed; the question is about four GPUs of a node against which nothing is known, and
about one that is refused. `python -m tests.bench.bench_gate [CALLS]`
"""

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.table import Row, Workplace, print_table
from tests.slurm.node_side import NodeSide, Signer, refusal

NOWHERE = subprocess.DEVNULL
CALLS = 200
GOAL = "<= 100 ms"


def main(calls: int = CALLS) -> list[Row]:
    """Rows in milliseconds a call, starting the process included."""
    with Workplace() as place:
        node = large_cluster(place.folder)
        python = [sys.executable, "-I", "-m"]
        cases: tuple[tuple[str, list[str], int, dict[str, str], str], ...] = (
            ("rsup gate", [str(Path(sys.executable).with_name("rsup")), "gate", "--gpus", "0-3"], 0, {}, GOAL),
            ("python -m ...gate", [*python, "rsup.launcher.slurm.gate", "--gpus", "0-3"], 0, {}, GOAL),
            (
                "the prolog's script, accepts",
                [str(node.hook("prolog"))],
                0,
                {"SLURM_JOB_GPUS": "0-3", "SLURM_JOB_ID": "1"},
                GOAL,
            ),
            ("the prolog's script, refuses", [str(node.hook("prolog"))], 1, {"SLURM_JOB_GPUS": "7", "SLURM_JOB_ID": "1"}, GOAL),
            ("the interpreter alone", [sys.executable, "-I", "-c", "pass"], 0, {}, ""),
        )
        return [measured(who, command, code, node.environ | more, goal, calls) for who, command, code, more, goal in cases]


def measured(who: str, command: list[str], code: int, environ: dict[str, str], goal: str, calls: int) -> Row:
    """A row. Its note has the processor's time of programs (a script leaves some of its own behind): on a machine that does
    other things it says more than the clock's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    samples = [once(command, code, environ) for _ in range(calls)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Row("gate", who, samples, "ms", goal, "" if "script" in who else f"CPU {cpu_s / calls * 1e3:.0f} ms a call")


def large_cluster(folder: Path) -> NodeSide:
    """A node n1999 whose GPU 7 is refused."""
    node = NodeSide(folder / "n1999", "n1999", Signer())
    boards = {str(index): [f"GPU-{index:032x}"] for index in range(8)}
    node.boards(boards)
    devices = {f"GPU-{index + 1000:032x}": refusal(node=f"n{index // 8}", serial=str(index)) for index in range(400)}
    devices[boards["7"][0]] = refusal(node="n1999", serial="1650")
    node.tell(nodes={f"n{index}": refusal() for index in range(50)}, devices=devices, num_nodes=2000, max_refused=100)
    return node


def once(command: list[str], code: int, environ: dict[str, str]) -> float:
    """Milliseconds; nothing in the environment but what SLURM sets, no terminal, no output kept. Gate and hook have time limits
    of their own; with one here Python would look only after 0.5, 1, 2, ... 50 ms whether the process has ended, and each answer
    would be 64, 114 or 164 ms."""
    started = time.perf_counter()
    done = subprocess.run(command, env=environ, cwd="/", stdin=NOWHERE, stdout=NOWHERE, stderr=NOWHERE)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    assert done.returncode == code, (command, done.returncode)
    return elapsed_ms


if __name__ == "__main__":
    rows = main(int(sys.argv[1]) if len(sys.argv) > 1 else CALLS)
    print_table(rows)
    sys.exit(statistics.median(rows[0].samples) > 100)
