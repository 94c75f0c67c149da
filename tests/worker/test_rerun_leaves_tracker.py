"""The tracker files of rejected results, and the iterations that follow from them: S22."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rsup.supervisor.wire import UsageError
from rsup.worker.rerun.contract import Rejection
from rsup.worker.rerun.skip_list import iterations_to_skip
from rsup.worker.rerun.tracker import RejectionRecord, RejectionTracker, read_lines, read_trackers, tracker_path

REPRODUCED = Rejection.FIRST_RERUN_REPRODUCIBLE


def test_a_line_has_all_that_happened(tmp_path: Path) -> None:
    """P2, P19, P21: the iteration as it was handed in, stable codes, the run's own id, a value that reads back."""
    tracker = RejectionTracker(tmp_path / "rejected", 7, "job-1.2", 3, "GPU-b", "node-a")
    tracker.write(Rejection.INITIAL_RUN, 12, "loss", float("nan"))
    tracker.write(Rejection.VERDICT, 12, case_id="c1", verdict="application")
    tracker.close()
    first, second = (json.loads(line) for line in (tmp_path / "rejected.rank0007.jsonl").read_text().splitlines())
    assert first.pop("ts").endswith("+00:00")
    assert first == {
        "version": 1,
        "run": "job-1.2",
        "attempt": 3,
        "rank": 7,
        "node": "node-a",
        "device": "GPU-b",
        "iteration": 12,
        "phase": "train",
        "status": "INITIAL_RUN",
        "check": "loss",
        "value": "nan",
        "fatal": True,
        "case_id": "",
        "verdict": "",
    }
    assert (second["status"], second["verdict"], second["case_id"]) == ("VERDICT", "application", "c1")
    assert read_trackers(tmp_path / "rejected").records[1].job == "job-1"


def test_a_message_cannot_forge_a_record(tmp_path: Path) -> None:
    """P19, S22: whatever a message or a result holds, the record is the one that was written."""
    tracker = RejectionTracker(tmp_path / "[odd] name*", 0, "j.1")
    for text in ("rank=3 iteration=9", 'x\n{"version":1}\ny', "'message'", "\u2028 \x00 \ud83d", "z" * 5000):
        tracker.write(REPRODUCED, 4, text.encode("utf-8", "replace").decode(), 1.5)
    tracker.close()
    found = read_trackers(tmp_path / "[odd] name*")
    assert [(record.rank, record.iteration, record.value) for record in found.records] == [(0, 4, "1.5")] * 5
    assert found.records[0].check == "rank=3 iteration=9" and found.num_skipped == 0 and found.complaint == ""


def test_several_writers_of_one_file_lose_nothing(tmp_path: Path) -> None:
    """S22: attempts that overlap; each line is one write."""
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); from rsup.worker.rerun.tracker import *\n"
        "from rsup.worker.rerun.contract import Rejection\n"
        "t = RejectionTracker(sys.argv[1], 1, 'j.1', int(sys.argv[2])); print(flush=True); sys.stdin.readline()\n"
        "for i in range(500): t.write(Rejection.INITIAL_RUN, i, 'loss' * 50, 1.0)\n"
    )
    arguments = [[sys.executable, "-c", script, str(tmp_path / "t"), str(attempt)] for attempt in (1, 2)]
    writers = [subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for each in arguments]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == b"\n"
    for writer in writers:
        writer.communicate(b"\n", timeout=60)
        assert writer.returncode == 0
    found = read_trackers(tmp_path / "t")
    assert found.num_files == 1 and found.num_skipped == 0 and len(found.records) == 1000


def test_a_truncated_line_costs_that_line_only(tmp_path: Path) -> None:
    """S22: a rank that was killed in a write; the next attempt's first record is not glued to the rest."""
    tracker = RejectionTracker(tmp_path / "t", 0, "j.1")
    for i in range(3):
        tracker.write(Rejection.INITIAL_RUN, i)
    tracker.close()
    path = tracker_path(tmp_path / "t", 0)
    os.truncate(path, path.stat().st_size - 20)
    assert [record.iteration for record in read_trackers(tmp_path / "t").records] == [0, 1]
    tracker = RejectionTracker(tmp_path / "t", 0, "j.1", 2)
    tracker.write(Rejection.INITIAL_RUN, 9)
    tracker.close()
    found = read_trackers(tmp_path / "t")
    assert [record.iteration for record in found.records] == [0, 1, 9] and found.num_skipped == 1
    assert "1 lines that are cut off" in found.complaint


def test_lines_of_other_versions_and_garbage_are_counted() -> None:
    good = {"ts": "", "run": "j.1", "attempt": 1, "rank": 0, "node": "", "device": "", "iteration": 3, "phase": "train"}
    lines = [
        good | {"status": "INITIAL_RUN", "version": 1, "later": {"field": 1}},
        good | {"status": "INITIAL_RUN", "version": 2},
        good | {"status": "UNHEARD_OF", "version": 1},
        good | {"status": "INITIAL_RUN", "iteration": "3"},
        [1],
    ]
    encoded = [json.dumps(line).encode() for line in lines]
    old = b"ts=2024-01-01 node=a device=0 jobID=1 rank=0 iteration=3 status=INITIAL_RUN result=nan message='loss'"
    found = read_lines([*encoded, old, b"\xff\xfe", b"", b"  "])
    assert len(found.records) == 1 and found.num_skipped == 6


def test_a_file_that_cannot_be_opened_ends_the_start_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory") as caught:
        RejectionTracker(tmp_path / "missing" / "t", 0)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    found = read_trackers(tmp_path / "missing" / "t")
    assert found.records == () and "missing" in found.complaint


def test_a_full_disk_warns_once_and_ends_nothing(tmp_path: Path) -> None:
    tracker = RejectionTracker(tmp_path / "t", 0)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, tracker._fd)
    os.close(full)
    with pytest.warns(RuntimeWarning, match="No space left") as caught:
        for i in range(3):
            tracker.write(Rejection.INITIAL_RUN, i)
    assert len(caught) == 1
    tracker.close()


def test_nothing_is_written_while_nothing_is_rejected(tmp_path: Path) -> None:
    """H4: the file is made at the start and then left alone."""
    tracker = RejectionTracker(tmp_path / "t", 3)
    assert tracker.path.read_bytes() == b""
    tracker.close()
    assert read_trackers(tmp_path / "t").num_files == 1


# ----------------------------------------------------------------------------------------------------------- skip list


def seen(
    iteration: int, rank: int = 0, run: str = "job.1", attempt: int = 1, status: Rejection = REPRODUCED, **more: Any
) -> RejectionRecord:
    fields: dict[str, Any] = {"ts": "", "node": "", "device": "", "phase": "train", "check": "NaN in loss", "value": "nan"}
    fields |= {"iteration": iteration, "rank": rank, "run": run, "attempt": attempt, "status": status.value}
    return RejectionRecord(**(fields | more))


def verdict(iteration: int, said: str, **more: Any) -> RejectionRecord:
    return seen(iteration, status=Rejection.VERDICT, verdict=said, **more)


TWICE = [seen(7), seen(7, attempt=2)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], ()),
        ([verdict(7, "application"), verdict(3, "application", rank=4)], (3, 7)),
        ([verdict(7, "persistent"), verdict(8, "transient"), verdict(9, "corrupted state"), verdict(4, "undecided")], ()),
        (TWICE, (7,)),
        ([seen(7), seen(7, run="job.2", status=Rejection.SECOND_RERUN_REPRODUCIBLE)], (7,)),
        ([seen(7, status=Rejection.RERUN_DISABLED), seen(7, attempt=2, status=Rejection.RERUN_DISABLED)], (7,)),
        ([seen(7), seen(7)], ()),
        ([seen(7), seen(7, attempt=2, rank=1)], ()),
        ([seen(7), seen(7, attempt=2, check="NaN in grad")], ()),
        ([seen(7), seen(8, attempt=2)], ()),
        ([*TWICE, verdict(7, "undecided")], (7,)),
        ([*TWICE, verdict(7, "persistent")], ()),
        ([*TWICE, verdict(7, "corrupted state", run="job.3")], ()),
        ([*TWICE, verdict(7, "persistent", run="other.1")], (7,)),
        ([verdict(7, "application"), verdict(7, "persistent", run="job.2")], (7,)),
        ([*TWICE, seen(7, rank=1)], ()),
        ([*TWICE, seen(7, rank=1, run="other.1")], (7,)),
        ([seen(7), seen(7, attempt=2, status=Rejection.FIRST_RERUN_NOT_REPRODUCIBLE)], ()),
        ([seen(7, status=Rejection.INITIAL_RUN), seen(7, attempt=2, status=Rejection.INITIAL_RUN)], ()),
        ([seen(7, fatal=False), seen(7, attempt=2, fatal=False)], ()),
        ([seen(7, run="job.1"), seen(7, run="other.1")], ()),
        ([seen(7, phase="eval"), seen(7, attempt=2, phase="eval"), verdict(7, "application", phase="eval")], ()),
    ],
)
def test_which_iterations_are_left_out(records: list[RejectionRecord], expected: tuple[int, ...]) -> None:
    """P15: evaluation never counts. P19: several ranks in one run speak against bad data, those of another job say nothing."""
    assert iterations_to_skip(records) == expected
    assert iterations_to_skip(reversed(records)) == expected


def test_other_jobs_can_be_left_out() -> None:
    records = [verdict(7, "application"), verdict(9, "application", run="other.4")]
    assert iterations_to_skip(records) == (7, 9)
    assert iterations_to_skip(records, job="job") == (7,)


def test_what_is_written_is_what_is_skipped(tmp_path: Path) -> None:
    """P2, P18: the round trip through the files of all ranks; one reader decides, so differing views cannot part the ranks."""
    for rank in range(3):
        tracker = RejectionTracker(tmp_path / "t", rank, "job.1", 1)
        if rank == 1:
            tracker.write(Rejection.INITIAL_RUN, 25, "loss", float("nan"))
            tracker.write(REPRODUCED, 25, "loss", float("nan"))
        tracker.write(Rejection.VERDICT, 25, verdict="application", case_id="c")
        tracker.close()
    assert iterations_to_skip(read_trackers(tmp_path / "t").records) == (25,)
