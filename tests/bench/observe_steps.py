"""Whole steps of the reference model for `bench_observe`: bare, logged and timed in 12 places, and with dumps of tensors."""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch

from rsup.worker.observe.dump_plan import DumpPlan
from rsup.worker.observe.tensor_dump import TensorDumps
from rsup.worker.observe.timers import Timers
from rsup.worker.observe.training_log import StepNumbers, TrainingLog, TrainingLogOptions
from rsup.worker.reference.model import GPT, mean_loss
from tests.bench.graph_ranks import World
from tests.bench.table import Row

MICRO_BATCHES = 3
TURNS = 30


class Step:
    """A step of the reference model, timed in 12 places, logged, and dumped where that is due."""

    def __init__(self, world: World, timers: Timers, log: TrainingLog | None, dumps: TensorDumps | None) -> None:
        on_gpu = world.device.type == "cuda"
        self.device = world.device
        shape = (12, 2048, 16, 1024) if on_gpu else (2, 32, 2, 32)
        torch.manual_seed(1)
        self.module = GPT(*shape, 0.0, 0.0, None).to(self.device)
        self._optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        self._text = torch.randint(0, 255, (2, shape[3] + 1), device=self.device)
        self._compute = torch.bfloat16 if on_gpu else None
        self._forward_backward, self._step, self._optimize = (
            timers(name, 1) for name in ("forward-backward", "optimizer-inner-step", "optimizer")
        )
        self._batch, self._forward, self._backward = (
            timers(f"{name}", 2) for name in ("batch-generator", "forward-compute", "backward-compute")
        )
        self.log = log
        self.dumps = dumps
        self._iteration = 0

    def run(self) -> None:
        """One step; queued, on a GPU."""
        self._iteration += 1
        with self.dumps.iteration(self._iteration) if self.dumps is not None else contextlib.nullcontext():
            total = self._compute_all()
        if self.log is not None:
            self.log.step(StepNumbers(self._iteration, self._iteration * 16, {"lm loss": total}, 1e-4, 16))

    def _compute_all(self) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        if self.dumps is not None:
            self.dumps.begin_pass()
        with self._forward_backward:
            self._optimizer.zero_grad()
            for number in range(MICRO_BATCHES):
                with self._batch:
                    text = self._text
                if self.dumps is not None:
                    self.dumps.micro_batch(number, MICRO_BATCHES)
                with self._forward:
                    loss = mean_loss(self.module, text, self._compute)
                with self._backward:
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        if self.dumps is not None:
            self.dumps.gradients()
        with self._optimize, self._step:
            self._optimizer.step()
        if self.dumps is not None:
            self.dumps.updated()
        return total


def step_rows(world: World) -> list[Row]:
    """Steps without and with what watches them, in turns; and what a dump adds to its step."""
    steps: dict[str, Step] = {}
    kinds = (
        ("bare", 0, "event"),
        ("bare, again", 0, "event"),
        ("log and event timers of level 1", 1, "event"),
        ("log and event timers of level 2", 2, "event"),
        ("log and waiting timers of level 2", 2, "sync"),
    )
    for what, level, mode in kinds:
        timers = Timers(level, device=world.device, mode=mode, barrier_with_level_1=False, warn=fail)
        log = None
        if level:
            options = TrainingLogOptions(10**9, log_interval=100)
            log = TrainingLog(options, group=world.control, say=lambda text: None, warn=fail, timers=timers)
        steps[what] = Step(world, timers, log, None)
    samples: dict[str, list[float]] = {what: [] for what in steps}
    for turn in range(TURNS + 1):
        order = list(steps)[turn % len(steps) :] + list(steps)[: turn % len(steps)]
        for what in order:
            took_ms = turn_ms(steps[what], 5)
            if turn:  # the first one warms up
                samples[what].append(took_ms)
    rows = []
    for what, times in samples.items():  # clocks drift: each turn is compared with the bare steps of the same turn
        more = statistics.median(one / bare for one, bare in zip(times, samples["bare"], strict=True)) - 1
        rows.append(Row(f"step, {MICRO_BATCHES} micro-batches", what, times, "ms", note=f"{more * 100:+.2f} %"))
    steps.clear()
    return rows + dump_rows(world)


def turn_ms(step: Step, num_steps: int) -> float:
    """Mean time of these steps: the device runs on between them."""
    step.run()
    _wait(step.device)
    began_s = time.perf_counter()
    for _ in range(num_steps):
        step.run()
    _wait(step.device)
    return (time.perf_counter() - began_s) / num_steps * 1e3


def dump_rows(world: World) -> list[Row]:
    """Steps of a dump: while it is collected, and what writing it takes; and the others."""
    every = 4
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        labels = ("activations", "dgrads", "wgrads", "params")
        plan = DumpPlan(Path(folder), dict.fromkeys(labels, every))
        step = Step(world, Timers(0, device=world.device, mode="event", warn=fail), None, None)
        step.dumps = dumps = TensorDumps(plan, [step.module], warn=print)
        others_ms: list[float] = []
        due_ms: list[float] = []
        write_ms: list[float] = []
        size_bytes = 0
        for iteration in range(1, 4 * every + 1):
            _wait(world.device)
            began_s = time.perf_counter()
            step.run()
            _wait(world.device)
            (due_ms if dumps.due(iteration) else others_ms).append((time.perf_counter() - began_s) * 1e3)
            began_s = time.perf_counter()
            written = dumps.write()
            if dumps.due(iteration):
                write_ms.append((time.perf_counter() - began_s) * 1e3)
                size_bytes = sum(path.stat().st_size for path in written)
                for path in written:
                    path.unlink()
    note = f"{size_bytes / 2**20:.1f} MiB"
    return [
        Row("step without a dump due", "rsup", others_ms[2:], "ms"),
        Row("step of a dump of all four", "rsup", due_ms[1:], "ms", note=note),
        Row("writing the dump", "rsup", write_ms[1:], "ms", note=note),
    ]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def fail(text: str) -> None:
    """Nothing here is to be warned of."""
    raise AssertionError(text)
