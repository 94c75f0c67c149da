"""Whole jobs of several agents on this host, beyond what the comparison with torchrun has."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.jobs.conftest import Launched, Place, free_port, wait_until
from tests.jobs.test_plain_jobs import SLEEPS, is_alive, pids


def node(place: Place, port: int, *words: str, apart: str = "", **extra: str) -> Launched:
    """A launch of a job that meets at that port. `apart`: a name; then with directories of its own, as on another host."""
    if apart:
        home = place.folder / apart
        (home / "run").mkdir(parents=True, exist_ok=True)
        extra = {"RSUP_STATE_DIR": str(home / "state"), "XDG_RUNTIME_DIR": str(home / "run"), "HOME": str(home)} | extra
    return place.launch("--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1", *words, cwd=None, **extra)


def kinds(place: Place, job: str) -> list[str]:
    return [line.split(": ")[0].split()[-1] for line in place.rsup("events", job).splitlines()]


def test_a_node_with_another_torch_is_warned_of(place: Place) -> None:
    """It is found without importing torch: what an installed package says of itself is enough."""
    fake = place.folder / "site" / "torch-1.0.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    port, script = free_port(), place.script("pass")
    words = ("--nnodes", "2", "--job-id", "v", script)
    first = node(place, port, "--node-rank", "0", *words)
    second = node(place, port, "--node-rank", "1", *words, apart="b", PYTHONPATH=str(fake.parent))
    first.ends(0)
    second.ends(0)
    assert "has torch 1.0.0" in first.stderr and "install the same on all nodes" in first.stderr
    assert "has torch 1.0.0" in second.stderr
    assert "VersionsDiffer" in kinds(place, "v")


@pytest.mark.timeout(240)
def test_a_silent_node_is_named_and_left_alone(place: Place) -> None:
    port, script = free_port(), place.script(SLEEPS)
    words = ("--nnodes", "2", "--job-id", "s", script, "300")
    nodes = [node(place, port, "--node-rank", str(rank), *words) for rank in (0, 1)]
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    nodes[1].process.send_signal(signal.SIGSTOP)
    wait_until(lambda: "nothing heard of node" in nodes[0].stderr, "the line about the silent node", within_s=60)
    assert "nothing is restarted yet" in nodes[0].stderr
    assert all(is_alive(pid) for pid in pids(place).values())
    nodes[1].process.send_signal(signal.SIGCONT)
    wait_until(lambda: "answers again" in nodes[0].stderr, "the line about its return")
    Path(place.folder, "finish").touch()
    for launched in nodes:
        launched.ends(0)


@pytest.mark.timeout(240)
def test_the_first_node_of_an_elastic_job_leaves_and_its_supervisor_stays(place: Place) -> None:
    """SIGINT at its terminal; the other node, with directories of its own, becomes the first."""
    port, script = free_port(), place.script(SLEEPS)
    words = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=6", script, "300")
    nodes = [node(place, port, "--node-rank", str(rank), *words, apart=f"n{rank}") for rank in (0, 1)]
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    nodes[0].process.send_signal(signal.SIGINT)
    nodes[0].ends(130)
    assert "goes on without it" in nodes[0].stderr
    wait_until(lambda: 0 in pids(place, attempt=1), "the second attempt")
    Path(place.folder, "finish").touch()
    nodes[1].ends(0)


@pytest.mark.timeout(240)
def test_a_killed_node_comes_back_under_its_rank(place: Place) -> None:
    """Its slot is free as soon as its keeper has spoken; the same command line takes it again."""
    port, script = free_port(), place.script(SLEEPS)
    words = ("--nnodes", "2", "--job-id", "k", "--max-restarts", "1", script, "300")
    nodes = [node(place, port, "--node-rank", str(rank), *words) for rank in (0, 1)]
    wait_until(lambda: len(pids(place)) == 2, "both ranks")
    nodes[1].process.kill()
    wait_until(lambda: "AgentGone" in kinds(place, "k"), "its end")
    again = node(place, port, "--node-rank", "1", *words)
    wait_until(lambda: len(pids(place, attempt=1)) == 2, "the second attempt")
    Path(place.folder, "finish").touch()
    again.ends(0)
    nodes[0].ends(0)


def test_a_stranger_at_the_endpoint_is_named(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        launched = node(place, port, "--nnodes", "2", "--rdzv-conf", "join_timeout=15", place.script("pass"))
        wait_until(lambda: "is no rsup supervisor" in launched.stderr, "the line about the stranger")
        assert str(os.getpid()) in launched.stderr
        launched.ends(1)
    assert f"no supervisor answered at 127.0.0.1:{port} within 15 s" in launched.stderr


LOSES_ITS_DISK = """
import os, shutil, sys
disk = sys.argv[sys.argv.index("--non-persistent-local-ckpt-dir") + 1]
if os.environ["RANK"] + os.environ["RSUP_ATTEMPT"] == "12":
    shutil.rmtree(disk)
from rsup.worker.reference.train import run_as_program
run_as_program()
"""


@pytest.mark.timeout(240)
def test_a_node_that_lost_its_local_checkpoints_goes_on_from_the_other_nodes_copies(place: Place) -> None:
    """Two launchers with directories of their own, as on two hosts. After a fault the newest checkpoint is the local one."""
    port, script = free_port(), place.script(LOSES_ITS_DISK)
    tiny = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --eval-iters 0"
    train = (script, *tiny.split(), "--iterations", "9", "--save", str(place.folder / "c"), "--save-interval", "8")
    train += ("--no-async-save", "--non-persistent-save-interval", "3", "--non-persistent-ckpt-type", "local", "--replication")
    nodes = []
    for rank in (0, 1):
        disk = (
            "--non-persistent-local-ckpt-dir",
            str(place.folder / f"disk-{rank}"),
            "--fault=rank=0,iteration=8,kind=sigkill",
        )
        words = ("--node-rank", str(rank), "--nnodes", "2", "--job-id", "l", "--max-restarts", "1", *train, *disk)
        nodes.append(node(place, port, *words, apart=f"n{rank}"))
    for launched in nodes:
        launched.ends(0, within_s=180)
    assert "local checkpoint of iteration 6 is whole" in nodes[0].stdout
    assert f"resumed from the local checkpoint in {place.folder}/disk-0/rsup-" in nodes[0].stdout
    assert ": 6 iterations" in nodes[0].stdout and (place.folder / "c" / "iter_0000009").is_dir()
