"""Warm standbys in whole jobs: a restart that imports nothing again, scripts that must start cold, and memory that is short."""

import os
import signal
from pathlib import Path

from tests.jobs.conftest import Place, wait_until
from tests.jobs.test_operator_requests import keeper_of
from tests.jobs.test_plain_jobs import is_alive

TRAIN = """
import os, sys, time
import torch
import rsup.worker

attempt, rank = os.environ["RSUP_ATTEMPT"], os.environ["RANK"]
started = any(type(finder).__name__ == "Guard" for finder in sys.meta_path)  # it still keeps torch's late parts
print(f"attempt {attempt} rank {rank} warm {started}", flush=True)
for iteration in range(1, 100000 if attempt == "1" else 4):
    rsup.worker.set_iteration(iteration)
    if iteration == 2:
        path = f"{os.environ['OUT']}/pid-{attempt}-{rank}"
        with open(path + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(path + ".new", path)
    time.sleep(0.02)
"""


def events(place: Place, job: str) -> str:
    return place.rsup("events", job) if place.status(job) else ""


def kill_when_ready(place: Place, job: str) -> None:
    wait_until(lambda: "2 warm standbys are ready" in events(place, job), "standbys", 60)
    kill_rank_1(place)


def kill_rank_1(place: Place) -> None:
    """Kill rank 1 of the first attempt, once it has trained an iteration."""
    wait_until((place.folder / "pid-1-1").exists, "the second iteration", 60)
    os.kill(int((place.folder / "pid-1-1").read_text()), signal.SIGKILL)


def test_a_restart_imports_nothing_again(place: Place) -> None:
    job = place.launch("--job-id", "w1", "--nproc-per-node", "2", "--max-restarts", "2", place.script(TRAIN))
    kill_when_ready(place, "w1")
    job.ends(0)
    assert "attempt 1 rank 0 warm False" in job.stdout
    assert {f"attempt 2 rank {rank} warm True" for rank in (0, 1)} <= set(job.stdout.splitlines())
    assert "2 of 2 ranks took over a warm standby" in events(place, "w1")


def test_no_standby(place: Place) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--no-standby")
    job = place.launch("--job-id", "w2", *options, place.script(TRAIN))
    kill_rank_1(place)
    job.ends(0)
    assert "attempt 2 rank 1 warm False" in job.stdout
    assert "warm" not in events(place, "w2")


def test_standbys_end_with_their_agent(place: Place) -> None:
    job = place.launch("--job-id", "w3", "--nproc-per-node", "2", "--max-restarts", "1", place.script(TRAIN))
    wait_until(lambda: "2 warm standbys are ready" in events(place, "w3"), "standbys", 60)
    assert "  2 warm standbys ready, " in place.rsup("status", "w3")
    [on_node] = place.status("w3")["standbys"]
    assert on_node["ready"] == 2 and on_node["size_bytes"] > 100 << 20
    standbys = standbys_of(job.pid)
    assert len(standbys) == 2
    keeper = keeper_of(job)
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in standbys), "no standby left")
    wait_until(lambda: not is_alive(keeper), "the keeper's last words, while there is a supervisor to hear them")


def standbys_of(agent: int) -> list[int]:
    """Children of the agent that run the standby's program."""
    found = []
    for listing in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((listing.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and b"standby_process.py" in listing.read_bytes():
                found.append(int(listing.parent.name))
        except OSError:
            continue
    return found


def test_a_script_that_prepares_the_import_has_no_standby_and_is_told_why(place: Place) -> None:
    text = TRAIN.replace("import torch\n", "os.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n", 1)
    job = place.launch("--job-id", "w4", "--nproc-per-node", "2", "--max-restarts", "2", place.script(text))
    why = "no warm standbys for this job: line 3 sets OMP_NUM_THREADS before torch is imported"
    wait_until(lambda: why in events(place, "w4"), "the reason", 60)
    assert standbys_of(job.pid) == []
    kill_rank_1(place)
    job.ends(0)
    assert "attempt 2 rank 0 warm False" in job.stdout
