"""Who may commit, and what a whole checkpoint is, on real files."""

import errno
import json
import os
from pathlib import Path

import pytest

from rsup.supervisor.wire import EXIT_NO_REQUEUE, UsageError
from rsup.worker.checkpoint_directory import (
    COMMIT_FILE,
    FENCE_FILE,
    LATEST_FILE,
    CheckpointDirectory,
    CheckpointError,
    Commit,
    Damaged,
    DirectoryTaken,
    Owner,
    StaleAttempt,
    file_digest,
    read_commit,
    verify_files,
    write_durably,
)


def write(directory: CheckpointDirectory, owner: Owner, iteration: int, content: bytes = b"tensors") -> Path:
    """Write and commit a checkpoint of one file."""
    folder = directory.make_temporary(owner, iteration)
    (folder / "data").write_bytes(content)
    files = {"data": (len(content), file_digest(folder / "data"))}
    return directory.commit(owner, Commit(owner.job_key, owner.attempt, iteration, 2, files, {"at": iteration}))


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    made = CheckpointDirectory(tmp_path / "deep" / "save", keep=2)
    made.make()
    return made


def test_a_commit_is_read_back_and_named(directory: CheckpointDirectory) -> None:
    owner = directory.claim("a", 1)
    folder = write(directory, owner, 10)
    commit = read_commit(folder)
    verify_files(folder, commit, commit.files)
    assert (commit.job_key, commit.attempt, commit.iteration, commit.world_size) == ("a", 1, 10, 2)
    assert commit.progress == {"at": 10}
    assert (directory.path / LATEST_FILE).read_text() == "10\n"
    assert sorted(path.name for path in directory.path.iterdir()) == [
        FENCE_FILE, "fence.lock", "iter_0000010", LATEST_FILE
    ]  # fmt: skip


def test_an_older_attempt_is_refused_when_it_commits_and_when_it_comes(directory: CheckpointDirectory) -> None:
    old = directory.claim("a", 1)
    write(directory, old, 10)
    new = directory.claim("a", 2)
    with pytest.raises(StaleAttempt, match=r"attempt 2 of this job has taken .*: attempt 1 may not commit"):
        directory.commit(old, Commit("a", 1, 20, 1, {}, {}))
    with pytest.raises(StaleAttempt):
        directory.claim("a", 1)
    write(directory, new, 20)
    assert directory.iterations() == [20, 10]


def test_a_job_whose_directory_was_taken_is_refused_for_good(directory: CheckpointDirectory) -> None:
    first = directory.claim("a", 1)
    second = directory.claim("b", 1)
    assert second.took_from == "a", "it had no checkpoint there that could be lost"
    with pytest.raises(DirectoryTaken, match="job b has taken") as refusal:
        directory.commit(first, Commit("a", 1, 20, 1, {}, {}))
    assert refusal.value.exit_code == EXIT_NO_REQUEUE
    with pytest.raises(DirectoryTaken):
        directory.claim("a", 1)
    write(directory, second, 20)
    with pytest.raises(DirectoryTaken, match="holds checkpoints of job b, the newest of iteration 20, and this is job a: "):
        directory.claim("a", 2)
    resumed = directory.claim("a", 2, on_purpose=True)
    with pytest.raises(DirectoryTaken):
        directory.check_owner(second)
    directory.check_owner(resumed)


@pytest.mark.parametrize(
    ("before", "now", "is_another"),
    [
        ("a.1", "b.1", True),
        ("a.1", "a.b.1", True),
        ("run-7-9", "other-7-10", True),
        ("a.1", "run-7-9", True),
        ("a.1", "a.2", False),
        ("run-7-9", "run-8-10", False),
        ("none-7-9", "none-8-10", False),
        ("alone-7-9", "a.1", False),
        ("6f9619ff-8b86-4d01-b42d-00cf4fc964ff-7-9", "0a9619ff-8b86-4d01-b42d-00cf4fc964ff-8-9", False),
    ],
)
def test_another_jobs_checkpoints_are_not_gone_on_from_by_accident(
    directory: CheckpointDirectory, before: str, now: str, is_another: bool
) -> None:
    """The next run of the same job is no other job, and neither is one without a name: by hand, or by a plain torchrun."""
    first = directory.claim(before, 1)
    write(directory, first, 10)
    if is_another:
        with pytest.raises(DirectoryTaken, match=rf"to go on from them on purpose add --load {directory.path}"):
            directory.claim(now, 1)
        directory.check_owner(first)
    assert bool(directory.claim(now, 1, on_purpose=is_another).took_from) == is_another


def test_the_same_attempt_may_claim_again_and_the_claim_before_ends(directory: CheckpointDirectory) -> None:
    before = directory.claim("a", 3)
    again = directory.claim("a", 3)
    with pytest.raises(StaleAttempt):
        directory.check_owner(before)
    directory.check_owner(again)


def test_a_refused_commit_changes_nothing(directory: CheckpointDirectory) -> None:
    old = directory.claim("a", 1)
    write(directory, old, 10)
    directory.claim("a", 2)
    directory.make_temporary(old, 20)
    before = sorted(path.name for path in directory.path.iterdir())
    with pytest.raises(StaleAttempt):
        directory.commit(old, Commit("a", 1, 20, 1, {}, {}))
    assert sorted(path.name for path in directory.path.iterdir()) == before
    assert (directory.path / LATEST_FILE).read_text() == "10\n"


def test_leftovers_go_with_the_next_claim_and_are_never_read(directory: CheckpointDirectory) -> None:
    owner = directory.claim("a", 1)
    (directory.make_temporary(owner, 30) / "half").write_bytes(b"x")
    (directory.path / "iter_0000005.deleted-1").mkdir()
    assert directory.iterations() == []
    directory.claim("a", 2)
    assert sorted(path.name for path in directory.path.iterdir()) == [FENCE_FILE, "fence.lock"]


def test_old_ones_go_and_a_recommitted_one_replaces_the_damaged(directory: CheckpointDirectory) -> None:
    owner = directory.claim("a", 1)
    for iteration in (10, 20, 30):
        write(directory, owner, iteration)
    assert directory.iterations() == [30, 20]
    (directory.folder(30) / "data").write_bytes(b"damage!")
    folder = write(directory, owner, 30, b"whole")
    verify_files(folder, read_commit(folder), ["data"])
    assert not list(directory.path.glob("*.deleted-*"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "data").write_bytes(b"short"), "data has 5 bytes instead of 7"),
        (lambda folder: (folder / "data").write_bytes(b"tensorS"), "data does not match its checksum"),
        (lambda folder: (folder / "data").unlink(), "data is missing"),
        (lambda folder: (folder / COMMIT_FILE).unlink(), "it has no commit.json"),
        (lambda folder: (folder / COMMIT_FILE).write_text("[]"), "commit.json does not match its checksum"),
        (lambda folder: (folder / COMMIT_FILE).write_bytes(b"\xff\xfe{"), "commit.json is cut short or garbled"),
        (lambda folder: (folder / COMMIT_FILE).write_text(""), "commit.json is cut short or garbled"),
    ],
)
def test_damage_is_named(directory: CheckpointDirectory, damage, reason: str) -> None:
    folder = write(directory, directory.claim("a", 1), 10)
    damage(folder)
    with pytest.raises(Damaged, match=reason):
        commit = read_commit(folder)
        verify_files(folder, commit, commit.files)


def test_every_changed_byte_of_a_commit_record_is_noticed(directory: CheckpointDirectory) -> None:
    folder = write(directory, directory.claim("a", 1), 10)
    whole = (folder / COMMIT_FILE).read_bytes()
    truth = read_commit(folder)
    for place in range(len(whole)):
        (folder / COMMIT_FILE).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert read_commit(folder) == truth  # layout only, such as a space
        except Damaged:
            continue


def test_a_commit_moved_to_another_iteration_is_damage(directory: CheckpointDirectory) -> None:
    folder = write(directory, directory.claim("a", 1), 10)
    moved = folder.rename(directory.folder(50))
    with pytest.raises(Damaged, match="is of iteration 10"):
        read_commit(moved)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_durably(path, "old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_durably(path, "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("x.json", "old")]


@pytest.mark.parametrize("content", ["", "[]", '{"job_key": 1}'])
def test_a_damaged_fence_is_said(directory: CheckpointDirectory, content: str) -> None:
    (directory.path / FENCE_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"fence\.json"):
        directory.claim("a", 1)


def test_a_file_in_the_way_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"it is or lies below a file; choose a directory with --save$"):
            CheckpointDirectory(path).make()
    with pytest.raises(UsageError, match="cannot save to /proc/nowhere: "):
        CheckpointDirectory(Path("/proc/nowhere")).make()


def test_iterations_beyond_seven_digits_sort_by_number(directory: CheckpointDirectory) -> None:
    owner = directory.claim("a", 1)
    for iteration in (9_999_999, 10_000_000):
        write(directory, owner, iteration)
    assert directory.iterations() == [10_000_000, 9_999_999]
    (directory.path / "iter_mine").mkdir()
    assert json.loads((directory.path / FENCE_FILE).read_text())["job_key"] == "a"
    assert directory.iterations() == [10_000_000, 9_999_999]
