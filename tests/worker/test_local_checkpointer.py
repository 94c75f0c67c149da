"""Local checkpoints on several nodes (directories): nodes that are lost, damaged files, full disks, other jobs' files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("local_ranks.py")
Follow = Callable[..., list[list[str]]]


@pytest.fixture
def follow(runs, tmp_path: Path) -> Follow:
    """Run a plan on some ranks; return each rank's lines."""
    count = 0

    def run(
        num_ranks: int, per_node: int, *plan: list[Any], replication: list[Any] | None = None, job: str = "a.1"
    ) -> list[list[str]]:
        nonlocal count
        count += 1
        environment = {
            "ROOT": str(tmp_path),
            "PER_NODE": str(per_node),
            "PLAN": json.dumps(plan),
            "REPLICATION": json.dumps(replication),
            "JOB": job,
        }
        attempt = runs.start(num_ranks, number=count, environment=environment, script=SCRIPT)
        assert attempt.finish() == [0] * num_ranks, "\n".join(attempt.text(rank) for rank in range(num_ranks))
        return [attempt.text(rank).splitlines() for rank in range(num_ranks)]

    return run


def files(node: Path) -> list[Path]:
    """Parts and copies on a node, by name."""
    return sorted(node.glob("rsup-*/iter_*"))


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_lost_node_is_brought_back_from_the_copies_on_the_other(follow: Follow, tmp_path: Path) -> None:
    """The newest save is opened by all ranks: from their own node, over the wire, and past damaged files."""
    saved = follow(4, 2, ["save", 3], ["save", 6], replication=[2])
    assert saved == [["saved 3: error='' lost=''", "saved 6: error='' lost=''"]] * 4
    names = [path.name.rpartition(".rank_")[2] for node in (0, 1) for path in files(tmp_path / f"node-{node}")]
    own, copies = {0: ["00000", "00001"], 1: ["00002", "00003"]}, {0: ["00002.kept-by-00000", "00003.kept-by-00001"]}
    assert names == sorted(own[0] + copies[0]) + sorted([*own[1], "00000.kept-by-00002", "00001.kept-by-00003"])
    shutil.rmtree(tmp_path / "node-1")
    assert follow(4, 2, ["open"], ["save", 9], replication=[2]) == [["opened 6", "saved 9: error='' lost=''"]] * 4
    flip(files(tmp_path / "node-0")[0])
    opened = follow(4, 2, ["open"], replication=[2])
    assert [lines[-1] for lines in opened] == ["opened 9"] * 4
    assert "cannot be used by rank 0" in opened[0][0] and "does not match its digest" in opened[0][0]
    flip(next(path for path in files(tmp_path / "node-1") if ".rank_00000.kept-by" in path.name))
    spoiled = follow(4, 2, ["open"], replication=[2])
    assert [lines[-1] for lines in spoiled] == ["opened nothing"] * 4
    assert any("is skipped: no whole part of ranks [0] is left" in line for line in spoiled[0])


def test_without_copies_a_truncated_part_or_a_lost_node_is_the_end_of_a_save(follow: Follow, tmp_path: Path) -> None:
    follow(2, 1, ["save", 3])
    part = files(tmp_path / "node-1")[0]
    content = part.read_bytes()
    part.write_bytes(content[:-100])
    lines = follow(2, 1, ["open"])
    assert [own[-1] for own in lines] == ["opened nothing"] * 2
    assert f"{part.name} has {len(content) - 100} bytes instead of {len(content)}" in lines[0][0]
    part.write_bytes(content)
    assert follow(2, 1, ["open"], job="b.1") == [["opened nothing"]] * 2  # another job does not see them
    assert follow(2, 1, ["open"]) == [["opened 3"]] * 2
    part.unlink()
    assert follow(2, 1, ["open"]) == [["opened nothing"]] * 2


def test_parts_of_two_runs_are_not_mixed(follow: Follow, tmp_path: Path) -> None:
    follow(2, 1, ["save", 3])
    away = tmp_path / "away"
    (tmp_path / "node-1").rename(away)
    follow(2, 1, ["save", 3])
    shutil.rmtree(tmp_path / "node-1")
    away.rename(tmp_path / "node-1")
    assert follow(2, 1, ["open"]) == [["opened nothing"]] * 2


def test_a_save_that_fails_leaves_the_older_one(follow: Follow, tmp_path: Path) -> None:
    """Too little room seen before, a disk that fills up in mid-save, a copy that finds no room, a directory that vanishes."""
    lines = follow(
        2, 1, ["save", 3], ["limit", 1], ["save", 6], ["open"], ["unlimit", 1], ["save", 9], ["vanish", 0], ["save", 12]
    )
    assert lines[0] == lines[1]
    assert lines[0][1].startswith("saved 6: error='cannot write") and "File too large" in lines[0][1]
    assert lines[0][2:] == ["opened 3", "saved 9: error='' lost=''", "saved 12: error='' lost=''"]
    assert [path.name[:12] for node in (0, 1) for path in files(tmp_path / f"node-{node}")] == ["iter_0000012"] * 2
    full = follow(2, 1, ["fill", 0], ["save", 15], ["open"])
    assert all("has room for 0 MiB" in own[0] and "free some space" in own[0] and own[1] == "opened 12" for own in full)
    unfinished = [path for node in (0, 1) for path in (tmp_path / f"node-{node}").glob("rsup-*/.iter*")]
    assert unfinished == []


def test_the_room_must_do_for_all_ranks_of_the_node(follow: Follow, tmp_path: Path) -> None:
    """Shared memory that is full kills whoever writes next; each rank alone would have found room."""
    lines = follow(2, 2, ["room", 0], ["save", 3], ["room", 0, 1], ["save", 6])
    assert all("has room for 0 MiB" in own[0] and own[1] == "saved 6: error='' lost=''" for own in lines)
    sizes = [path.stat().st_size for path in files(tmp_path / "node-0")]
    assert len(sizes) == 2 and max(sizes) < 300_000 < sum(sizes)


def test_a_directory_that_cannot_be_used_is_said_at_the_start(follow: Follow, tmp_path: Path) -> None:
    (tmp_path / "node-1").write_text("a file")
    first, second = follow(2, 1)
    assert first == second and first[0].startswith(f"error 2: cannot keep local checkpoints in {tmp_path}/node-1/rsup-")
    (tmp_path / "node-1").unlink()
    follow(2, 1, ["save", 3])
    owner = next((tmp_path / "node-0").glob("rsup-*/owner.json"))
    owner.write_text(owner.read_text().replace("a.1", "z.9"))
    refused = follow(2, 1, ["open"])
    assert "holds local checkpoints of job z.9; use another directory for this job" in refused[1][0]
