"""The trainer with local checkpoints: a restart goes on from the newest whole one, and ends like an undisturbed run."""

import os
import re
from pathlib import Path

from rsup.worker.local_checkpoint_directory import memory_root

LENGTH = ("--iterations", "14", "--no-async-save")  # else a fault may come before the save that it is to follow is whole
COMMON = (*LENGTH, "--save-interval", "8", "--non-persistent-save-interval", "3")


def whole(text: str) -> list[int]:
    """Iterations whose local checkpoint was said to be whole."""
    return [int(number) for number in re.findall(r"local checkpoint of iteration (\d+) is whole", text)]


def leftovers() -> list[Path]:
    """Files of local checkpoints in memory, of all jobs of this user."""
    return sorted(memory_root().glob("rsup-*/iter_*")) if memory_root().exists() else []


def test_a_restart_goes_on_from_memory_and_the_job_leaves_nothing_there(runs, tmp_path: Path) -> None:
    clean = runs.run(2, "--iterations", "14", "--save-interval", "8", "--save", str(tmp_path / "clean"))
    options = (*COMMON, "--save", str(tmp_path / "save"), "--non-persistent-ckpt-type", "in_memory")
    before = leftovers()
    first, second = runs.run_with_restarts(2, *options, "--fault=rank=1,iteration=14,kind=sigkill", job="memory")
    assert first.codes()[1] == -9 and whole(first.text())[-1] == 12, first.text()
    assert re.search(r"resumed from the local checkpoint in /dev/shm/\S+: 12 iterations, 48 samples", second.text())
    assert second.digest() == clean.digest()
    assert leftovers() == before
    assert memory_root().stat().st_uid == os.getuid()


def test_damage_falls_back_to_what_is_older_and_whole(runs, tmp_path: Path) -> None:
    """The newest is local and damaged, the durable one before it too; the job leaves no local files."""
    options = (*LENGTH, "--save-interval", "4", "--non-persistent-save-interval", "5", "--save", str(tmp_path / "save"))
    options += ("--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", str(tmp_path / "local"))
    clean = runs.run(2, "--iterations", "14", "--save-interval", "4", "--save", str(tmp_path / "clean"))
    killed = runs.run(2, *options, "--fault=rank=1,iteration=11,kind=sigkill", job="damage")
    assert whole(killed.text()) == [5, 10]
    part = next((tmp_path / "local").glob("rsup-*/iter_0000010.*.rank_00001"))
    part.write_bytes(part.read_bytes()[:-1])
    (tmp_path / "save" / "iter_0000008" / "commit.json").unlink()
    again = runs.run(2, *options, "--fault=rank=1,iteration=11,kind=sigkill", job="damage", number=2)
    text = again.text()
    assert f"{part.name} has" in text and "iter_0000008 is skipped: it has no commit.json" in text
    assert f"resumed from {tmp_path}/save/iter_0000004" in text
    assert again.digest() == clean.digest()
    assert not list((tmp_path / "local").glob("rsup-*/iter_*"))


def test_a_save_killed_on_one_rank_is_not_gone_on_from(runs, tmp_path: Path) -> None:
    """P34: a local save is no reason to leave, and the end is durable; one that is not whole on all ranks does not count."""
    options = (*COMMON, "--save", str(tmp_path / "save"), "--non-persistent-ckpt-type", "in_memory", "--replication")
    fault = "--fault=rank=1,iteration=6,kind=sigkill-in-checkpoint"
    first, second = runs.run_with_restarts(2, *options, fault, job="half")
    assert whole(first.text()) == [3] and first.codes()[1] == -9
    assert "all ranks are on one node: copies of local checkpoints only help against a damaged file" in first.text()
    assert "from the local checkpoint in" in second.text() and ": 3 iterations, 12 samples" in second.text()
    assert "checkpoint of iteration 14 is durable" in second.text()
    elsewhere = ("--save", str(tmp_path / "other"))
    left = runs.run(2, *options, *elsewhere, "--exit-interval", "9", "--iterations", "9", job="leave", number=1)
    assert left.codes() == [0, 0] and "checkpoint of iteration 9 is durable" in left.text()


def test_the_optimizer_away_during_evaluations_changes_nothing(runs, tmp_path: Path) -> None:
    options = ("--iterations", "4", "--eval-interval", "2", "--eval-iters", "1", "--require-loader-state")
    usual = runs.run(1, *options)
    moved = runs.run(1, *options, "--offload-optimizer-during-evaluation", "--empty-unused-memory-level", "2")
    assert moved.digest() == usual.digest()
