"""SIGTERM to the launcher until it has exited, with a durable checkpoint of the last iteration (2 ranks, reference trainer).

Peer: torchrun with the same trainer in the same runs, in turns. Two times of each: until the checkpoint was committed (the
time of its commit file), and until the launcher was gone. An exit without a checkpoint of the iteration that the trainer left
after counts as lost, in the note. torchrun then exits with an error, whether or not anything was saved.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.bench.table import RSUP, Row, Workplace, peer

RUNS = 10
READY_WITHIN_S = 120.0
LEAVES_WITHIN_S = 60.0
TRAINER = (
    *("-m", "rsup.worker.reference.train", "--iterations", "1000000", "--log-interval", "5", "--eval-iters", "0"),
    *("--exit-signal-handler", "--num-layers", "4", "--hidden-size", "256"),
)


def commands() -> dict[str, list[str]]:
    """Launcher -> command line in front of the trainer."""
    two = ["--nproc-per-node", "2"]
    found = {"rsup": [*RSUP, "launch", "--job-id", "bench", *two]}
    if torchrun := peer("torchrun"):
        found["torchrun"] = [torchrun, *two]
    return found


def one_run(command: Sequence[str]) -> tuple[float, float] | None:
    """Seconds from SIGTERM to the commit and to the launcher's end; None where nothing durable came of it."""
    with Workplace() as place:
        saves = place.folder / "saves"
        process = place.start([*command, *TRAINER, "--save", str(saves)])
        log = place.folder / "last.log"
        try:
            deadline_s = time.monotonic() + READY_WITHIN_S
            while log.read_text(errors="replace").count(" iteration ") < 3:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    return None
                time.sleep(0.02)
            told_s, began_s = time.time(), time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(LEAVES_WITHIN_S)
            took_s = time.monotonic() - began_s
        except subprocess.TimeoutExpired:
            return None
        finally:
            place.kill(process)
        left = re.search(r"leaving after iteration (\d+)", log.read_text(errors="replace"))
        commit = saves / f"iter_{int(left[1]) if left else 0:07d}" / "commit.json"
        return (commit.stat().st_mtime - told_s, took_s) if commit.exists() else None


def main(runs: int = RUNS) -> list[Row]:
    """Rows in seconds. The launchers take turns, so that a machine that warms up favours none."""
    found: dict[str, list[tuple[float, float] | None]] = {name: [] for name in commands()}
    for _ in range(runs):
        for name, command in commands().items():
            found[name].append(one_run(command))
    rows = []
    for place, what in enumerate(("SIGTERM to the durable checkpoint", "SIGTERM to the launcher's exit")):
        for name, samples in found.items():
            durable = [sample[place] for sample in samples if sample is not None]
            lost = len(samples) - len(durable)
            rows.append(Row(what, name, durable, "s", "", f"{lost} of {len(samples)} without a durable save" if lost else ""))
    return rows


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
