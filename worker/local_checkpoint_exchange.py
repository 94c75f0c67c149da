"""Files sent between ranks over a gloo group, in pieces, many at once. Runs on a thread of its own, never the training thread.

All ranks call `exchange` with parts of one plan: each sender's list names what some receiver's list expects, in the same
order for each pair of ranks. A rank that cannot read or write goes on to the end of the exchange and says so afterwards, so
that no other waits for it.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

PIECE_BYTES = 16 << 20
_Item = TypeVar("_Item")


@dataclass
class Outgoing:
    """A file for the rank `to` (of the group). `size_bytes` are sent in any case; `error` says why they are not the file's."""

    to: int
    path: Path
    size_bytes: int
    error: str = ""
    _file: io.FileIO | None = field(default=None, repr=False)

    def piece(self, start: int, length: int) -> torch.Tensor:
        """The next `length` bytes, at `start`: [length], uint8."""
        buffer = bytearray(length)
        if not self.error:
            try:
                if self._file is None:
                    self._file = self.path.open("rb", buffering=0)
                view = memoryview(buffer)
                while view and (count := self._file.readinto(view)):
                    view = view[count:]
                self.error = f"{self.path.name} is cut short" if view else ""
            except OSError as error:
                self.error = f"{self.path.name} cannot be read: {error.strerror}"
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@dataclass
class Incoming:
    """What the rank `sender` sends: `take(start, data)` is called with each piece in order; `error` says why it gave up."""

    sender: int
    size_bytes: int
    take: Callable[[int, memoryview], None]
    error: str = ""

    def put(self, start: int, piece: torch.Tensor) -> None:
        """Take a piece that has come."""
        if not self.error:
            try:
                self.take(start, bytes_of(piece))
            except OSError as error:
                self.error = error.strerror or str(error)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU, as bytes; a copy where it is not contiguous."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def exchange(group: dist.ProcessGroup, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> None:
    """Send and receive all of it. Raises what gloo raises where another rank is gone."""
    try:
        start = 0
        longest = max([*(item.size_bytes for item in outgoing), *(item.size_bytes for item in incoming)], default=0)
        while start < longest:
            _one_piece_each(group, outgoing, incoming, start)
            start += PIECE_BYTES
    finally:
        for item in outgoing:
            item.close()


def _one_piece_each(group: dist.ProcessGroup, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], start: int) -> None:
    received, works = [], []
    for tag, source in _numbered(incoming, lambda item: item.sender):
        length = min(PIECE_BYTES, source.size_bytes - start)
        if length > 0:
            piece = torch.empty(length, dtype=torch.uint8)
            works.append(dist.irecv(piece, group=group, group_src=source.sender, tag=tag))
            received.append((source, piece))
    kept = []  # gloo reads from the tensors until they are sent
    for tag, target in _numbered(outgoing, lambda item: item.to):
        length = min(PIECE_BYTES, target.size_bytes - start)
        if length > 0:
            kept.append(target.piece(start, length))
            works.append(dist.isend(kept[-1], group=group, group_dst=target.to, tag=tag))
    for work in works:
        if work is not None:
            work.wait()
    for source, piece in received:
        source.put(start, piece)


def _numbered(items: Sequence[_Item], peer: Callable[[_Item], int]) -> list[tuple[int, _Item]]:
    """Each with its number among those of the same peer: the tag by which both ends know it."""
    count: dict[int, int] = {}
    numbered = []
    for item in items:
        other = peer(item)
        numbered.append((count.get(other, 0), item))
        count[other] = count.get(other, 0) + 1
    return numbered
