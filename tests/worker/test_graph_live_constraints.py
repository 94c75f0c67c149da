"""What only live objects show is refused too: modules, hooks, optimizers, and the very call that reads from the device."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from rsup.worker.cuda_graph.constraints import check_module, check_step
from rsup.worker.cuda_graph.contract import ConstraintError

torch = pytest.importorskip("torch")
nn = torch.nn
META = torch.device("meta")
"""Stands for a GPU: tensors of another device than the CPU."""


def adamw(module: Any, **options: Any) -> Any:
    device = next(module.parameters()).device
    lr = options.pop("lr", torch.zeros((), device=device))
    optimizer = torch.optim.AdamW(module.parameters(), **{"fused": True, "capturable": True, **options})
    optimizer.param_groups[0]["lr"] = lr  # a meta tensor has no value that the constructor could check
    return optimizer


def on_meta() -> Any:
    return nn.Linear(3, 2, device=META)


def hooked(hook: Callable[..., None]) -> Any:
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].register_forward_hook(hook)
    return module


def writes_out(*values: Any) -> None:
    """A hook such as those that dump activations."""


def on_two_devices() -> Any:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device=META))


def with_post_accumulate_hook() -> Any:
    module = nn.Linear(3, 2)
    module.weight.register_post_accumulate_grad_hook(writes_out)
    return module


LiveCase = tuple[Callable[[], Any], Callable[[Any], Any], dict[str, Any], str, str]
LIVE_CASES: list[LiveCase] = [
    (
        on_two_devices,
        lambda m: None,
        {},
        "0.weight on cpu, 1.weight on meta: parameters on several devices",
        "move the module to one device",
    ),
    (
        lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None)),
        lambda m: None,
        {},
        "0: batch normalisation with momentum=None",
        "give it a momentum",
    ),
    (lambda: hooked(writes_out), lambda m: None, {}, "forward hook of 0 (", "call such steps with eager=True"),
    (
        lambda: hooked(functools.partial(writes_out, 1)),
        lambda m: None,
        {},
        "test_graph_live_constraints.writes_out)",
        "allowed_hooks",
    ),
    (with_post_accumulate_hook, lambda m: None, {}, "gradient hook of weight (", "allowed_hooks"),
    (
        on_meta,
        lambda m: None,
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        "the allocator: expandable_segments",
        "NCCL_GRAPH_REGISTER=0",
    ),
    (on_meta, lambda m: None, {"scaler": torch.amp.GradScaler("cpu")}, "GradScaler: an enabled GradScaler", "use bfloat16"),
    (
        on_meta,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {},
        "SGD: an optimizer that cannot be gated",
        "fused=True, or give it a gated_step",
    ),
    (
        on_meta,
        lambda m: adamw(m, lr=0.1),
        {},
        "AdamW, parameter group 0: a learning rate that is a plain number",
        "prepare_optimizer_for_graph",
    ),
    (
        on_meta,
        lambda m: adamw(m, lr=torch.zeros(())),
        {},
        "AdamW, parameter group 0: a learning rate",
        "set it by set_lr or fill_",
    ),
    (
        on_meta,
        lambda m: adamw(m, capturable=False),
        {},
        "AdamW, parameter group 0: capturable=False",
        "prepare_optimizer_for_graph",
    ),
    (
        on_meta,
        lambda m: adamw(m, fused=False),
        {},
        "AdamW, parameter group 0: an optimizer without fused=True",
        "make it with fused=True",
    ),
]


@pytest.mark.parametrize("case", LIVE_CASES, ids=lambda case: case[3])
def test_live_objects_that_do_not_go_are_named_with_a_remedy(case: LiveCase) -> None:
    make, optimizer, options, beginning, remedy = case
    module = make()
    with pytest.raises(ConstraintError) as raised:
        check_module(module, optimizer(module), **{"environment": {}, **options})
    text = str(raised.value)
    assert beginning in text and remedy in text.rpartition("; ")[2] and "\n" not in text


def test_live_objects_that_go() -> None:
    for module in (on_meta(), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.1))):
        check_module(module, adamw(module, capturable=module.__class__ is nn.Linear), environment={})
    torch.nn.utils.parametrizations.spectral_norm(module[0])  # torch's own hooks
    check_module(module, environment={}, scaler=torch.amp.GradScaler("cpu", enabled=False))
    check_module(hooked(writes_out), allowed_hooks=["*.writes_out"], environment={})
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    check_module(nn.Linear(3, 2), environment=environment)  # on the CPU nothing is captured
    check_module(on_meta(), environment={**environment, "NCCL_GRAPH_REGISTER": "0"})


def test_an_optimizer_with_a_gate_of_its_own_is_taken() -> None:
    class Gated(torch.optim.SGD):  # type: ignore[misc, name-defined]
        def gated_step(self, gate: Any) -> None: ...

    module = on_meta()
    check_module(module, Gated(module.parameters(), lr=0.1), environment={})


def test_optimizer_state_that_is_away_is_named() -> None:
    module = on_meta()
    optimizer = adamw(module)
    optimizer.state[module.weight]["exp_avg"] = torch.zeros(2, 3)
    with pytest.raises(
        ConstraintError, match=r"parameter group 0, exp_avg: optimizer state on another device .*restore_from_cpu"
    ):
        check_module(module, optimizer, environment={})


def test_anomaly_detection_is_refused() -> None:
    with torch.autograd.set_detect_anomaly(True), pytest.raises(ConstraintError, match=r"set_detect_anomaly .*switch it off"):
        check_module(nn.Linear(3, 2), environment={})


def test_wrappers_that_communicate_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = object.__new__(DistributedDataParallel)  # one that joined no group: only what it was told counts
    nn.Module.__init__(wrapped)
    wrapped.module, wrapped.static_graph, wrapped.find_unused_parameters = on_meta(), False, True
    with pytest.raises(ConstraintError, match=r"DDP\(find_unused_parameters=True\) .*use False, or static_graph=True"):
        check_module(wrapped, environment={}, warmup_steps=11)
    wrapped.find_unused_parameters = False
    with pytest.raises(ConstraintError, match=r"3 warm-up steps: .*use cuda_graph_warmup_steps 11 or more, or GradientGroups"):
        check_module(wrapped, environment={}, warmup_steps=3)
    check_module(wrapped, environment={}, warmup_steps=11)

    class Sharded(torch.distributed.fsdp.FSDPModule, nn.Linear):  # type: ignore[misc, name-defined]
        def __new__(cls, *arguments: Any) -> Any:
            return object.__new__(cls)

    with pytest.raises(ConstraintError, match=r"^0: sharded parameters \(FSDP\) .*use DDP or GradientGroups"):
        check_module(nn.Sequential(Sharded(3, 2)), environment={})


# ---------------------------------------------------------------------------------------------------------------- the step


def item(x: Any) -> Any:
    return x * x.sum().item()


def branch(x: Any) -> Any:
    return x if x.sum() > 0 else -x


def nonzero(x: Any) -> Any:
    return x[x > 0].sum()


def masked_write(x: Any) -> Any:
    y = x.clone()
    y[y >= 0] = x[:2]
    return y


def in_backward(x: Any) -> Any:
    weight = torch.ones((), requires_grad=True)
    weight.register_hook(lambda gradient: gradient * gradient.item())
    (weight * x.sum()).backward()
    return weight.grad


@pytest.mark.parametrize("step", [item, branch, nonzero, masked_write, in_backward], ids=lambda step: step.__name__)
def test_a_read_of_the_device_in_a_step_is_named_with_its_line(step: Callable[[Any], Any]) -> None:
    with pytest.raises(ConstraintError) as raised:
        check_step(lambda batches: step(batches[0][0]), [[torch.arange(3.0) - 1]])
    first = step.__code__.co_firstlineno
    found = re.search(r"^aten\.\w+ in (\S+):(\d+): a read of the device inside of the step", str(raised.value))
    assert found is not None, str(raised.value)
    assert found[1] == __file__ and first < int(found[2]) <= first + 3
    assert "keep it on the device" in str(raised.value) and "\n" not in str(raised.value)


def test_a_step_that_can_be_captured_runs_once_and_gives_its_result() -> None:
    runs = []

    def step(batches: Any) -> Any:
        runs.append(1)
        x = batches[0][0]
        y = torch.where(x > 0, x, -x).clone()
        y[y > 1] = 0.0  # a fill
        weight = torch.ones((), requires_grad=True)
        (weight * y.sum()).backward()
        return weight.grad

    assert float(check_step(step, [[torch.arange(3.0) - 1]])) == 2.0 and runs == [1]
    host = torch.ones(3)
    check_step(lambda batches: host.sum().item(), [[torch.ones(3, device=META)]])  # a host tensor may be read
    with pytest.raises(ConstraintError, match=r"aten\._to_copy in .*"):
        check_step(lambda batches: batches[0][0] + host.to(META), [[torch.ones(3, device=META)]])
