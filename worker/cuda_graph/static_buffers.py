"""The inputs of a step at fixed addresses: a graph reads where it was captured, so that new data are copied there.

One set of buffers per signature. All tensors of a set lie in one piece of memory, so that a batch in host memory costs one
copy: through two page-locked slots in turn, since one from pageable memory would let the host wait for the running step.
"""

from collections.abc import Collection, Hashable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from rsup.worker.cuda_graph.contract import Batches, GraphError
from rsup.worker.cuda_graph.nesting import map_leaves, walk

_ALIGNMENT = 256
"""Bytes; that of the caching allocator, so that kernels choose what they would choose for a tensor of its own."""
Entry = tuple[object, ...]
"""What it is: a kind, and what must stay the same."""
Signature = tuple[Entry, ...]
"""An entry for each container and leaf: (where, path, what it is...). `where`: model chunk and micro-batch."""


class StaticBuffers:
    """The static inputs of one `FullIterationGraph`. `device`: where the step computes.

    `ignored_inputs`: patterns (`*`) of the paths within a micro-batch, such as `document_ids` or `meta.*`, of values that the
    graph does not read. They may change from call to call, and are handed on as they are.
    """

    def __init__(self, device: torch.device, ignored_inputs: Collection[str] = ()) -> None:
        self._device = device
        self._ignored = tuple(ignored_inputs)
        self._sets: dict[Hashable, _BufferSet] = {}

    def signature(self, batches: Batches) -> Signature:
        """Everything of `batches` that a graph takes for granted: structure, shapes, dtypes, and values that are no tensors.

        Raises `GraphError` for what cannot be an input of a graph, naming chunk, micro-batch and path.
        """
        entries: list[Entry] = [(_where(), "", "model chunks", len(_as_sequence(batches, "the batches")))]
        for chunk, micros in enumerate(batches):
            entries.append((_where(chunk), "", "micro-batches", len(_as_sequence(micros, f"model chunk {chunk}"))))
            for micro, batch in enumerate(micros):
                where = _where(chunk, micro)
                for path, value, is_leaf in walk(batch):
                    if not self._is_ignored(path):
                        entries.append((where, path, *(_leaf(value, where, path) if is_leaf else _container(value))))
        return tuple(entries)

    def load(self, key: Hashable, batches: Batches) -> Batches:
        """Copy `batches` into the buffers of `key`, made at first use, and return them in the same nesting.

        Copies in the order of the current stream, without waiting for it. `batches` must have the signature of the first load
        of that key. The memory of `batches` may be reused as soon as this returns (on the device: in stream order).
        """
        sources: list[torch.Tensor] = []

        def collect(path: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not self._is_ignored(path):
                sources.append(leaf)
            return leaf

        for micros in batches:
            for batch in micros:
                map_leaves(batch, collect)
        buffers = self._sets.get(key)
        if buffers is None:
            buffers = self._sets[key] = _BufferSet(sources, self._device)
        buffers.fill(sources)
        static = iter(buffers.tensors)

        def place(path: str, leaf: Any) -> Any:
            return next(static) if isinstance(leaf, torch.Tensor) and not self._is_ignored(path) else leaf

        return [[map_leaves(batch, place) for batch in micros] for micros in batches]

    def keep(self, keys: Collection[Hashable]) -> None:
        """Give the buffers of all other keys back."""
        for key in self._sets.keys() - set(keys):
            del self._sets[key]

    @property
    def size_bytes(self) -> int:
        """Memory of all buffers on the device."""
        return sum(buffers.size_bytes for buffers in self._sets.values())

    def _is_ignored(self, path: str) -> bool:
        if not self._ignored or not path:
            return False
        parts = path.split(".")
        names = [".".join(parts[: count + 1]) for count in range(len(parts))]  # what is in something ignored is ignored too
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._ignored)


def difference(known: Signature, new: Signature) -> str:
    """The first thing in which two signatures differ: "model chunk 0, micro-batch 1, tokens: ... instead of ..."."""
    before, after = ({entry[:2]: entry[2:] for entry in signature} for signature in (known, new))
    for place in (*before, *after):
        if before.get(place) != after.get(place):
            where, path = place
            name = ", ".join(part for part in (str(where), str(path)) if part)
            return f"{name}: {_described(after.get(place))} instead of {_described(before.get(place))}"
    return "the same in another order"


def _described(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    kind, *rest = entry
    if kind == "tensor":
        shape, dtype, requires_grad = rest
        return f"a tensor {list(shape)} {dtype}{', requires grad' if requires_grad else ''}"  # type: ignore[call-overload]
    if kind in ("model chunks", "micro-batches"):
        return f"{rest[0]} {kind}"
    if kind == "container":
        return f"a {rest[0].__qualname__} of {rest[1]!s:.200}"  # type: ignore[attr-defined]
    if kind in (float, complex):
        return str(rest[0])
    return f"{rest[0]!r:.80}"


def _where(chunk: int | None = None, micro: int | None = None) -> str:
    if chunk is None:
        return ""
    return f"model chunk {chunk}" if micro is None else f"model chunk {chunk}, micro-batch {micro}"


def _as_sequence(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    raise GraphError(
        f"{what}: a {type(value).__qualname__} is not a sequence: give for each model chunk the list of its micro-batches"
    )


def _container(value: Any) -> Entry:
    content = tuple(value.keys()) if hasattr(value, "keys") else len(value) if hasattr(value, "__len__") else "fields"
    return "container", type(value), content


def _leaf(value: Any, where: str, path: str) -> Entry:
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized
        if not plain:
            kind = type(value).__qualname__ if type(value) is not torch.Tensor else str(value.layout)
            raise GraphError(
                f"{where}, {path or 'itself'}: a graph takes plain dense tensors, not {kind}: convert it in the loader"
            )
        return "tensor", tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, float | complex):  # NaN equals nothing, and 0.0 equals -0.0
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        raise GraphError(
            f"{where}, {path or 'itself'}: a {type(value).__qualname__} would be frozen in a graph and its changes go unseen: "
            f"make it a tensor, or name it in ignored_inputs if the step does not read it"
        ) from None
    return type(value), value


class _BufferSet:
    """Buffers for the tensors of one signature, in the order of the leaves."""

    def __init__(self, sources: Sequence[torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._offsets: list[int] = []
        end = 0
        for source in sources:
            self._offsets.append(end)
            size = source.numel() * source.element_size()
            end += (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        self.size_bytes = end
        self._flat = torch.empty(end, dtype=torch.uint8, device=device)
        self._writable = self._views(self._flat, sources)
        self.tensors = [view.detach().requires_grad_(s.requires_grad) for view, s in zip(self._writable, sources, strict=True)]
        self._slots: list[_Slot] = []

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy the sources in, on the current stream."""
        for static, source in zip(self._writable, sources, strict=True):
            assert static.shape == source.shape and static.dtype == source.dtype, "batches of another signature"
        for static in self.tensors:
            if static.grad is not None:
                static.grad.zero_()
        with torch.no_grad():
            staged = []
            for index, source in enumerate(sources):
                if self._device.type == "cuda" and source.device.type == "cpu":
                    staged.append(index)
                else:
                    self._writable[index].copy_(source, non_blocking=True)
            if staged:
                self._fill_from_host(sources, staged)

    def _fill_from_host(self, sources: Sequence[torch.Tensor], staged: list[int]) -> None:
        if not self._slots:
            self._slots = [
                _Slot(self._views(flat, sources), flat) for flat in (_page_locked(self.size_bytes) for _ in range(2))
            ]
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.wait()
        for index in staged:
            slot.tensors[index].copy_(sources[index])
        if len(staged) == len(sources):
            self._flat.copy_(slot.flat, non_blocking=True)
        else:
            for index in staged:
                self._writable[index].copy_(slot.tensors[index], non_blocking=True)
        slot.copied()

    def _views(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors in `flat`, laid out as dense ones like the sources (channels-last stays so)."""
        views = []
        for offset, source in zip(self._offsets, like, strict=True):
            part = flat[offset : offset + source.numel() * source.element_size()].view(source.dtype)
            strides = torch.empty_like(source, device="meta", memory_format=torch.preserve_format).stride()
            views.append(part.as_strided(source.shape, strides))
        return views


class _Slot:
    """Page-locked memory for one step's inputs, and when its copy to the device is done."""

    def __init__(self, tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
        self.tensors = tensors
        self.flat = flat
        self._event: Any = None

    def wait(self) -> None:
        """Until the slot's last copy is done: that of two steps ago, which ran before the step that is running."""
        if self._event is not None:
            self._event.synchronize()

    def copied(self) -> None:
        """Its copy was queued on the current stream."""
        if self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()


def _page_locked(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no more memory may be locked: the host waits for each copy, and it works
        return torch.empty(size_bytes, dtype=torch.uint8)
