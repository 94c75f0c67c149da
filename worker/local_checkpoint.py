"""Non-persistent checkpoints: each rank's part on its own node, in memory or on local disk, with copies on other nodes.

`save` copies the tensors and returns; a thread writes the part, sends it to the ranks that keep copies, and when every rank
has its own the save is whole and the one before it goes. All of that runs over a gloo group that nothing else uses. At a
restart `saves` lists what is whole across all nodes, and `open` brings each rank its part: from its node, else over the wire
from a node that has it.

A local checkpoint is lost with its nodes and never counts as durable. Nothing that goes wrong here ends the training: the
save is given up, with the reason in its result, and the older one is kept.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rsup.supervisor.wire import RsupError, UsageError
from rsup.worker.checkpoint_directory import CheckpointError, Damaged
from rsup.worker.local_checkpoint_directory import Launcher, LocalDirectory
from rsup.worker.local_checkpoint_exchange import Incoming, Outgoing, bytes_of, exchange
from rsup.worker.local_checkpoint_format import PartHeader, lay_out, part_bytes, read_header, write_part
from rsup.worker.local_checkpoint_plan import (
    PartFile,
    Replication,
    SaveId,
    check_replication,
    keepers,
    split_shared,
    what_replicas_are_worth,
    whole_saves,
)
from rsup.worker.local_restore import LocalCheckpoint, gather_objects, open_save
from rsup.worker.staging import Staging

_newest_token: dict[Path, str] = {}
"""By folder: the entry of this process that may still rename and remove there. A thread of an entry that was left for an
in-process restart may wake up later, and must not touch what the next one does."""


@dataclass(frozen=True)
class LocalResult:
    """How a local save ended: whole on all nodes, or not, with the reason in `error`. `lost_copies`: copies that are
    missing."""

    iteration: int
    path: Path
    duration_s: float
    stall_s: float
    error: str = ""
    lost_copies: str = ""


class LocalCheckpointer:
    """Local saves of one rank. Make it on every rank; call from the training thread, in the same order everywhere.

    `group`: a gloo group that nothing else uses. `control`: the training thread's. `split`: values that all ranks have alike
    are divided among them, not kept by each. `ended(result)` is called by rank 0's thread as soon as a save is whole or given
    up; `probe(point, iteration)` by each rank's, at `writing`, `written`, `copied` and `whole`: a place for injected faults.
    Raises `UsageError` on every rank where one cannot use its directory.
    """

    def __init__(
        self,
        directory: LocalDirectory,
        launcher: Launcher,
        attempt: int,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        replication: Replication | None = None,
        split: bool = True,
        warn: Callable[[str], None] | None = None,
        ended: Callable[[LocalResult], None] | None = None,
        probe: Callable[[str, int], None] | None = None,
    ) -> None:
        self._directory = directory
        self._launcher = launcher
        self._attempt = attempt
        self._group = group
        self._control = control
        self._split = split
        self._warn = warn or (lambda text: None)
        self._ended = ended or (lambda result: None)
        self._probe = probe or (lambda point, iteration: None)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._result: LocalResult | None = None
        self._nodes, self._token = self._meet(launcher)
        _newest_token[directory.path] = self._token
        self._keepers: list[tuple[int, ...]] = [() for _ in range(self._world_size)]
        if replication is not None:
            check_replication(replication, self._world_size)
            self._keepers = keepers(self._nodes, replication)
            if warning := what_replicas_are_worth(self._nodes, self._keepers):
                self._warn(warning)

    def _meet(self, launcher: Launcher) -> tuple[list[str], str]:
        """Make the folder, and learn every rank's node and the token of this run."""
        problem, node = "", ""
        lines: list[str] = []
        try:
            self._directory.make(launcher)
            self._directory.remove_unfinished()
            lines = self._directory.sweep() + self._directory.earlier_runs()
            node = self._directory.node
        except RsupError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot keep local checkpoints in {self._directory.path}: {error.strerror}"
        answers: list[tuple[str, str, str, list[str]]] = gather_objects((problem, node, _new_token(), lines), self._group)
        first = next((text for text, _, _, _ in answers if text), "")
        if first:
            raise UsageError(first)
        for line in dict.fromkeys(line for *_, said in answers for line in said):  # a node's ranks find the same
            self._warn(line)
        return [node for _, node, _, _ in answers], answers[0][2]

    # ----------------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        iteration: int,
        own: Mapping[str, torch.Tensor],
        shared: Mapping[str, torch.Tensor],
        progress: dict[str, Any],
    ) -> float | None:
        """Begin to save; return how long the copy took, or None where a rank is still busy with the save before: then nothing
        is done.

        `own`: only this rank's. `shared`: equal on all ranks. They may change as soon as this returns. `progress`: JSON,
        equal on all ranks. The result comes from `poll`. Collective.
        """
        for name, tensor in (*own.items(), *shared.items()):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                raise CheckpointError(
                    f"{name} is a {type(tensor).__name__}: local checkpoints hold plain tensors, like to_local()'s"
                )
        began_s = time.monotonic()
        busy = torch.tensor([int(self.is_saving)])
        dist.all_reduce(busy, dist.ReduceOp.MAX, group=self._control)
        if int(busy):
            return None
        if self._split:
            owners = split_shared({name: _size_bytes(tensor) for name, tensor in shared.items()}, self._world_size)
            shared = {name: tensor for name, tensor in shared.items() if owners[name] == self._rank}
        staged = self._staging.copy({**own, **shared})
        stall_s = time.monotonic() - began_s
        self._thread = threading.Thread(
            target=self._run,
            args=(iteration, staged, set(shared), progress, stall_s),
            name="rsup-local-checkpoint",
            daemon=True,
        )
        self._thread.start()
        return stall_s

    def poll(self) -> LocalResult | None:
        """The result of the save that was on its way, once; None while it is, or if there is none."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self.finish()

    def finish(self) -> LocalResult | None:
        """Wait for the save that is on its way, and return its result as `poll` does."""
        if self._thread is None:
            return None
        while self._thread.is_alive():
            self._thread.join(0.1)  # in slices: an in-process restart interrupts the wait with an exception
        self._thread = None
        return self._result

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def discard(self) -> None:
        """Remove all local checkpoints of this job from this node: they are not to be resumed from."""
        self.finish()
        self._directory.remove()

    # ---------------------------------------------------------------------------------------------- the writing thread

    def _run(
        self, iteration: int, staged: dict[str, torch.Tensor], shared: set[str], progress: dict[str, Any], stall_s: float
    ) -> None:
        began_s = time.monotonic()
        error, lost = "", ""
        try:
            error, lost = self._write(self._header(iteration, staged, shared, progress), staged)
        except Exception as failure:  # outermost frame of the thread: it becomes the result
            error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else 'no reason given'}"
        if error and self._is_current:
            self._directory.remove_save(self._token, iteration, self._rank)
        result = LocalResult(iteration, self._directory.path, time.monotonic() - began_s, stall_s, error, lost)
        self._result = result
        if self._rank == 0 and self._is_current:
            self._ended(result)

    def _header(
        self, iteration: int, staged: dict[str, torch.Tensor], shared: set[str], progress: dict[str, Any]
    ) -> PartHeader:
        entries = lay_out(
            [
                (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _size_bytes(tensor), name in shared)
                for name, tensor in staged.items()
            ]
        )
        now_us = time.time_ns() // 1000
        key = self._directory.job_key
        return PartHeader(key, self._attempt, iteration, self._token, self._rank, self._world_size, now_us, progress, entries)

    def _write(self, header: PartHeader, staged: dict[str, torch.Tensor]) -> tuple[str, str]:
        """Write, copy, agree; return why the save does not count, and which copies are missing."""
        iteration, size_bytes = header.iteration, part_bytes(header)
        sizes: list[int] = gather_objects(size_bytes, self._group)
        kept = [rank for rank, others in enumerate(self._keepers) if self._rank in others]
        error = self._lack_of_room(self._bytes_on_this_node(sizes))
        errors: list[str] = gather_objects(error, self._group)  # nobody writes before all have looked at the room
        error = next(filter(None, errors), "")
        final = self._directory.final(iteration, self._token, self._rank)
        temporary = self._directory.temporary(final)
        if not error:
            self._probe("writing", iteration)
            try:
                write_part(temporary, header, [bytes_of(staged[entry.name]) for entry in header.tensors])
            except OSError as failure:
                error = f"cannot write {temporary}: {failure.strerror}"
            self._probe("written", iteration)
        errors = gather_objects(error, self._group)
        if any(errors):
            return next(filter(None, errors)), ""
        lost = self._send_copies(iteration, temporary, sizes, kept)
        self._probe("copied", iteration)
        if not self._is_current:
            return "the training function was left meanwhile", ""
        temporary.rename(final)
        outcomes: list[str] = gather_objects(lost, self._group)
        if self._is_current:
            self._directory.remove_all_but(self._token, iteration)
            self._directory.remove_earlier_runs()
        self._probe("whole", iteration)
        return "", "; ".join(filter(None, outcomes))

    def _send_copies(self, iteration: int, part: Path, sizes: list[int], kept: list[int]) -> str:
        """Send this rank's part to its keepers and keep those of others; say which could not be kept."""
        outgoing = [Outgoing(keeper, part, sizes[self._rank]) for keeper in self._keepers[self._rank]]
        copies = [_Copy(self._directory, iteration, self._token, rank, self._rank) for rank in kept]
        incoming = [Incoming(rank, sizes[rank], copy.take) for rank, copy in zip(kept, copies, strict=True)]
        try:
            exchange(self._group, outgoing, incoming)
        finally:
            for copy in copies:
                copy.close()
        problems = [f"rank {self._rank}: {item.error}" for item in outgoing if item.error]
        for item, copy in zip(incoming, copies, strict=True):
            if problem := copy.finish(item.error):
                problems.append(f"rank {self._rank} has no copy of rank {item.sender}'s part: {problem}")
        return "; ".join(problems)

    def _bytes_on_this_node(self, sizes: list[int]) -> int:
        """What all ranks of this node write: their parts, and the copies that they keep of others'."""
        here = {rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._rank]}
        copies = sum(sizes[rank] for rank, others in enumerate(self._keepers) for keeper in others if keeper in here)
        return copies + sum(sizes[rank] for rank in here)

    def _lack_of_room(self, needed_bytes: int) -> str:
        try:
            self._directory.make(self._launcher)  # anew, where somebody has tidied it away
            free_bytes = self._directory.free_bytes()
        except UsageError as failure:
            return str(failure)
        except OSError as failure:
            return f"cannot write to {self._directory.path}: {failure.strerror}"
        if needed_bytes <= free_bytes:
            return ""
        hint = (
            "give it more memory, or use --non-persistent-ckpt-type local" if self._directory.in_memory else "free some space"
        )
        return f"{self._directory.root} has room for {free_bytes >> 20} MiB, and {needed_bytes >> 20} MiB are needed: {hint}"

    @property
    def _is_current(self) -> bool:
        return _newest_token.get(self._directory.path) == self._token

    # --------------------------------------------------------------------------------------------------------- resuming

    def saves(self) -> list[tuple[SaveId, list[PartFile]]]:
        """Saves of this job that are whole across all nodes, newest first, with all files that have parts of them.
        Collective."""
        found: list[PartFile] = []
        complaints: list[str] = []
        if self._nodes.index(self._nodes[self._rank]) == self._rank:  # one rank a node looks
            found, complaints = self._look()
        answers: list[tuple[list[PartFile], list[str]]] = gather_objects((found, complaints), self._group)
        for _, lines in answers:
            for line in lines:
                self._warn(line)
        files = [file for listed, _ in answers for file in listed]
        sizes = {file.world_size for file in files} - {self._world_size}
        if sizes:
            made_by = ", ".join(map(str, sorted(sizes)))
            self._warn(f"local checkpoints made by {made_by} ranks are not used: now there are {self._world_size}")
        return [(save_id, files) for save_id in whole_saves(files, self._world_size)]

    def _look(self) -> tuple[list[PartFile], list[str]]:
        try:
            parts, complaints = self._directory.parts()
        except OSError as error:
            return [], [f"local checkpoints in {self._directory.path} cannot be read: {error.strerror}"]
        node = self._nodes[self._rank]
        files = []
        for name, header in parts:
            save_id = SaveId(header.iteration, header.attempt, header.token)
            files.append(PartFile(save_id, header.rank, header.world_size, node, name))
        return files, complaints

    def open(self, save_id: SaveId, files: list[PartFile]) -> LocalCheckpoint | None:
        """That save, each rank's part read and checked; None where a part is nowhere whole. Collective."""
        return open_save(self._directory.path, save_id, files, self._nodes, self._group, self._warn)


class _Copy:
    """A copy of another rank's part, being received."""

    def __init__(self, directory: LocalDirectory, iteration: int, token: str, rank: int, keeper: int) -> None:
        self._final = directory.final(iteration, token, rank, keeper)
        self._temporary = directory.temporary(self._final)
        self._file: Any = None

    def take(self, start: int, data: memoryview) -> None:
        if self._file is None:
            self._file = self._temporary.open("wb", buffering=0)
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def finish(self, error: str) -> str:
        """Give it its name if it is whole; say why it is not."""
        try:
            if not error:
                read_header(self._temporary)
                self._temporary.rename(self._final)
                return ""
        except (Damaged, OSError) as failure:
            error = str(failure)
        self._temporary.unlink(missing_ok=True)
        return error


def _new_token() -> str:
    """Sixteen hex digits, of which a later one is the greater."""
    return f"{(time.time_ns() // 1000 << 12 | int.from_bytes(os.urandom(2), 'little') & 0xFFF):016x}"


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
