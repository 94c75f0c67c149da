"""Leaving on purpose in real jobs: signals, deadlines, phases, and a save that fails on the way out."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Launched, Place, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TINY = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --eval-iters 0"
TRAIN = ("-m", "rsup.worker.reference.train", *TINY.split())
ENDLESS = (*TRAIN, "--iterations", "1000000", "--log-interval", "20")


def story(place: Place, job: str, kind: str) -> list[dict[str, Any]]:
    """The job's events of that kind."""
    events: list[dict[str, Any]] = json.loads(place.rsup("events", job, "--json"))
    return [event for event in events if event["kind"] == kind]


def way_out(place: Place, job: str) -> dict[str, Any]:
    """What the ranks said of the one way out that they took; their last checkpoint is of that iteration."""
    (left,) = story(place, job, "RankLeaves")
    data: dict[str, Any] = left["data"]
    if data["durable"]:
        assert place.status(job)["checkpoints"][-1]["iteration"] == data["iteration"]
    return data


def rank_pids(place: Place, job: str) -> list[int]:
    (started, *_) = wait_until(lambda: story(place, job, "AttemptStarted"), "the supervisor to hear of the ranks")
    pids: list[int] = started["data"]["pids"]
    return pids


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def at_work(launched: Launched) -> int:
    """Wait until its ranks have logged some further iterations, and return how many logs there are."""
    before = launched.stdout.count(" iteration ")
    wait_until(lambda: launched.stdout.count(" iteration ") >= before + 2, "further iterations", 150)
    return launched.stdout.count(" iteration ")


def digest_of(launched: Launched) -> str:
    last = launched.stdout.strip().splitlines()[-1]
    assert last.startswith("digest "), launched.stdout
    return last


def test_signals_reach_the_loop_and_not_the_loaders_processes(place: Place) -> None:
    """P35: a signal to one rank only ends the job with 0 after a durable save, also beside the launcher's own; a data loader's
    processes survive what would have killed them."""
    options = ("--exit-signal-handler", "--exit-signal", "TERM,USR1", "--num-workers", "1", "--save", str(place.folder / "c"))
    launched = place.launch("--nproc-per-node", "2", "--job-id", "s", *ENDLESS, *options)
    at_work(launched)
    ranks = rank_pids(place, "s")
    workers = [child for rank in ranks for child in children_of(rank)]
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    at_work(launched)
    os.kill(ranks[1], signal.SIGUSR1)
    launched.process.send_signal(signal.SIGTERM)
    launched.ends(0)
    left = way_out(place, "s")
    assert (left["kind"], left["durable"]) == ("signal", True)
    assert f"leaving after iteration {left['iteration']}: signal SIG" in launched.stdout
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def test_the_deadline_is_planned_for(place: Place) -> None:
    """Ranks leave while there is time for a durable save; how long that takes was measured, if there was time for that, too."""
    end_s = time.time() + 40
    options = ("--save", str(place.folder / "c"))
    launched = place.launch("--deadline", f"{end_s:.0f}", "--job-id", "d", *ENDLESS, *options)
    launched.ends(0)
    assert time.time() < end_s
    left = way_out(place, "d")
    assert (left["kind"], left["durable"]) == ("deadline", True)
    assert re.search(r"a save takes [0-9.]+ s \((not yet )?measured\), an iteration [0-9.]+ s", launched.stdout)
    measured = "saving after iteration 1: the deadline is not far" in launched.stdout
    assert [c["iteration"] for c in place.status("d")["checkpoints"]] == [*([1] if measured else []), left["iteration"]]


PHASES = """
[[phases]]
name = "first"
until_iteration = 8
arguments = ["--data-path", "{a}"]
[[phases]]
until_iteration = 14
arguments = ["--data-path", "{b}", "--lr", "2e-3", "--exit-interval", "14"]
[[phases]]
arguments = ["--data-path", "{a}"]
"""


SECOND_WAITS = """
import os, time
while os.environ["RSUP_ATTEMPT"] == "2" and not os.path.exists(os.environ["OUT"] + "/killed"):
    time.sleep(0.02)
from rsup.worker.reference.train import run_as_program
run_as_program()
"""


BY_HAND = """
import json, sys
from rsup.worker.reference.train import main
print([main(arguments) for arguments in json.loads(sys.argv[1])])
"""


def test_three_phases_end_as_three_runs_by_hand(place: Place) -> None:
    """The next phase's configuration follows by itself, also under another supervisor and in a job that is resumed; with the
    samples of each phase counted from its beginning."""
    texts = {}
    for name in "ab":
        texts[name] = place.folder / f"{name}.txt"
        texts[name].write_text("".join(f"{name} {i * i} " for i in range(5000)))
    file = place.folder / "phases.toml"
    file.write_text(PHASES.format(**texts))
    common = (*TRAIN, "--iterations", "20", "--save-interval", "4", "--log-interval", "1")
    program = (place.script(SECOND_WAITS), *common[2:])
    launch = ("--phases", str(file), "--job-id", "p", *program, "--save", str(place.folder / "c"))
    first = place.launch(*launch)
    wait_until(lambda: "leaving after iteration 8" in first.stdout, "the end of the first phase", 150)
    os.kill(place.supervisor_pid(), signal.SIGKILL)
    (place.folder / "killed").touch()
    first.ends(0, within_s=200)
    assert "phase 1 of 3 (first) is over after iteration 8: phase 2 of 3 follows (costs no restart)" in first.stderr
    second = place.launch("--resume", *launch).ends(0, within_s=200)

    starts = [event["text"] for event in story(place, "p", "StartAttempt")]
    assert [text.partition(" of 3")[0][-1] for text in starts] == ["1", "2", "3"]
    assert [event["data"]["kind"] for event in story(place, "p", "RankLeaves")] == ["phase", "interval", "finished"]
    assert not place.status("p")["incidents"]

    by_hand = (*common[2:], "--save", str(place.folder / "h"), "--phase-transition-iterations", "8,14")
    runs = [[*by_hand, "--data-path", str(texts[name]), *more] for name, *more in (("a",), ("b", "--lr", "2e-3"), ("a",))]
    command = [sys.executable, place.script(BY_HAND, "by_hand.py"), json.dumps(runs)]
    done = subprocess.run(command, env=place.environment(), capture_output=True, text=True, timeout=200)
    *_, digest, codes = done.stdout.splitlines()
    assert codes == "[0, 0, 0]", done.stderr
    assert digest == digest_of(second)
