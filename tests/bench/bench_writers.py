"""What a step costs to write: `python -m tests.bench.bench_writers`. A step has 10 values, 6 of them over samples, too.

`training thread`: until the call returns. `all threads`: CPU of the process until it is in the file. Peer: torch's
`SummaryWriter`, called as Megatron-LM calls it (`add_scalar` for each value), with a queue in which it never waits.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.utils.tensorboard as torch_tensorboard

from rsup.worker.observe.contract import Point
from rsup.worker.observe.end_to_end import EndToEnd
from rsup.worker.observe.end_to_end_facts import Counters, RunFacts
from rsup.worker.observe.writers import WriterOptions, make_writers
from rsup.worker.observe.writers.supervisor import SupervisorWriter
from tests.bench.table import Row, print_table

NUM_STEPS = 2000
REPEATS = 7
TRAINING = ("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "num-zeros")
MEMORY = ("mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes", "mem-allocated-count")
POINTS = [Point(key, 1.5, True) for key in TRAINING] + [Point(key, 3e9) for key in MEMORY]


def main() -> list[Row]:
    """Run it; the rows of the table."""
    goal = "with log and event timers <= 70 us"
    ours, ours_all = zip(*(_ours() for _ in range(REPEATS)), strict=True)
    peers, peers_all = zip(*(_torch() for _ in range(REPEATS)), strict=True)
    return [
        Row("TensorBoard, a step, training thread", "rsup", ours, "us", goal),
        Row("TensorBoard, a step, training thread", "torch SummaryWriter", peers, "us"),
        Row("TensorBoard, a step, all threads", "rsup", ours_all, "us"),
        Row("TensorBoard, a step, all threads", "torch SummaryWriter", peers_all, "us"),
        Row("supervisor's writer, a step outside rsup launch", "rsup", [_each_us(_supervisor()) for _ in range(REPEATS)], "us"),
        Row("end to end, a step without one-logger", "rsup", [_each_us(_record().stepped) for _ in range(REPEATS)], "us"),
        Row("end to end, a log point", "rsup", [_each_us(_log_point()) for _ in range(REPEATS)], "us"),
    ]


def _ours() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        options = WriterOptions(tensorboard_dir=Path(folder), tensorboard_queue_size=NUM_STEPS * 2)
        made = make_writers(options, warn=print, run_name="", config={}, resumed_at=0)
        writer = next(writer for writer in made if not isinstance(writer, SupervisorWriter))
        writer.write(1, 8, POINTS)
        writer.flush()
        return _timed(lambda at: writer.write(at, at * 8, POINTS), writer.close)


def _torch() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        writer = torch_tensorboard.SummaryWriter(folder, max_queue=NUM_STEPS * 32)

        def write(iteration: int) -> None:
            for point in POINTS:
                writer.add_scalar(point.key, point.value, iteration)
                if point.vs_samples:
                    writer.add_scalar(f"{point.key} vs samples", point.value, iteration * 8)

        write(1)
        return _timed(write, writer.close)


def _timed(write: Callable[[int], None], close: Callable[[], object]) -> tuple[float, float]:
    """Microseconds a step: until the calls have returned, and of all threads until it is closed."""
    cpu_s, began_s = time.process_time(), time.perf_counter()
    for iteration in range(2, NUM_STEPS + 2):
        write(iteration)
    took_s = time.perf_counter() - began_s
    close()
    return took_s / NUM_STEPS * 1e6, (time.process_time() - cpu_s) / NUM_STEPS * 1e6


def _supervisor() -> Callable[[], object]:
    writer = SupervisorWriter()
    return lambda: writer.write(1, 8, POINTS)


def _record() -> EndToEnd:
    facts = RunFacts(world_size=8, global_batch_size=8, micro_batch_size=1, seq_length=128, train_iterations_target=10)
    record = EndToEnd(facts, app_started_s=0.0, counters=lambda: Counters(5, 40, 1.0))
    record.train_started()
    return record


def _log_point() -> Callable[[], object]:
    record = _record()
    return lambda: (record.logged(), record.metrics(1.0))  # type: ignore[func-returns-value]


def _each_us(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(20):
        began_s = time.perf_counter()
        for _ in range(100):
            call()
        samples.append((time.perf_counter() - began_s) / 100 * 1e6)
    return statistics.median(samples)


if __name__ == "__main__":
    print_table(main())
