"""A small training for the tests of the graph of a step: what it computes is known from running it as it is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rsup.worker.cuda_graph.contract import Batches
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph

CPU = torch.device("cpu")


class Trained:
    """A small model with dropout, its gradients in place, and a schedule over its micro-batches that counts its executions."""

    def __init__(self, num_chunks: int = 1) -> None:
        torch.manual_seed(0)
        self.chunks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)) for _ in range(num_chunks))
        for parameter in self.chunks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.executions = 0
        torch.manual_seed(1)

    def step(self, batches: Batches) -> Any:
        """Forward of all micro-batches through all chunks, each chunk adding its own input; backward of each."""
        self.executions += 1
        self.chunks.zero_grad(set_to_none=False)
        losses = []
        for micros in zip(*batches, strict=True):
            hidden = torch.zeros(2, 3)
            for chunk, batch in zip(self.chunks, micros, strict=True):
                hidden = chunk(hidden + batch["x"]) * batch["scale"]
            loss = hidden.square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss)
        return {"losses": losses, "calls": self.executions}

    def combined(self, batches: Batches) -> Any:
        """The forward of each micro-batch before the backward of the one before it."""
        self.executions += 1
        self.chunks.zero_grad(set_to_none=False)
        losses: list[torch.Tensor] = []
        for batch in batches[0]:
            losses.append(self.chunks[0](batch["x"]).square().mean())
            if len(losses) > 1:
                losses[-2].backward()  # type: ignore[no-untyped-call]
        losses[-1].backward()  # type: ignore[no-untyped-call]
        return losses

    def graph(self, **options: Any) -> FullIterationGraph:
        return FullIterationGraph(self.step, CPU, parameters=self.chunks.named_parameters(), **options)

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.chunks.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.chunks.parameters()]


def batches_of(number: int, num_micros: int = 2, num_chunks: int = 1, rows: int = 2, scale: float = 1.0) -> Batches:
    generator = torch.Generator().manual_seed(number)
    return [
        [{"x": torch.randn(rows, 3, generator=generator), "scale": scale} for _ in range(num_micros)] for _ in range(num_chunks)
    ]


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
