"""Numbers of single steps that are on a device: copied there behind the step's kernels, read when somebody needs them.

A step hands in a row of scalars. Those on a GPU are copied into a block of rows beside them, in one operation that nobody waits
for. Who reads the rows later waits for the newest one, and fetches each block at once.
"""

import time
from collections.abc import Sequence
from typing import cast

import torch

from rsup.worker.observe.current_stream import current_stream

ROWS_OF_BLOCK = 256
Value = torch.Tensor | float
"""A number, or a tensor of one or more, on any device; what is read here is plain (see `plain_tensor`)."""


class LateScalars:
    """Rows of numbers, in the order of the steps. One thread. Memory is kept for the next rows once the first are read."""

    def __init__(self) -> None:
        self._rows: list[list[list[float] | _Place]] = []
        self._blocks: dict[_Layout, list[_Block]] = {}
        """By the layout of what a step hands in; all but the last of a list are full."""

    def __len__(self) -> int:
        return len(self._rows)

    def are_there(self, within_s: float) -> bool:
        """Whether `take` would wait for no GPU. Waits for one that long at most: what it does may never end."""
        deadline_s = time.monotonic() + within_s
        blocks = [block for blocks in self._blocks.values() for block in blocks if block.num_rows]
        while not all(block.is_there() for block in blocks):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.01)
        return True

    def put(self, values: Sequence[Value]) -> None:
        """A row more; tensors are read as they are now, on the current stream of their device. Never waits for a GPU."""
        on_device = [value for value in values if isinstance(value, torch.Tensor) and value.is_cuda]
        places = iter(self._copied(on_device) if on_device else ())
        row: list[list[float] | _Place] = []
        for value in values:
            if not isinstance(value, torch.Tensor):
                row.append([value])
            elif value.is_cuda:
                row.append(next(places))
            else:
                row.append(read_now(value))
        self._rows.append(row)

    def take(self) -> list[list[float]]:
        """All rows, in order; each its values one behind the other. Waits until the last copy is over."""
        rows, self._rows = self._rows, []
        used = [block for blocks in self._blocks.values() for block in blocks if block.num_rows]
        fetched = {id(block): block.fetch() for block in used}
        self._blocks = {layout: blocks[:1] for layout, blocks in self._blocks.items()}
        return [[number for part in row for number in _numbers(part, fetched)] for row in rows]

    def _copied(self, tensors: "list[torch.Tensor]") -> "list[_Place]":
        """Where the numbers will be."""
        home = tensors[0].device
        if any(tensor.device != home for tensor in tensors):
            tensors = [tensor.to(home, non_blocking=True) for tensor in tensors]
        layout = (home, _dtype(tensors), tuple(tensor.shape for tensor in tensors))
        blocks = self._blocks.setdefault(layout, [])
        if not blocks or blocks[-1].num_rows == ROWS_OF_BLOCK:
            blocks.append(_Block(*layout))
        return blocks[-1].put(tensors)


def read_now(value: Value) -> list[float]:
    """Its numbers. Waits for its device."""
    if not isinstance(value, torch.Tensor):
        return [value]
    num_dims = value.dim()
    if num_dims == 0:
        return [cast(float, value.tolist())]
    return cast(list[float], (value if num_dims == 1 else value.reshape(-1)).tolist())


_Layout = tuple[torch.device, torch.dtype, tuple[torch.Size, ...]]


class _Block:
    """Rows of one layout on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shapes: tuple[torch.Size, ...]) -> None:
        sizes = [shape.numel() for shape in shapes]
        self.num_rows = 0
        self._device = device
        self._rows = torch.empty((ROWS_OF_BLOCK, sum(sizes)), dtype=dtype, device=device)
        self._views = [
            [part.view(shape) for part, shape in zip(torch.split(row, sizes), shapes, strict=True)]
            for row in self._rows.unbind()
        ]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        self._slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._streams: set[torch.cuda.Stream] = set()

    def put(self, tensors: list[torch.Tensor]) -> "list[_Place]":
        with torch.cuda.device(self._device), torch.no_grad():
            torch._foreach_copy_(self._views[self.num_rows], tensors)  # pyright: ignore[reportPrivateImportUsage]
            self._streams.add(current_stream())
        self.num_rows += 1
        return [(id(self), self.num_rows - 1, of_row) for of_row in self._slices]

    def is_there(self) -> bool:
        with torch.cuda.device(self._device):
            return all(stream.query() for stream in {*self._streams, current_stream()})

    def fetch(self) -> list[list[float]]:
        """The rows; it is empty then. Waits for them."""
        with torch.cuda.device(self._device):
            now = current_stream()
            for stream in self._streams - {now}:
                now.wait_stream(stream)
            rows = cast(list[list[float]], self._rows[: self.num_rows].tolist())
        self._streams.clear()
        self.num_rows = 0
        return rows


_Place = tuple[int, int, slice]
"""A block, a row of it, and which numbers of the row."""


def _numbers(part: "list[float] | _Place", fetched: dict[int, list[list[float]]]) -> list[float]:
    if isinstance(part, list):
        return part
    block, row, of_row = part
    return fetched[block][row][of_row]


def _dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    """Float32, or float64 where counts or doubles are among them."""
    wide = any(tensor.dtype == torch.float64 or not tensor.is_floating_point() for tensor in tensors)
    return torch.float64 if wide else torch.float32
