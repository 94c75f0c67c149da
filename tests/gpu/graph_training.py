"""The small training that the GPU tests of the graph-captured step run, eagerly and as graphs, with what they feed it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rsup.worker.cuda_graph.capture import SharedCapture
from rsup.worker.cuda_graph.contract import Batches
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.optimizer_graph import OptimizerGraph, prepare_optimizer_for_graph
from rsup.worker.reference.model import GPT
from rsup.worker.rerun.contract import RerunConfig

NUM_MICRO_BATCHES = 2
LENGTH = 16
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
"""The CPU, so that the tests' own logic can be tried anywhere: there nothing is captured."""


def batches_of(step: int, batch_size: int = 2) -> Batches:
    """One chunk's micro-batches, other ones for each step, with factors that spoil a loss or a norm for the checks."""
    generator = torch.Generator().manual_seed(step)

    def micro_batch() -> dict[str, torch.Tensor]:
        text = torch.randint(256, (batch_size, LENGTH + 1), generator=generator)
        return {"text": text, "loss_factor": torch.ones(1), "norm_factor": torch.ones(1)}

    return [[micro_batch() for _ in range(NUM_MICRO_BATCHES)]]


class Training:
    """A GPT of a layer with its optimizer: `step` runs one, as graphs or eagerly. Alike to the bit for one `seed`."""

    def __init__(
        self,
        capture: SharedCapture,
        *,
        captures: bool = True,
        dropout: float = 0.1,
        checks: RerunConfig | None = None,
        seed: int = 1,
        inside: Callable[[torch.Tensor], Any] = lambda loss: None,
        **graph: Any,
    ) -> None:
        """`inside`: called with each micro-batch's loss, within the graph. `graph`: options of the `FullIterationGraph`."""
        self.capture = capture
        self._inside = inside
        torch.manual_seed(seed)
        with capture.on_stream():
            self.model = GPT(1, 32, 2, LENGTH, dropout, dropout).to(DEVICE)
            self.parameters = list(self.model.parameters())
            self.groups = GradientGroups(self.parameters, None, group_bytes=16 << 10)
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, weight_decay=0.1, fused=True)
            prepare_optimizer_for_graph(self.optimizer)
            self.checks: DeviceChecks | None = None
            if checks is not None:
                num_norms = self.groups.num_groups
                self.checks = DeviceChecks(NUM_MICRO_BATCHES, num_norms, DEVICE, config=checks, group=None)
            gate = self.checks.gate if self.checks is not None else None
            self.update = OptimizerGraph(
                self.optimizer,
                DEVICE,
                gate=gate,
                max_norm=1.0,
                gradients=self.groups,
                captures=captures,
                capture=capture,
            )
            self.graph = FullIterationGraph(
                self.forward_backward, DEVICE, parameters=self.model.named_parameters(), capture=capture, **graph
            )
        self._captures = captures

    def forward_backward(self, batches: Batches) -> torch.Tensor:
        """Gradients in place; the loss, [], float32."""
        self.groups.zero_()
        if self.checks is not None:
            self.checks.begin()
        total = torch.zeros((), device=DEVICE)
        micro_batches = batches[0]
        for place, batch in enumerate(micro_batches):
            loss = self.model(batch["text"].to(DEVICE))
            self._inside(loss)
            if self.checks is not None:
                self.checks.loss(place, loss.detach() * batch["loss_factor"].to(DEVICE)[0])
            (loss / len(micro_batches)).backward()
            total += loss.detach() / len(micro_batches)
        factor = micro_batches[0]["norm_factor"].to(DEVICE)[0]
        self.groups.reduce(lambda group, norm: self._on_norm(group, norm * factor))
        if self.checks is not None:
            self.checks.judge()
        return total

    def _on_norm(self, group: int, norm: torch.Tensor) -> None:
        if self.checks is not None:
            self.checks.norm(group, norm)

    def step(self, batches: Batches) -> torch.Tensor:
        """One step; its loss, [], of its own."""
        with self.capture.on_stream():
            loss: torch.Tensor = self.graph(batches, eager=not self._captures).value.clone()
            self.update.step()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of parameters, moments and step counts."""
        kept = {f"parameter {name}": one.detach().clone() for name, one in self.model.named_parameters()}
        for place, parameter in enumerate(self.parameters):
            for name, value in self.optimizer.state[parameter].items():
                kept[f"{name} {place}"] = value.clone()
        return kept

    def close(self) -> None:
        """Give up the graphs."""
        self.graph.reset()
        self.update.reset()


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal to the bit, with the largest difference."""
    assert one.keys() == other.keys()
    return [
        f"{name}: {float((one[name].double() - other[name].double()).abs().max()):.3g}"
        for name in one
        if not torch.equal(one[name], other[name])
    ]


def rng_state() -> torch.Tensor:
    """State of the device's own generator."""
    return torch.cuda.get_rng_state(DEVICE) if DEVICE.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Set the device's own generator."""
    if DEVICE.type == "cuda":
        torch.cuda.set_rng_state(state, DEVICE)
    else:
        torch.set_rng_state(state)


def make_evaluation(model: nn.Module, capture: SharedCapture) -> FullIterationGraph:
    """A forward-only graph beside the training's."""

    @torch.no_grad()
    def forward(batches: Batches) -> torch.Tensor:
        was_training = model.training
        model.eval()
        losses = torch.stack([model(batch["text"].to(DEVICE)) for batch in batches[0]])
        model.train(was_training)
        return losses.mean()

    return FullIterationGraph(forward, DEVICE, name="evaluation", capture=capture)
