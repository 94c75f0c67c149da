"""The optimizer's state away and back: bitwise the same training, shared memory shared again, buffers used again."""

import copy
from typing import Any

import pytest
import torch

from rsup.worker.optimizer_offload import OptimizerOffload
from rsup.worker.unused_memory import empty_unused_memory, make_room_for_save


def everything(tensor: torch.Tensor) -> bool:
    """On a machine without a GPU all state stands for what is on one."""
    return True


def trained(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = torch.nn.Linear(5, 3)
    optimizer = kind(module.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    for _ in range(2):
        step(module, optimizer)
    return module, optimizer


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}), (torch.optim.LBFGS, {})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_training_goes_on_as_if_nothing_had_moved(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    if kind is torch.optim.LBFGS:  # state in lists, and a closure for a step
        module = torch.nn.Linear(5, 3)
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(module.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(2, 5)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        module, optimizer = trained(kind, **options)
    before = copy.deepcopy(optimizer.state_dict())
    offload = OptimizerOffload(optimizer, is_away=everything)
    moved = offload.offload_to_cpu()
    assert moved > 0 and offload.is_offloaded and offload.offload_to_cpu() == 0
    assert offload.restore_from_cpu() == moved and not offload.is_offloaded and offload.restore_from_cpu() == 0
    assert repr(optimizer.state_dict()) == repr(before)
    if kind is not torch.optim.LBFGS:
        other, untouched = trained(kind, **options)
        step(module, optimizer)
        step(other, untouched)
        assert torch.equal(module.weight, other.weight)


def test_shared_memory_is_shared_again_and_step_counters_stay() -> None:
    module, optimizer = trained(torch.optim.AdamW)
    state = optimizer.state[module.weight]
    flat = torch.arange(30.0)
    state["exp_avg"], state["exp_avg_sq"] = flat[:15].view(3, 5), flat[15:].view(5, 3).t()
    state["again"] = state["exp_avg"]
    counter, address = state["step"], flat.data_ptr()
    offload = OptimizerOffload(optimizer, is_away=everything)
    offload.offload_to_cpu()
    away = state["exp_avg"]
    assert away.data_ptr() != address and state["step"] is counter
    assert away.untyped_storage().data_ptr() == state["exp_avg_sq"].untyped_storage().data_ptr()
    offload.restore_from_cpu()
    assert state["exp_avg_sq"].stride() == (1, 3) and state["exp_avg"].tolist()[0] == [0, 1, 2, 3, 4]
    state["exp_avg"].zero_()
    assert state["again"].abs().sum() == 0 and state["exp_avg_sq"].data_ptr() == state["exp_avg"].data_ptr() + 15 * 4
    first = away.data_ptr()
    offload.offload_to_cpu()
    assert state["exp_avg"].data_ptr() == first  # the same buffer
    offload.restore_from_cpu()


def test_graphs_are_invalidated_before_anything_moves_either_way() -> None:
    module, optimizer = trained(torch.optim.SGD, momentum=0.9)
    seen = []
    offload = OptimizerOffload(optimizer, is_away=everything)
    offload.invalidate.append(lambda: seen.append(optimizer.state[module.weight]["momentum_buffer"].data_ptr()))
    here = optimizer.state[module.weight]["momentum_buffer"].data_ptr()
    away = 0
    with pytest.raises(RuntimeError, match="in the evaluation"), offload.away():
        away = optimizer.state[module.weight]["momentum_buffer"].data_ptr()
        raise RuntimeError("in the evaluation")
    assert seen == [here, away] and not offload.is_offloaded


def test_without_a_gpu_nothing_moves_and_no_graph_is_lost() -> None:
    _, optimizer = trained(torch.optim.AdamW)
    offload = OptimizerOffload(optimizer, [lambda: pytest.fail("nothing moves")])
    assert offload.offload_to_cpu() == 0 and not offload.is_offloaded


def test_levels_of_emptying_unused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for level in (0, 1, 2):
        for place in (1, 2):
            empty_unused_memory(level, place, cuda)
            empty_unused_memory(level, place, cpu)
    assert len(calls) == 3
    module = torch.nn.Linear(1, 1)
    module.free_overlap_buffers = lambda: calls.append("freed")  # type: ignore[assignment]
    make_room_for_save(module, cpu)
    make_room_for_save(module, cuda)
    assert calls[3:] == ["freed", "freed", "emptied"]
