"""Batches of any nesting, copied by value.

Known here: tensors, NumPy arrays, dicts, lists, tuples, named tuples, dataclasses, `UserDict` (Hugging Face's batches) and
their subclasses; what else a batch holds is copied by `copy.deepcopy`. What is one object in a batch is one object in its
copy, and tensors that share memory share it in the copy too: a change of one in place shows in the other, as it did in the
original.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch

from rsup.worker.rerun.contract import RerunError

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_ALIGNMENT = 16


def copy_batch(batch: Any) -> Any:
    """A copy that shares nothing with `batch` that can be changed. Raises `RerunError` for what cannot be copied."""
    if isinstance(batch, torch.Tensor):  # by far the most frequent one
        return _clone(batch)
    copies: dict[int, Any] = {}
    copy_shared_memory(batch, copies)
    return _copy(batch, copies)


def is_same_batch(a: Any, b: Any) -> bool:
    """Whether two batches have the same tensors, bit for bit (without any: whether they are equal)."""
    tensors, others = list(_tensors(a, set())), list(_tensors(b, set()))
    if not tensors and not others:
        return bool(a == b)
    return len(tensors) == len(others) and all(map(_is_same_tensor, tensors, others))


def _is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b.to(a.device)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    known = copies.get(id(value))
    if known is not None:
        return known
    if isinstance(value, torch.Tensor):
        made: Any = _clone(value)
    elif isinstance(value, dict | list | UserDict) or is_dataclass(value):
        return _copy_container(value, copies)
    elif isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make")):
        items = [_copy(item, copies) for item in value]
        made = tuple(items) if type(value) is tuple else value._make(items)  # type: ignore[attr-defined]
    else:
        made = _copy_unknown(value, copies)
    copies[id(value)] = made
    return made


def _copy_container(value: Any, copies: dict[int, Any]) -> Any:
    """Entered into `copies` before its content, which may refer to it."""
    try:
        made = copy.copy(value)
    except Exception as error:  # a constructor of the user's
        raise _cannot_copy(value, error) from None
    copies[id(value)] = made
    if isinstance(value, list):
        made[:] = [_copy(item, copies) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():
            made[key] = _copy(item, copies)
    for name, item in attributes_of(value).items():
        object.__setattr__(made, name, _copy(item, copies))
    return made


def _copy_unknown(value: Any, copies: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, copies)
    except Exception as error:  # deepcopy runs the user's code
        raise _cannot_copy(value, error) from None


def _cannot_copy(value: Any, error: Exception) -> RerunError:
    why = str(error).splitlines()[0] if str(error) else repr(error)
    return RerunError(
        f"a batch holds a {kind_of(value)}, which cannot be copied for a replay ({why}): let the loader deliver tensors, or "
        f"containers of them"
    )


def kind_of(value: Any) -> str:
    """The name of its class, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes beside the items of a container."""
    found = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        found |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found


def is_dataclass(value: Any) -> bool:
    """Whether `value` is an instance of one."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().clone()
    return made.requires_grad_() if tensor.requires_grad else made


# ------------------------------------------------------------------------------------------------------- shared memory


def copy_shared_memory(batch: Any, copies: dict[int, Any], device: torch.device | None = None) -> None:
    """Copy tensors of `batch` whose memory overlaps as views of one copy, on `device`; enter them into `copies` by `id`."""
    by_storage: dict[tuple[torch.device, int], dict[int, torch.Tensor]] = {}
    for tensor in _tensors(batch, set()):
        if tensor.layout == torch.strided and tensor.numel() and not (tensor.is_conj() or tensor.is_neg()):
            storage = tensor.untyped_storage()
            by_storage.setdefault((tensor.device, storage.data_ptr()), {})[id(tensor)] = tensor
    for sharing in by_storage.values():
        if len(sharing) > 1:
            for group in _overlapping(list(sharing.values())):
                _copy_views(group, copies, device or group[0].device)


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter):  # memory of a subclass is its own affair
            yield value
        return
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen)
    if isinstance(value, dict | list | UserDict) or is_dataclass(value):
        for item in attributes_of(value).values():
            yield from _tensors(item, seen)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, of a tensor in its storage."""
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _overlapping(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of two or more that overlap, one storage: parts of one large memory map are no reason to copy it whole."""
    group: list[torch.Tensor] = []
    group_end = 0
    for tensor in sorted(tensors, key=_extent):
        start, end = _extent(tensor)
        if group and start >= group_end:
            if len(group) > 1:
                yield group
            group = []
        group_end = max(end, group_end) if group else end
        group.append(tensor)
    if len(group) > 1:
        yield group


def _copy_views(group: list[torch.Tensor], copies: dict[int, Any], device: torch.device) -> None:
    start = min(_extent(tensor)[0] for tensor in group) // _ALIGNMENT * _ALIGNMENT
    end = max(_extent(tensor)[1] for tensor in group)
    dtype = torch.uint8 if (end - start) % 8 else torch.int64  # fewer elements are copied faster
    first, size = start // dtype.itemsize, (end - start) // dtype.itemsize
    whole = torch.empty(0, dtype=dtype, device=group[0].device)
    whole.set_(group[0].untyped_storage(), first, (size,))  # type: ignore[call-overload]
    storage = whole.to(device, copy=True).untyped_storage()
    for tensor in group:
        offset = int(tensor.storage_offset()) - start // tensor.element_size()
        made = torch.empty(0, dtype=tensor.dtype, device=device)
        made.set_(storage, offset, tensor.shape, tensor.stride())
        copies[id(tensor)] = made.requires_grad_() if tensor.requires_grad else made
