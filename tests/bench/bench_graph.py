"""Step time eager, compiled, and as CUDA graphs with and without checks; kernel time, memory; does DDP run inside the graph.

`python -m tests.bench.bench_graph [quick|full|ddp] [1|2] [small|large]...`: ranks are processes, one a GPU. Without GPUs a tiny
model shows that it runs. The kinds take turns of some steps each, so that a machine that slows down slows them all. `quick`
leaves out torch.compile and most of the repetitions; `ddp` is the part about DDP alone. Each table is printed once it is known.
"""

import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.bench import graph_ddp
from tests.bench.graph_ranks import World, first_line, joined, spawn
from tests.bench.graph_steps import SIZES, Kind, Size, Training, make_batches
from tests.bench.graph_timing import Memory, Times, profile, turn
from tests.bench.table import Row, print_table

COMPILE_WITHIN_S = 120
EFFORT = {"quick": (2, 15), "full": (4, 25)}
"""Turns of each kind, and steps of a turn."""
WITHIN_S = {"quick": 150.0, "full": 320.0}
"""Limit of one model's ranks."""


def main(effort: str = "quick", num_ranks: str = "1", *sizes: str) -> list[Row]:
    """Run it; the rows of all tables."""
    rows: list[Row] = []
    if effort == "ddp":
        return graph_ddp.main(num_ranks)
    has_gpus = torch.cuda.device_count() >= int(num_ranks)
    for name in sizes or (("small", "large") if has_gpus else ("tiny",)):
        with tempfile.TemporaryDirectory(prefix="rb-") as folder:
            path = Path(folder, "rows")
            problem = spawn("tests.bench.bench_graph", ["rank", name, effort, str(path)], int(num_ranks), WITHIN_S[effort])
            rows += [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
        if problem:
            print(f"{name}, {num_ranks} ranks: {problem}", flush=True)
    return rows


# ------------------------------------------------------------------------------------------------------------- in a rank


def rank_main(name: str, effort: str, path: str) -> None:
    """What each rank runs: all kinds of one size."""
    with joined() as world:
        report = Report(SIZES[name], world, Path(path))
        trainings: dict[Kind, Training] = {}
        for kind in Kind:
            if kind is not Kind.COMPILED and (training := report.make(kind)) is not None:
                trainings[kind] = training
        report.measure(trainings, *EFFORT[effort])
        report.profile(trainings)
        if effort == "full":
            report.compiled(*EFFORT[effort])
        for training in trainings.values():
            training.destroy()


class Report:
    """Measures on all ranks, and says on rank 0 what came of it. Every method is collective."""

    def __init__(self, size: Size, world: World, path: Path) -> None:
        self._size, self._world, self._path = size, world, path
        self._batches = make_batches(size, world)
        self._times = {kind: Times() for kind in Kind}
        self._rows: list[Row] = []
        where = torch.cuda.get_device_name() if world.device.type == "cuda" else "1 CPU thread"
        self._where = f"{size.name}, {world.world_size} x {where}"
        shape = f"{size.num_micro_batches} micro-batches of {size.batch_size} x {size.length}"
        world.say(f"\n{self._where}, {shape}, {'bf16 autocast' if size.bf16 else 'float32'}, torch {torch.__version__}")

    def make(self, kind: Kind) -> Training | None:
        """A training in its steady state: warmed up, and captured where it has graphs. None where that failed on any rank."""
        training, problem, memory = None, "", Memory(self._world.device)
        try:
            training = Training(kind, self._size, self._world)
            if kind is Kind.COMPILED:
                with _alarm(COMPILE_WITHIN_S):
                    training.compile()
        except Exception as error:
            problem = first_line(error)
        if self._world.agree(not problem) and training is not None:
            try:
                for number in range(8):  # 3 of warm-up, the capture, the first pass of the rerun machine, and some more
                    training.run(self._batches[number % len(self._batches)])
                training.finish()
            except Exception as error:
                problem = first_line(error)
            if self._world.agree(not problem):
                times = self._times[kind]
                times.reserved_mib, times.used_mib = memory.taken_mib()
                return training
        print(f"rank {self._world.rank}: {kind}: {problem or 'failed on another rank'}", flush=True)
        return None

    def measure(self, trainings: dict[Kind, Training], num_turns: int, num_steps: int) -> None:
        """Step times, in turns, and memory."""
        for _ in range(num_turns):
            for kind in list(trainings):
                if not self._take_turn(kind, trainings[kind], num_steps):
                    del trainings[kind]
        rows = [row for kind, training in trainings.items() for row in self._of_times(kind, training)]
        self._print(rows + list(self._comparisons()))

    def _take_turn(self, kind: Kind, training: Training, num_steps: int) -> bool:
        problem = ""
        try:
            turn(training, self._batches, num_steps, self._times[kind], self._world)
        except Exception as error:
            problem = first_line(error)
            print(f"rank {self._world.rank}: {kind}: {problem}", flush=True)
        return self._world.agree(not problem)

    def compiled(self, num_turns: int, num_steps: int) -> None:
        """The same for torch.compile, last since it may take long."""
        if (training := self.make(Kind.COMPILED)) is not None:
            if self._take_turn(Kind.COMPILED, training, num_turns * num_steps // 2):
                self._print(list(self._of_times(Kind.COMPILED, training)))
            training.destroy()

    def profile(self, trainings: dict[Kind, Training]) -> None:
        """Kernel time over step time."""
        rows: list[Row] = []
        for kind in (Kind.EAGER, Kind.GRAPH, Kind.LATE, Kind.DRIVEN):
            if kind not in trainings:
                continue
            busy = profile(trainings[kind], self._batches, self._world)
            if busy is None:
                continue
            step_ms = statistics.median(self._times[kind].device)
            note = f"{busy.busy_ms:.3f} of {step_ms:.3f} ms, {busy.num_kernels} kernels; {busy.span_ms:.3f} ms while profiled"
            goal = "<= 2 %" if kind is Kind.LATE else ""
            rows.append(Row("gap between kernels and step time", kind, [100 * (1 - busy.busy_ms / step_ms)], "%", goal, note))
        self._print(rows)

    def _of_times(self, kind: Kind, training: Training) -> Iterator[Row]:
        times = self._times[kind]
        note = f"median {statistics.median(times.device):.3f} ms, loss {training.loss:.5f}"
        yield Row("step, device", kind, times.device, "ms", note=note)
        yield Row("step, host", kind, times.host, "ms")
        used = f"{times.used_mib:.0f} MiB by the driver's count"
        yield Row("memory reserved", kind, [times.reserved_mib], "MiB", note=used)

    def _comparisons(self) -> Iterator[Row]:
        """By turn, so that the spread shows how much of a difference is noise."""
        turns = {kind: times.turns for kind, times in self._times.items()}
        plain = turns[Kind.GRAPH]
        goal = ">= 1.4 x" if self._size is SIZES["large"] else ""
        for kind in (Kind.EAGER, Kind.EAGER_CASTS):
            ratios = [eager / graph for eager, graph in zip(turns[kind], plain, strict=False)]
            yield Row("over the graph without checks", kind, ratios, "x", goal)
        for kind in (Kind.LATE, Kind.LATE_ALL, Kind.HOST_READ, Kind.DRIVEN):
            more = [100 * (checked / graph - 1) for checked, graph in zip(turns[kind], plain, strict=False)]
            yield Row("more than the graph without checks", kind, more, "%", "<= 0.5 %" if kind is Kind.LATE else "")

    def _print(self, rows: list[Row]) -> None:
        if self._world.rank or not rows:
            return
        print_table(rows)
        self._rows += [dataclasses.replace(row, what=f"{row.what}, {self._where}") for row in rows]
        plain: list[dict[str, Any]] = [dataclasses.asdict(row) for row in self._rows]
        self._path.write_text(json.dumps(plain))


@contextmanager
def _alarm(within_s: int) -> Iterator[None]:
    def too_late(*_: object) -> None:
        raise TimeoutError(f"skipped: not done within {within_s} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(within_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        rank_main(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
