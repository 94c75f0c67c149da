"""Activations in host memory between forward and backward: what autograd saves is copied out, and back when it is needed.

    offload = ActivationOffload(device, max_inflight=4)
    with offload.saving(module.parameters()):
        loss = module(batch)
    loss.backward()
    offload.join()

Copies run on a stream of their own. A tensor's memory on the device is free once the computing stream has waited for its copy
("joined" it): with a limit of copies in flight that happens while forward goes on, without it where the host sees that a copy
is over. The limit makes the order a fixed one, so that a CUDA graph can be captured; then the pass has to have run before, as
page-locked memory cannot be allocated in a capture. Source: Megatron-LM's fine-grained activation offloading.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch.autograd.graph import saved_tensors_hooks

from rsup.supervisor.wire import RsupError


class OffloadError(RsupError):
    """An activation cannot be moved to host memory here; the text says what to change."""


_Loaded = tuple[torch.Tensor, "torch.cuda.Event | None"]
"""A tensor on the device again, and what to wait for before it is read."""


class _Kept:
    """One tensor in host memory. Its buffer goes back to `free` when autograd needs it no more; what was fetched and not asked
    for, to `unused`: the copy into it may be under way."""

    def __init__(
        self,
        host: torch.Tensor,
        buffer: torch.Tensor,
        order: list[int],
        free: list[torch.Tensor],
        unused: "list[_Loaded]",
    ) -> None:
        self.host = host
        self.order = order
        self.loaded: _Loaded | None = None
        self.was_used = False
        self.before: weakref.ref[_Kept] | None = None
        """The one kept before it, which the backward pass most likely needs next."""
        self._buffer = buffer
        self._free = free
        self._unused = unused

    def __del__(self) -> None:
        self._free.append(self._buffer)
        if self.loaded is not None:
            self._unused.append(self.loaded)


class ActivationOffload:
    """Moves what autograd saves inside `saving`; on the training thread, and autograd's.

    `max_inflight`: copies to the host that may be under way when the next kernel is queued; None: no limit, and then not
    inside a CUDA graph. `min_bytes`: smaller tensors stay. On a CPU tensors are copied in host memory, which saves nothing.
    """

    def __init__(self, device: torch.device, max_inflight: int | None = None, min_bytes: int = 1 << 16) -> None:
        self._device = device
        self.max_inflight = max_inflight
        self._min_bytes = min_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._inflight: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._unused: list[_Loaded] = []
        self._is_in_use = False
        """Something was queued on our stream since the last `join`."""
        self._parameters: frozenset[int] | None = None
        self._last: weakref.ref[_Kept] | None = None
        self.host_bytes = 0
        """Page-locked memory in all, in use or not."""
        self.num_offloaded = 0
        """Tensors moved so far."""

    @contextlib.contextmanager
    def saving(self, parameters: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Move what is saved inside; `parameters`, and what shares their memory, stay."""
        if self._parameters is None:
            self._parameters = frozenset(parameter.untyped_storage().data_ptr() for parameter in parameters)
        self._last = None
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._join(0)

    def join(self) -> None:
        """After the backward pass: let the computing stream wait for what is still on its way, such as a tensor that was
        fetched ahead and never asked for. A capture must end so."""
        if self._stream is not None and self._is_in_use:  # a capture does not know a stream that it has not used
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._is_in_use = False
        self._unused.clear()

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Kept":
        plain, order = _in_order_of_memory(tensor.detach())
        if not self._is_worth_it(plain):
            return tensor
        kept = self._take(plain, order)
        kept.before, self._last = self._last, weakref.ref(kept)
        self._copy_out(plain, kept.host)
        self.num_offloaded += 1
        return kept

    def _unpack(self, kept: "torch.Tensor | _Kept") -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self._load(kept)
        before = kept.before() if kept.before is not None else None
        if before is not None and self._stream is not None and not before.was_used:
            self._load(before)
        assert kept.loaded is not None
        (tensor, event), kept.loaded, kept.was_used = kept.loaded, None, True
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return tensor.permute([kept.order.index(dim) for dim in range(len(kept.order))])

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        assert self._parameters is not None
        is_here = tensor.device.type == self._device.type and tensor.layout is torch.strided and tensor.is_contiguous()
        return (
            is_here
            and tensor.numel() * tensor.element_size() >= self._min_bytes
            and tensor.untyped_storage().data_ptr() not in self._parameters
        )

    # -------------------------------------------------------------------------------------------------------- memory

    def _take(self, tensor: torch.Tensor, order: list[int]) -> _Kept:
        size_bytes = tensor.numel() * tensor.element_size()
        free = self._free.setdefault(size_bytes, [])
        buffer = free.pop() if free else self._allocate(size_bytes)
        return _Kept(buffer.view(tensor.dtype).view(tensor.shape), buffer, order, free, self._unused)

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        is_cuda = self._stream is not None
        if is_cuda and torch.cuda.is_current_stream_capturing():
            raise OffloadError(
                "activation offload needs page-locked memory in the middle of a capture: let the same step run before, with "
                "--cuda-graph-warmup-steps 1 or more"
            )
        self.host_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_cuda)

    # -------------------------------------------------------------------------------------------------------- copies

    def _copy_out(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        if self._stream is None:
            host.copy_(tensor)
            return
        self._is_in_use = True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._inflight.append((_recorded(self._stream), tensor))
        if self.max_inflight is None:
            self._drop_finished()
        else:
            self._join(self.max_inflight)

    def _join(self, num_left: int) -> None:
        """Let the computing stream wait for the oldest copies, so that it may use their sources' memory again."""
        while len(self._inflight) > num_left:
            torch.cuda.current_stream(self._device).wait_event(self._inflight[0][0])
            self._inflight.popleft()

    def _drop_finished(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise OffloadError(
                "activation offload without a limit cannot be captured: give --fine-grained-offloading-max-inflight-offloads"
            )
        while self._inflight and self._inflight[0][0].query():  # type: ignore[no-untyped-call]
            self._inflight.popleft()

    def _load(self, kept: _Kept) -> None:
        """Begin the copy back, unless it was begun."""
        if kept.loaded is not None:
            return
        if self._stream is None:
            kept.loaded = (kept.host.clone(), None)
            return
        self._is_in_use = True
        tensor = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # who had this memory before may still use it
        with torch.cuda.stream(self._stream):
            tensor.copy_(kept.host, non_blocking=True)
        kept.loaded = (tensor, _recorded(self._stream))


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _in_order_of_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The tensor with its dimensions in the order in which they lie in memory, and that order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.permute(order), order
