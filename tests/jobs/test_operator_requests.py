"""What people ask of a real job, from the command to the ranks and into the story: stop, checkpoint, fence; and what is
left when everything was killed at once."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher.stacks import process_state
from tests.jobs.conftest import RSUP, Launched, Place, free_port, wait_until
from tests.jobs.test_plain_jobs import SLEEPS, is_alive, pids

TRAINS = """
import os, sys, time
import rsup.worker as worker
worker.init()
at, saved = 0, os.environ["OUT"] + "/saved"
while not os.path.exists(os.environ["OUT"] + "/finish"):
    at += 1
    worker.set_iteration(at)
    time.sleep(0.02)
    asked = worker.requested()
    if asked is not None:
        if os.environ["RANK"] == "0":
            open(saved, "w").write(str(at))
            worker.report_checkpoint(at, saved, 0.01)
        worker.request_done(asked.request_id, at)
        if asked.leave:
            break
worker.shutdown()
"""


def events(place: Place, job: str, kind: str) -> list[dict[str, Any]]:
    """The job's events of a kind."""
    found: list[dict[str, Any]] = json.loads(place.rsup("events", job, "--json"))
    return [event for event in found if event["kind"] == kind]


def owner(place: Place, job: str) -> str:
    return str(place.status(job)["job"]["owner"])


def test_checkpoint_and_stop_reach_the_ranks_with_their_reason_and_principal(place: Place) -> None:
    launched = place.launch("--nproc-per-node", "2", "--job-id", "s", place.script(TRAINS))
    wait_until(lambda: place.iteration_of("s") > 3, "both ranks at work")
    size = "job s: running, attempt 1, 2 ranks on 1 node"
    assert place.rsup("checkpoint", "s", "--dry-run") == f"would ask for a checkpoint of {size}\n"
    assert place.rsup("stop", "s", "--dry-run", "--reason", "x") == f"would stop {size}\n"
    assert not events(place, "s", "SaveCheckpoint") and not events(place, "s", "StopRequested"), "a dry run does nothing"
    place.rsup("checkpoint", "s", "--reason", "before the upgrade")
    wait_until(lambda: events(place, "s", "CheckpointCommitted"), "the checkpoint that was asked for")
    (asked,) = events(place, "s", "SaveCheckpoint")
    assert asked["principal"] == owner(place, "s") and "before the upgrade" in asked["text"]
    answer = json.loads(place.rsup("stop", "s", "--reason", "enough", "--json"))
    assert answer["verb"] == "stop" and not answer["dry_run"]
    launched.ends(0)
    (stop,) = events(place, "s", "StopRequested")
    assert stop["principal"] == owner(place, "s") and "enough" in stop["text"]
    assert "has ended" in place_error(place, "stop", "s")


def place_error(place: Place, *arguments: str) -> str:
    """What a command that is refused prints: one line on stderr."""
    done = subprocess.run([*RSUP, *arguments], env=place.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def keeper_of(launched: Launched) -> int:
    """The keeper's pid: the child of the launcher that runs the keeper's module."""
    return int(wait_until(lambda: _keeper_of(launched.pid), "the keeper"))


def _keeper_of(launcher: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"keeper" in (path / "cmdline").read_bytes():
                return int(path.name)
        except OSError:
            continue
    return 0


def kill_together(*pids: int) -> None:
    """As when the machine goes: nobody is left to tell of the others. Stopped first, so that no one can react."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(process_state(pid) == "T" for pid in pids), "all to stand still")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(240)
def test_a_fenced_node_is_done_without(place: Place) -> None:
    """Takes 15 s: only then a silent node counts as lost."""
    port, script = free_port(), place.script(SLEEPS)
    common = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--job-id", "f"]
    common += ["--rdzv-conf", "last_call_timeout=6"]
    first = place.launch(*common, "--node-rank", "0", "--max-restarts", "1", script, "300")
    second = place.launch(*common, "--node-rank", "1", "--max-restarts", "1", script, "300")
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    node = events(place, "f", "AgentJoined")[0]["node"]
    assert "only a node that does not answer" in place_error(place, "fence", "f", node)
    kill_together(second.pid, keeper_of(second))
    wait_until(lambda: not is_alive(pids(place)[1]), "the death of the ranks with their launcher")
    second.process.wait(60)
    wait_until(lambda: events(place, "f", "AgentLost"), "the loss")
    assert "would declare dead" in place.rsup("fence", "f", node, "--dry-run")
    assert not events(place, "f", "Fence")
    place.rsup("fence", "f", node, "--reason", "it is off")
    wait_until(lambda: pids(place, 1), "the next attempt, on one node")
    (fence,) = events(place, "f", "Fence")
    assert fence["principal"] == owner(place, "f")
    assert "(it is off) is sure that no process of this job lives on" in fence["text"]
    (place.folder / "finish").touch()
    first.ends(0)
    os.kill(place.supervisor_pid(), signal.SIGTERM)  # it would wait a minute for the fenced node to hear of the end


@pytest.mark.timeout(240)
def test_a_job_all_of_whose_processes_were_killed_ends_as_lost(place: Place) -> None:
    """Takes 20 s: that long a keeper would have had to speak for its dead agent."""
    launched = place.launch("--nproc-per-node", "1", "--max-restarts", "3", "--job-id", "k", place.script(SLEEPS), "300")
    wait_until(lambda: len(pids(place)) == 1, "the rank")
    kill_together(launched.pid, keeper_of(launched), pids(place)[0])
    launched.process.wait(60)
    status = wait_until(lambda: (s := place.status("k")) and s["job"]["state"] == "ended" and s, "the end", within_s=90)
    assert status["attempts"][0]["outcome"] == "lost" and status["job"]["exit_code"] != 0
    assert "its launcher, its keeper and its ranks are gone" in status["job"]["reason"]


def test_a_store_that_cannot_be_used_is_said_on_the_terminal_and_in_the_story(place: Place) -> None:
    state = Path(os.environ["RSUP_STATE_DIR"])
    state.mkdir(mode=0o700)
    (state / "rsup.db").write_bytes(b"this is no database" * 100)
    launched = place.launch("--nproc-per-node", "1", "--job-id", "d", "--no-python", "true").ends(0)
    (store,) = state.glob("rsup-fallback-*.db")
    said = [line for line in launched.stderr.splitlines() if "this job's story is kept in" in line]
    assert len(said) == 1 and str(store) in said[0] and said[0].startswith("rsup: ")
    where = said[0].partition("RSUP_DATABASE_URL=")[2]
    place.supervisors_end()
    story = json.loads(place.rsup("events", "d", "--json", RSUP_DATABASE_URL=where))
    assert story[0]["kind"] == "JobCreated" and [e["level"] for e in story if e["kind"] == "StoreTrouble"] == ["warning"]
