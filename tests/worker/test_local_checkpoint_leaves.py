"""Leaves of local checkpoints: who keeps whose part, which saves are whole, the file's own checks, whose files may be swept."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rsup.supervisor.wire import UsageError
from rsup.worker import local_checkpoint_directory
from rsup.worker.checkpoint_directory import Damaged
from rsup.worker.local_checkpoint_directory import Launcher, LocalDirectory, this_launcher
from rsup.worker.local_checkpoint_format import PartHeader, lay_out, parse_part, part_bytes, read_header, read_part, write_part
from rsup.worker.local_checkpoint_plan import (
    PartFile,
    Reading,
    Replication,
    SaveId,
    check_replication,
    keepers,
    plan_readings,
    split_shared,
    what_replicas_are_worth,
    whole_saves,
)
from rsup.worker.reference.command_line import parse_options


@pytest.mark.parametrize(
    ("nodes", "replication", "expected"),
    [
        ("aabb", Replication(2), [(2,), (3,), (0,), (1,)]),
        ("aabb", Replication(2, jump=1), [(1,), (2,), (3,), (0,)]),
        ("aaab", Replication(2), [(3,), (3,), (3,), (0,)]),
        ("abc", Replication(3), [(1, 2), (2, 0), (0, 1)]),
        ("aabb", Replication(3), [(2,), (3,), (0,), (1,)]),
        ("aaa", Replication(2), [(1,), (2,), (0,)]),
        ("abab", Replication(2), [(1,), (0,), (3,), (2,)]),
    ],
)
def test_copies_are_on_other_nodes(nodes: str, replication: Replication, expected: list[tuple[int, ...]]) -> None:
    chosen = keepers(nodes, replication)
    assert chosen == expected
    assert all(rank not in others for rank, others in enumerate(chosen))


def test_copies_that_would_go_with_their_node_are_warned_of() -> None:
    assert "only help against a damaged file" in what_replicas_are_worth("aa", [(1,), (0,)])
    assert "of ranks [0, 2] are on their own node" in what_replicas_are_worth("aabb", keepers("aabb", Replication(2, jump=1)))
    assert what_replicas_are_worth("aabb", keepers("aabb", Replication(2))) == ""


@pytest.mark.parametrize("replication", [Replication(1), Replication(5), Replication(3, jump=2), Replication(2, jump=4)])
def test_replication_that_cannot_be_is_refused(replication: Replication) -> None:
    with pytest.raises(UsageError, match="--replication-"):
        check_replication(replication, 4)


def part(iteration: int, rank: int, node: str, token: str = "t", world_size: int = 2, name: str = "") -> PartFile:
    return PartFile(SaveId(iteration, 1, token), rank, world_size, node, name or f"{iteration}-{rank}-{token}")


def test_whole_saves_newest_first_and_never_of_two_runs() -> None:
    files = [part(3, 0, "a"), part(3, 1, "b"), part(6, 0, "a"), part(9, 0, "a", "t"), part(9, 1, "b", "u")]
    files += [part(4, 0, "b"), part(4, 1, "a"), part(12, 0, "a", world_size=1)]
    assert [save.iteration for save in whole_saves(files, 2)] == [4, 3]
    assert [save.iteration for save in whole_saves(files, 1)] == [12]


def test_readings_prefer_the_own_node_and_pass_over_bad_files() -> None:
    files = [part(3, 0, "a"), part(3, 1, "a", name="copy"), part(3, 1, "b")]
    nodes = ["a", "a", "b"]
    assert plan_readings(SaveId(3, 1, "t"), files, set(), ["a", "b"]) == [Reading(files[0], None), Reading(files[2], None)]
    moved = plan_readings(SaveId(3, 1, "t"), files, {("b", "3-1-t")}, ["a", "b"])
    assert moved == [Reading(files[0], None), Reading(files[1], 0)]
    assert plan_readings(SaveId(3, 1, "t"), files, {("b", "3-1-t"), ("a", "copy")}, nodes)[1] is None


def test_values_that_all_have_alike_are_divided_evenly() -> None:
    owners = split_shared({"a": 10, "b": 6, "c": 5, "d": 1}, 2)
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert split_shared({}, 2) == {}


def header(job_key: str = "a.1") -> PartHeader:
    entries = lay_out(
        [("x", "float32", (3,), 12, True), ("y", "uint8", (100,), 100, False), ("empty", "int64", (0,), 0, False)]
    )
    return PartHeader(job_key, 2, 30, "0" * 16, 1, 4, 123, {"samples": 9}, entries)


def test_a_part_is_what_was_written_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "part"
    buffers = [memoryview(bytes(12)), memoryview(bytes(range(100))), memoryview(b"")]
    write_part(path, header(), buffers)
    assert path.stat().st_size == part_bytes(header()) and read_header(path) == header()
    found, payload = read_part(path)
    assert found == header() and payload[64:164] == bytes(range(100))
    content = path.read_bytes()
    for length in (0, 10, 30, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(Damaged, match=r"^part (is cut short or garbled|has \d+ bytes instead of \d+)$"):
            read_header(path)
    for place in range(0, len(content), 37):
        spoiled = bytearray(content)
        spoiled[place] ^= 4
        with pytest.raises(Damaged):
            parse_part("part", memoryview(bytes(spoiled)))
    path.unlink()
    with pytest.raises(Damaged, match="No such file"):
        read_part(path)


def test_files_of_another_job_are_passed_over_with_a_reason(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path, "a.1", in_memory=False)
    directory.make(this_launcher(None))
    path = directory.final(30, "0" * 16, 1)
    write_part(path, header("b.7"), [memoryview(bytes(entry.size_bytes)) for entry in header().tensors])
    (directory.path / "notes.txt").write_text("not ours")
    assert directory.parts() == ([], [f"local checkpoint {directory.path}: {path.name} is of job b.7"])
    directory.remove()
    assert not directory.path.exists()


HOLDER = """
import os, sys
from pathlib import Path
from rsup.worker.local_checkpoint_directory import LocalDirectory, Launcher
from rsup.supervisor.heartbeat_board import process_start_ticks
pid = int(sys.argv[3]) or os.getpid()
LocalDirectory(Path(sys.argv[1]), sys.argv[2], True).make(Launcher(pid, process_start_ticks(pid)))
print("made", flush=True)
sys.stdin.read()
"""


def test_only_jobs_of_which_nothing_lives_are_swept_from_memory(tmp_path: Path) -> None:
    """A rank that lives, or a launcher that may start ranks again, keeps its job's files; a user's directory is never swept."""

    def hold(job: str, launcher: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", HOLDER, str(tmp_path), job, str(launcher)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"made\n"
        return process

    mine = LocalDirectory(tmp_path, "mine.1", in_memory=True)
    mine.make(this_launcher(None))
    living, between, over = hold("living.1", 0), hold("between.1", os.getpid()), hold("over.1", 0)
    for process in (between, over):
        process.communicate(b"", timeout=60)
    try:
        assert LocalDirectory(tmp_path, "mine.1", in_memory=False).sweep() == []
        removed = mine.sweep()
        assert len(removed) == 1 and "of run 1 of job over, which is over" in removed[0]
        left = {(path / "owner.json").read_text().split('"')[3] for path in tmp_path.iterdir()}
        assert left == {"mine.1", "living.1", "between.1"}
    finally:
        living.communicate(b"", timeout=60)


@pytest.mark.parametrize("in_memory", [False, True])
def test_local_checkpoints_of_an_earlier_run_of_the_job_are_named_and_go(tmp_path: Path, in_memory: bool) -> None:
    """A new run (no --resume) goes on without them. In memory they go at once, on disk with its first own one."""
    earlier, other = LocalDirectory(tmp_path, "a.b.1", in_memory), LocalDirectory(tmp_path, "a.1", in_memory)
    for directory in (earlier, other):
        directory.make(Launcher(1, 1))  # another process has that number now
        directory.final(30, "0" * 16, 1).write_bytes(bytes(3 << 20))
        local_checkpoint_directory._release(directory.path)
    mine = LocalDirectory(tmp_path, "a.b.2", in_memory)
    mine.make(this_launcher(None))
    (line,) = [line for line in mine.sweep() + mine.earlier_runs() if "run 1 of job a.b" in line]
    assert "3 MiB of local checkpoints of run 1 of job a.b (the newest of iteration 30), an earlier run" in line
    assert (
        line.startswith("removed ") if in_memory else line.endswith("they go once this run has a local checkpoint of its own")
    )
    assert earlier.path.exists() != in_memory
    mine.remove_earlier_runs()
    assert not earlier.path.exists() and other.path.exists() != in_memory and mine.path.exists()
    assert not mine.earlier_runs()
    mine.remove()


def test_an_earlier_run_of_which_a_rank_lives_keeps_its_files(tmp_path: Path) -> None:
    earlier, mine = LocalDirectory(tmp_path, "a.1", in_memory=False), LocalDirectory(tmp_path, "a.2", in_memory=False)
    earlier.make(Launcher(1, 1))
    earlier.final(30, "0" * 16, 1).write_bytes(b"part")
    assert mine.earlier_runs()[0].endswith("they stay: it may be alive")
    mine.remove_earlier_runs()
    assert earlier.path.exists()
    earlier.remove()


def test_a_swept_folder_is_made_again(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path, "a.1", in_memory=True)
    directory.make(this_launcher(None))
    shutil.rmtree(directory.path)
    directory.make(Launcher(1, 1))
    assert (directory.path / "owner.json").exists() and (directory.path / "lock").exists()
    directory.remove()


def test_shared_memory_that_is_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="it is not a directory of our own; use --non-persistent-ckpt-type local"):
        LocalDirectory(tmp_path / "link", "a.1", in_memory=True).make(this_launcher(None))
    directory = LocalDirectory(tmp_path / "real", "a.1", in_memory=True)
    directory.make(this_launcher(None))
    usual = os.statvfs(tmp_path)
    small = dataclasses.make_dataclass("Small", ["f_blocks", "f_frsize", "f_bavail"])(1000, usual.f_frsize, 60)
    monkeypatch.setattr(local_checkpoint_directory.os, "statvfs", lambda path: small)
    assert directory.free_bytes() == 10 * usual.f_frsize  # some is left for others
    assert LocalDirectory(tmp_path / "real", "a.1", in_memory=False).free_bytes() == 60 * usual.f_frsize
    directory.remove()


LOCAL = ["--save", "s", "--save-interval", "10", "--non-persistent-save-interval", "3", "--non-persistent-ckpt-type"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save", "s", "--non-persistent-save-interval", "3"], "go together"),
        ([*LOCAL, "local"], "--non-persistent-local-ckpt-dir go together"),
        ([*LOCAL, "in_memory", "--non-persistent-local-ckpt-dir", "d"], "--non-persistent-local-ckpt-dir go together"),
        ([*LOCAL, "in_memory", "--replication-jump", "2"], "--replication-jump needs --replication"),
        ([*LOCAL, "in_memory", "--replication", "--replication-factor", "3"], "--replication-factor 3 needs that many ranks"),
        (["--replication"], "--replication needs --non-persistent-save-interval"),
        (
            ["--non-persistent-save-interval", "3", "--non-persistent-ckpt-type", "in_memory"],
            "needs --save: a local checkpoint",
        ),
        ([*LOCAL, "in_memory", "--save-interval", "1"], "is a multiple of --save-interval 1: each local checkpoint would fall"),
        (["--empty-unused-memory-level", "3"], "invalid choice"),
        (["--replication-factor", "3"], "--replication-factor needs --replication"),
        (["--non-persistent-local-ckpt-algo", "atomic"], "needs --non-persistent-save-interval"),
        (["--exit-on-missing-checkpoint"], "--exit-on-missing-checkpoint needs --load or --save"),
        (["--exit-duration-in-mins", "0"], "--exit-duration-in-mins must be more than 0"),
        (["--distributed-timeout-minutes", "0"], "--distributed-timeout-minutes must be more than 0"),
        (["--inprocess-soft-timeout", "5"], "--inprocess-soft-timeout needs --inprocess-restart"),
    ],
)
def test_options_that_do_not_fit_together(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(arguments, world_size=2)


def test_options_of_local_checkpoints() -> None:
    options = parse_options([*LOCAL, "in_memory", "--replication", "--replication-jump", "1"], world_size=2)
    assert options.replicas == Replication(2, 1) and options.exit_plan.local_save_interval == 3
    assert parse_options([*LOCAL, "in_memory"], world_size=1).replicas is None
