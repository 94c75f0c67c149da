"""The numbers that checks look at: taken without waiting for the device, read together, and compared by a total rule.

Two values count as the same only when that is proven: whatever cannot be compared is a mismatch.
"""

import math
from collections.abc import Sequence

import torch

from rsup.worker.rerun.contract import Compare, RerunError
from rsup.worker.rerun.difference import FLOOR, difference

__all__ = ["FLOOR", "as_value", "difference", "is_same", "read_values"]


def is_same(initial: float, again: float, tolerance: float, compare: Compare | None = None) -> bool:
    """Whether a replay's value is the initial one, within `tolerance`: a mismatch unless a match is proven.

    A `compare` of the user's that raises, or answers with a NaN, a truth value or no number, proves nothing.
    """
    if compare is None:
        return difference(initial, again) <= tolerance
    try:
        answer = compare(initial, again)
        if isinstance(answer, bool):  # True may mean "equal" as well as "1 apart"
            return False
        return abs(float(answer)) <= tolerance
    except Exception:  # the user's code may raise anything; inside a replay it must not end one rank alone
        return False


def as_value(result: object) -> torch.Tensor | float:
    """A copy of a check's result that nobody changes later: a float, or, on an accelerator, a tensor `[]` there.

    Does not wait for the device. `result`: a Python float, or a floating-point tensor of one element; anything else raises
    `RerunError`.
    """
    if isinstance(result, float):
        return float(result)
    if not isinstance(result, torch.Tensor):
        raise RerunError(
            f"a result to validate must be a float or a floating-point tensor of one element, not {_kind(result)}: "
            f"hand in float(result) if that is what it means"
        )
    if hasattr(result, "to_local"):
        raise RerunError(
            "a result to validate is a DTensor: hand in result.to_local() to check this rank's own number, or "
            "result.full_tensor() for the reduced one, which cannot name a rank"
        )
    if not result.is_floating_point():
        raise RerunError(
            f"a result to validate is a tensor of {result.dtype}: hand in result.float() if its rounding does not matter"
        )
    if result.numel() != 1:
        raise RerunError(
            f"a result to validate has the shape {tuple(result.shape)}: reduce it to one number, as with result.norm()"
        )
    if result.layout != torch.strided or result.device.type == "meta":
        raise RerunError(f"a result to validate has no plain value (layout {result.layout}, device {result.device})")
    if result.is_cpu:  # nobody has to wait for it
        return float(result.item())
    return result.detach().reshape(()).clone()


def read_values(values: Sequence[torch.Tensor | float]) -> list[float]:
    """All of `values` as Python floats, in order, with one copy to the host for each device that holds some."""
    numbers = [value if isinstance(value, float) else math.nan for value in values]
    if not any(isinstance(value, torch.Tensor) for value in values):
        return numbers
    groups: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    tensors = {place: value for place, value in enumerate(values) if isinstance(value, torch.Tensor)}
    for place, tensor in tensors.items():
        groups.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(place)
    for by_dtype in groups.values():
        wide = [torch.stack([tensors[place] for place in places]).double() for places in by_dtype.values()]
        order = [place for places in by_dtype.values() for place in places]
        for place, number in zip(order, torch.cat(wide).tolist(), strict=True):
            numbers[place] = number
    return numbers


def _kind(result: object) -> str:
    return "None" if result is None else f"{type(result).__module__}.{type(result).__qualname__}".removeprefix("builtins.")
