"""Ranks that reduce static gradient storage and close their gates together; run by `test_graph_gradients.py`."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.cuda_graph.contract import Code, GraphError, Verdict
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.optimizer_graph import OptimizerGraph
from rsup.worker.deterministic import rank_order_hook
from rsup.worker.rerun.contract import RerunConfig
from rsup.worker.rerun.gradient_checks import GradientChecks

CPU = torch.device("cpu")


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def batch_of(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(1000 * number + rank))


def same_everywhere(tensor: torch.Tensor, size: int) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(one, tensor) for one in everyone)


def check_gradients_are_ddps_mean_and_norms_are_local(rank: int, size: int) -> None:
    """The same to the last digit, in which the order of three summands shows; and the same on all ranks, to the bit."""
    ddp = DistributedDataParallel(make_model())
    checks = GradientChecks()
    checks.attach(ddp)
    plain = make_model()
    for measures_reduced in (False, True):
        groups = GradientGroups(list(plain.parameters()), dist.group.WORLD, measures_reduced=measures_reduced)
        for number in range(2):
            ddp.zero_grad()
            groups.zero_()
            ddp(batch_of(rank, number)).square().sum().backward()
            loss = plain(batch_of(rank, number)).square().sum()
            norms: list[float] = []
            if number == 0:
                loss.backward()
                groups.reduce(lambda _, norm, norms=norms: norms.append(float(norm)))  # type: ignore[misc]
            else:
                with groups.reducing(lambda _, norm, norms=norms: norms.append(float(norm))):  # type: ignore[misc]
                    loss.backward()
            for ours, theirs in zip(plain.parameters(), ddp.parameters(), strict=True):
                assert ours.grad is not None and theirs.grad is not None
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)
            flat = torch.cat([parameter.grad.flatten() for parameter in plain.parameters() if parameter.grad is not None])
            assert same_everywhere(flat, size)
            ((_, local),) = checks.take_numbers()
            assert math.isclose(norms[0], float(local), rel_tol=1e-6)
            total = groups.total_norm()
            if measures_reduced:
                expected = nn.utils.get_total_norm(
                    [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
                )
                assert total is not None and math.isclose(float(total), float(expected), rel_tol=1e-6)
            else:
                assert total is None


def check_gradients_in_rank_order_have_the_bits_of_the_hook(rank: int, size: int) -> None:
    ddp, plain = DistributedDataParallel(make_model()), make_model()
    ddp.register_comm_hook(None, rank_order_hook)
    groups = GradientGroups(list(plain.parameters()), group_bytes=64, measures_reduced=True, in_rank_order=True)
    for number in range(2):
        ddp.zero_grad()
        groups.zero_()
        ddp(batch_of(rank, number)).square().sum().backward()
        with groups.reducing(None):
            plain(batch_of(rank, number)).square().sum().backward()
        for ours, theirs in zip(plain.parameters(), ddp.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    total, grads = groups.total_norm(), [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    assert total is not None and math.isclose(float(total), float(nn.utils.get_total_norm(grads)), rel_tol=1e-6)


def check_a_fault_on_one_rank_closes_all_gates_and_names_that_rank(rank: int, size: int) -> None:
    model = make_model()
    groups = GradientGroups(list(model.parameters()), group_bytes=64)
    checks = DeviceChecks(1, groups.num_groups, CPU, config=RerunConfig())
    update = OptimizerGraph(
        torch.optim.AdamW(model.parameters(), fused=True), CPU, gate=checks.gate, max_norm=1.0, gradients=groups
    )

    def step(number: int, factor: float) -> Verdict:
        checks.begin()
        groups.zero_()
        loss = model(batch_of(rank, number)).square().sum()
        checks.loss(0, loss)
        (loss * factor).backward()
        groups.reduce(checks.norm)
        checks.judge()
        update.step()
        return DeviceChecks.parse(checks.result.tolist())

    def state() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    for bad, code in ((math.nan, Code.NAN), (1e25, Code.INF)):
        assert step(0, 1.0).agreed is Code.CLEAN
        before = state().clone()
        verdict = step(1, bad if rank == 1 else 1.0)
        assert verdict.code is (code if rank == 1 else Code.CLEAN) and verdict.agreed is code, verdict
        assert step(2, 1.0).agreed is Code.CLEAN and float(checks.gate) == 1.0
        assert torch.equal(state(), before)
        checks.open_gate()
        step(3, 1.0)
        assert not torch.equal(state(), before)
        assert same_everywhere(state(), size)


def check_reductions_begin_in_the_backward_and_in_order(rank: int, size: int) -> None:
    """Also where the last group is complete first, where one has an unused parameter, and where the backward fails."""
    first, unused, last = (nn.Parameter(torch.full((4,), float(number))) for number in range(3))
    groups = GradientGroups([first, unused, last], group_bytes=16)
    norms: list[float] = []
    with groups.reducing(lambda _, norm: norms.append(float(norm))):
        (first * last).sum().mul(float(rank)).backward()
        assert groups._pass is not None
        assert groups._pass.num_started == 1, (
            "the last parameter's group; that of the unused one comes next, and is not complete"
        )
    assert norms == [0.0, 0.0, rank * 4.0]
    assert first.grad is not None and torch.equal(first.grad, torch.full((4,), 2.0 * sum(range(size)) / size))
    try:
        with groups.reducing(lambda _, norm: None):
            last.sum().backward()
            last.sum().backward()
    except GraphError as error:
        assert "a second backward runs inside reducing()" in str(error)
    else:
        raise AssertionError("gradients on their way were added to")
    last.sum().backward()  # outside it may be run again


def check_sharded_parameters_are_refused(rank: int, size: int) -> None:
    mesh = DeviceMesh("cpu", list(range(size)))
    weight = nn.Parameter(distribute_tensor(torch.ones(6), mesh))
    try:
        GradientGroups([weight], names=["weight"])
    except GraphError as error:
        assert "weight is sharded" in str(error)
    else:
        raise AssertionError("a DTensor has no flat place")


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in CHECKS:
        one(dist.get_rank(), dist.get_world_size())
        print(f"holds: {one.__name__}", flush=True)
    dist.destroy_process_group()
