"""Ranks whose training logs reduce together; run by `test_training_log_ranks.py`."""

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from rsup.worker.observe.contract import Point
from rsup.worker.observe.step_reduction import StepReduction
from rsup.worker.observe.training_log import StepNumbers, TrainingLog, TrainingLogOptions


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


def made(rank: int, lines: list[str], warnings: list[str], **options: Any) -> tuple[TrainingLog, Kept]:
    kept = Kept()
    writers = [kept] if rank == 0 else []
    chosen: dict[str, Any] = {"train_iters": 99} | options
    log = TrainingLog(TrainingLogOptions(**chosen), writers=writers, say=lines.append, warn=warnings.append)
    return log, kept


def scaled(loss: torch.Tensor, factor: float) -> torch.Tensor:
    return loss * torch.tensor([factor, 1.0]) if loss.ndim else loss * factor


def check_losses_are_reduced_in_one_collective_and_no_step_meets_the_others(rank: int, size: int) -> None:
    """Pitfalls 18 and 20. Rank 1 has a loss that the others have not, and rank 2 none at all."""
    lines, warnings = list[str](), list[str]()
    log, kept = made(rank, lines, warnings, log_interval=4)
    own: list[dict[str, torch.Tensor]] = [
        {"lm loss": torch.tensor([2.0, 4.0])},
        {"lm loss": torch.tensor([6.0, 4.0]), "aux": torch.tensor(0.5)},
        {},
    ]
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions,
        mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchanges,
        mock.patch.object(dist, "barrier", wraps=dist.barrier) as barriers,
    ):
        seen = []
        for iteration in range(1, 9):
            losses: dict[str, torch.Tensor | float] = {"late": float(rank)}
            if iteration < 6:
                losses = {name: scaled(loss, iteration) for name, loss in own[rank].items()}
            lr = 0.25 if rank == 2 else None
            norm = (1.0, float("nan"), None)[rank] if iteration == 4 else (1.0, 7.0, None)[rank]
            logit = None if rank == 2 else -7.0 + 4 * rank
            log.step(StepNumbers(iteration, 8 * iteration, losses, lr, 8, grad_norm=norm, max_attention_logit=logit))
            seen.append((reductions.call_count, exchanges.call_count, barriers.call_count))
        assert seen == [(2, 1, 0)] * 3 + [(4, 1, 0)] * 4 + [(6, 2, 0)], seen  # sums and maxima; names where they are new
        with log.paused():
            pass
        assert barriers.call_count == 2  # before it and behind it
    fields = [dict(part.split(": ", 1) for part in line.split(" | ")[1:-1]) for line in lines]
    assert [one.get("grad norm") for one in fields] == ["7.000", "nan", "7.000"]
    assert [one["learning rate"] for one in fields] == ["2.500000E-01"] * 3
    assert [one.get("lm loss") for one in fields] == ["1.000000E+00", "2.500000E+00", "5.000000E+00"]
    assert [one.get("late") for one in fields] == [None, None, "1.000000E+00"] and fields[1]["aux"] == "1.250000E+00"
    log.flush()
    if rank == 0:
        assert {i: kept.values[i, "lm loss"] for i in range(1, 6)} == {i: 1.0 * i for i in range(1, 6)}
        assert (6, "lm loss") not in kept.values and kept.values[7, "late"] == 1.0
        assert kept.values[3, "max_attention_logit"] == -3.0, "the greatest of those that have one"
        assert math.isnan(kept.values[4, "grad-norm"]) and kept.values[3, "grad-norm"] == 7.0
    assert sorted(text.partition(":")[0] for text in warnings) == [
        "no rank has the loss 'aux' in iteration 6",
        "no rank has the loss 'lm loss' in iteration 6",
    ]


def check_an_evaluation_divides_sums_of_all_ranks(rank: int, size: int) -> None:
    lines, warnings = list[str](), list[str]()
    log, kept = made(rank, lines, warnings)
    log.evaluation(6, 48, {"lm loss": (torch.tensor(float(rank)), 2.0)} if rank else {})
    assert lines == [" validation loss at iteration 6 | lm loss value: 7.500000E-01 | lm loss PPL: 2.117000E+00 |"]
    assert kept.values == ({(6, "lm loss validation"): 0.75} if rank == 0 else {})


def check_energy_counts_the_ranks_that_can_measure_it(rank: int, size: int) -> None:
    (_,), extra = StepReduction().steps([{}], [()], (12.0, 1.0) if rank else (0.0, 0.0))
    assert extra == (24.0, 2.0)


def check_bad_values_of_one_rank_keep_nobody_waiting(rank: int, size: int) -> None:
    lines, warnings = list[str](), list[str]()
    log, kept = made(rank, lines, warnings, log_interval=1, flops_per_step=lambda samples: None if rank == 1 else 1e9)
    log.on_point.append(lambda point: 1 / (rank - 1))  # type: ignore[arg-type, func-returns-value]
    for iteration in (1, 2):
        bad: Any = torch.ones(3) if rank == 1 else float(rank)
        losses: Any = {"lm loss": "x"} if rank == 1 else {"lm loss": (2.0, 1.0)}
        log.step(StepNumbers(iteration, iteration, losses, bad, 1, grad_norm=bad))
        log.evaluation(iteration, iteration, None if rank == 1 else losses)  # type: ignore[arg-type]
    log.flush()
    if rank == 0:
        assert {key: kept.values[2, key] for key in ("lm loss", "grad-norm", "learning-rate", "lm loss validation")} == {
            "lm loss": 2.0,
            "grad-norm": 2.0,
            "learning-rate": 2.0,
            "lm loss validation": 2.0,
        }
    assert len(warnings) == (6 if rank == 1 else 0), warnings


def check_dtensors_are_read_where_every_rank_has_the_number(rank: int, size: int) -> None:
    """As FSDP2's gradient norm. One in parts would take a collective, which a step has none of."""
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)), mesh=mesh)
    loss = model(torch.full((2, 6), rank + 1.0)).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    whole = norm.full_tensor().item()
    alike = DTensor.from_local(torch.tensor([8.0, 4.0]), mesh, [Replicate()], run_check=False)
    parts = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()], run_check=False)
    lines, warnings = list[str](), list[str]()
    log, kept = made(rank, lines, warnings, log_interval=2)
    with (
        mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError),
        mock.patch.object(DTensor, "redistribute") as moved,
    ):
        for iteration in (1, 2):
            losses = {"lm loss": loss, "alike": alike, "parts": parts}
            log.step(StepNumbers(iteration, iteration, losses, 0.1, 1, grad_norm=norm, params_norm=parts))
        assert not moved.called
    log.flush()
    if rank == 0:
        assert math.isclose(kept.values[2, "grad-norm"], whole, rel_tol=1e-6) and kept.values[2, "alike"] == 2.0
        assert "params-norm" not in {key for _, key in kept.values} and (2, "parts") not in kept.values
    why = "is not logged: it is a DTensor in parts: hand in its full_tensor(), of all ranks"
    assert warnings == [f"the params norm {why}", f"the loss 'parts' {why}"]


def check_closing_waits_for_nobody(rank: int, size: int) -> None:
    """Pitfall 24: after an exception the other ranks may be gone."""
    lines, warnings = list[str](), list[str]()
    log, kept = made(rank, lines, warnings, log_interval=3)
    for iteration in (1, 2):
        log.step(StepNumbers(iteration, iteration, {"lm loss": 2.0 - rank / 2}, 0.1, 1))
    if rank == 0:
        log.close()
        assert [kept.values[i, "lm loss"] for i in (1, 2)] == [1.5, 2.0], "of all ranks, and of this one"
        assert kept.values[2, "learning-rate"] == 0.1
        assert warnings == ["iterations 2 to 2 are written with the losses of this rank alone: the ranks did not end together"]


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(rank, size)
            print(f"holds: {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
