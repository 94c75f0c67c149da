"""Finds the call in a step that makes the host wait for the device, or gives a shape that depends on data: no graph holds it.

Works by watching the operations that are dispatched, on any device, in forward and backward.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rsup.worker.cuda_graph.contract import Batches, ForwardBackward

_aten = torch.ops.aten
READS = frozenset(
    {
        _aten._local_scalar_dense,
        _aten.is_nonzero,
        _aten.equal,
        _aten.nonzero,
        _aten.masked_select,
        _aten._unique2,
        _aten.unique_dim,
        _aten.unique_consecutive,
        _aten.unique_dim_consecutive,
        _aten.bincount,
    }
)
"""`.item()` and `bool()` of a tensor, comparisons that answer on the host, and results whose length the data decides."""
COPIES = frozenset({_aten._to_copy, _aten.copy_})
INDEXED = frozenset({_aten.index, _aten.index_put, _aten.index_put_})

MakeError = Callable[[str], Exception]


def first_device(batches: Batches) -> torch.device:
    """Where the first tensor of the batches lies; the CPU without one."""
    for leaf in pytree.tree_leaves(list(batches)):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return torch.device("cpu")


def run_without_host_reads(
    forward_backward: ForwardBackward, batches: Batches, device: torch.device, make_error: MakeError
) -> Any:
    """What `forward_backward` returns; raises `make_error(place)` at the first read of a tensor on a device of that type."""
    with _Watch(device.type, make_error):
        return forward_backward(batches)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device_type: str, make_error: MakeError) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._make_error = make_error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._waits(func, args, kwargs):
            raise self._make_error(f"{func.overloadpacket} in {_place()}")
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        operation = func.overloadpacket
        if operation in READS:
            return any(self._is_ours(argument) for argument in args)
        if operation in INDEXED:
            return self._indexes_by_mask(operation, args)
        if operation is _aten.repeat_interleave:
            return self._is_ours(args[0]) and kwargs.get("output_size") is None
        if operation in COPIES and self._device_type != "cpu":
            return self._copies_to_wait_for(operation, args, kwargs)
        return False

    def _indexes_by_mask(self, operation: Any, args: Any) -> bool:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        value = None if operation is _aten.index else args[2]
        fills = value is not None and value.numel() == 1 and value.device.type == "cpu"  # torch makes a masked fill of it
        return any(self._is_ours(mask) for mask in masks) and not fills

    def _copies_to_wait_for(self, operation: Any, args: Any, kwargs: Any) -> bool:
        """Between the device and pageable memory, or without `non_blocking`."""
        if operation is _aten.copy_:
            to, source, flag = args[0].device, args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            host = args[0] if to.type == "cpu" else source
        else:
            source, flag = args[0], kwargs.get("non_blocking", False)
            to = torch.device(kwargs.get("device") or source.device)
            host = source
            if source.device.type != "cpu" and to.type == "cpu":
                return not (flag and kwargs.get("pin_memory"))
        if (source.device.type == "cpu") == (to.type == "cpu"):
            return False
        return not (flag and host.is_pinned())

    def _is_ours(self, argument: Any) -> bool:
        return isinstance(argument, torch.Tensor) and argument.device.type == self._device_type


def _place() -> str:
    """File and line of the innermost frame that is neither torch's nor ours; autograd's threads have none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "torch" and name != __name__:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"
