"""Training functions that do what they must not, in one job: each misuse is named in one line, and training goes on."""

import pytest

from tests.jobs.conftest import Place, wait_until

pytest.importorskip("nvidia_resiliency_ext")
pytestmark = pytest.mark.slow

SCRIPT = """
import os, time
import torch, torch.distributed as dist
from rsup.worker.checkpoint_directory import CheckpointError
from rsup.worker.inprocess import current_entry, restartable

RANK, KEPT = int(os.environ["RANK"]), []

def training():
    entry = current_entry().number
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if RANK == 1 and entry == 3:
        KEPT.append(dist.group.WORLD)
    while RANK == 1 and entry == 4 and not os.path.exists(os.environ["OUT"] + "/go"):
        time.sleep(0.01)
    if RANK == 1 and entry <= 4:
        raise ValueError(f"in entry {entry}")
    if entry == 1:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            return
    if entry == 2:
        try:
            while True:
                time.sleep(0.01)
        finally:
            raise KeyError("a clean-up that fails")
    if entry == 4:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            os._exit(0)
    if entry == 5 and RANK == 0:
        raise CheckpointError("the directory is another job's; use one of its own")
    while True:
        dist.all_reduce(ones)

restartable(training)()
"""


@pytest.mark.timeout(240)
def test_each_misuse_is_named_and_an_operating_error_ends_the_job(place: Place) -> None:
    """A restart of no process but the one whose connections hold up the other, and the one that ends with 0."""
    limits = ("--inprocess-identical-limit", "0", "--inprocess-no-progress-limit", "0")
    launched = place.launch("--nproc-per-node", "2", "--job-id", "mis", *limits, place.script(SCRIPT))
    in_entry_4 = "every rank is in entry 4"
    wait_until(lambda: place.status("mis") and in_entry_4 in place.rsup("events", "mis"), in_entry_4, within_s=120)
    (place.folder / "go").touch()
    launched.ends(1)
    story = place.rsup("events", "mis")
    assert f"rank 0: training ({place.folder}/script.py:" in launched.stderr
    assert "was interrupted for a restart and returned: it must let every BaseException pass; entry 1 is over" in story
    assert "was interrupted for a restart and raised KeyError in its place: 'a clean-up that fails'" in story
    assert "rank 1: the global variable KEPT of __main__ (a list) keeps a process group" in story
    assert "in which rank 0 waits: this process ends, and another takes its place" in story
    assert "exited with code 0 in entry 4, before all had finished; rank 0 gets a new process" in story
    assert "(entry 5)" in story  # which may end before the supervisor has heard that every rank is in it
    assert "every rank is in entry 6" not in story
    status = place.status("mis")
    assert len(status["attempts"]) == 1
    assert "InternalError" not in launched.stderr
    assert "CheckpointError: the directory is another job's; use one of its own" in launched.stderr
