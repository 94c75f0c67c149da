"""The checks of a graph-captured step: their rules are the rerun machine's, and a closed gate stays closed."""

import math
import random

import pytest
import torch

from rsup.worker.cuda_graph.baselines import WINDOW
from rsup.worker.cuda_graph.contract import Code, GraphError, StaleResultError
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.late_reader import LateReader
from rsup.worker.rerun.built_in import LARGE_FACTOR, MAX_NORM, BuiltInRules
from rsup.worker.rerun.contract import RerunConfig
from rsup.worker.rerun.large_values import FLOOR, LargeValues

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]),
]
ALL = RerunConfig(check_for_spiky_loss=True, check_for_large_grads=True)
CODES = {"NaN": Code.NAN, "Inf": Code.INF, "gradient whose square": Code.INF, "unexpectedly large loss": Code.SPIKY_LOSS}


def float32(value: float) -> float:
    return float(torch.tensor(value))


def step(checks: DeviceChecks, losses: list[float], norms: list[float]) -> Code:
    """Hand in and judge, as a step does; the code of this rank."""
    device = checks.gate.device
    checks.begin()
    for index, loss in enumerate(losses):
        checks.loss(index, torch.tensor(loss, device=device))
    for index, norm in enumerate(norms):
        checks.norm(index, torch.tensor(norm, device=device))
    checks.judge()
    verdict = DeviceChecks.parse(checks.result.tolist())
    assert verdict.code is verdict.agreed and len(verdict.values) == len(losses) + len(norms)
    return verdict.code


class Host:
    """The rerun machine's rules, over the same values."""

    def __init__(self, config: RerunConfig) -> None:
        self.large = LargeValues()
        self._rules = BuiltInRules(config, self.large)

    def code(self, losses: list[float], norms: list[float]) -> Code:
        """The worst of what the rules find; learned if it is nothing."""
        found = [Code.CLEAN]
        for loss in losses:
            found += [self._as_code(rule.label) for rule in self._rules.of_loss("loss") if rule.reject(loss)]
        for number, norm in enumerate(norms):
            context = f"grad norm of bucket {number}"
            found += [self._as_code(rule.label) for rule in self._rules.of_gradients(context) if rule.reject(norm)]
        if max(found) is Code.CLEAN:
            self.large.commit()
        else:
            self.large.rollback()
        return max(found)

    def _as_code(self, label: str) -> Code:
        return next((code for start, code in CODES.items() if label.startswith(start)), Code.LARGE_GRADIENT)


def draw(source: random.Random, scale: float) -> float:
    """Mostly ordinary, now and then around the threshold, huge, or no number."""
    value = scale * source.lognormvariate(0, 0.5) * source.choice([1, 1, 1, -1])
    kind = source.random()
    if kind < 0.02:
        value *= source.choice([9.0, 20.0, 1e6, 1e19, 1e30])
    elif kind < 0.024:
        value = source.choice([math.nan, math.inf, -math.inf, 0.0, MAX_NORM])
    return float32(value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "config",
    [
        ALL,
        RerunConfig(check_for_spiky_loss=True),
        RerunConfig(check_for_large_grads=True),
        RerunConfig(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=True, check_for_large_grads=True),
        RerunConfig(),
    ],
    ids=["all", "spiky", "large", "only large", "finite"],
)
def test_the_device_judges_random_streams_as_the_host_does(config: RerunConfig, device: str) -> None:
    source = random.Random(f"{config}")
    host, checks = Host(config), DeviceChecks(3, 2, torch.device(device), config=config)
    seen: dict[Code, int] = dict.fromkeys(Code, 0)
    for number in range(400):
        losses = [draw(source, 3.0) for _ in range(3)]
        norms = [abs(draw(source, scale)) for scale in (1.0, 1e-3)]
        expected = host.code(losses, norms)
        assert step(checks, losses, norms) is expected, (number, losses, norms)
        assert float(checks.gate) == float(expected > 0)
        checks.open_gate()
        seen[expected] += 1
    looks_for = {Code.CLEAN}
    looks_for |= {Code.INF, Code.NAN} if config.check_for_nan_in_loss_and_grad else set()
    looks_for |= {Code.SPIKY_LOSS} if config.check_for_spiky_loss else set()
    looks_for |= {Code.LARGE_GRADIENT} if config.check_for_large_grads else set()
    assert {code for code, count in seen.items() if count} == looks_for


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_at_the_threshold_is_not_large_and_the_next_float_is(device: str) -> None:
    for typical in (0.1, 1 / 3, FLOOR / 7):
        host = Host(ALL)
        for _ in range(WINDOW):
            host.code([float32(typical)], [])
        checks = DeviceChecks(1, 0, torch.device(device), config=ALL, large=host.large)
        bound = torch.tensor(max(float32(typical), FLOOR) * LARGE_FACTOR, dtype=torch.float64)
        below = bound.float() if bound.float().double() <= bound else torch.nextafter(bound.float(), torch.tensor(0.0))
        above = torch.nextafter(below, torch.tensor(math.inf))
        assert step(checks, [float(below)], []) is Code.CLEAN
        checks.load_baselines(host.large, ["loss"], [])
        assert step(checks, [float(above)], []) is Code.SPIKY_LOSS
        host.large.rollback()
        assert [host.code([float(value)], []) for value in (above, below)] == [Code.SPIKY_LOSS, Code.CLEAN]


def test_baselines_go_on_from_what_the_host_has_learned_with_other_contexts_too() -> None:
    source = random.Random(6)
    host = Host(ALL)
    for _ in range(70):
        host.code([source.lognormvariate(0, 1) for _ in range(2)], [1.0])  # float64 values, as an eager run learns them
    checks = DeviceChecks(2, 1, torch.device("cpu"), config=ALL)
    checks.load_baselines(host.large, ["loss", "loss"], ["grad norm of bucket 0"])
    for _ in range(150):
        losses = [float32(source.lognormvariate(0, 1.2)) for _ in range(2)]
        norms = [float32(source.lognormvariate(0, 1.2))]
        assert step(checks, losses, norms) is host.code(losses, norms)
        checks.open_gate()
    checks.load_baselines(LargeValues(), ["loss of chunk 0", "loss of chunk 1"], ["norm"])
    assert step(checks, [1e9, 1e9], [1e9]) is Code.CLEAN, "nothing is known of these"
    with pytest.raises(GraphError, match="1 losses and 0 gradient norms, but the step has 2 and 1"):
        checks.load_baselines(host.large, ["loss"], [])


def test_more_values_of_a_context_in_a_step_than_a_baseline_holds() -> None:
    source = random.Random(7)
    num = WINDOW + 30
    host, checks = Host(ALL), DeviceChecks(num, 0, torch.device("cpu"), config=ALL)
    for scale in (1.0, 3.0, 1.0, 30.0, 5.0):
        losses = [float32(scale * source.lognormvariate(0, 0.4)) for _ in range(num)]
        assert step(checks, losses, []) is host.code(losses, [])
        checks.open_gate()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("losses", "norms", "code"),
    [
        ([2.0, math.nan], [1.0], Code.NAN),
        ([2.0, 2.0], [math.nan], Code.NAN),
        ([math.inf, math.nan], [1.0], Code.NAN),
        ([-math.inf, 2.0], [1.0], Code.INF),
        ([2.0, 2.0], [1.0001 * MAX_NORM], Code.INF),
        ([1e30, 2.0], [1.0], Code.SPIKY_LOSS),
        ([1e30, 2.0], [1e9], Code.SPIKY_LOSS),
        ([2.0, 2.0], [1e9], Code.LARGE_GRADIENT),
    ],
)
def test_each_code_closes_the_gate_with_a_one_until_it_is_opened(
    losses: list[float], norms: list[float], code: Code, device: str
) -> None:
    host = Host(ALL)
    for _ in range(WINDOW):
        host.code([2.0, 2.0], [1.0])
    checks = DeviceChecks(2, 1, torch.device(device), config=ALL, large=host.large)
    assert step(checks, [2.0, 2.5], [1.5]) is Code.CLEAN and float(checks.gate) == 0.0
    assert step(checks, losses, norms) is code
    assert checks.gate.dtype == torch.float32 and float(checks.gate) == 1.0
    assert step(checks, [2.0, 2.5], [1.5]) is Code.CLEAN and float(checks.gate) == 1.0, "a clean step behind it changes nothing"
    checks.open_gate()
    assert step(checks, [2.0, 2.5], [1.5]) is Code.CLEAN and float(checks.gate) == 0.0
    checks.close_gate()
    assert step(checks, [2.0, 2.5], [1.5]) is Code.CLEAN and float(checks.gate) == 1.0


def test_what_is_not_judged_is_not_learned_with_a_closed_gate() -> None:
    checks = DeviceChecks(1, 0, torch.device("cpu"), config=ALL)
    checks.close_gate()
    for _ in range(WINDOW + 1):
        step(checks, [1.0], [])
    checks.open_gate()
    assert step(checks, [1e9], []) is Code.CLEAN, "nothing was learned"


def test_without_checks_values_are_recorded_and_nothing_is_judged() -> None:
    checks = DeviceChecks(1, 1, torch.device("cpu"), config=RerunConfig(check_for_nan_in_loss_and_grad=False))
    assert step(checks, [math.nan], [math.inf]) is Code.CLEAN and float(checks.gate) == 0.0
    assert checks.result.tolist()[3] == math.inf and math.isnan(checks.result.tolist()[2])
    nothing = DeviceChecks(0, 0, torch.device("cpu"), config=RerunConfig())
    assert step(nothing, [], []) is Code.CLEAN


def test_a_loss_may_change_after_it_was_handed_in_and_may_have_any_floating_dtype() -> None:
    checks = DeviceChecks(2, 1, torch.device("cpu"), config=RerunConfig())
    loss = torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True)
    checks.begin()
    checks.loss(0, loss)
    checks.loss(1, torch.tensor(2.5, dtype=torch.float64))
    with torch.no_grad():
        loss.fill_(math.nan)
    checks.norm(0, torch.tensor(3.0, dtype=torch.float64))
    checks.judge()
    assert checks.result.tolist() == [0.0, 0.0, 1.5, 2.5, 3.0] and not checks.result.requires_grad


def test_a_value_that_was_not_handed_in_is_an_error_in_every_pass() -> None:
    checks = DeviceChecks(3, 2, torch.device("cpu"), config=RerunConfig())
    assert step(checks, [1.0, 1.0, 1.0], [1.0, 1.0]) is Code.CLEAN
    checks.loss(1, torch.ones(()))
    with pytest.raises(GraphError, match=r"not handed in loss 0, loss 2, gradient norm 0 and 1 more: call checks\.loss"):
        checks.judge()


def test_a_buffer_that_no_step_has_written_is_no_verdict() -> None:
    for values in ([math.nan, 0.0, 1.0], [0.0, math.inf], [7.0, 0.0]):
        with pytest.raises(GraphError, match="no codes"):
            DeviceChecks.parse(values)
    verdict = DeviceChecks.parse([3.0, 4.0, 1.5])
    assert (verdict.code, verdict.agreed, verdict.values) == (Code.INF, Code.NAN, (1.5,))


@pytest.mark.parametrize("device", DEVICES)
def test_a_late_reader_gives_the_numbers_of_the_ticket_or_none(device: str) -> None:
    source = torch.zeros(2, device=device)
    reader = LateReader(source)
    tickets = []
    for number in range(4):
        source.fill_(number)
        tickets.append(reader.take())
        if number:
            assert reader.read(tickets[-2]) == [number - 1.0] * 2
    assert reader.read(tickets[-1]) == reader.read(tickets[-1]) == [3.0, 3.0]
    with pytest.raises(StaleResultError, match="copy 1 of the result buffer is gone, 4 were taken"):
        reader.read(tickets[1])
