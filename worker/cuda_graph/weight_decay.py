"""A weight decay that changes during training, with the optimizer in a graph.

Fused AdamW takes its decay as a Python float, which a graph would keep for ever. So the optimizer's own decay is set to 0, and
parameters are multiplied by `1 - lr * decay` from device tensors before its step: exactly by 1 where the gate is closed, which
leaves every bit. The factor is float32, as in torch's AdamW without `fused`; fused AdamW computes it in float64, so results
differ from it in the last digits. It costs one pass over the decayed parameters.
"""

from typing import Any

import torch

from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.cuda_graph.optimizer_gate import Gateable


class ScheduledWeightDecay:
    """Takes over the decay of all groups that have one; their values stay until `set` is called.

    Hand it to `OptimizerGraph`, or call `apply` before the optimizer's step. `gate`: [], float32, 0 or 1, as of `DeviceChecks`;
    None: always open. Raises `GraphError` for Adam's L2 penalty, which is no decay of weights.
    """

    def __init__(self, optimizer: Gateable, gate: torch.Tensor | None = None) -> None:
        self._optimizer = optimizer
        self._gate = gate
        self._decays: dict[int, torch.Tensor] = {}
        """By number of the group: [], float32, on its device."""
        for number, group in enumerate(optimizer.param_groups):
            if group.get("weight_decay"):
                if group.get("decoupled_weight_decay") is False:
                    text = f"the weight_decay of {type(optimizer).__name__} is an L2 penalty inside the gradient"
                    raise GraphError(f"{text}: use AdamW, whose decay can be scheduled in a graph")
                self._decays[number] = torch.zeros((), device=group["params"][0].device)
        if not self._decays:
            raise GraphError("no parameter group has a weight_decay to schedule: give the optimizer the first value of it")
        self._one = torch.ones((), device=next(iter(self._decays.values())).device)
        self._take_over(optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_load_state_dict_post_hook(self._take_over)

    def set(self, weight_decay: float) -> None:
        """The decay from the next step on, in all groups that have one. On the step's stream, without waiting. A checkpoint's
        optimizer state does not hold it."""
        for decay in self._decays.values():
            decay.fill_(weight_decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Decay the parameters that have gradients. In the step, before the optimizer's."""
        for number, decay in self._decays.items():
            group = self._optimizer.param_groups[number]
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            factor = 1 - group["lr"] * decay
            if self._gate is not None:
                factor = torch.where(self._gate == 0, factor, self._one)
            if parameters:
                torch._foreach_mul_(parameters, factor)  # pyright: ignore[reportPrivateImportUsage]

    def _take_over(self, optimizer: Any) -> None:
        """Set the optimizer's own decay to 0, also the one that a loaded state brings along."""
        for number, decay in self._decays.items():
            group = optimizer.param_groups[number]
            if group["weight_decay"]:
                decay.fill_(group["weight_decay"])
                group["weight_decay"] = 0.0
