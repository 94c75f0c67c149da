"""An optimizer's state moved to host memory and back, to leave a GPU's memory to something else (evaluation, generation).

What Megatron-LM's optimizers do for reinforcement learning (`offload_to_cpu`, `restore_from_cpu`), for any torch optimizer:
every state tensor goes back to the device that it was on, tensors that share memory share it again, step counters and states
that were on the CPU stay where they are, and the page-locked buffers are used again.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rsup.worker.cuda_graph import lifecycle

Hook = Callable[[], object]


@dataclass(frozen=True)
class _Moved:
    """One state tensor: where it is kept in the optimizer, and how it lay on its device."""

    holder: Any
    key: Any
    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


class OptimizerOffload:
    """Moves the state of one optimizer; call it on the training thread, between steps.

    `invalidate`: called, in order, before anything moves, in both directions: a CUDA graph that was captured with the
    optimizer's state reads addresses that are no longer its own, and has to be thrown away. Unless given, all registered graphs
    are (`cuda_graph.lifecycle`). More may be added to the list.
    `pin`: page-lock the buffers. `is_away`: which state tensors move; those on a GPU, unless given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        invalidate: list[Hook] | None = None,
        pin: bool = True,
        is_away: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda,
    ) -> None:
        self.invalidate = invalidate if invalidate is not None else [_destroy_graphs]
        self._optimizer = optimizer
        self._pin = pin
        self._is_away = is_away
        self._moved: list[_Moved] = []
        self._sources: dict[int, tuple[torch.device, torch.Tensor]] = {}
        """By number of a storage: its device, and its bytes in host memory."""
        self._buffers: dict[int, torch.Tensor] = {}

    @property
    def is_offloaded(self) -> bool:
        """Whether the state is in host memory."""
        return bool(self._moved)

    def offload_to_cpu(self) -> int:
        """Move what is on GPUs to the CPU and free its memory there; return the bytes moved. Does nothing where it has been
        done.

        While it is away the optimizer's state holds CPU tensors: a step needs `restore_from_cpu` first.
        """
        if self.is_offloaded:
            return 0
        found = [entry for entry in _state_tensors(self._optimizer) if self._is_away(entry[2])]
        if not found:
            return 0
        self._call_hooks()
        numbers: dict[tuple[torch.device, int], int] = {}
        moved_bytes = 0
        for _, _, tensor in found:
            storage = tensor.untyped_storage()
            name = (tensor.device, storage.data_ptr())
            if name not in numbers:
                number = numbers[name] = len(numbers)
                self._sources[number] = (tensor.device, self._copy_out(number, storage, tensor.device))
                moved_bytes += storage.nbytes()
        _wait({device for device, _ in self._sources.values()})
        for holder, key, tensor in found:
            number = numbers[tensor.device, tensor.untyped_storage().data_ptr()]
            place = _Moved(holder, key, number, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
            self._moved.append(place)
            holder[key] = _view(place, self._sources[number][1])
        return moved_bytes

    def restore_from_cpu(self) -> int:
        """Bring the state back to where it was; return the bytes moved. Does nothing where it was not moved."""
        if not self.is_offloaded:
            return 0
        self._call_hooks()
        back: dict[int, torch.Tensor] = {}
        for number, (device, kept) in self._sources.items():
            back[number] = kept.to(device, non_blocking=True, copy=True)
        _wait({device for device, _ in self._sources.values()})
        for place in self._moved:
            place.holder[place.key] = _view(place, back[place.storage])
        moved_bytes = sum(kept.numel() for _, kept in self._sources.values())
        self._moved.clear()
        self._sources.clear()
        return moved_bytes

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """The state is in host memory for what is inside."""
        self.offload_to_cpu()
        try:
            yield
        finally:
            self.restore_from_cpu()

    def _call_hooks(self) -> None:
        for hook in self.invalidate:
            hook()

    def _copy_out(self, number: int, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        size_bytes = storage.nbytes()
        buffer = self._buffers.get(number)
        if buffer is None or buffer.numel() != size_bytes:
            buffer = self._buffers[number] = _host_buffer(size_bytes, self._pin and device.type == "cuda")
        whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size_bytes,), (1,))
        return buffer.copy_(whole, non_blocking=True)


def _destroy_graphs() -> None:
    lifecycle.let_go_of_graphs("the optimizer's state cannot be moved")


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Every tensor of the state with where it is kept: in dicts and lists at any depth. Not parameters, nor step counters."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    pending: list[Any] = list(optimizer.state.values())
    while pending:
        holder = pending.pop()
        items = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, value in items:
            if isinstance(value, torch.Tensor):
                if id(value) not in parameters and not (key == "step" and value.numel() == 1):
                    yield holder, key, value
            elif isinstance(value, dict | list):
                pending.append(value)


def _view(place: _Moved, whole: torch.Tensor) -> torch.Tensor:
    """The tensor as it lay in its storage, of which `whole` is a copy: [bytes], uint8."""
    made = torch.empty(0, dtype=place.dtype, device=whole.device)
    return made.set_(whole.untyped_storage(), place.offset, place.shape, place.stride)


def _host_buffer(size_bytes: int, pin: bool) -> torch.Tensor:
    if pin:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # no more memory may be locked: slower, and works
            pass
    return torch.empty(size_bytes, dtype=torch.uint8)


def _wait(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
