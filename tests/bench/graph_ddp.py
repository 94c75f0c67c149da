"""How many eager steps does torch's DDP need before a full-iteration graph can hold it? Each answer from fresh processes.

`python -m tests.bench.bench_graph ddp [1|2]`. "works" means: captured, then 12 replays with changing data, after which
parameters are those of the same model trained eagerly without DDP, within float32's rounding. With `static_graph` each
micro-batch is reduced, since DDP then takes no `no_sync`.
"""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.cuda_graph.capture import SharedCapture
from rsup.worker.cuda_graph.contract import Batches
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.rerun.gradient_checks import GradientChecks
from tests.bench.graph_ranks import World, joined, spawn
from tests.bench.graph_steps import LanguageModel, Size, make_batches
from tests.bench.table import Row

WITHIN_S = 60.0
AT_ONCE = 4
"""Trials that share the GPUs: only their outcome counts, not their time."""
SIZE = Size("DDP", 2, 128, 4, 512, 64, 4, num_micro_batches=2, bf16=False)
NUM_REPLAYS = 12
LEARNING_RATE = 0.1


def main(num_ranks: str = "1") -> list[Row]:
    """Try all; print a line for each as soon as it is known."""
    print(f"\nDDP inside the graph, {num_ranks} ranks, torch {torch.__version__}", flush=True)
    cases = list(itertools.product(("3", "11"), ("static", "dynamic"), ("plain", "checked")))
    with ThreadPoolExecutor(AT_ONCE if torch.cuda.is_available() else 1) as pool:
        for case, outcome in zip(cases, pool.map(lambda case: _try(case, int(num_ranks)), cases), strict=True):
            warmup, graph, hook = case
            what = f"warm-up {warmup:>2}, static_graph {graph == 'static'!s:5}, gradient checks {hook == 'checked'!s:5}"
            print(f"{what}: {outcome}", flush=True)
    return []


def _try(case: Sequence[str], num_ranks: int) -> str:
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        path = Path(folder, "outcome")
        problem = spawn("tests.bench.graph_ddp", [*case, str(path)], num_ranks, WITHIN_S, quiet=True)
        return f"fails: {problem}" if problem else path.read_text()


# ------------------------------------------------------------------------------------------------------------- in a rank


def rank_main(warmup: str, graph: str, hook: str, path: str) -> None:
    """One trial."""
    with joined() as world:
        num_steps = int(warmup) + 1 + NUM_REPLAYS
        batches = make_batches(SIZE, world, 5)
        trained, captured = _with_ddp(world, batches, num_steps, int(warmup), graph == "static", hook == "checked")
        expected = _without_ddp(world, batches, num_steps)
        far = max(float((one - other).abs().max()) for one, other in zip(trained, expected, strict=True))
        moved = max(float(other.abs().max()) for other in expected)
        assert far <= 1e-4 * moved, f"parameters differ by {far:.3g} from those of an eager run"
        if world.rank == 0:
            Path(path).write_text(f"works, {captured}; largest difference to an eager run {far:.2g}")


def _with_ddp(
    world: World, batches: list[list[dict[str, torch.Tensor]]], num_steps: int, warmup: int, static: bool, checked: bool
) -> tuple[list[torch.Tensor], str]:
    capture = SharedCapture(world.device)
    with capture.on_stream():
        torch.manual_seed(1)
        model = LanguageModel(SIZE).to(world.device)
        devices = [world.rank] if world.device.type == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, static_graph=static)
        checks = GradientChecks()
        if checked:
            checks.attach(ddp)

    def forward_backward(inputs: Batches) -> list[torch.Tensor]:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        checks.begin(is_new=True)
        for micro, batch in enumerate(inputs[0]):
            is_reduced = static or micro == len(inputs[0]) - 1  # a static graph of DDP's takes no `no_sync`
            with contextlib.nullcontext() if is_reduced else ddp.no_sync():
                (ddp(batch["inputs"].to(world.device), batch["targets"].to(world.device)) / len(inputs[0])).backward()
        return [norm for _, norm in checks.take()] if checked else []

    graph = FullIterationGraph(forward_backward, world.device, warmup_steps=warmup, group=world.control, capture=capture)
    norms: list[torch.Tensor] = []
    for step in range(num_steps):
        with capture.on_stream():
            norms = graph([batches[step % len(batches)]]).value
            _descend(list(model.parameters()))
    assert not checked or all(float(norm) > 0 for norm in norms), norms
    captured = "captured" if graph.captured else "not captured: no CUDA"
    parameters = [parameter.detach().cpu() for parameter in model.parameters()]
    graph.reset()
    return parameters, captured


def _without_ddp(world: World, batches: list[list[dict[str, torch.Tensor]]], num_steps: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = LanguageModel(SIZE).to(world.device)
    for step in range(num_steps):
        model.zero_grad()
        micro_batches = batches[step % len(batches)]
        for batch in micro_batches:
            (model(batch["inputs"].to(world.device), batch["targets"].to(world.device)) / len(micro_batches)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.world_size
        _descend(list(model.parameters()))
    return [parameter.detach().cpu() for parameter in model.parameters()]


@torch.no_grad()
def _descend(parameters: list[torch.nn.Parameter]) -> None:
    """Plain descent: it enlarges no rounding error, as Adam's division does."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
