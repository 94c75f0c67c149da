"""Static gradient storage: where gradients lie, what is measured, and that they stay. With ranks: `gate_ranks.py`."""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.rerun import gradient_checks

SCRIPT = Path(__file__).with_name("gate_ranks.py")


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def norms_of(groups: GradientGroups) -> list[float]:
    found: dict[int, torch.Tensor] = {}
    groups.reduce(lambda number, norm: found.update({number: norm}))
    assert list(found) == list(range(groups.num_groups))
    assert all(norm.shape == () and norm.dtype == torch.float32 for norm in found.values())
    return [float(norm) for norm in found.values()]


def test_three_ranks_reduce_measure_and_agree(runs: Any) -> None:
    run = runs.start(3, script=SCRIPT)
    codes = run.finish()
    assert codes == [0, 0, 0], "\n".join(run.text(rank)[-3000:] for rank in range(3))
    functions = [node.name for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    expected = [f"holds: {name}" for name in functions if name.startswith("check_")]
    assert len(expected) == 5
    for rank in range(3):
        assert [line for line in run.text(rank).splitlines() if line.startswith("holds: ")] == expected


def test_groups_are_those_of_the_rerun_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    some = parameters((3, 5), (7,), (100,), (1,), (2, 2), (50,))
    some[1].requires_grad_(False)
    for limit in (1, 60, 64, 200, 500, 10_000):
        monkeypatch.setattr(gradient_checks, "GROUP_BYTES", limit)
        machines = gradient_checks._ParameterNorms(some)._groups
        ours = GradientGroups(some, group_bytes=limit)
        assert ours.num_groups == len(machines)
        assert ours._trained == [[place for place in group if some[place].requires_grad] for group in machines]
    assert list(gradient_checks.groups_of(some, 64)) == [[5], [4, 3], [2], [1], [0]]


def test_backward_accumulates_in_place_and_zero_keeps_the_memory() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain.load_state_dict(model.state_dict())
    groups = GradientGroups(list(model.parameters()), group_bytes=100)
    assert groups.num_groups == 3 and len(groups.storages) == 1
    for _ in range(2):
        plain.zero_grad()
        groups.zero_()
        for batch in torch.randn(2, 4, 5):
            for one in (model, plain):
                one(batch).square().sum().backward()
        assert groups.check_in_place() == ""
        grads = [(ours.grad, theirs.grad) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)]
        assert all(torch.equal(a, b) for a, b in grads if a is not None and b is not None)
        assert norms_of(groups) == pytest.approx(norms_of(_storage_of(plain)))
    assert all(grad is not None and grad.data_ptr() % 16 == 0 for grad, _ in grads)
    total, expected = groups.total_norm(), nn.utils.get_total_norm([grad for _, grad in grads if grad is not None])
    assert total is not None and float(total) == pytest.approx(float(expected))


def _storage_of(plain: nn.Module) -> GradientGroups:
    """Storage for a model with gradients of its own, which are kept."""
    kept = [parameter.grad for parameter in plain.parameters()]
    groups = GradientGroups(list(plain.parameters()), group_bytes=100)
    for parameter, grad in zip(plain.parameters(), kept, strict=True):
        assert grad is not None and parameter.grad is not None
        parameter.grad.copy_(grad)
    return groups


def _drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


def _replace(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


@pytest.mark.parametrize("leave", [_drop, _replace])
def test_a_gradient_that_left_is_named_until_it_is_attached_again(leave: Callable[[nn.Parameter], None]) -> None:
    some = parameters((4, 3), (2,))
    groups = GradientGroups(some)
    assert groups.check_in_place() == ""
    leave(some[1])
    assert groups.check_in_place() == "parameter 1 of shape (2,)"
    groups.attach()
    assert groups.check_in_place() == ""
    named = GradientGroups(some, names=["weight", "bias"])
    leave(some[0])
    assert named.check_in_place() == "weight"


def test_layouts_dtypes_frozen_and_scalar_parameters() -> None:
    image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    frozen, scalar = nn.Parameter(torch.ones(600), requires_grad=False), nn.Parameter(torch.tensor(2.0))
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    turned = nn.Parameter(torch.randn(4, 6).t())
    some = [image, frozen, scalar, half, turned]
    groups = GradientGroups(some, group_bytes=700)
    assert groups.num_groups == 3 and frozen.grad is None and len(groups.storages) == 2
    for parameter in (image, turned, scalar):
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
    (image.square().sum() + scalar * 3 + (half * 2).sum() + turned.sum()).backward()  # type: ignore[no-untyped-call]
    together = math.sqrt(24 + 3 * 4 + 9)
    assert norms_of(groups) == pytest.approx([together, 0.0, float(2 * image.detach().norm())])


@pytest.mark.parametrize(("number", "norm"), [(1e36, 2e36), (math.nan, math.nan), (math.inf, math.inf), (3e-30, 6e-30)])
def test_norms_of_huge_and_tiny_gradients_are_finite_and_bad_ones_show(number: float, norm: float) -> None:
    (weight,) = parameters((4,))
    groups = GradientGroups([weight])
    assert groups.total_norm() is None, "nothing was measured yet"
    assert weight.grad is not None
    weight.grad.fill_(number)
    assert norms_of(groups) == pytest.approx([norm], nan_ok=True)


def test_what_has_no_flat_place_is_refused() -> None:
    some: list[Any] = parameters((2,), (3,))
    for parameter in some:
        parameter.requires_grad_(False)
    with pytest.raises(GraphError, match="nothing to train"):
        GradientGroups(some)
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(
        GraphError, match=r"parameter 1 of shape .* is on meta, others on cpu: .* make a GradientGroups for each"
    ):
        GradientGroups(mixed)
