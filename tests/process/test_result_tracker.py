"""The tracker file of Megatron-LM's rerun machine, read from the attempt's beginning on."""

import os
import threading
import time
from pathlib import Path

import pytest

from rsup.launcher import result_tracker
from rsup.launcher.result_tracker import FLAG, ResultTracker, tracker_path

NODE = os.uname().nodename
FIELDS = {"node": NODE, "device": 3, "job": "N/A", "rank": 5, "iteration": 7, "status": "FIRST_RERUN_REPRODUCIBLE"}


def line(**fields: object) -> str:
    values = FIELDS | fields
    return (
        "ts=2026-11-30 01:02:03.4567 node={node} device={device} jobID={job} rank={rank} iteration={iteration} "
        "status={status} result=tensor(nan, device='cuda:3') message='found NaN in local forward loss'\n"
    ).format(**values)


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ([], None),
        (["--log", "x"], None),
        ([FLAG, "a/b"], "a/b"),
        ([f"{FLAG}=a"], "a"),
        (["--result-rejected-tracker", "a"], "a"),
        (["--result_rejected_tracker_filename=a"], "a"),
        ([f"{FLAG}=a", "--lr", "1", FLAG, "b"], "b"),
        ([FLAG], None),
        (["--result", "a"], None),
        ([f"{FLAG}s", "a"], None),
    ],
)
def test_the_file_is_found_on_the_command_line(words: list[str], path: str | None) -> None:
    assert tracker_path(words) == (Path(path) if path else None)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is too busy to read a file within the usual time is no file system that hangs."""
    monkeypatch.setattr(result_tracker, "READ_WITHIN_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_what_counts_is_new_ours_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "tracker"
    path.write_text(line(iteration=1))
    tracker = ResultTracker(path, {})
    assert tracker.added(0, 8, str_of) == []
    with path.open("a") as file:
        file.write(line(rank=8) + line(rank=-1) + line(node="another") + line(job="4711") + "junk \xff\n")
        file.write(line(status="RerunValidationStatus.INITIAL_RUN") + line(status="first_rerun_reproducible"))
        file.write(line(iteration=9).rstrip("'\n"))  # cut off
    found = tracker.added(4, 4, str_of)
    assert [(one.rank, one.status, one.iteration, one.device, one.ordinal) for one in found] == [
        (5, "INITIAL_RUN", 7, "5/3", 3),
        (5, "FIRST_RERUN_REPRODUCIBLE", 7, "5/3", 3),
    ]
    assert found[0].message == "found NaN in local forward loss" and found[0].result == "tensor(nan, device='cuda:3')"
    assert tracker.added(0, 4, str_of) == []


@pytest.mark.usefixtures("patient")
def test_a_job_of_slurm_a_missing_file_and_one_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "tracker"
    tracker = ResultTracker(path, {"SLURM_JOBID": "4711"})
    assert tracker.added(0, 8, str_of) == []
    path.write_text(line() + line(job="4711"))
    assert len(tracker.added(0, 8, str_of)) == 1
    later = ResultTracker(path, {})
    path.write_text(line())
    assert len(later.added(0, 8, str_of)) == 1


def test_a_file_system_that_hangs_costs_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_tracker, "READ_WITHIN_S", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it waits for a writer
    tracker = ResultTracker(pipe, {})
    begin = time.monotonic()
    assert tracker.added(0, 8, str_of) == []
    assert time.monotonic() - begin < 30
    os.close(os.open(pipe, os.O_WRONLY))
    for thread in threading.enumerate():
        if thread.name == "rsup-tracker":
            thread.join(30)
            assert not thread.is_alive()


def str_of(rank: int, ordinal: int) -> str:
    return f"{rank}/{ordinal}"
