"""Copies of tensors in host memory, for a thread that writes them while training goes on.

The time of the copy is all that a save costs the training thread. Buffers are kept from save to save: fresh memory costs about
three times the copy (page faults), and page-locking it costs more than that.
"""

from collections.abc import Mapping

import torch


class Staging:
    """Host buffers by name. What `copy` returned is overwritten by the next `copy`: be done with it before."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._for_gpu: dict[str, bool] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of `tensors` on the CPU, as they are now. From GPUs they run side by side, and are waited for once."""
        staged, devices = {}, set()
        for name, tensor in tensors.items():
            source = tensor.detach()
            if type(source) is not torch.Tensor or source.layout is not torch.strided:
                staged[name] = source.to("cpu", copy=True)
                continue
            buffer = self._buffer(name, source)
            buffer.copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
            staged[name] = buffer
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        for name in self._buffers.keys() - staged.keys():
            del self._buffers[name]
        return staged

    def release(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(name)
        if kept is None or kept.shape != source.shape or kept.dtype != source.dtype or self._for_gpu[name] != source.is_cuda:
            kept = self._buffers[name] = _empty(source)
            self._for_gpu[name] = source.is_cuda
        return kept


def _empty(source: torch.Tensor) -> torch.Tensor:
    if source.is_cuda:
        try:
            return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        except RuntimeError:  # no more memory may be locked: slower, and works
            pass
    return torch.empty(source.shape, dtype=source.dtype)
