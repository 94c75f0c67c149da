"""Faults injected into a graph change the same numbers, in the same passes, as those injected without one."""

import pytest
import torch
from torch import nn

from rsup.supervisor.wire import UsageError
from rsup.worker.corruption import Corruption, MemoryMarks
from rsup.worker.cuda_graph.graph_corruption import GraphCorruption
from rsup.worker.faults import parse_any_fault

NUM_MICROBATCHES = 3
Numbers = list[list[float]]


def make_module() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 1))


def micro_batches(iteration: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(iteration)
    return [{"x": torch.randn(2, 4, generator=generator)} for _ in range(NUM_MICROBATCHES)]


def without_graph(faults: list[str], passes: list[int], said: list[str]) -> Numbers:
    """Losses, gradients and parameters of each pass; iterations by pass."""
    module = make_module()
    corruption = Corruption([parse_any_fault(fault) for fault in faults], 0, "GPU-a", MemoryMarks(), module, said.append)
    found = []
    for iteration in passes:
        module.zero_grad()
        corruption.begin_pass(iteration)
        losses = []
        for batch in micro_batches(iteration):
            corruption.takes(batch)
            loss = module(batch["x"]).square().mean()
            corruption.damage_loss(loss)
            losses.append(float(loss.detach()))
            loss.backward()
        found.append(losses + numbers_of(module))
    return found


def in_graph(faults: list[str], passes: list[int], said: list[str]) -> Numbers:
    module = make_module()
    parsed = [parse_any_fault(fault) for fault in faults]
    corruption = GraphCorruption(parsed, 0, "GPU-a", MemoryMarks(), module, NUM_MICROBATCHES, torch.device("cpu"), said.append)
    found = []
    for iteration in passes:
        module.zero_grad()
        batches = micro_batches(iteration)
        corruption.before_pass(iteration, batches)
        losses = []
        for number, batch in enumerate(batches):
            corruption.computes(number)
            loss = module(batch["x"]).square().mean()
            corruption.damage_loss(loss)
            losses.append(float(loss.detach()))
            loss.backward()
        found.append(losses + numbers_of(module))
    return found


def numbers_of(module: nn.Module) -> list[float]:
    found: list[float] = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        found += parameter.grad.view(-1).tolist() + parameter.detach().view(-1).tolist()
    return found


@pytest.mark.parametrize(
    "fault",
    [
        "rank=0,iteration=2,kind=nan,site=loss",
        "rank=0,iteration=2,kind=inf,site=grad",
        "rank=0,iteration=2,kind=bitflip,bit=31,site=grad,param=0.weight",
        "rank=0,iteration=2,kind=bitflip,bit=22,site=param,param=2.weight",
        "rank=0,iteration=2,kind=scale,factor=-1.5,site=grad,param=2.weight,element=3,repeat",
        "device=GPU-a,kind=scale,site=loss,when=1/2",
        "device=GPU-a,kind=bitflip,site=grad,from=2,until=2",
    ],
)
def test_the_same_numbers_change(fault: str) -> None:
    passes = [1, 2, 2, 3]
    said: list[list[str]] = [[], []]
    expected, found = without_graph([fault], passes, said[0]), in_graph([fault], passes, said[1])
    assert repr(found) == repr(expected)  # NaN is equal to itself here
    assert said[0] == said[1] == [f"rank 0: injected fault: {parse_any_fault(fault)}"]
    assert repr(found) != repr(in_graph([], passes, []))


def test_others_faults_add_nothing() -> None:
    module = make_module()
    others = [parse_any_fault(f) for f in ("rank=1,iteration=2,kind=nan,site=grad", "device=GPU-b,kind=nan,site=loss")]
    corruption = GraphCorruption(others, 0, "GPU-a", MemoryMarks(), module, 2, torch.device("cpu"))
    loss = torch.ones(())
    corruption.damage_loss(loss)
    assert corruption.is_armed and float(loss) == 1.0
    assert not any(parameter._backward_hooks for parameter in module.parameters())


def test_an_element_that_is_not_there_is_refused_before_training() -> None:
    fault = parse_any_fault("rank=0,iteration=2,kind=nan,site=grad,param=0.bias,element=5")
    with pytest.raises(UsageError, match="no element 5 among 5"):
        GraphCorruption([fault], 0, "GPU-a", MemoryMarks(), make_module(), 1, torch.device("cpu"))
