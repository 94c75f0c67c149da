"""Gradient norms: what they read, in one process; under DDP and FSDP2 in three, whose checks are in `gradient_ranks.py`."""

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from rsup.worker.rerun import gradient_checks
from rsup.worker.rerun.gradient_checks import GradientChecks
from rsup.worker.rerun.gradient_norms import combined, local_norms

SCRIPT = Path(__file__).with_name("gradient_ranks.py")


def test_three_ranks_read_local_norms_and_reduce_as_before(runs) -> None:
    run = runs.start(3, script=SCRIPT)
    codes = run.finish()
    assert codes == [0, 0, 0], "\n".join(run.text(rank)[-3000:] for rank in range(3))
    functions = [node.name for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    expected = [f"holds: {name}" for name in functions if name.startswith("check_")]
    assert len(expected) == 7
    for rank in range(3):
        assert [line for line in run.text(rank).splitlines() if line.startswith("holds: ")] == expected


@pytest.mark.parametrize(
    ("numbers", "dtype", "norm"),
    [
        ([3.0, 4.0], torch.float32, 5.0),
        ([1e36] * 4, torch.float32, 2e36),
        ([3e38] * 4, torch.float32, 6e38),
        ([3e38] * 4, torch.bfloat16, 6e38),
        ([60000.0] * 4, torch.float16, 120000.0),
        ([1e200, 1.0], torch.float64, 1e200),
        ([1.0, math.inf], torch.float32, math.inf),
        ([1.0, -math.inf], torch.bfloat16, math.inf),
        ([], torch.float32, 0.0),
    ],
)
def test_finite_gradients_have_a_finite_norm_and_huge_ones_a_huge_one(
    numbers: list[float], dtype: torch.dtype, norm: float
) -> None:
    got = local_norms([torch.tensor(numbers, dtype=dtype), torch.ones(2)])
    assert got.dtype == torch.float64 and got[1] == pytest.approx(math.sqrt(2))
    assert float(got[0]) == pytest.approx(norm, rel=0.01)


def test_nan_wins_over_inf_and_sparse_and_complex_gradients_are_read() -> None:
    assert local_norms([torch.tensor([math.inf, math.nan])]).isnan().all()
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 5]]), torch.tensor([3.0, 4.0]), (9,), check_invariants=True)
    assert local_norms([sparse, torch.tensor([3 + 4j])]).tolist() == [5.0, 5.0]
    assert combined(torch.tensor([[3e300, 4e300], [0, 0], [math.inf, 1], [math.nan, math.inf]], dtype=torch.float64)).tolist()[
        :3
    ] == [
        pytest.approx(5e300),
        0.0,
        math.inf,
    ]


def model_of(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def test_one_process_reads_its_gradients_by_group_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_checks, "GROUP_BYTES", 600)
    model, other = model_of(8, 16, 4), model_of(2, 2)
    checks = GradientChecks()
    checks.attach(model)
    checks.attach(other)
    assert checks.names_a_rank and checks.take() == []
    model(torch.ones(3, 8)).sum().backward()
    other(torch.ones(1, 2)).sum().backward()
    taken = checks.take()
    assert [message for message, _ in taken] == [f"grad norm of bucket {number}" for number in range(3)]
    assert all(norm.shape == () and norm.dtype == torch.float64 for _, norm in taken)
    last = [p.grad for p in (*model[1].parameters(), model[0].bias) if p.grad is not None]
    assert float(taken[0][1]) == pytest.approx(float(torch.cat([grad.flatten() for grad in last]).norm()))
    assert model[0].weight.grad is not None
    assert float(taken[1][1]) == pytest.approx(float(model[0].weight.grad.norm()))


def test_under_a_loss_scale_an_overflow_is_no_value_and_the_norms_are_unscaled() -> None:
    """P41, and the seed: a NaN is a normal signal there; the scaler skips the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = model_of(4, 2)
    checks = GradientChecks(scaler)
    checks.attach(model)
    expected = model_of(4, 2)
    expected.load_state_dict(model.state_dict())
    expected(torch.ones(1, 4)).sum().backward()
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    [(_, norm)] = checks.take()
    plain = GradientChecks()
    plain.attach(expected)
    assert float(norm) == pytest.approx(float(plain.take()[0][1]))
    overflow = checks.take_overflow()
    assert overflow is not None and not overflow and checks.take_overflow() is None
    assert plain.take_overflow() is None
    scaler.scale(model(torch.full((1, 4), math.inf)).sum()).backward()
    [(_, norm)] = checks.take()
    overflow = checks.take_overflow()
    assert float(norm) == 0.0 and overflow is not None and bool(overflow)


def test_a_disabled_scaler_changes_nothing() -> None:
    checks = GradientChecks(torch.amp.GradScaler("cpu", enabled=False))
    model = model_of(2, 2)
    checks.attach(model)
    model(torch.full((1, 2), math.nan)).sum().backward()
    [(_, norm)] = checks.take()
    assert norm.isnan() and checks.take_overflow() is None
