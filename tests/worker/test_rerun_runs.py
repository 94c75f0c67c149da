"""Whole runs of the reference trainer with damaged numbers: how each ends, what is on disk then, and how a later run goes on.

S1 to S30 are the scenarios, P1 to P46 the faults of Megatron-LM's machine, that these runs get right.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rsup.supervisor.places import boot_id

COMMON = ("--iterations", "12", "--save-interval", "4", "--global-batch-size", "4")
ON_A, ON_B = {"RSUP_DEVICE_UUID": "GPU-a"}, {"RSUP_DEVICE_UUID": "GPU-b"}
BROKEN = "--fault=device=GPU-a,kind=bitflip,bit=30,site=grad,from=7"
POISONED = "--fault=kind=nan-data,iteration=7"


class Job:
    """Attempts of one job that saves to one directory."""

    def __init__(self, runs: Any, save: Path, *options: str, ranks: int = 1) -> None:
        self._runs, self._options, self._number, self.ranks = runs, options, 0, ranks
        self.save = save
        self.text = ""

    def attempt(self, *options: str, on: dict[str, str] | None = None, ranks: int | None = None) -> int:
        """Run once more; rank 0's exit code."""
        self._number += 1
        arguments = (*COMMON, "--save", str(self.save), *self._options, *options)
        attempt = self._runs.start(ranks or self.ranks, *arguments, number=self._number, environment=on)
        codes = attempt.finish()
        self.text = attempt.text()
        assert len(set(codes)) == 1, f"{codes}\n{self.text}"
        return int(codes[0])

    @property
    def digest(self) -> str:
        """The last line."""
        return self.text.splitlines()[-1]

    def files(self) -> dict[str, bytes]:
        """Everything in the checkpoints, by path."""
        return {str(p.relative_to(self.save)): p.read_bytes() for p in self.save.glob("iter_*/*") if p.is_file()}


@pytest.fixture
def calm(runs, tmp_path: Path) -> str:
    """Digest of the undisturbed run of one rank."""
    job = Job(runs, tmp_path / "calm")
    assert job.attempt() == 0
    return job.digest


def test_a_transient_error_costs_a_replay(runs, tmp_path: Path, calm: str) -> None:
    """S4, P5, P7: also in the first iteration of a process, and the loss may be scaled in place after its check."""
    job = Job(runs, tmp_path / "save")
    faults = ("--fault=rank=0,iteration=1,kind=nan,site=loss", "--fault=rank=0,iteration=9,kind=bitflip,bit=30,site=grad")
    assert job.attempt(*faults) == 0
    assert job.text.count("transient: the same data and random numbers gave a healthy result") == 2
    assert job.digest == calm


def test_a_transient_error_can_start_again_from_the_last_checkpoint(runs, tmp_path: Path, calm: str) -> None:
    """S3, H1 (P20), P42: 17, nothing saved in the middle of a case, and the checkpoint before is good."""
    job = Job(runs, tmp_path / "save", "--fault=rank=0,iteration=7,kind=inf,site=grad", "--on-transient", "restart")
    assert job.attempt() == 17
    assert {path.name for path in job.save.glob("iter_*")} == {"iter_0000004"} and not (job.save / "rerun").exists()
    assert job.attempt() == 0
    assert "resumed from" in job.text and "iter_0000004" in job.text and job.digest == calm


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_broken_device_is_found_by_moving_the_rank(runs, tmp_path: Path, calm: str, is_durable: bool) -> None:
    """S5, S7, S20, P6, P22, P32, P46, H2: 16 with a checkpoint of the completed iterations; on the same device again 16 and
    nothing changes; on another one the verdict, and training goes on there. A checkpoint that is there stays as it is."""
    job = Job(runs, tmp_path / "save", BROKEN, *(("--save-interval", "6") if is_durable else ()))
    assert job.attempt(on=ON_A) == 16
    assert "case job-" in job.text and "another device has to decide" in job.text
    assert (job.save / "iter_0000006").exists() and (job.save / "rerun" / "iter_0000006").exists() == is_durable
    before = job.files()
    assert job.attempt(on=ON_A) == 16
    assert "tried before" in job.text and "lm loss" not in job.text and job.files() == before
    assert job.attempt(on=ON_B) == 0
    assert "no rank computes on GPU-a: --fault device=GPU-a,kind=bitflip,site=grad,bit=30,from=7 is not armed" in job.text
    assert "persistent: another, healthy value came out on another device (rank 0: GPU-b after GPU-a)" in job.text
    assert job.digest == calm


def test_bad_data_are_found_and_skipped_by_the_next_job(runs, tmp_path: Path) -> None:
    """S6, S23, P2, P17, P18, P21: 16, then 17 with the verdict, which is asked for no more; a new run reads the tracker and
    leaves out exactly that iteration."""
    tracker = ("--result-rejected-tracker-filename", str(tmp_path / "rejected"))
    job = Job(runs, tmp_path / "save", POISONED)
    assert job.attempt(*tracker, on=ON_A) == 16
    assert job.attempt(*tracker, on=ON_B) == 17
    assert "application: the same came out on another device" in job.text
    lines = [json.loads(line) for path in tmp_path.glob("rejected*") for line in path.read_text().splitlines()]
    statuses = [line["status"] for line in lines]
    assert {line["iteration"] for line in lines} == {7}
    for status in ("INITIAL_RUN", "FIRST_RERUN_REPRODUCIBLE", "SECOND_RERUN_REPRODUCIBLE", "VERDICT"):
        assert status in statuses
    assert job.attempt(on=ON_A) == 16
    assert "has its verdict already: application" in job.text
    assert job.attempt(*tracker, on=ON_B) == 0
    assert "iteration 7 is skipped" in job.text
    asked = Job(runs, tmp_path / "asked", POISONED)
    assert asked.attempt("--iterations-to-skip", "7") == 0
    assert asked.digest == job.digest


def test_bad_data_of_one_rank_are_skipped_at_once(runs, tmp_path: Path) -> None:
    """Rotation decides; with dropout, whose random numbers the skipped iteration must not have used up."""
    options = ("--fault=kind=nan-data,iteration=7,rank=1", "--fault=kind=nan-data,iteration=8")
    job = Job(runs, tmp_path / "save", *options, ranks=2)
    assert job.attempt("--on-application", "skip") == 0
    assert job.text.count("application: ") == 2
    asked = Job(runs, tmp_path / "asked", *options, ranks=2)
    assert asked.attempt("--iterations-to-skip", "7,8") == 0
    assert asked.digest == job.digest


def test_a_skipped_iteration_is_left_out_and_nothing_else(runs, tmp_path: Path) -> None:
    """P33, S25: saves, exits and log lines that fall on it happen."""
    job = Job(runs, tmp_path / "save", "--log-interval", "1")
    assert job.attempt("--iterations-to-skip", "4,6", "--exit-interval", "6") == 0
    assert {path.name for path in job.save.glob("iter_*")} == {"iter_0000004", "iter_0000006"}
    assert "leaving after iteration 6" in job.text
    (line,) = re.findall(r"iteration +4/12 .*", job.text)
    assert "number of skipped iterations: 1" in line and "consumed samples: 16 " in line


@pytest.mark.parametrize("later", ["other layout", "disabled", "skipped", "damaged", "damaged and broken"])
def test_a_rerun_that_cannot_go_on_is_ignored(runs, tmp_path: Path, later: str) -> None:
    """S8, S9, S21, S23, H7, P42, P44: training goes on without it, and says so."""
    job = Job(runs, tmp_path / "save", BROKEN, "--save-interval", "6")
    assert job.attempt(on=ON_A) == 16
    if "damaged" in later:
        (data,) = (job.save / "rerun" / "iter_0000006").glob("*.distcp")
        data.write_bytes(data.read_bytes()[:-10])
    options = {"disabled": ("--rerun-mode", "disabled"), "skipped": ("--iterations-to-skip", "7")}.get(later, ())
    code = job.attempt(*options, on=ON_A if "broken" in later else ON_B, ranks=2 if later == "other layout" else 1)
    assert code == (16 if "broken" in later else 0), job.text
    said = {
        "other layout": "job sharding has changed: rerun state is ignored",
        "disabled": "rerun mode is disabled: the rerun state is ignored",
        "skipped": "iteration 7 is skipped",
        "damaged": "is skipped: __0_0.distcp has",
        "damaged and broken": "is skipped: __0_0.distcp has",
    }[later]
    assert said in job.text and "persistent" not in job.text


def test_without_a_checkpoint_nothing_is_promised(runs) -> None:
    """P46: no 16 that nobody could go on from."""
    attempt = runs.run(1, *COMMON[:2], BROKEN.replace("device=GPU-a", "device=GPU-x"), job="a")
    assert attempt.codes() == [0]
    attempt = runs.start(1, *COMMON[:2], BROKEN, job="b", environment=ON_A)
    assert attempt.finish() == [17]
    assert "undecided: " in attempt.text() and "without a checkpoint no other device can repeat" in attempt.text()


def test_a_damaged_parameter_is_reloaded(runs, tmp_path: Path) -> None:
    """Checksums name the state, not a device; the checkpoint before is good."""
    calm = Job(runs, tmp_path / "calm", ranks=2)
    assert calm.attempt() == 0
    job = Job(runs, tmp_path / "save", "--fault=rank=1,iteration=7,kind=bitflip,bit=30,site=param", ranks=2)
    assert job.attempt() == 17
    assert "corrupted state" in job.text
    assert job.attempt() == 0
    assert job.digest == calm.digest


def test_an_audit_finds_what_no_check_sees(runs, tmp_path: Path) -> None:
    """A gradient that is wrong by a half on one device: no NaN, nothing large."""
    fault = f"--fault=device=CPU-{boot_id()}-1,kind=scale,factor=1.5,site=grad,from=4"
    job = Job(runs, tmp_path / "save", fault, "--global-batch-size", "6", ranks=3)
    assert job.attempt() == 0
    assert "rerun:" not in job.text
    audited = Job(runs, tmp_path / "audited", fault, "--global-batch-size", "6", ranks=3)
    assert audited.attempt("--rerun-mode", "audit", "--rerun-audit-interval", "2") == 16
    assert "rerun: iteration 4" in audited.text and "persistent" in audited.text and "rank 1" in audited.text


def test_what_is_usual_is_known_after_a_restart(runs, tmp_path: Path) -> None:
    """P14, S18: the baseline of spiky losses comes with the checkpoint."""
    options = ("--check-for-spiky-loss", "--fault=rank=0,iteration=112,kind=scale,factor=1e6,site=loss")
    job = Job(runs, tmp_path / "save", "--iterations", "115", "--save-interval", "110", *options)
    assert job.attempt("--exit-interval", "110") == 0
    assert job.attempt() == 0
    assert "iteration 112 (found on rank 0): transient" in job.text


def test_the_monitor_hears_of_replays() -> None:
    """S27, P40: a replay counts as progress; the section's time begins anew."""
    from rsup.worker.sections import TrainingSections

    sections = TrainingSections(num_warmup_iters=1)
    calls: list[str] = []

    class Step:
        def enter(self) -> None:
            calls.append("enter")

        def exit(self) -> None:
            calls.append("exit")

    sections._step = Step()  # type: ignore[assignment]
    for _ in range(2):
        with sections.training_step():
            sections.on_replay()
    assert calls == ["exit", "enter", "exit", "enter", "exit"]
