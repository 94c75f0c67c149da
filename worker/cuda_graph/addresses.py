"""Where a graph reads parameters and writes gradients: it goes on doing so there, whatever became of the memory."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

Parameters = Iterable[nn.Parameter | tuple[str, nn.Parameter]]


class _Place(NamedTuple):
    name: str
    parameter: nn.Parameter
    address: int
    grad_address: int


def named(parameters: Parameters) -> list[tuple[str, nn.Parameter]]:
    """Parameters with their names: those of `named_parameters()`, or numbers and shapes."""
    found: list[tuple[str, nn.Parameter]] = []
    for index, item in enumerate(parameters):
        if isinstance(item, nn.Parameter):
            found.append((f"parameter {index} of shape {list(item.shape)}", item))
        else:
            found.append(item)
    return found


class Addresses:
    """The addresses of parameters and gradients as they are when this is made."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._plain: list[_Place] = []
        self._sharded: list[_Place] = []
        for name, parameter in parameters:
            grad_address = 0 if parameter.grad is None else _address(parameter.grad)
            places = self._sharded if hasattr(parameter, "to_local") else self._plain
            places.append(_Place(name, parameter, _address(parameter), grad_address))

    def moved(self) -> str:
        """What is not where it was, for a message; empty when all is in place. Half a microsecond for each parameter."""
        for name, parameter, address, grad_address in self._plain:
            gradient = parameter.grad
            if parameter.data_ptr() != address or (grad_address and (gradient is None or gradient.data_ptr() != grad_address)):
                return _what_moved(name, parameter, address)
        for name, parameter, address, grad_address in self._sharded:
            gradient = parameter.grad
            if _address(parameter) != address or (grad_address and (gradient is None or _address(gradient) != grad_address)):
                return _what_moved(name, parameter, address)
        return ""


def _what_moved(name: str, parameter: nn.Parameter, address: int) -> str:
    if _address(parameter) != address:
        return f"{name} lies elsewhere in memory"
    return f"the gradient of {name} {'is None' if parameter.grad is None else 'lies elsewhere in memory'}"


class Gradients:
    """Which tensor is whose gradient: a capture that fails has put ones in their place that nothing was written to."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._kept = [(parameter, parameter.grad) for _, parameter in parameters]

    def restore(self) -> None:
        """Give each parameter the gradient that it had."""
        for parameter, gradient in self._kept:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _address(tensor: torch.Tensor) -> int:
    to_local = getattr(tensor, "to_local", None)  # a DTensor is no memory, its shard is
    return int((tensor if to_local is None else to_local()).data_ptr())
