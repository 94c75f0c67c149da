"""Batches as plain values and CPU tensors, for a checkpoint that `torch.load(weights_only=True)` reads."""

import dataclasses
import sys
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch

from rsup.worker.rerun.batches import attributes_of, copy_shared_memory, is_dataclass, kind_of
from rsup.worker.rerun.contract import RerunError

_CPU = torch.device("cpu")


def pack_batch(batch: Any) -> Any:
    """`batch` as dicts, lists, plain values and copies of tensors; those that share memory share it in the checkpoint too.

    Raises `RerunError` for what has no such form.
    """
    copies: dict[int, torch.Tensor] = {}
    copy_shared_memory(batch, copies, _CPU)
    return _pack(batch, copies)


def unpack_batch(packed: Any, device: torch.device | None = None) -> Any:
    """What `pack_batch` was given, anew. Tensors that were on a GPU come to `device`, or to the current one.

    Classes are taken from modules that are imported; nothing is imported, and no constructor is called. Raises `RerunError`
    where one is missing. A `defaultdict` comes back without its factory.
    """
    copies: dict[int, torch.Tensor] = {}
    by_place: dict[torch.device, list[torch.Tensor]] = {}
    for entry in _packed_tensors(packed):
        by_place.setdefault(_place(entry, device), []).append(entry["tensor"])
    for place, tensors in by_place.items():
        copy_shared_memory(tensors, copies, place)
    try:
        return _unpack(packed, device, copies)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RerunError(f"a batch in the checkpoint is unreadable ({error!r}): it cannot be replayed") from None


def _pack(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, copies)
    if type(value) is list:
        return [_pack(item, copies) for item in value]
    if type(value) in (tuple, torch.Size):
        return {"kind": "tuple", "items": [_pack(item, copies) for item in value]}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return {"kind": "named tuple", "class": _class_name(value), "items": [_pack(item, copies) for item in value]}
    if _is_array(value):
        return {"kind": "array", "tensor": _as_tensor(value)}
    if isinstance(value, dict | list | UserDict) or is_dataclass(value):
        return _pack_container(value, copies)
    raise RerunError(
        f"a batch holds a {kind_of(value)}, which cannot be kept in a checkpoint: use tensors, arrays, numbers and strings in "
        f"dicts, lists, tuples or dataclasses"
    )


def _pack_tensor(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> Any:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise RerunError(f"a batch holds a {kind_of(tensor)}, which cannot be kept in a checkpoint: use plain tensors")
    held = copies.get(id(tensor))
    if held is None:
        held = copies[id(tensor)] = tensor.detach().to(_CPU, copy=True)
    return {"kind": "tensor", "tensor": held, "device": tensor.device.type, "requires_grad": tensor.requires_grad}


def _pack_container(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    packed: dict[str, Any] = {"kind": "container", "class": _class_name(value)}
    if isinstance(value, list):
        packed["items"] = [_pack(item, copies) for item in value]
    elif isinstance(value, dict):
        packed["pairs"] = [[_pack(key, copies), _pack(item, copies)] for key, item in value.items()]
    packed["attributes"] = {name: _pack(item, copies) for name, item in attributes_of(value).items()}
    return packed


def _packed_tensors(packed: Any) -> Iterator[dict[str, Any]]:
    if isinstance(packed, dict) and packed.get("kind") == "tensor" and isinstance(packed.get("tensor"), torch.Tensor):
        yield packed
    elif isinstance(packed, dict | list):
        for item in packed.values() if isinstance(packed, dict) else packed:
            yield from _packed_tensors(item)


def _place(entry: dict[str, Any], device: torch.device | None) -> torch.device:
    """Where a tensor comes to. A checkpoint of a GPU's data that is read where there is none stays on the CPU."""
    kind = str(entry.get("device"))
    if device is not None and device.type == kind:
        return device
    return _CPU if kind == "cuda" and not torch.cuda.is_available() else torch.device(kind)


def _unpack(packed: Any, device: torch.device | None, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(packed, list):
        return [_unpack(item, device, copies) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed["kind"]
    if kind == "tensor":
        return _unpack_tensor(packed, device, copies)
    if kind == "array":
        return packed["tensor"].clone().numpy()
    if kind == "tuple":
        return tuple(_unpack(packed["items"], device, copies))
    if kind == "named tuple":
        return _class_of(packed)._make(_unpack(packed["items"], device, copies))
    if kind == "container":
        return _unpack_container(packed, device, copies)
    raise ValueError(f"kind {kind!r}")


def _unpack_tensor(packed: dict[str, Any], device: torch.device | None, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    kept: torch.Tensor = packed["tensor"]
    made = copies.get(id(kept))
    if made is None:
        made = copies[id(kept)] = kept.detach().to(_place(packed, device), copy=True)
    return made.requires_grad_() if packed["requires_grad"] else made


def _unpack_container(packed: dict[str, Any], device: torch.device | None, copies: dict[int, torch.Tensor]) -> Any:
    kind = _class_of(packed)
    is_container = issubclass(kind, dict | list | UserDict) or dataclasses.is_dataclass(kind)
    if not is_container:
        raise RerunError(f"a batch in the checkpoint names the class {packed['class']}, which is no container")
    make: Any = kind.__new__
    made: Any = make(kind)
    for name, item in packed["attributes"].items():
        object.__setattr__(made, name, _unpack(item, device, copies))
    if "items" in packed:
        list.extend(made, _unpack(packed["items"], device, copies))
    for key, item in packed.get("pairs", []):
        made[_unpack(key, device, copies)] = _unpack(item, device, copies)
    return made


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _class_of(packed: dict[str, Any]) -> Any:
    module_name, _, qualified_name = packed["class"].partition(":")
    found: Any = sys.modules.get(module_name)
    for name in qualified_name.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, type):
        raise RerunError(f"a batch in the checkpoint needs the class {packed['class']}: import its module before loading")
    return found


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _as_tensor(array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy())
    except TypeError as error:
        raise RerunError(f"a batch holds an array of {array.dtype}, which cannot be kept in a checkpoint ({error})") from None
