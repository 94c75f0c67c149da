"""Asynchronous checkpoints of a distributed run, with torch.distributed.checkpoint; durable before they count.

`save` copies the tensors and returns; a thread of each rank writes them, over a gloo group of its own (never the default
process group, which training uses meanwhile). When every rank's files are synced, rank 0 commits (`checkpoint_directory`)
and tells the others. The training thread asks with `poll` at the head of each iteration, and waits with `finish` on every
way out. A full disk fails that checkpoint, not the training; a directory that belongs to somebody else ends the process.
"""

import contextlib
import errno
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rsup.worker.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
    Commit,
    Damaged,
    DirectoryTaken,
    Owner,
    StaleAttempt,
    file_digest,
    read_commit,
    sync_directory,
    verify_files,
)
from rsup.worker.staging import Staging
from rsup.worker.unreadable import is_damage, why_unreadable

_MOVE_AWAY = "move it away and start again: the checkpoint before it is used then"


@dataclass(frozen=True)
class SaveResult:
    """How a save ended: durable at `path`, or not at all, with the reason in `error`."""

    iteration: int
    path: Path
    duration_s: float
    error: str = ""


@dataclass(frozen=True)
class WholeCheckpoint:
    """A durable checkpoint that was found whole by all ranks."""

    path: Path
    commit: Commit

    @property
    def progress(self) -> dict[str, Any]:
        """What the trainer has kept with it."""
        return self.commit.progress

    @property
    def world_size(self) -> int:
        """How many ranks made it."""
        return self.commit.world_size

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor in it."""
        return tensor_sizes(self.path)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """As `load_tensors`."""
        load_tensors(self.path, tensors)


class Checkpointer:
    """Saves of one rank into a claimed directory. Make it on every rank, call from the training thread, in the same order.

    `group`: a gloo group that nothing else uses. `owner`: rank 0's claim, the same on every rank.
    `probe(point, iteration)` is called by the writing thread at `written` (all files of this rank are synced), `committing`
    (rank 0, before the commit) and `committed`: a place for injected faults. `committed(iteration, path, duration_s)` is called
    by rank 0's writing thread as soon as a checkpoint counts, so that a training thread that hangs cannot keep it a secret.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        owner: Owner,
        group: dist.ProcessGroup,
        probe: Callable[[str, int], None] | None = None,
        committed: Callable[[int, Path, float], None] | None = None,
    ) -> None:
        self._directory = directory
        self._owner = owner
        self._group = group
        self._probe = probe or (lambda point, iteration: None)
        self._committed = committed or (lambda iteration, path, duration_s: None)
        self._rank = dist.get_rank(group)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._result: SaveResult | None = None
        self._refusal: CheckpointError | None = None

    def save(self, iteration: int, tensors: dict[str, torch.Tensor], progress: dict[str, Any]) -> SaveResult | None:
        """Begin to save; return the result of the save before, if one was still on its way (it is waited for).

        `tensors`: equal names hold equal values on all ranks (each is written once), except those that only one rank has.
        They are copied here and may change as soon as this returns. `progress`: JSON, kept in `commit.json`.
        """
        earlier = self.finish()
        staged = self._staging.copy(tensors)
        self._thread = threading.Thread(
            target=self._run, args=(iteration, staged, progress), name="rsup-checkpoint", daemon=True
        )
        self._thread.start()
        return earlier

    def poll(self) -> SaveResult | None:
        """The result of the save that was on its way, once; None while it is, or if there is none.

        Raises `StaleAttempt` or `DirectoryTaken` on every rank if the commit was refused.
        """
        if self._thread is None or self._thread.is_alive():
            return None
        return self.finish()

    def finish(self) -> SaveResult | None:
        """Wait for the save that is on its way, and return its result as `poll` does."""
        if self._thread is None:
            return None
        while self._thread.is_alive():
            self._thread.join(0.1)  # in slices: an in-process restart interrupts the wait with an exception
        self._thread = None
        if self._refusal is not None:
            raise self._refusal
        assert self._result is not None
        return self._result

    def abandon(self, within_s: float = 1.0) -> None:
        """Training is left in the middle, for another entry: give a save that is on its way a moment to end.

        It may commit until that entry claims the directory, and is refused afterwards; its folder is its own, so a thread
        that is still stuck with a peer is in nobody's way.
        """
        if self._thread is not None:
            self._thread.join(within_s)

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way or its result not yet taken."""
        return self._thread is not None

    # ----------------------------------------------------------------------------------------------- the writing thread

    def _run(self, iteration: int, staged: dict[str, torch.Tensor], progress: dict[str, Any]) -> None:
        began_s = time.monotonic()
        path = self._directory.folder(iteration)
        error = ""
        try:
            self._write(iteration, staged, progress)
            if self._rank == 0:
                self._committed(iteration, path, time.monotonic() - began_s)
        except (StaleAttempt, DirectoryTaken) as refusal:
            self._refusal = refusal
        except CheckpointError as failure:
            error = str(failure)
            self._wait_until_all_are_out()
        except Exception as failure:  # outermost frame of the thread: it becomes the result
            error = f"{type(failure).__name__}: {_first_line(failure)}"
        if error and self._rank == 0:
            self._directory.discard(self._owner, iteration)
        self._result = SaveResult(iteration, path, time.monotonic() - began_s, error)

    def _wait_until_all_are_out(self) -> None:
        """Before the folder of a save that has failed on all ranks is removed: one that still writes would bring it back."""
        with contextlib.suppress(RuntimeError):  # a peer is gone, and writes nothing
            dist.barrier(self._group)

    def _write(self, iteration: int, staged: dict[str, torch.Tensor], progress: dict[str, Any]) -> None:
        temporary = self._directory.temporary(self._owner, iteration)
        self._on_rank_0(lambda: self._directory.make_temporary(self._owner, iteration))
        self._write_tensors(temporary, staged)
        self._probe("written", iteration)
        files = self._gather_files(temporary)
        commit = Commit(self._owner.job_key, self._owner.attempt, iteration, dist.get_world_size(self._group), files, progress)
        self._on_rank_0(lambda: self._commit(commit, temporary))

    def _write_tensors(self, temporary: Path, staged: dict[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
        failure: BaseException | None = None
        try:
            save(dict(staged), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            failure = next(iter(error.failures.values()))[0]
        if failure is not None:
            reason = self._disk_error(failure, temporary)
            raise CheckpointError(f"cannot write {temporary}: {reason}")

    def _disk_error(self, failure: BaseException, temporary: Path) -> str:
        """Why writing failed; torch's writer hides a full disk behind an error of its file format."""
        if isinstance(failure, OSError) and failure.strerror:
            return failure.strerror
        probe = temporary / f".probe-{self._rank}"
        try:
            with probe.open("wb") as file:
                file.write(bytes(1 << 20))
        except OSError as error:
            return error.strerror or str(error)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        return _first_line(failure)

    def _gather_files(self, temporary: Path) -> dict[str, tuple[int, str]]:
        """Size and digest of every file, each read by the rank that wrote it. Raises on all ranks if one cannot."""
        mine: dict[str, tuple[int, str]] | str
        try:
            own = sorted(temporary.glob(f"__{self._rank}_*"))
            if self._rank == 0:
                own.append(temporary / ".metadata")
            mine = {path.name: (path.stat().st_size, file_digest(path)) for path in own}
        except OSError as error:
            mine = f"rank {self._rank} cannot read back {error.filename}: {error.strerror}"
        gathered: list[dict[str, tuple[int, str]] | str] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(gathered, mine, group=self._group)
        files: dict[str, tuple[int, str]] = {}
        for part in gathered:
            if isinstance(part, str):
                raise CheckpointError(part)
            files.update(part)
        return files

    def _commit(self, commit: Commit, temporary: Path) -> None:
        sync_directory(temporary)
        self._probe("committing", commit.iteration)
        self._directory.commit(self._owner, commit)
        self._probe("committed", commit.iteration)

    def _on_rank_0(self, act: Callable[[], object]) -> None:
        """Do it on rank 0; raise its error on every rank."""
        outcome: list[CheckpointError | None] = [None]
        if self._rank == 0:
            try:
                act()
            except CheckpointError as error:
                outcome = [error]
            except OSError as error:
                outcome = [CheckpointError(f"cannot write {error.filename or self._directory.path}: {_os_text(error)}")]
            except Exception as error:  # whatever it is: the other ranks wait for the outcome
                outcome = [
                    CheckpointError(f"cannot commit to {self._directory.path}: {type(error).__name__}: {_first_line(error)}")
                ]
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(self._group, 0), group=self._group)
        if outcome[0] is not None:
            raise outcome[0]


def claim_for_all(
    directory: CheckpointDirectory, job_key: str, attempt: int, group: dist.ProcessGroup, on_purpose: bool = False
) -> Owner:
    """Rank 0 makes and claims the directory; every rank gets the claim, or its error (see `CheckpointDirectory.claim`)."""
    outcome: list[Owner | CheckpointError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            outcome = [directory.claim(job_key, attempt, on_purpose)]
        except CheckpointError as error:
            outcome = [error]
        except OSError as error:
            outcome = [CheckpointError(f"cannot make {directory.path}: {_os_text(error)}")]
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    owner = outcome[0]
    if isinstance(owner, CheckpointError):
        raise owner
    assert owner is not None
    return owner


def find_whole_checkpoint(
    directory: CheckpointDirectory, group: dist.ProcessGroup | None, warn: Callable[[str], None]
) -> WholeCheckpoint | None:
    """The newest checkpoint that is whole, agreed by all ranks; None if there is none.

    Each rank reads a part of the files and compares checksums. A damaged checkpoint is passed over for the one before, and
    rank 0 calls `warn` with the reason.
    """
    rank = dist.get_rank(group)
    candidates: list[Any] = [directory.iterations() if rank == 0 else None]
    dist.broadcast_object_list(candidates, src=0, group=group)
    for iteration in candidates[0]:
        found = check_whole(directory.folder(iteration), group, warn)
        if found is not None:
            return found
    return None


def check_whole(folder: Path, group: dist.ProcessGroup | None, warn: Callable[[str], None]) -> WholeCheckpoint | None:
    """That checkpoint, if all its files are as they were committed; else rank 0 calls `warn`. Collective, as
    `find_whole_checkpoint`."""
    rank = dist.get_rank(group)
    commit, problem = _check_part(folder, rank, dist.get_world_size(group))
    problems: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    found = next((text for text in problems if text), "")
    if not found and commit is not None:
        return WholeCheckpoint(folder, commit)
    if rank == 0:
        warn(f"checkpoint {folder} is skipped: {found}")
    return None


def _check_part(folder: Path, rank: int, world_size: int) -> tuple[Commit | None, str]:
    try:
        commit = read_commit(folder)
        verify_files(folder, commit, sorted(commit.files)[rank::world_size])
    except Damaged as damage:
        return None, str(damage)
    return commit, ""


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` (by name, in place) from a checkpoint. Each rank reads on its own. Raises `CheckpointError`."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
            load(dict(tensors), checkpoint_id=path, no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        reason = failures[0][0] if failures else error
        advice = _MOVE_AWAY if is_damage(reason) else "were model and options the same?"
        raise CheckpointError(f"cannot load {path}: {why_unreadable(reason)}; {advice}") from None


def tensor_sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint. Raises `CheckpointError`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except (pickle.UnpicklingError, EOFError, ImportError, AttributeError, OSError) as error:  # what pickle makes of damage
        what = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise CheckpointError(f"cannot load {path}: {what}; {_MOVE_AWAY}") from None
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _os_text(error: OSError) -> str:
    text = error.strerror or str(error)
    return f"{text}; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else text
