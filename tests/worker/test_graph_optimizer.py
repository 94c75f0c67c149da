"""The gated optimizer step: a closed gate changes no bit, an open one gives what torch gives, and nothing is ignored silently.

Without CUDA a "graph" calls the step again; with it these tests replay one.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from rsup.worker.cuda_graph import lifecycle
from rsup.worker.cuda_graph.contract import Code, GraphError
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.optimizer_graph import GatedOptimizer, OptimizerGraph, prepare_optimizer_for_graph
from rsup.worker.cuda_graph.weight_decay import ScheduledWeightDecay
from rsup.worker.rerun.contract import RerunConfig
from rsup.worker.rerun.large_values import LargeValues

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]),
]
ALL = RerunConfig(check_for_spiky_loss=True, check_for_large_grads=True)


def make_model(device: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)


def batch_of(number: int, device: str) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number)).to(device)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, moments and step counts, copied."""
    found = [parameter.detach().clone() for parameter in model.parameters()]
    return found + [value.clone() for state in optimizer.state.values() for value in state.values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Step:
    """Forward, backward, checks and update of one rank, with baselines that know what is usual."""

    def __init__(self, device: str, scheduled: bool = False, adam: type[torch.optim.Adam] = torch.optim.AdamW, **options: Any):
        self.device = device
        self.model = make_model(device)
        self.optimizer = adam(self.model.parameters(), lr=0.01, weight_decay=0.1, fused=True, **options)
        self.groups = GradientGroups(list(self.model.parameters()))
        large = LargeValues()
        for _ in range(100):
            for context in ("loss", "grad norm of bucket 0"):
                large.is_unexpectedly_large(1.0, 10.0, context)
        large.commit()
        self.checks = DeviceChecks(1, 1, torch.device(device), config=ALL, large=large)
        decay = ScheduledWeightDecay(self.optimizer, self.checks.gate) if scheduled else None
        self.decay = decay
        self.update = OptimizerGraph(
            self.optimizer,
            torch.device(device),
            gate=self.checks.gate,
            max_norm=0.5,
            gradients=self.groups,
            weight_decay=decay,
            warmup_steps=1,
        )

    def run(self, number: int, loss_factor: float = 1.0, gradient_factor: float = 1.0) -> Code:
        self.checks.begin()
        self.groups.zero_()
        loss = self.model(batch_of(number, self.device)).square().mean()
        self.checks.loss(0, loss.detach() * loss_factor)
        (loss * gradient_factor).backward()
        self.groups.reduce(self.checks.norm)
        self.checks.judge()
        self.update.set_lr(0.01 / (1 + number))
        if self.decay is not None:
            self.decay.set(0.1 + number / 10)
        self.update.step()
        return DeviceChecks.parse(self.checks.result.tolist()).agreed

    def state(self) -> list[torch.Tensor]:
        return tensors(self.model, self.optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad_at", [0, 3], ids=["first step", "replay"])
@pytest.mark.parametrize(
    ("code", "loss_factor", "gradient_factor"),
    [
        (Code.NAN, math.nan, 1.0),
        (Code.NAN, 1.0, math.nan),
        (Code.INF, -math.inf, 1.0),
        (Code.INF, 1.0, math.inf),
        (Code.INF, 1.0, 1e25),
        (Code.SPIKY_LOSS, 1e6, 1.0),
        (Code.LARGE_GRADIENT, 1.0, 1e6),
    ],
)
def test_each_verdict_leaves_parameters_moments_and_step_count_to_the_bit(
    code: Code, loss_factor: float, gradient_factor: float, bad_at: int, device: str
) -> None:
    """The bad step, and the one launched behind it; then all goes on as if neither had been."""
    if code is Code.INF and math.isinf(gradient_factor):
        code = Code.NAN  # 0 * inf somewhere in backward
    faulty, healthy = Step(device, scheduled=bad_at == 3), Step(device, scheduled=bad_at == 3)
    for number in range(bad_at):
        assert faulty.run(number) is healthy.run(number) is Code.CLEAN
    before = [parameter.detach().clone() for parameter in faulty.model.parameters()]
    assert faulty.run(bad_at, loss_factor, gradient_factor) is code
    assert faulty.run(bad_at + 1) is Code.CLEAN and float(faulty.checks.gate) == 1.0
    assert equal(before, [parameter.detach() for parameter in faulty.model.parameters()])
    if bad_at:
        assert equal(faulty.state(), healthy.state())
    faulty.checks.open_gate()
    for number in range(bad_at, bad_at + 3):
        assert faulty.run(number) is healthy.run(number) is Code.CLEAN
        assert equal(faulty.state(), healthy.state())
    assert not equal(before, [parameter.detach() for parameter in faulty.model.parameters()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_closed_gate_keeps_every_bit_whatever_the_gradients_hold(
    adam: type[torch.optim.Adam], amsgrad: bool, device: str
) -> None:
    model, gate = make_model(device), torch.zeros((), device=device)
    optimizer = adam(model.parameters(), lr=0.1, fused=True, amsgrad=amsgrad)
    update = OptimizerGraph(optimizer, torch.device(device), gate=gate, max_norm=1.0, warmup_steps=2)
    groups = GradientGroups(list(model.parameters()))
    for number, fill in enumerate([0.5, math.nan, 0.25, math.inf, 1e38, -0.0, math.nan]):
        for storage in groups.storages:
            storage.fill_(fill)
        is_closed = number % 2 == 1
        gate.fill_(float(is_closed))
        before = tensors(model, optimizer)
        update.step()
        assert equal(before, tensors(model, optimizer)) == is_closed or number == 6, (number, fill)
    assert update.is_captured


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e6, math.inf, None])
def test_open_it_gives_what_torch_gives_bit_for_bit(max_norm: float | None, device: str) -> None:
    """Norm, clipped gradients, parameters and state; no storage of ours, so that the norm is computed as torch's is."""
    ours, theirs = make_model(device), make_model(device)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1, fused=True)
    update = OptimizerGraph(optimizer, torch.device(device), max_norm=max_norm)
    plain = torch.optim.AdamW(theirs.parameters(), lr=optimizer.param_groups[0]["lr"].clone(), fused=True)
    for number in range(6):
        lr = 0.1 / (1 + number)
        for model in (ours, theirs):
            model.zero_grad(set_to_none=number == 0)
            model(batch_of(number, device)).square().sum().backward()
        update.set_lr(lr)
        norm = update.step()
        plain.param_groups[0]["lr"].fill_(lr)
        if max_norm is None:
            assert norm is None
        else:
            assert norm is not None and torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
        grads = [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in grads)
        plain.step()
        assert equal(tensors(ours, optimizer), tensors(theirs, plain)), number
    assert update.is_captured


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e6])
def test_norms_that_were_measured_already_clip_to_the_last_digits(factor: float, device: str) -> None:
    ours, theirs = make_model(device), make_model(device)
    groups = GradientGroups(list(ours.parameters()), group_bytes=64)
    update = OptimizerGraph(
        torch.optim.AdamW(ours.parameters(), fused=True), torch.device(device), max_norm=0.5, gradients=groups
    )
    for model in (ours, theirs):
        (model(batch_of(1, device)).square().sum() * factor).backward()
    groups.reduce(lambda number, norm: None)
    norm, expected = update.step(), nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert norm is not None and float(norm) == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-6, atol=0)


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_state_is_there_before_the_capture_and_a_reset_warms_up_anew(warmup_steps: int) -> None:
    step, calls = Step("cpu"), []
    step.update = OptimizerGraph(step.optimizer, torch.device("cpu"), warmup_steps=warmup_steps)
    same = Step("cpu")
    same.update = OptimizerGraph(same.optimizer, torch.device("cpu"), captures=False)
    for number in range(3):
        calls.append(step.update.is_captured)
        step.run(number)
        same.run(number)
        assert equal(step.state(), same.state()) and not same.update.is_captured
    assert calls == [number > warmup_steps for number in range(3)] and step.update.is_captured
    assert step.update in lifecycle.live_graphs()
    step.update.reset()
    assert not step.update.is_captured
    step.run(3)
    same.run(3)
    assert equal(step.state(), same.state()) and step.update.is_captured == (warmup_steps == 0)


def captured_step() -> Step:
    step = Step("cpu")
    for number in range(3):
        step.run(number)
    assert step.update.is_captured
    return step


def test_what_the_graph_holds_may_not_change_without_a_word() -> None:
    for key, value, remedy in (("weight_decay", 0.2, "ScheduledWeightDecay"), ("betas", (0.5, 0.9), r"reset\(\)")):
        step = captured_step()
        step.optimizer.param_groups[0][key] = value
        step.optimizer.param_groups[0]["initial_lr"] = 1.0  # what schedulers add counts for nothing
        before = step.state()
        with pytest.raises(GraphError, match=rf"^{key} of parameter group 0 has become .*, and the graph holds .*: .*{remedy}"):
            step.run(3)
        assert equal(before, step.state())
        step.update.reset()
        assert step.run(3) is Code.CLEAN and not equal(before, step.state())
    step = captured_step()
    step.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(GraphError, match=r"learning rate of parameter group 0 was replaced.*set_lr\(\)"):
        step.run(3)


def test_what_moved_is_named_and_a_reset_finds_it() -> None:
    step = captured_step()
    state = step.optimizer.state[next(step.model.parameters())]
    kept, state["exp_avg"] = state["exp_avg"], state["exp_avg"].clone()
    with pytest.raises(GraphError, match=r"exp_avg of parameter 0 in group 0 is no longer what .*: call reset\(\)"):
        step.run(3)
    del kept
    step.update.reset()
    assert step.run(3) is step.run(4) is Code.CLEAN and step.update.is_captured
    weight = list(step.model.parameters())[2]
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(GraphError, match="grad of parameter 2 in group 0"):
        step.update.step()
    step.groups.attach()
    step.update.step()
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(GraphError, match="in group 1"):
        step.update.step()


def test_a_loaded_state_is_prepared_and_captured_anew() -> None:
    step, other = captured_step(), captured_step()
    plain = torch.optim.AdamW(make_model("cpu").parameters(), lr=0.5, fused=True)
    plain.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    saved = plain.state_dict()
    saved["param_groups"][0].update(lr=0.25, capturable=False)  # as a run without graphs saves it
    step.optimizer.load_state_dict(saved)
    assert not step.update.is_captured
    (group,) = step.optimizer.param_groups
    assert group["capturable"] and group["lr"].dtype == torch.float64 and float(group["lr"]) == 0.25
    for number in range(3, 6):
        assert step.run(number) is other.run(number) is Code.CLEAN
        assert equal(step.state(), other.state())
    assert step.update.is_captured


def test_learning_rates_are_filled_for_all_groups_or_by_group() -> None:
    shared = torch.tensor(0.1)
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [one]}, {"params": [other]}], lr=shared, fused=True, weight_decay=0.0)
    update = OptimizerGraph(optimizer, torch.device("cpu"))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[0] is not rates[1]
    update.set_lr([0.0, 0.5])
    for parameter in (one, other):
        parameter.grad = torch.ones(2)
    update.step()
    assert torch.equal(one.detach(), torch.ones(2)) and float(other.detach()[0]) == pytest.approx(0.5)
    update.set_lr(0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    prepare_optimizer_for_graph(optimizer)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True)), "it may be repeated"


@pytest.mark.parametrize("device", DEVICES)
def test_scheduled_weight_decay_is_torchs_with_a_decay_that_changes(device: str) -> None:
    ours, theirs, fused = make_model(device), make_model(device), make_model(device)

    def split(model: nn.Module) -> list[dict[str, Any]]:
        matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]

    gate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(split(ours), lr=0.1, fused=True)
    decay = ScheduledWeightDecay(optimizer, gate)
    update = OptimizerGraph(optimizer, torch.device(device), gate=gate, weight_decay=decay, warmup_steps=1)
    plain = torch.optim.AdamW(split(theirs), lr=optimizer.param_groups[0]["lr"].clone(), fused=True)
    plain.param_groups[0]["weight_decay"] = 0.0
    close = torch.optim.AdamW(split(fused), lr=torch.tensor(0.1, device=device), fused=True)
    for number in range(4):
        now = 0.1 * (1 + number)
        for model in (ours, theirs, fused):
            model.zero_grad(set_to_none=number == 0)
            model(batch_of(number, device)).square().sum().backward()
        if number:  # before, it is the optimizer's own value
            decay.set(now)
        close.param_groups[0]["weight_decay"] = now
        update.step()
        with torch.no_grad():
            for parameter in plain.param_groups[0]["params"]:
                parameter.mul_(1 - plain.param_groups[0]["lr"] * torch.tensor(now, device=device))
        plain.step()
        close.step()
        assert equal(tensors(ours, optimizer), tensors(theirs, plain))
    for one, other in zip(ours.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    gate.fill_(1.0)
    with torch.no_grad():
        weight = next(ours.parameters())
        weight[0, 0], weight[0, 1] = -0.0, 1e-42  # which a sum with 0 would change
    before = tensors(ours, optimizer)
    update.step()
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, tensors(ours, optimizer), strict=True)
    )


def test_scheduled_weight_decay_takes_over_a_loaded_decay_and_refuses_what_is_none() -> None:
    model = make_model("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
    decay = ScheduledWeightDecay(optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["weight_decay"] = 0.25
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0, "else it would decay twice"
    weight = next(model.parameters()).detach()
    before = weight.clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.5
    decay.apply()
    assert torch.equal(weight, before * (1 - 0.5 * 0.25))
    with pytest.raises(GraphError, match="L2 penalty"):
        ScheduledWeightDecay(torch.optim.Adam(model.parameters(), weight_decay=0.1, fused=True))
    with pytest.raises(GraphError, match="no parameter group has a weight_decay"):
        ScheduledWeightDecay(torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True))


class _Scaler:
    def is_enabled(self) -> bool:
        return True


def test_optimizers_without_a_gate_and_dynamic_loss_scales_are_refused_with_a_remedy() -> None:
    some = list(make_model("cpu").parameters())
    refused: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.SGD(some, lr=0.1), "SGD has no gate.*gated_step"),
        (torch.optim.AdamW(some), "AdamW is not fused.*fused=True"),
        (torch.optim.Adam(some, foreach=True), "Adam is not fused"),
    ]
    for optimizer, text in refused:
        with pytest.raises(GraphError, match=text):
            prepare_optimizer_for_graph(optimizer)
        with pytest.raises(GraphError, match=text):
            OptimizerGraph(optimizer, torch.device("cpu"))
    with pytest.raises(GraphError, match=r"dynamic loss scale .* bf16 or fp32"):
        OptimizerGraph(torch.optim.AdamW(some, fused=True), torch.device("cpu"), scaler=_Scaler())


class GatedSgd(torch.optim.SGD):
    """Plain descent with a gate of its own."""

    @torch.no_grad()
    def gated_step(self, gate: torch.Tensor) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(torch.where(gate == 0, parameter - group["lr"] * parameter.grad, parameter))


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_with_a_gate_of_its_own_is_captured_too(device: str) -> None:
    weight = nn.Parameter(torch.ones(3, device=device))
    weight.grad = torch.full((3,), math.nan, device=device)
    gate = torch.ones((), device=device)
    optimizer = GatedSgd([weight], lr=torch.tensor(0.5, device=device))
    assert isinstance(optimizer, GatedOptimizer)
    update = OptimizerGraph(optimizer, torch.device(device), gate=gate, warmup_steps=1)
    for _ in range(3):
        update.step()
    assert weight.tolist() == [1.0] * 3
    gate.zero_()
    weight.grad.fill_(1.0)
    update.set_lr(0.25)
    update.step()
    assert weight.tolist() == [0.75] * 3 and update.is_captured
