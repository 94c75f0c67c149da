"""Bringing a local checkpoint back: each rank's part from its own node, or from another rank over the wire; checked before
use."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rsup.worker.checkpoint_directory import CheckpointError, Damaged
from rsup.worker.local_checkpoint_exchange import Incoming, Outgoing, exchange
from rsup.worker.local_checkpoint_format import PartHeader, TensorEntry, parse_part, read_part
from rsup.worker.local_checkpoint_plan import PartFile, Reading, SaveId, plan_readings


class LocalCheckpoint:
    """A local checkpoint of which this rank holds its part in memory. Methods that say so are collective."""

    def __init__(self, path: Path, header: PartHeader, payload: memoryview, group: dist.ProcessGroup) -> None:
        self.path = path
        self.progress = header.progress
        self.world_size = header.world_size
        self.iteration = header.iteration
        self._payload = payload
        self._entries = {entry.name: entry for entry in header.tensors}
        self._group = group
        mine = [(entry.name, entry.dtype, entry.shape) for entry in header.tensors if entry.shared]
        answers: list[list[tuple[str, str, tuple[int, ...]]]] = gather_objects(mine, group)
        self._shared: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        """Name -> (the lowest rank that keeps it, dtype, shape)."""
        for rank, listed in enumerate(answers):
            for name, dtype, shape in listed:
                self._shared.setdefault(name, (rank, dtype, shape))
        self._is_kept_by_all = all(len(listed) == len(self._shared) for listed in answers)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` can give this rank."""
        return {name: shape for name, (_, _, shape) in self._shared.items()} | {
            name: entry.shape for name, entry in self._entries.items()
        }

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill `tensors` (by name, in place). Values that all ranks have alike are sent by the one that keeps them: for these
        all ranks ask together, in any order. Raises `CheckpointError`."""
        for name, tensor in tensors.items():
            known = self.sizes().get(name)
            if known is None or known != tuple(tensor.shape):
                found = "is not in it" if known is None else f"has the shape {list(known)} in it, not {list(tensor.shape)}"
                raise CheckpointError(f"cannot load {self.path}: {name} {found}; were model and options the same?")
        for name in sorted(tensors):
            if name in self._shared:
                self._receive(name, tensors[name])
            else:
                tensors[name].copy_(self._tensor(self._entries[name]))

    def _receive(self, name: str, tensor: torch.Tensor) -> None:
        """From the rank that keeps it, unless each keeps its own (then nothing is sent)."""
        owner, dtype, shape = self._shared[name]
        if self._is_kept_by_all:
            tensor.copy_(self._tensor(self._entries[name]))
            return
        if owner == dist.get_rank(self._group):
            sent = self._tensor(self._entries[name]).clone()
        else:
            sent = torch.empty(shape, dtype=getattr(torch, dtype))
        flat = sent.reshape(-1).view(torch.uint8)
        if flat.numel():
            dist.broadcast(flat, group_src=owner, group=self._group)
        tensor.copy_(sent)

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        data = self._payload[entry.offset : entry.offset + entry.size_bytes]
        dtype = getattr(torch, entry.dtype)
        if not entry.size_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # it is only read
            return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def open_save(
    folder: Path,
    save_id: SaveId,
    files: list[PartFile],
    nodes: list[str],
    group: dist.ProcessGroup,
    warn: Callable[[str], None],
) -> LocalCheckpoint | None:
    """Each rank reads or fetches its part; a damaged file is passed over for another copy. None where none is left.
    Collective."""
    rank = dist.get_rank(group)
    bad: set[tuple[str, str]] = set()
    while True:
        readings = plan_readings(save_id, files, bad, nodes)
        missing = [number for number, reading in enumerate(readings) if reading is None]
        if missing:
            warn(f"the local checkpoint of iteration {save_id.iteration} is skipped: no whole part of ranks {missing} is left")
            return None
        planned = [reading for reading in readings if reading is not None]
        part, problem = _take_part(folder, planned, rank, group)
        problems: list[str] = gather_objects(problem, group)
        for number, text in enumerate(problems):
            if text:
                warn(f"a part of the local checkpoint of iteration {save_id.iteration} cannot be used by rank {number}: {text}")
                bad.add((planned[number].file.node, planned[number].file.name))
        if not any(problems):
            assert part is not None
            return LocalCheckpoint(folder, *part, group)


def _take_part(
    folder: Path, planned: list[Reading], rank: int, group: dist.ProcessGroup
) -> tuple[tuple[PartHeader, memoryview] | None, str]:
    """This rank's part, and its help to others; or why it cannot be used."""
    to_send = [(number, reading) for number, reading in enumerate(planned) if reading.sender == rank]
    announced = {number: _size_of(folder / reading.file.name) for number, reading in to_send}
    sizes: dict[int, int] = {}
    for listed in gather_objects(announced, group):
        sizes.update(listed)
    mine = planned[rank]
    content = bytearray(sizes.get(rank, 0))

    def take(start: int, data: memoryview) -> None:
        content[start : start + len(data)] = data

    incoming = [] if mine.sender is None else [Incoming(mine.sender, sizes[rank], take)]
    exchange(group, [Outgoing(number, folder / item.file.name, announced[number]) for number, item in to_send], incoming)
    try:
        name = mine.file.name
        part = read_part(folder / name) if mine.sender is None else parse_part(name, memoryview(content))
        _check_is(part[0], mine.file)
    except Damaged as damage:
        return None, str(damage)
    return part, ""


def _check_is(header: PartHeader, file: PartFile) -> None:
    found = (SaveId(header.iteration, header.attempt, header.token), header.rank)
    if found != (file.save_id, file.rank):
        raise Damaged(f"{file.name} has another rank's part, or one of another save")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank of the group gave, by rank. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
