"""Which optimizers can leave everything as it is when a device scalar says so, and what they need before a graph holds them."""

from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from rsup.worker.cuda_graph.contract import GraphError


@runtime_checkable
class GatedOptimizer(Protocol):
    """An optimizer with a gate of its own. The learning rate in its `param_groups` has to be a device tensor."""

    param_groups: list[dict[str, Any]]

    def gated_step(self, gate: torch.Tensor) -> None:
        """One step; where `gate` ([], float32, 0 or 1, on the device) is 1, parameters and all state must stay, to the bit,
        whatever the gradients hold. Without a host read: it is captured."""
        ...


Gateable = torch.optim.Optimizer | GatedOptimizer


def prepare_optimizer_for_graph(optimizer: Gateable) -> None:
    """Make a fused Adam or AdamW ready to be captured, with the values that it has: step counters on the device, learning rates
    as device tensors ([], one for each group) that are filled, never replaced. May be repeated; `OptimizerGraph` does
    so after a `load_state_dict`. Raises `GraphError` for an optimizer that has no gate.

    On a GPU fused Adam reads a learning rate in a tensor as float32, one that is a Python float as float64: compare with an
    eager run whose rate is a tensor too. On a CPU both are float64, and the numbers the same.
    """
    require_gate(optimizer)
    if has_own_gate(optimizer):
        return
    assert isinstance(optimizer, torch.optim.Optimizer)
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    rates: set[int] = set()
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = _own_rate(group["lr"], device, rates)
        rates.add(id(group["lr"]))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)
    setattr(optimizer, "_warned_capturable_if_run_uncaptured", True)  # noqa: B010 - the warm-up is meant to be eager


def require_gate(optimizer: Gateable) -> None:
    """Raise `GraphError` for an optimizer whose update nothing on the device can stop."""
    if has_own_gate(optimizer):
        return
    name = type(optimizer).__name__
    remedy = "use torch.optim.Adam or AdamW with fused=True, or give the optimizer a method gated_step(gate) (GatedOptimizer)"
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise GraphError(f"{name} has no gate, so a bad step would reach the parameters: {remedy}")
    if not all(group.get("fused") for group in optimizer.param_groups):
        raise GraphError(f"{name} is not fused, and has a gate only with fused=True: {remedy}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise GraphError(f"{name} is differentiable, which cannot be captured: make it with differentiable=False")


def refuse_loss_scale(scaler: Any) -> None:
    """Raise `GraphError` for a dynamic loss scale: it replaces its scale, and skips steps on the host."""
    if scaler is not None and scaler.is_enabled():
        text = "a dynamic loss scale cannot be captured: it is replaced after each update, and the graph would keep the old one"
        raise GraphError(f"{text}; train in bf16 or fp32, or multiply the loss by a fixed scale")


def has_own_gate(optimizer: Gateable) -> TypeGuard[GatedOptimizer]:
    """Whether it is a `GatedOptimizer`."""
    return isinstance(optimizer, GatedOptimizer)


def _own_rate(rate: float | torch.Tensor, device: torch.device, taken: set[int]) -> torch.Tensor:
    """`rate` itself where it fits and is not another group's as well."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    if isinstance(rate, torch.Tensor) and rate.dtype == dtype and rate.device == device and id(rate) not in taken:
        return rate
    return torch.tensor(float(rate), dtype=dtype, device=device)
