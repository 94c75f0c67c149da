"""`rsup demo`: a training on two ranks that loses one to SIGKILL, then hangs, and ends as if nothing had happened.

Three acts, each a real command that is printed before it runs: an undisturbed run, the same run with two faults, and the
report of the second from the store. The last lines compare the parameters of both.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.wire import RsupError

ITERATIONS = 60
KILL_AT, HANG_AT = 25, 42
STEP_LIMIT_S = 4


class DemoFailed(RsupError):
    """A run of the demonstration did not end as it should."""


def main(argv: list[str]) -> int:
    """Run the demonstration; 0 when both runs end with the same parameters."""
    parser = OneLineParser(prog="rsup demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", default="demo-run", help="where checkpoints and the store go (replaced; default: demo-run)")
    folder = Path(parser.parse_args(argv).dir).absolute()
    _make_empty(folder)
    os.environ["RSUP_STATE_DIR"] = str(folder / "state")
    started = time.monotonic()

    _say(f"1. An undisturbed run: 2 ranks, {ITERATIONS} iterations of a small GPT on Python's own sources.")
    calm = _train("calm", folder, [])
    print("\nStatus page, also while the next run goes on:")
    _run(["status", "calm", "--page"])
    _say(f"2. The same; rank 1 is killed at iteration {KILL_AT}, rank 0 hangs at {HANG_AT} (limit {STEP_LIMIT_S} s a step).")
    disturbed = _train("disturbed", folder, _faults())
    _say("3. What happened, from the supervisor's store (rsup report disturbed):")
    _run(["report", "disturbed", "--output", str(folder / "report.html")])

    print(f"\nundisturbed: {calm}\ndisturbed:   {disturbed}")
    print(f"took {time.monotonic() - started:.0f} s; look around with:")
    print(f"  RSUP_STATE_DIR={shlex.quote(str(folder / 'state'))} rsup jobs")
    if calm != disturbed:
        raise DemoFailed("the two runs ended with different parameters; please report this")
    print("The run with faults ended with bitwise the same parameters.")
    return 0


def _faults() -> list[str]:
    return [
        *("--fault", f"rank=1,iteration={KILL_AT},kind=sigkill"),
        *("--fault", f"rank=0,iteration={HANG_AT},kind=hang"),
    ]


def _make_empty(folder: Path) -> None:
    if folder.exists() and not (folder / "state").is_dir() and any(folder.iterdir()):
        raise DemoFailed(f"{folder} is not a folder of an earlier demonstration; choose another with --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _train(job_id: str, folder: Path, faults: list[str]) -> str:
    """Run the reference trainer under `rsup launch`; return its last line, the digest."""
    launch = ["launch", "--nproc-per-node", "2", "--job-id", job_id, "--max-restarts", "3"]
    launch += ["--ft-rank-section-timeouts", f"step:{STEP_LIMIT_S}"]
    train = ["-m", "rsup.worker.reference.train", "--iterations", str(ITERATIONS), "--save-interval", "10"]
    train += ["--save", str(folder / job_id), "--log-interval", "10", "--enable-ft-package", *faults]
    digest = _run([*launch, *train])
    if not digest.startswith("digest "):
        raise DemoFailed(f"the run {job_id} did not end with a digest: {digest!r}")
    return digest


def _run(arguments: list[str]) -> str:
    """Run an rsup command, its output passed through line by line; return the last line that says something."""
    print(f"$ rsup {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "rsup.launcher", *arguments]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        raise DemoFailed(f"rsup {arguments[0]} ended with exit code {process.returncode}")
    return last


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)
