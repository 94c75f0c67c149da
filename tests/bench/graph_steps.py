"""The training steps that bench_graph compares: one model, one optimizer, the same inputs; eager, compiled, and as graphs.

All of them keep gradients in `GradientGroups`, so each sends the same bytes; only what the name says differs.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rsup.worker.cuda_graph.capture import SharedCapture
from rsup.worker.cuda_graph.contract import Batches, Code
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.graphed_step import GraphedStep
from rsup.worker.cuda_graph.late_reader import LateReader, Ticket
from rsup.worker.cuda_graph.optimizer_graph import OptimizerGraph, prepare_optimizer_for_graph
from rsup.worker.rerun.contract import RerunConfig
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine
from tests.bench.graph_ranks import World

LEARNING_RATE = 1e-4
CLIP = 1.0


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocabulary_size: int
    length: int
    batch_size: int
    num_micro_batches: int = 4
    bf16: bool = True


SIZES = {
    "small": Size("launch-bound, 4 layers x 256", 4, 256, 4, 4096, 128, 4),
    "large": Size("compute-bound, 12 layers x 1024", 12, 1024, 16, 32768, 1024, 4),
    "tiny": Size("tiny, 2 layers x 32", 2, 32, 2, 64, 16, 2, 2, bf16=False),
}
"""`large` is the model of DESIGN.md section 7; `tiny` shows on a CPU that the benchmark runs."""


class Kind(StrEnum):
    """How a step is run."""

    EAGER = "eager"
    EAGER_CASTS = "eager, weights cast for each micro-batch"
    COMPILED = "torch.compile"
    GRAPH = "graph, no checks"
    LATE = "graph, checks read one step late"
    LATE_ALL = "graph, those of spiky and large values too"
    HOST_READ = "graph, checks read each step"
    DRIVEN = "GraphedStep with the rerun machine"


EAGER_KINDS = (Kind.EAGER, Kind.EAGER_CASTS, Kind.COMPILED)


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.projection = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp_in = nn.Linear(hidden_size, 4 * hidden_size)
        self.mlp_out = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [batch, sequence, hidden]."""
        batch, length, size = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.num_heads, size // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, size))
        out: torch.Tensor = hidden + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return out


class LanguageModel(nn.Module):
    """The GPT of DESIGN.md section 7: no dropout, an output layer of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary_size, size.hidden_size)
        self.blocks = nn.ModuleList(Block(size.hidden_size, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.hidden_size)
        self.head = nn.Linear(size.hidden_size, size.vocabulary_size, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy. Both [batch, sequence], int64."""
        hidden = self.tokens(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def make_batches(size: Size, world: World, num_steps: int = 4) -> list[list[dict[str, torch.Tensor]]]:
    """So many steps' micro-batches, in the memory a loader hands over: pinned, on the host."""
    generator = torch.Generator().manual_seed(100 + world.rank)

    def micro_batch() -> dict[str, torch.Tensor]:
        drawn = torch.randint(size.vocabulary_size, (2, size.batch_size, size.length), generator=generator)
        pinned = drawn.pin_memory() if world.device.type == "cuda" else drawn
        return {"inputs": pinned[0], "targets": pinned[1]}

    return [[micro_batch() for _ in range(size.num_micro_batches)] for _ in range(num_steps)]


class Training:
    """A model in training, seeded alike whatever its kind. `run` launches one step."""

    def __init__(self, kind: Kind, size: Size, world: World) -> None:
        self.kind, self.size, self.world = kind, size, world
        self.device = world.device
        self.capture = SharedCapture(world.device)  # of its own, so that each pays for its memory
        torch.manual_seed(1)
        with self.capture.on_stream():
            self._make()
        self._iteration = 0
        self._ticket: Ticket | None = None
        self.loss = float("nan")

    def _make(self) -> None:
        size, world = self.size, self.world
        self.model: Callable[..., torch.Tensor] = (model := LanguageModel(size).to(self.device))
        self.parameters = list(model.parameters())
        self.groups = GradientGroups(self.parameters, world.gradients, measures_reduced=True)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, fused=True)
        prepare_optimizer_for_graph(self.optimizer)
        is_checked = self.kind not in (*EAGER_KINDS, Kind.GRAPH)
        everything = self.kind is Kind.LATE_ALL
        config = RerunConfig(check_for_spiky_loss=everything, check_for_large_grads=everything)
        self.checks = self._make_checks(config) if is_checked else None
        captures = self.kind not in EAGER_KINDS
        self.optimizer_graph = OptimizerGraph(
            self.optimizer,
            self.device,
            gate=self.checks.gate if self.checks else None,
            max_norm=CLIP,
            gradients=self.groups,
            captures=captures,
            capture=self.capture,
            group=world.control,
        )
        if captures:
            self.graph = FullIterationGraph(
                self.forward_backward,
                self.device,
                parameters=self.parameters,
                group=world.control,
                capture=self.capture,
            )
        if self.checks is not None:
            self.reader = LateReader(self.checks.result)
        if self.kind is Kind.DRIVEN:
            self._make_driver(model, config)

    def _make_checks(self, config: RerunConfig) -> DeviceChecks:
        num_norms = self.groups.num_groups
        return DeviceChecks(self.size.num_micro_batches, num_norms, self.device, config=config, group=self.world.gradients)

    def _make_driver(self, model: nn.Module, config: RerunConfig) -> None:
        rerun = RerunStateMachine(config, torch_device=self.device, group=self.world.control)
        rerun.attach(model, self.optimizer, measures_gradients=False)
        data = RerunDataIterator(self._endless())
        assert self.checks is not None
        self.driver = GraphedStep(
            self.graph,
            self.optimizer_graph,
            self.checks,
            rerun,
            data,
            lambda: [[next(data) for _ in range(self.size.num_micro_batches)]],
            [f"grad norm of bucket {number}" for number in range(self.groups.num_groups)],
            around=self.capture.on_stream,
        )

    def _endless(self) -> Iterator[Any]:
        steps = itertools.cycle(make_batches(self.size, self.world))
        return (batch for step in steps for batch in step)

    def forward_backward(self, batches: Batches) -> torch.Tensor:
        """All micro-batches: gradients in place, reduced; the loss, [], float32."""
        self.groups.zero_()
        if self.checks is not None:
            self.checks.begin()
        on_norm = self.checks.norm if self.checks is not None else None  # None: no rank measures its own
        total = torch.zeros((), device=self.device)
        casts_once = self.size.bf16 and self.kind is not Kind.EAGER_CASTS
        with self._autocast(casts_once):  # around all of them: weights are cast once
            for micro, batch in enumerate(batches[0]):
                loss = self.micro_loss(batch)
                if self.checks is not None:
                    self.checks.loss(micro, loss.detach())
                is_last = micro == self.size.num_micro_batches - 1
                reducing = self.groups.reducing(on_norm) if is_last else contextlib.nullcontext()
                with reducing, self._autocast(False):
                    (loss / self.size.num_micro_batches).backward()  # type: ignore[no-untyped-call]
                total += loss.detach() / self.size.num_micro_batches
        if self.checks is not None:
            self.checks.judge()
        return total

    def micro_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss of a micro-batch: [], float32."""
        inputs, targets = (batch[name].to(self.device, non_blocking=True) for name in ("inputs", "targets"))
        with self._autocast(self.size.bf16):
            return self.model(inputs, targets).float()

    def _autocast(self, enabled: bool) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def compile(self) -> None:
        """Compile the model, forward and backward, without any communication."""
        self.model = torch.compile(self.model)
        with self.capture.on_stream():
            (self.micro_loss(make_batches(self.size, self.world, 1)[0][0])).backward()  # type: ignore[no-untyped-call]

    def run(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Launch a step; where numbers are read one step late, read those of the step before."""
        self._iteration += 1
        if self.kind is Kind.DRIVEN:
            report = self.driver.run(self._iteration, LEARNING_RATE)
            assert not report.exit.should_exit, report
            return
        with self.capture.on_stream():
            if self.kind in EAGER_KINDS:
                self._last = self.forward_backward([batches])
            else:
                self._last = self.graph([batches]).value
            if self.kind is Kind.HOST_READ:
                self._look(self.reader.take())
            self.optimizer_graph.step()
            if self.kind in (Kind.LATE, Kind.LATE_ALL):
                before, self._ticket = self._ticket, self.reader.take()
                if before is not None:
                    self._look(before)

    def _look(self, ticket: Ticket) -> None:
        assert self.checks is not None
        verdict = self.checks.parse(self.reader.read(ticket))
        assert verdict.agreed is Code.CLEAN, verdict

    def finish(self) -> None:
        """Bring in what is pending, and the loss of the last step."""
        if self.kind is Kind.DRIVEN:
            settled = self.driver.settle().settled
            self.loss = settled[-1].loss or float("nan") if settled else self.loss
        else:
            self.loss = float(self._last)

    def destroy(self) -> None:
        """Give up graphs and memory."""
        with contextlib.suppress(AttributeError):
            self.graph.reset()
        self.optimizer_graph.reset()
