"""Of a tensor of any kind the plain one that holds its numbers on this rank, which the host does not wait for."""

import importlib
from typing import Any, cast

import torch
import torch.distributed as dist

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_IN_MEMORY = torch.strided
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of real numbers in memory. Raises `TypeError` where this rank has none: no rank may wait for others here, as
    for the parts of a DTensor, for it does not know what they hand in."""
    if type(tensor) not in _PLAIN:
        tensor = _unwrapped(tensor)
    if tensor.dtype in _COMPLEX or tensor.is_meta or tensor.layout is not _IN_MEMORY:
        what = "complex" if tensor.is_complex() else "meta" if tensor.is_meta else str(tensor.layout)
        raise TypeError(f"it is a {what} tensor")
    return tensor


def _unwrapped(tensor: Any) -> torch.Tensor:
    kind, usual = type(tensor), cast(Any, torch.Tensor)
    if kind.__torch_dispatch__ is usual.__torch_dispatch__:
        same: torch.Tensor = tensor.as_subclass(torch.Tensor)
        return same
    if dist.is_available():
        if isinstance(tensor, importlib.import_module("torch.distributed.tensor").DTensor):
            return plain(_local(tensor))
        if isinstance(tensor, importlib.import_module("torch.distributed._functional_collectives").AsyncCollectiveTensor):
            return plain(tensor.wait())
    raise TypeError(f"it is a {kind.__name__}, no plain tensor")


def _local(tensor: Any) -> torch.Tensor:
    """What every rank has alike, as the norm of `clip_grad_norm_` of sharded parameters."""
    sizes = tensor.device_mesh.shape
    if not all(size == 1 or one.is_replicate() for size, one in zip(sizes, tensor.placements, strict=True)):
        raise TypeError("it is a DTensor in parts: hand in its full_tensor(), of all ranks")
    with torch.no_grad():  # else it is a step of autograd's
        local: torch.Tensor = tensor.to_local()
    return local
