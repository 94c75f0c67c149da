"""The training log on a GPU: no step waits, and each number belongs to its own iteration."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from rsup.worker.observe.contract import Point
from rsup.worker.observe.training_log import StepNumbers, TrainingLog, TrainingLogOptions

pytestmark = [pytest.mark.gpu(1), pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


class Kept:
    """A writer that keeps what it gets."""

    name = "kept"

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], float] = {}

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point], *, at_s: float | None = None) -> None:
        self.values |= {(iteration, point.key): point.value for point in points}

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def waiting_fails(allowed: bool) -> Iterator[None]:
    """An operation that waits for the GPU raises, unless it is allowed."""
    torch.cuda.set_sync_debug_mode("default" if allowed else "error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_no_step_waits_but_for_the_line_and_reused_memory_does_not_mix_iterations() -> None:
    kept = Kept()
    options = TrainingLogOptions(train_iters=99, log_interval=400, log_memory=True)
    log = TrainingLog(options, writers=[kept], say=lambda text: None, warn=pytest.fail)
    with torch.cuda.device(0):
        loss, pair = torch.zeros((), device="cuda"), torch.zeros(2, device="cuda")
        num_zeros = torch.full((), 16_777_216, device="cuda", dtype=torch.int64)
        for iteration in range(1, 301):  # more than a block of rows
            torch.cuda._sleep(100_000)
            loss.fill_(iteration)
            pair.fill_(iteration).mul_(1.0)
            num_zeros.add_(1)
            bf16 = loss.bfloat16()
            figures = {"grad_norm": bf16, "num_zeros": num_zeros if iteration % 2 else None}
            with waiting_fails(allowed=log.waits_at(iteration)):
                log.step(StepNumbers(iteration, iteration, {"lm loss": loss, "b": pair}, 0.1, 1, **figures))
            loss.zero_()
    log.close()
    for iteration in range(1, 301):
        assert kept.values[iteration, "lm loss"] == iteration and kept.values[iteration, "b"] == 1.0
        assert kept.values[iteration, "grad-norm"] == float(torch.tensor(float(iteration)).bfloat16())
        assert kept.values.get((iteration, "num-zeros")) == (16_777_216 + iteration if iteration % 2 else None)
        assert kept.values[iteration, "mem-allocated-bytes"] > 0
