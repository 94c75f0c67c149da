"""Asynchronous saves of one process: what fails, what is staged, what a full disk does."""

import errno
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rsup.worker.checkpoint import Checkpointer, find_whole_checkpoint, load_tensors, tensor_sizes
from rsup.worker.checkpoint_directory import CheckpointDirectory, CheckpointError, StaleAttempt
from rsup.worker.reference.ranks import joined


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    monkeypatch.delenv("RANK", raising=False)
    with joined(torch.device("cpu"), 30) as ranks:
        yield ranks.saving


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    made = CheckpointDirectory(tmp_path / "save")
    made.make()
    return made


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def test_a_save_holds_the_values_of_its_moment(group, directory) -> None:
    gate = threading.Event()
    saver = Checkpointer(directory, directory.claim("a", 1), group, lambda point, iteration: gate.wait(20) and None)
    value = torch.arange(6.0).reshape(2, 3)
    assert saver.save(3, {"x": value, "step": torch.tensor(2.0)}, {"samples": 9}) is None
    value.zero_()
    assert saver.poll() is None and saver.is_saving
    assert find_whole_checkpoint(directory, None, pytest.fail) is None
    gate.set()
    result = saver.finish()
    assert result is not None and result.error == "" and result.path == directory.folder(3)
    assert saver.poll() is None and not saver.is_saving
    found = find_whole_checkpoint(directory, None, pytest.fail)
    assert found is not None and found.commit.progress == {"samples": 9}
    assert tensor_sizes(found.path) == {"x": (2, 3), "step": ()}
    loaded = {"x": torch.empty(2, 3), "step": torch.empty(())}
    load_tensors(found.path, loaded)
    assert loaded["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and float(loaded["step"]) == 2


def test_a_second_save_waits_for_the_first_and_returns_its_result(group, directory) -> None:
    saver = Checkpointer(directory, directory.claim("a", 1), group)
    assert saver.save(1, {"x": torch.ones(2)}, {}) is None
    first = saver.save(2, {"x": torch.ones(2)}, {})
    assert first is not None and first.iteration == 1 and first.error == ""
    assert saver.finish() is not None
    assert directory.iterations() == [2, 1]


def test_a_full_disk_fails_that_checkpoint_only(group, directory, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Checkpointer(directory, directory.claim("a", 1), group)
    saver.save(1, {"x": torch.ones(2)}, {})
    assert saver.finish() is not None

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        saver.save(2, {"x": torch.ones(2)}, {})
        failed = saver.finish()
    assert failed is not None and failed.error.endswith("No space left on device")
    assert directory.iterations() == [1] and not list(directory.path.glob("*.tmp-*"))
    saver.save(3, {"x": torch.ones(2)}, {})
    again = saver.finish()
    assert again is not None and again.error == "" and directory.iterations() == [3, 1]


def test_a_directory_that_vanishes_fails_the_save_with_a_reason(group, directory) -> None:
    saver = Checkpointer(directory, directory.claim("a", 1), group)
    for path in directory.path.iterdir():
        path.unlink()
    directory.path.rmdir()
    saver.save(1, {"x": torch.ones(2)}, {})
    result = saver.finish()
    assert result is not None and "No such file or directory" in result.error


def test_a_stale_attempt_is_told_by_poll_and_by_finish(group, directory) -> None:
    saver = Checkpointer(directory, directory.claim("a", 1), group)
    directory.claim("a", 2)
    saver.save(1, {"x": torch.ones(2)}, {})
    with pytest.raises(StaleAttempt):
        saver.finish()
    assert directory.iterations() == []


def test_a_save_of_an_entry_that_was_left_is_in_nobodys_way(group, directory) -> None:
    """After an in-process restart its thread may still be stuck with a peer: another folder, no commit after a claim."""
    gate, at_gate = threading.Event(), threading.Event()

    def wait(point: str, iteration: int) -> None:
        if point == "written":
            at_gate.set()
            assert gate.wait(20)

    stuck = Checkpointer(directory, directory.claim("a", 1), group, wait)
    stuck.save(2, {"x": torch.ones(2)}, {})
    assert at_gate.wait(20)
    stuck.abandon(0.01)
    assert stuck.is_saving
    again = directory.claim("a", 1)  # the next entry's, of the same attempt
    newer = directory.make_temporary(again, 2)
    gate.set()
    result = stuck.finish()
    assert result is not None and result.error  # its files went with the claim
    assert newer.is_dir() and directory.iterations() == []


def test_a_failed_commit_leaves_the_checkpoint_before_current(group, directory) -> None:
    owner = directory.claim("a", 1)
    saver = Checkpointer(directory, owner, group)
    saver.save(1, {"x": torch.ones(2)}, {})
    saver.finish()

    def fail(point: str, iteration: int) -> None:
        if point == "committing":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory.path))

    failing = Checkpointer(directory, owner, group, fail)
    failing.save(2, {"x": torch.ones(2)}, {})
    result = failing.finish()
    assert result is not None and result.error == f"cannot write {directory.path}: Input/output error"
    found = find_whole_checkpoint(directory, None, pytest.fail)
    assert found is not None and found.commit.iteration == 1


def test_loading_what_is_not_there_is_one_line(group, directory) -> None:
    saver = Checkpointer(directory, directory.claim("a", 1), group)
    saver.save(1, {"x": torch.ones(2)}, {})
    saver.finish()
    for wanted in ({"y": torch.ones(2)}, {"x": torch.ones(3)}):
        with pytest.raises(CheckpointError, match=r"^cannot load .*were model and options the same\?$"):
            load_tensors(directory.folder(1), wanted)


def test_a_damaged_file_is_one_line_without_torchs_advice(group, directory) -> None:
    """Its reader would have the user set `weights_only=False`, which runs what is in the file."""
    saver = Checkpointer(directory, directory.claim("a", 1), group)
    saver.save(1, {"x": torch.ones(2000)}, {})
    saver.finish()
    folder = directory.folder(1)
    (data,) = folder.glob("*.distcp")
    whole = data.read_bytes()
    told = rf"^cannot load {folder}: it is damaged; move it away and start again: the checkpoint before it is used then$"
    for damaged in (b"garbage" * 1000, whole[:70] + b"\x00" * 30 + whole[100:], whole[:600], b""):
        data.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=told):
            load_tensors(folder, {"x": torch.zeros(2000)})
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=told):
        tensor_sizes(folder)
