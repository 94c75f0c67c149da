"""Takes the reference trainer through every fault of in-process restart: `python -m tests.soak.inprocess_faults [2] [3]`.

Each is one small job on so many ranks, with `--inprocess-restart`; it has to end with the digest of an undisturbed run, or,
where the ranks declare an exit, as the policy says. Prints a table, and fails if a digest differs or a job ends too late.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ENDS_WITHIN_S = 120.0
TRAIN = ("-m", "rsup.worker.reference.train", "--deterministic-mode")
OPTIONS = {
    "iterations": 30,
    "save-interval": 5,
    "log-interval": 10,
    "eval-iters": 0,
    "num-layers": 1,
    "hidden-size": 16,
    "num-attention-heads": 2,
    "seq-length": 16,
    "micro-batch-size": 2,
}
LIMITS = {
    "monitor-thread-interval": 0.2,
    "monitor-process-interval": 0.2,
    "progress-watchdog-interval": 0.2,
    "soft-timeout": 4,
    "hard-timeout": 8,
    "barrier-timeout": 60,
    "heartbeat-interval": 2,
    "heartbeat-timeout": 30,
}
RESTARTS = "a new process"
"""What the terminal shows when a restart has begun that waits for a process."""


@dataclass(frozen=True)
class Case:
    """One job. `faults`: the trainer's `--fault`; `strike_back`: SIGKILL rank 0 as soon as the restart after them is under way;
    `ends_with`: exit codes that are right in place of 0 and the digest."""

    name: str
    faults: tuple[str, ...] = ()
    strike_back: bool = False
    ends_with: tuple[int, ...] = ()


CASES = (
    Case("undisturbed"),
    Case("rank 0 killed", ("rank=0,iteration=13,kind=sigkill",)),
    Case("another rank killed", ("rank=1,iteration=13,kind=sigkill",)),
    Case("exception", ("rank=1,iteration=13,kind=exception",)),
    Case("out of memory", ("rank=0,iteration=13,kind=out-of-memory",)),
    Case("Python busy hang", ("rank=1,iteration=13,kind=busy-hang",)),
    Case("hang in a collective", ("rank=1,iteration=13,kind=hang-in-collective",)),
    Case("hang with the GIL held", ("rank=1,iteration=13,kind=gil-hang",)),
    Case("exit codes 16, then 17", ("kind=nan-data,iteration=13",), ends_with=(17,)),  # declared by the rerun machine
    Case("exit code 16, undeclared", ("rank=1,iteration=13,kind=exit=16",)),
    Case("exit code 3", ("rank=1,iteration=13,kind=exit=3",)),
    Case("two at once", ("rank=0,iteration=13,kind=exception", "rank=1,iteration=13,kind=sigkill")),
    Case("again during the restart", ("rank=1,iteration=13,kind=sigkill",), strike_back=True),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a case's job."""

    exit_code: int
    digest: str
    attempts: int
    entries: int
    seconds: float
    output: str


class Soak:
    """Jobs on `num_ranks` ranks, in `folder`."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        places = {"RSUP_STATE_DIR": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run")}
        self._environment = os.environ | places | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def run(self, case: Case) -> Outcome:
        """Launch, strike, wait. A job that does not end in time is ended, with exit code -1."""
        job = f"{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}-{self._num_ranks}"
        output = self._folder / f"{job}.txt"
        began_s = time.monotonic()
        with (
            output.open("w") as file,
            subprocess.Popen(self._command(job, case), stdout=file, stderr=file, env=self._environment) as launched,
        ):
            if case.strike_back:
                self._strike_back(job, output)
            try:
                exit_code = launched.wait(max(1.0, ENDS_WITHIN_S - (time.monotonic() - began_s)))
            except subprocess.TimeoutExpired:
                exit_code = -1
                launched.terminate()
        took_s, text = time.monotonic() - began_s, output.read_text(errors="replace")
        digests = re.findall(r"^digest (\w+)", text, re.MULTILINE)
        entries = max(map(int, re.findall(r"\(entry (\d+)\)", text)), default=1)
        return Outcome(exit_code, digests[-1] if digests else "", len(self._status(job)["attempts"]), entries, took_s, text)

    def _command(self, job: str, case: Case) -> list[str]:
        chosen = OPTIONS | {f"inprocess-{name}": value for name, value in LIMITS.items()}
        options = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
        faults = [part for fault in case.faults for part in ("--fault", fault)]
        launch = ["--nproc-per-node", str(self._num_ranks), "--job-id", job, "--max-restarts", "2"]
        launch += ["--no-standby"] if case.strike_back else []
        save = ["--save", str(self._folder / f"save-{job}")]
        return [*_rsup("launch"), *launch, *TRAIN, *options, "--inprocess-restart", *save, *faults]

    def _strike_back(self, job: str, output: Path) -> None:
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while RESTARTS not in output.read_text(errors="replace"):
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.05)
        for rank in self._status(job)["ranks"]:
            if rank["rank"] == 0 and rank["pid"]:
                os.kill(rank["pid"], signal.SIGKILL)

    def _status(self, job: str) -> dict[str, list[dict[str, int]]]:
        done = subprocess.run(
            [*_rsup("status"), job, "--json"], env=self._environment, capture_output=True, text=True, timeout=60
        )
        found: dict[str, list[dict[str, int]]] = (
            json.loads(done.stdout) if done.returncode == 0 else {"attempts": [], "ranks": []}
        )
        return found


def _rsup(command: str) -> list[str]:
    return [sys.executable, "-m", "rsup.launcher", command]


def run_all(num_ranks: int, cases: Sequence[Case], folder: Path) -> int:
    """Run the cases and print the table; how many went wrong."""
    soak, calm, num_wrong = Soak(folder, num_ranks), "", 0
    print(f"{num_ranks} ranks\n{'fault':26} {'attempts':>8} {'entries':>7} {'seconds':>7}  digest", flush=True)
    for case in cases:
        outcome = soak.run(case)
        calm = calm or outcome.digest
        is_equal = bool(calm) and outcome.exit_code == 0 and outcome.digest == calm
        verdict = "equal" if is_equal else f"ends with {outcome.exit_code}"
        is_right = is_equal or outcome.exit_code in case.ends_with
        verdict += "" if is_right else f": WRONG, digest {outcome.digest[:12] or 'none'}"
        print(f"{case.name:26} {outcome.attempts:8} {outcome.entries:7} {outcome.seconds:7.1f}  {verdict}", flush=True)
        num_wrong += not is_right
    return num_wrong


def main() -> int:
    """Parse, run; 0 if every job ended as it has to."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.inprocess_faults", description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--only", default="", help="cases whose name contains this, and the undisturbed one")
    given = parser.parse_args()
    chosen = [case for case in CASES if given.only in case.name or not case.faults]
    folder = Path(tempfile.mkdtemp(prefix="rsup-soak-"))
    num_wrong = sum(run_all(num_ranks, chosen, folder) for num_ranks in given.ranks)
    print(f"{num_wrong} wrong; what the jobs printed: {folder}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
