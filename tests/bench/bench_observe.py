"""What watching costs: timers that are off, on the host's clock, by events, waiting; the log; straggler scores; dumps.

`python -m tests.bench.bench_observe [NUM_RANKS]`: ranks are processes, one a GPU; without GPUs the same on the CPU, with a tiny
model. Peers: a timer as Megatron-LM's (wait for the device, then read the clock), and NVRx's detector where it loads. On CUDA,
torch refuses every wait of the host while event timers and the log are measured: it is known, not hoped, that they have none.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rsup.worker.device import this_device
from rsup.worker.observe.event_timers import EventTimer, Marks
from rsup.worker.observe.nvrx_straggler import load_kernel_scores
from rsup.worker.observe.straggler import StragglerDetector
from rsup.worker.observe.straggler_scores import Interval, RankTimes, make_report
from rsup.worker.observe.timers import Timers
from rsup.worker.observe.training_log import StepNumbers, TrainingLog, TrainingLogOptions
from tests.bench.graph_ranks import World, joined, spawn
from tests.bench.observe_steps import fail, step_rows
from tests.bench.table import Row, print_table

STEP_MS = 70.0
"""The step that the goals speak of: log and event timers together at most a thousandth of it."""
PAIRS_OF_STEP = 3 + 3 * 8
"""Forward-backward, optimizer and its step, and of each of 8 micro-batches the batch, forward and backward."""
WITHIN_S = 400.0


def main(num_ranks: str = "1") -> list[Row]:
    """Run it; the rows of the table."""
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        path = Path(folder, "rows")
        problem = spawn("tests.bench.bench_observe", ["rank", str(path)], int(num_ranks), WITHIN_S)
        rows = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
    if problem:
        print(f"{num_ranks} ranks: {problem}", flush=True)
    return rows


def rank_main(path: str) -> None:
    """What each rank runs."""
    with joined() as world:
        rows: list[Row] = []
        for part in (timer_rows, graph_rows, log_rows, straggler_rows, step_rows):
            rows += part(world)
            world.wait()
            if world.rank == 0:
                Path(path).write_text(json.dumps([vars(row) for row in rows]))


# ------------------------------------------------------------------------------------------------------- single calls


def each_ns(loop: Callable[[int], object], num_calls: int, repeats: int = 200) -> list[float]:
    """Nanoseconds of a pass through the loop, of each repeat the mean; an empty loop is taken off."""
    empty = min(_loop_ns(_nothing, num_calls) for _ in range(5))
    return [max(0.0, _loop_ns(loop, num_calls) - empty) for _ in range(repeats)]


def _loop_ns(loop: Callable[[int], object], num_calls: int) -> float:
    began_ns = time.perf_counter_ns()
    loop(num_calls)
    return (time.perf_counter_ns() - began_ns) / num_calls


def _nothing(num_calls: int) -> None:
    for _ in range(num_calls):
        pass


def calls(call: Callable[[], object]) -> Callable[[int], None]:
    """So many calls."""

    def loop(num_calls: int) -> None:
        for _ in range(num_calls):
            call()

    return loop


def pairs(timer: Any) -> Callable[[int], None]:
    """So many starts and stops."""

    def loop(num_calls: int) -> None:
        for _ in range(num_calls):
            timer.start()
            timer.stop()

    return loop


class WaitingTimer:
    """The peer: waits for the device, then reads the clock, as Megatron-LM's timers do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since_s = self.elapsed_s = 0.0

    def start(self) -> None:
        self._wait()
        self._since_s = time.time()

    def stop(self) -> None:
        self._wait()
        self.elapsed_s += time.time() - self._since_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Torch raises where the host would wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def timer_rows(world: World) -> list[Row]:
    """A start and a stop, of each kind; the device has nothing to do."""
    off, event = (Timers(level, device=world.device, mode="event", warn=fail) for level in (0, 2))
    off_ns = each_ns(calls(off("x", 2).start), 2_000)
    rows = [
        Row("timer that is off, start", "rsup", off_ns, "ns", "<= 50 ns"),
        Row("timer that is off, start and stop", "rsup", each_ns(pairs(off("x", 2)), 1_000), "ns", "<= 100 ns"),
        Row("timer of level 0, event mode", "rsup", each_ns(pairs(event("eval-time", 0)), 500), "ns"),
    ]
    with no_waits(world.device):
        times = each_ns(pairs(event("forward", 2)), 200)
    event_us = statistics.median(times) / 1e3
    rows.append(
        Row(
            "event timer, start and stop",
            "rsup",
            times,
            "ns",
            note=f"{PAIRS_OF_STEP} a step: {event_us * PAIRS_OF_STEP:.0f} us",
        )
    )
    waits = Timers(2, device=world.device, mode="sync", barrier_with_level_1=False, warn=fail)
    rows += [
        Row("waiting timer, start and stop", "rsup", each_ns(pairs(waits("forward", 2)), 200), "ns", note="device idle"),
        Row(
            "waiting timer, start and stop",
            "as Megatron-LM",
            each_ns(pairs(WaitingTimer(world.device)), 200),
            "ns",
            note="device idle",
        ),
    ]
    gathers = Timers(1, device=world.device, group=world.control, mode="event", warn=fail)
    names = [f"timer {number}" for number in range(20)]

    def gathered() -> None:
        for name in names:
            gathers(name, 1).set_elapsed(1.0)
        gathers.gather(names)

    rows.append(
        Row("20 timers over ranks", f"rsup, {world.world_size} ranks", [ns / 1e3 for ns in each_ns(calls(gathered), 1)], "us")
    )
    return rows


def graph_rows(world: World) -> list[Row]:
    """Events inside of a graph, as long as what is measured around it?"""
    if world.device.type != "cuda":
        return []
    matrix = torch.randn(4096, 4096, device=world.device)
    inside, around = (EventTimer(name, Marks(), fail) for name in ("inside", "around"))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            inside.begin_pass()
            with inside:
                for _ in range(10):
                    torch.mm(matrix, matrix)
        ratios = []
        for _ in range(10):
            with around:
                graph.replay()
            inside.replayed()
            torch.cuda.synchronize()
            ratios.append(inside.elapsed_s() / around.elapsed_s())
    return [Row("time in a graph / time around it", "rsup", ratios, "", "0.95 to 1")]


def log_rows(world: World) -> list[Row]:
    """A step of the log that is no log point; and one that is."""
    log = TrainingLog(
        TrainingLogOptions(10**9, log_interval=500, writer_interval=1), group=world.control, say=lambda text: None, warn=fail
    )
    loss = torch.tensor([3.0, 1.0], device=world.device)
    norm = torch.tensor(1.0, device=world.device)
    steps_us: list[float] = []
    points_us: list[float] = []
    iteration = 0
    for _ in range(4):
        for _ in range(500):
            iteration += 1
            is_point = log.waits_at(iteration)
            with contextlib.nullcontext() if is_point else no_waits_light(world.device):
                began_ns = time.perf_counter_ns()
                log.step(StepNumbers(iteration, iteration * 8, {"lm loss": loss}, 1e-4, 8, grad_norm=norm))
                (points_us if is_point else steps_us).append((time.perf_counter_ns() - began_ns) / 1e3)
    log.close()
    share = STEP_MS * 1e3 / 1000
    return [
        Row("log of a step", "rsup", steps_us, "us", f"<= {share:.0f} us with its timers"),
        Row(
            "log point of 500 steps",
            f"rsup, {world.world_size} ranks",
            points_us[1:],
            "us",
            note=f"{statistics.median(points_us[1:]) / 500:.2f} us a step",
        ),
    ]


@contextlib.contextmanager
def no_waits_light(device: torch.device) -> Iterator[None]:
    """As `no_waits`, without waiting itself."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def straggler_rows(world: World) -> list[Row]:
    """The detector's timers, on and off; a report; scores of many ranks; NVRx's section where it loads."""
    device = this_device(world.device)
    rows = []
    for is_on in (False, True):
        detector = StragglerDetector(
            rank=world.rank, device=device, torch_device=world.device, group=world.control, warn=print, enabled=is_on
        )
        timer = detector.timer("forward-compute")
        times = each_ns(pairs(timer), 200 if is_on else 1_000)
        rows.append(Row(f"straggler section, {'on' if is_on else 'off'}", "rsup", times, "ns"))
        reports_us = []
        for iteration in range(1, 42):
            for name in ("batch-generator", "forward-compute", "optimizer-inner-step"):
                pairs(detector.timer(name))(10)
            began_ns = time.perf_counter_ns()
            detector.report(iteration)
            reports_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        detector.close()
        rows.append(
            Row(f"straggler report, {'on' if is_on else 'off'}", f"rsup, {world.world_size} ranks", reports_us[1:], "us")
        )
    names = ("batch-generator", "forward-compute", "optimizer-inner-step", "step")
    ranks = [RankTimes(rank, f"GPU-{rank}", "n", {name: 0.01 + rank * 1e-6 for name in names}) for rank in range(1024)]
    scored = each_ns(calls(lambda: make_report(Interval(1, 100, 0.1), ranks)), 1, repeats=5)
    rows.append(Row("scores of 1,024 ranks", "rsup", [ns / 1e6 for ns in scored], "ms"))
    kernels = load_kernel_scores(world.device, device.node, print, profile_every=1)
    if kernels is not None:
        rows.append(Row("section, every one profiled by CUPTI", "NVRx", each_ns(pairs(kernels), 20), "ns"))
        kernels.close()
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2])
    else:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"{name}, torch {torch.__version__}, {time.strftime('%F')}")
        print_table(main(*sys.argv[1:]))
