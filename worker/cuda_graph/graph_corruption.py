"""Injected numeric faults where a pass is replayed as a graph: the damage is part of it, and a flag says whether it strikes.

Before each pass the host decides, for each fault and micro-batch, by the same rule as without a graph, and writes the flags on
the device; in the graph a damaged number is computed beside the healthy one, and the flag chooses. Without an armed fault
nothing is added to the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rsup.worker.corruption import Marks, Strikes, check_element, damage_parameters, damaged_parameter
from rsup.worker.numeric_faults import NumericFault


class GraphCorruption(Strikes):
    """The numeric faults that may strike on one rank. `before_pass` on the host, the other calls while the graph is captured or
    its function runs; all on the training thread (hooks: on autograd's), on the stream of the step."""

    def __init__(
        self,
        faults: Sequence[object],
        rank: int,
        device: str,
        marks: Marks,
        module: torch.nn.Module,
        num_microbatches: int,
        torch_device: torch.device,
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(faults, rank, device, marks, say)
        self._parameters = dict(module.named_parameters())
        in_graph = [*self.at("loss"), *self.at("grad")]
        self._flags = torch.zeros(len(in_graph), num_microbatches, dtype=torch.bool, device=torch_device)
        self._are_set = [[False] * num_microbatches for _ in in_graph]
        self._rows = {fault: row for row, fault in enumerate(in_graph)}
        self._micro_batch = 0
        for fault in self.at("grad"):
            parameter = damaged_parameter(fault, self._parameters)
            check_element(fault, parameter.numel())
            parameter.register_hook(self._grad_hook(fault))  # type: ignore[no-untyped-call]

    def before_pass(self, iteration: int, batches: Sequence[Any]) -> None:
        """A pass of `iteration` is about to be launched on these micro-batches, as they were drawn: raise the flags of what
        strikes in it."""
        self.begin_pass(iteration)
        damage_parameters(self, self._parameters)
        for number, batch in enumerate(batches):
            self.takes(batch)
            for fault, row in self._rows.items():
                self._set(row, number, self.strikes(fault))

    def _set(self, row: int, micro_batch: int, is_on: bool) -> None:
        if self._are_set[row][micro_batch] != is_on:  # seldom; a kernel with a constant, so nothing waits
            self._are_set[row][micro_batch] = is_on
            self._flags[row, micro_batch].fill_(is_on)

    # -------------------------------------------------------------------------------------------------- in the graph

    def computes(self, micro_batch: int) -> None:
        """What follows, forward and backward, is of that micro-batch (from 0)."""
        self._micro_batch = micro_batch

    def damage_loss(self, loss: torch.Tensor) -> None:
        """`loss`: [], float32, of the micro-batch; its value changes in place where a fault strikes, its gradients do not."""
        for fault in self.at("loss"):
            loss.data.copy_(_chosen(loss.data, fault, self._flag(fault)))

    def _grad_hook(self, fault: NumericFault) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            return _chosen(grad, fault, self._flag(fault))

        return hook

    def _flag(self, fault: NumericFault) -> torch.Tensor:
        return self._flags[self._rows[fault], self._micro_batch]


def _chosen(tensor: torch.Tensor, fault: NumericFault, flag: torch.Tensor) -> torch.Tensor:
    """A copy of a float32 tensor, with one number changed, as the fault's kind says, where `flag` ([], bool) is set."""
    flat = tensor.contiguous().view(-1)
    if fault.element is None:
        element = flat.abs().nan_to_num(0.0).argmax().view(1)
    else:
        element = torch.full((1,), fault.element, dtype=torch.int64, device=flat.device)
    healthy = flat.gather(0, element)
    return flat.scatter(0, element, torch.where(flag, _damaged(healthy, fault), healthy)).view(tensor.shape)


def _damaged(number: torch.Tensor, fault: NumericFault) -> torch.Tensor:
    if fault.kind == "bitflip":
        mask = 1 << fault.bit if fault.bit < 31 else -(1 << 31)
        return number.view(torch.int32).bitwise_xor(mask).view(torch.float32)
    if fault.kind == "scale":
        return number * fault.factor
    return torch.full_like(number, float(fault.kind))
