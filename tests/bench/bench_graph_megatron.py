"""The same training step under Megatron-core's own graph wrappers and under ours: time of a step, and memory.

`python -m tests.bench.bench_graph_megatron [quick|full] [1|2] [small|large]...`. Needs GPUs, and the package megatron-core with
its `optimizer_cuda_graph` (0.19 has it). Both wrap the same function, the same flat gradients and the same optimizer: theirs
with `FullCudaGraphWrapper` and `OptimizerCudaGraphWrapper`, one memory pool and 3 warm-up steps; ours without checks, and with
checks read one step late, which Megatron-LM refuses (`check_for_nan_in_loss_and_grad` has to be off).
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rsup.worker.cuda_graph.contract import Batches
from tests.bench.graph_ranks import World, first_line, joined, spawn
from tests.bench.graph_steps import SIZES, Kind, Size, Training, make_batches
from tests.bench.graph_timing import Memory, Times, profile, turn
from tests.bench.table import Row, print_table

EFFORT = {"quick": (2, 15), "full": (4, 25)}
WITHIN_S = 150.0
OURS = (Kind.GRAPH, Kind.LATE)


def main(effort: str = "quick", num_ranks: str = "1", *sizes: str) -> list[Row]:
    """Run it; the rows of all tables."""
    rows: list[Row] = []
    for name in sizes or ("large", "small"):
        with tempfile.TemporaryDirectory(prefix="rb-") as folder:
            path = Path(folder, "rows")
            module = "tests.bench.bench_graph_megatron"
            problem = spawn(module, ["rank", name, effort, str(path)], int(num_ranks), WITHIN_S)
            rows += [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
        if problem:
            print(f"{name}, {num_ranks} ranks: {problem}", flush=True)
    return rows


class MegatronTraining(Training):
    """Our step, wrapped by Megatron-core: eager parts of `Training`, graphs of theirs."""

    def __init__(self, size: Size, world: World) -> None:
        full_iteration, optimizer_graph = megatron_wrappers()
        super().__init__(Kind.EAGER, size, world)
        self._forward_backward = full_iteration(self._as_megatron_calls_it, cuda_graph_warmup_steps=3, use_single_mempool=True)
        self._step = optimizer_graph(self.optimizer_graph.step, cuda_graph_warmup_steps=3, use_single_mempool=True)

    def run(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """As Megatron-LM's loop does: on the current stream, all micro-batches read by the wrapper."""
        self._last = self._forward_backward(
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=self.size.num_micro_batches,
            seq_length=self.size.length,
            forward_only=False,
        )
        self._step()

    def _as_megatron_calls_it(self, data_iterator: list[Iterator[Any]], **_: Any) -> torch.Tensor:
        chunk: Batches = [[next(data_iterator[0]) for _ in range(self.size.num_micro_batches)]]
        return self.forward_backward(chunk)


def megatron_wrappers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Megatron-core's two wrapper classes, with its generator tracker in the form that can be captured.

    Its import fails where nvidia-resiliency-ext 0.7 is installed, which has no `__version__`: so it is hidden meanwhile.
    """
    name = "nvidia_resiliency_ext"
    hidden = {module: sys.modules.pop(module) for module in list(sys.modules) if module.split(".")[0] == name}
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        full_iteration = importlib.import_module("megatron.core.full_cuda_graph")
        optimizer = importlib.import_module("megatron.core.optimizer.optimizer_cuda_graph")
        generators = importlib.import_module("megatron.core.tensor_parallel.random")
    finally:
        del sys.modules[name]
        sys.modules.update(hidden)
    generators.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, tp_rank=0, ep_rank=0, etp_rank=0)
    return full_iteration.FullCudaGraphWrapper, optimizer.OptimizerCudaGraphWrapper


def rank_main(name: str, effort: str, path: str) -> None:
    """What each rank runs."""
    with joined() as world:
        size = SIZES[name]
        where = f"{size.name}, {world.world_size} x {torch.cuda.get_device_name()}"
        world.say(f"\nagainst Megatron-core: {where}, torch {torch.__version__}")
        batches = make_batches(size, world)
        makers: dict[str, Callable[[], Training]] = {
            f"rsup: {kind}": functools.partial(Training, kind, size, world) for kind in OURS
        }
        makers[f"Megatron-core {_version()}"] = lambda: MegatronTraining(size, world)
        trainings: dict[str, Training] = {}
        times: dict[str, Times] = {}
        for who, make in makers.items():
            memory, problem, training = Memory(world.device), "", None
            try:
                training = make()
                for number in range(8):
                    training.run(batches[number % len(batches)])
                training.finish()
            except Exception as error:
                problem = first_line(error)
                print(f"rank {world.rank}: {who}: {problem}", flush=True)
            if world.agree(not problem) and training is not None:
                trainings[who], times[who] = training, Times()
                times[who].reserved_mib, times[who].used_mib = memory.taken_mib()
        num_turns, num_steps = EFFORT[effort]
        for _ in range(num_turns):
            for who, training in trainings.items():
                turn(training, batches, num_steps, times[who], world)
        rows = [row for who, training in trainings.items() for row in _rows(who, training, times[who])]
        if world.rank == 0:
            print_table(rows)
            found = [dataclasses.asdict(dataclasses.replace(row, what=f"{row.what}, {where}")) for row in rows]
            Path(path).write_text(json.dumps(found))
        _say_kernels(trainings, batches, world)


def _rows(who: str, training: Training, times: Times) -> Iterator[Row]:
    note = f"median {statistics.median(times.device):.3f} ms, loss {training.loss:.5f}"
    yield Row("step, device", who, times.device, "ms", note=note)
    yield Row("step, host", who, times.host, "ms")
    yield Row("memory reserved", who, [times.reserved_mib], "MiB", note=f"{times.used_mib:.0f} MiB by the driver's count")


def _say_kernels(trainings: dict[str, Training], batches: list[Any], world: World) -> None:
    for who, training in trainings.items():
        if (busy := profile(training, batches, world)) is not None:
            world.say(f"{who}: kernels {busy.busy_ms:.3f} ms a step, {busy.num_kernels} of them")


def _version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
