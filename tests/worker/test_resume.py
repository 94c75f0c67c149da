"""A run with faults ends with bitwise the parameters of one without."""

import contextlib
import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from rsup.supervisor.wire import EXIT_NO_REQUEUE
from rsup.worker.checkpoint_directory import COMMIT_FILE

pytestmark = pytest.mark.timeout(300)  # several attempts each


def durable(text: str) -> list[int]:
    """Iterations whose checkpoint was said to be durable."""
    return [int(number) for number in re.findall(r"checkpoint of iteration (\d+) is durable", text)]


COMMON = ("--iterations", "20", "--save-interval", "4", "--global-batch-size", "24")


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_killed_runs_end_like_an_undisturbed_one(runs, tmp_path: Path, num_ranks: int) -> None:
    clean = runs.run(num_ranks, *COMMON, "--save", str(tmp_path / "clean"))
    assert clean.codes() == [0] * num_ranks, clean.text()
    faults = ["rank=1,iteration=3,kind=sigkill", "rank=1,iteration=8,kind=sigkill-in-checkpoint", "rank=0,iteration=14,exit=7"]
    options = [f"--fault={fault}" for fault in faults]
    attempts = runs.run_with_restarts(num_ranks, *COMMON, *options, "--save", str(tmp_path / "faulty"))
    assert attempts[-1].digest() == clean.digest()
    assert len(attempts) == 4
    assert attempts[0].codes()[1] == -9 and attempts[1].codes()[1] == -9 and attempts[2].codes()[0] == 7
    assert "training starts" in attempts[1].text()
    assert f"resumed from {tmp_path}/faulty/iter_0000004: 4 iterations, 96 samples" in attempts[2].text()
    assert 8 not in durable(attempts[1].text())
    assert "iter_0000012" in attempts[3].text()


def test_one_rank_alone_and_without_launcher_options(runs, tmp_path: Path) -> None:
    whole = runs.run(1, "--iterations", "6", "--save", str(tmp_path / "a"), "--save-interval", "3")
    part = runs.run(1, "--iterations", "6", "--save", str(tmp_path / "b"), "--exit-interval", "4")
    assert part.codes() == [0]
    assert "leaving after iteration 4" in part.text()
    rest = runs.run(1, "--iterations", "6", "--save", str(tmp_path / "b"), "--save-interval", "5", number=2)
    assert rest.digest() == whole.digest() != part.digest()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no commit", "garbled commit", "changed commit"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(runs, tmp_path: Path, damage: str) -> None:
    save = tmp_path / "save"
    first = runs.run(2, "--iterations", "8", "--save-interval", "2", "--save", str(save))
    newest = save / "iter_0000008"
    data = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    commit = newest / COMMIT_FILE
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif damage == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage == "missing":
        data.unlink()
    elif damage == "no commit":
        commit.unlink()
    elif damage == "garbled commit":
        commit.write_text(commit.read_text()[:50])
    else:
        commit.write_text(commit.read_text().replace('"consumed_samples": ', '"consumed_samples": 1'))
    again = runs.run(2, "--iterations", "8", "--save-interval", "2", "--save", str(save), number=2)
    reasons = {
        "truncated": f"{data.name} has",
        "flipped": f"{data.name} does not match its checksum",
        "missing": f"{data.name} is missing",
        "no commit": "it has no commit.json",
        "garbled commit": "commit.json is cut short or garbled",
        "changed commit": "commit.json does not match its checksum",
    }
    assert f"warning: checkpoint {newest} is skipped: {reasons[damage]}" in again.text()
    assert f"resumed from {save}/iter_0000006" in again.text()
    assert again.digest() == first.digest()
    assert durable(again.text()) == [8]
    third = runs.run(2, "--iterations", "8", "--save", str(save), number=3)
    assert f"resumed from {newest}" in third.text() and third.digest() == first.digest()


def test_another_number_of_ranks_resumes_the_parameters(runs, tmp_path: Path) -> None:
    common = ("--global-batch-size", "24", "--save", str(tmp_path))
    runs.run(2, "--iterations", "4", *common)
    more = runs.run(3, "--iterations", "4", *common, number=2)
    assert "was made by 2 ranks, now there are 3" in more.text()
    two = json.loads((tmp_path / "iter_0000004" / COMMIT_FILE).read_text())
    assert two["world_size"] == 2 and two["progress"]["consumed_samples"] == 96
    assert "iter_0000004: 4 iterations, 96 samples" in more.text()
    fresh = runs.run(2, "--iterations", "4", *common, number=3)
    assert more.digest() == fresh.digest()  # nothing was trained: the parameters themselves


def test_another_model_is_refused_in_one_line(runs, tmp_path: Path) -> None:
    runs.run(1, "--iterations", "2", "--save", str(tmp_path))
    other = runs.run(1, "--iterations", "4", "--save", str(tmp_path), "--hidden-size", "32", number=2)
    assert other.codes() == [2]
    assert "was made with --hidden-size 16" in other.text().splitlines()[-1]
    assert "Traceback" not in other.text()


def test_only_the_last_checkpoints_are_kept(runs, tmp_path: Path) -> None:
    runs.run(1, "--iterations", "10", "--save-interval", "2", "--save", str(tmp_path), "--keep-checkpoints", "2")
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000008", "iter_0000010"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10\n"


def test_load_from_another_directory(runs, tmp_path: Path) -> None:
    runs.run(1, "--iterations", "4", "--save", str(tmp_path / "old"))
    run = runs.run(1, "--iterations", "6", "--load", str(tmp_path / "old"), "--save", str(tmp_path / "new"))
    assert f"resumed from {tmp_path}/old/iter_0000004" in run.text()
    assert durable(run.text()) == [6]
    restarted = runs.run(1, "--iterations", "7", "--load", str(tmp_path / "old"), "--save", str(tmp_path / "new"), number=2)
    assert f"resumed from {tmp_path}/new/iter_0000006" in restarted.text(), "a restart loses nothing of its own"
    anew = runs.run(1, "--iterations", "5", "--load", str(tmp_path / "old"), "--save", str(tmp_path / "new"), job="next")
    assert anew.codes() == [EXIT_NO_REQUEUE] and "holds checkpoints of job job" in anew.text()
    shutil.rmtree(tmp_path / "old" / "iter_0000004")
    lost = runs.run(1, "--iterations", "6", "--load", str(tmp_path / "old"))
    assert "training starts from the beginning" in lost.text()
    refused = runs.run(1, "--iterations", "6", "--load", str(tmp_path / "old"), "--exit-on-missing-checkpoint")
    assert refused.codes() == [1] and "no whole checkpoint" in refused.text().splitlines()[-1]


@pytest.mark.slow
def test_kills_at_random_moments(runs, tmp_path: Path) -> None:
    num_ranks = 3
    options = ("--iterations", "40", "--save-interval", "2", "--global-batch-size", "12")
    clean = runs.run(num_ranks, *options, "--save", str(tmp_path / "clean"))
    seed = time.time_ns() % 1000
    draw, num_killed = random.Random(seed), 0
    for job in range(10):  # again where ranks were done before they were struck
        for number in range(1, 41):
            run = runs.start(num_ranks, *options, "--save", str(tmp_path / f"killed-{job}"), number=number)
            run.wait_for(lambda run=run: "resumed" in run.text() or "starts" in run.text(), "the start")
            if number < 11:
                time.sleep(draw.uniform(0, 0.15))  # the moment is what is random here; nothing waits for it
                with contextlib.suppress(ProcessLookupError):
                    run.signal(draw.randrange(num_ranks), signal.SIGKILL)
            if not any(run.finish()):
                break
        assert run.digest() == clean.digest(), f"seed {seed}"
        num_killed += number - 1
        if num_killed > 1:
            return
    pytest.fail("hardly a run was killed")
