"""Values nested in dicts, lists, tuples, named tuples and dataclasses: inputs and results of a step, walked leaf by leaf.

A leaf has a dotted path, such as `images.0.pixels`. Subclasses of `dict` and `list` and `UserDict` (Hugging Face's batches)
keep their class; an object of any other class is a leaf.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

Visit = Callable[[str, Any], Any]


def map_leaves(value: Any, visit: Visit, path: str = "") -> Any:
    """The same nesting with `visit(path, leaf)` in the place of each leaf; the original stays as it is."""
    if isinstance(value, torch.Tensor):
        return visit(path, value)
    if isinstance(value, dict | UserDict):
        made: Any = {} if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            made[key] = map_leaves(item, visit, _join(path, key))
        return made
    if isinstance(value, list):
        items = [map_leaves(item, visit, _join(path, index)) for index, item in enumerate(value)]
        if type(value) is list:
            return items
        made = copy.copy(value)
        made[:] = items
        return made
    if _is_known_tuple(value):
        items = [map_leaves(item, visit, _join(path, name)) for name, item in _items(value)]
        return tuple(items) if type(value) is tuple else value._make(items)
    if _is_dataclass(value):
        made = copy.copy(value)
        for name, item in _fields(value):
            object.__setattr__(made, name, map_leaves(item, visit, _join(path, name)))
        return made
    return visit(path, value)


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """(path, value, whether it is a leaf) of each container and each leaf, containers before their content."""
    if isinstance(value, torch.Tensor):
        yield path, value, True
        return
    if isinstance(value, dict | UserDict):
        content = list(value.items())
    elif isinstance(value, list) or _is_known_tuple(value):
        content = _items(value)
    elif _is_dataclass(value):
        content = list(_fields(value))
    else:
        yield path, value, True
        return
    yield path, value, False
    for key, item in content:
        yield from walk(item, _join(path, key))


def detached(value: Any) -> Any:
    """The same nesting with tensors that share memory with the original's and belong to no autograd graph."""
    return map_leaves(value, lambda _, leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def cloned(value: Any) -> Any:
    """A deep copy: tensors are copied on the current stream, detached; what cannot be copied is kept as it is."""
    return map_leaves(value, lambda _, leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else _copied(leaf))


def _copied(leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception:  # a lock, a generator: the user's code decides
        return leaf


def _is_known_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make"))


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            yield field.name, getattr(value, field.name)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
