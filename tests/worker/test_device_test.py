"""The SDC screen of `rsup devices test`: what it compares, what it says, and that it never calls a skip a pass."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.device_test import float64_bound as bound
from rsup.worker.device_test.chosen import Chosen, choose
from rsup.worker.device_test.command import lines_of, parser
from rsup.worker.device_test.computations import Computation, Missing, computations, digest
from rsup.worker.device_test.injected_fault import read_fault
from rsup.worker.device_test.judging import Known, judge, learned, record_key
from rsup.worker.device_test.results import FAILED, PASSED, SKIPPED, DeviceReport, Range, TestResult, overall, whole
from rsup.worker.device_test.screen import Screen
from rsup.worker.device_test.sensors import Sensors

CPU = torch.device("cpu")


# ----------------------------------------------------------------------------------------------------- the error bound


@pytest.mark.parametrize(
    ("dtype", "roundoff"),
    [
        (torch.float64, bound.FP64),
        (torch.float32, bound.FP32),
        (torch.bfloat16, bound.BF16),
        (torch.float16, bound.FP16),
    ],
)
def test_rounding_is_explained_and_a_flipped_bit_is_not(dtype: torch.dtype, roundoff: bound.Roundoff) -> None:
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(40, 300, generator=generator).to(dtype)
    right = torch.randn(300, 25, generator=generator).to(dtype)
    product = left @ right
    assert 0 <= bound.deviation(left, right, product, roundoff, 1) < 1
    for place in ((0, 0), (39, 24), (17, 3)):
        wrong = product.clone()
        wrong[place] = wrong[place] * 64 + 1000  # as a bit of the exponent does
        assert bound.deviation(left, right, wrong, roundoff, 1) > 1
    for value in (math.nan, math.inf):
        wrong = product.clone()
        wrong[3, 3] = value
        assert bound.deviation(left, right, wrong, roundoff, 1) == math.inf


def test_a_less_exact_type_does_not_pass_for_a_more_exact_one() -> None:
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    coarse = (left.bfloat16() @ right.bfloat16()).float()
    assert bound.deviation(left, right, coarse, bound.FP32, 1) > 1


# -------------------------------------------------------------------------------------------------------- the computations


def test_every_computation_repeats_its_bits_and_is_what_float64_says() -> None:
    """The whole set as a CPU runs it, for no time: twice each."""
    listed = computations(CPU, "small")
    screen = Screen(CPU, listed)
    found = {result.name: result for result in screen.run(0.0)}
    assert screen.rounds == 2 and len(found) == len(listed) >= 11
    for result in found.values():
        assert (result.outcome, result.repetitions) == (PASSED, 2), result
        assert result.error is not None and result.error < 1 and len(result.digest) == 64 and result.rate > 0
    assert {name.split()[0] for name in found} == {"fp32", "fp64", "bf16", "fp16", "attention", "reductions", "memory"}
    again = {one.name: digest(one.run()) for one in computations(CPU, "small") if isinstance(one, Computation)}
    assert again == {name: result.digest for name, result in found.items()}, "inputs come from fixed seeds"


# ------------------------------------------------------------------------------------------------------------- the screen


class Clock:
    """Each look at it takes a second."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def screened(run: Callable[[int], torch.Tensor], duration_s: float = 0.0, **more: Any) -> TestResult:
    """One computation, whose result is a function of the repetition."""
    count = iter(range(10**6))
    fault = more.pop("fault", None)
    screen = Screen(CPU, [Computation("c", lambda: run(next(count)), **more)], fault, Clock())
    (result,) = screen.run(duration_s)
    return result


def same(_: int) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


def test_it_goes_on_for_the_wanted_time() -> None:
    assert screened(same).repetitions == 2
    assert screened(same, 60.0).repetitions > 10


def test_one_differing_repetition_fails_and_is_described() -> None:
    def third(repetition: int) -> torch.Tensor:
        result = same(repetition)
        result[1, 2] += repetition == 2
        return result

    result = screened(third, 60.0)
    assert result.outcome == FAILED
    assert result.reason == "repetition 3 differs from the first: 1 of 12 elements, the first at 6: 7.0 instead of 6.0"
    assert result.repetitions == 3, "nothing more is learned from it"


def test_equal_nans_are_equal_bits_and_unequal_zeros_are_not() -> None:
    assert screened(lambda _: torch.full((2,), math.nan)).outcome == PASSED
    assert screened(lambda n: torch.full((2,), -0.0 if n else 0.0)).outcome == FAILED


def test_what_float64_contradicts_fails_though_it_repeats() -> None:
    result = screened(same, deviation=lambda found: 3.5)
    assert (result.outcome, result.error) == (FAILED, 3.5) and "3.5 times what rounding explains" in result.reason
    assert screened(same, deviation=lambda found: math.nan).outcome == FAILED, "a comparison with NaN proves nothing"


def raises(error: Exception, at: int) -> Callable[[int], torch.Tensor]:
    def run(repetition: int) -> torch.Tensor:
        if repetition == at:
            raise error
        return same(repetition)

    return run


@pytest.mark.parametrize(
    ("error", "at", "outcome", "is_required"),
    [
        (RuntimeError("not implemented for 'Half'"), 0, SKIPPED, False),
        (RuntimeError("CUDA error: uncorrectable ECC error"), 0, SKIPPED, True),
        (RuntimeError("CUDA error: an illegal instruction"), 1, FAILED, True),
        (torch.OutOfMemoryError("CUDA out of memory"), 0, SKIPPED, True),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, SKIPPED, True),
    ],
)
def test_what_a_computation_raises(error: Exception, at: int, outcome: str, is_required: bool) -> None:
    """A device that fails at what it could do before has failed; what it never could is not tested."""
    result = screened(raises(error, at), 9.0)
    assert (result.outcome, result.is_required) == (outcome, is_required) and str(error) in result.reason


def test_after_an_error_of_the_device_nothing_else_runs() -> None:
    listed = [Computation("good", lambda: same(0)), Computation("bad", lambda: raises(RuntimeError("CUDA error: x"), 0)(0))]
    results = Screen(CPU, listed, clock=Clock()).run(99.0)
    assert [result.repetitions for result in results] == [1, 0] and whole(results)[0] == SKIPPED


@pytest.mark.parametrize(
    ("text", "outcome", "says"),
    [
        ("kind=bitflip", FAILED, "repetition 2 differs from the first"),
        ("kind=bitflip,bit=0", FAILED, "repetition 2 differs from the first"),
        ("kind=bitflip,steady=1", FAILED, "differs from float64"),
        ("kind=bitflip,steady=1,bit=0", PASSED, ""),  # within rounding: that is what like devices and the record are for
    ],
)
def test_an_injected_bit_flip_is_found(text: str, outcome: str, says: str) -> None:
    result = screened(
        lambda n: same(n) + 1, fault=read_fault(text), deviation=lambda f: bound.same_as_float64(f, same(0) + 1, 1e-3)
    )
    assert result.outcome == outcome and says in result.reason


@pytest.mark.parametrize("text", ["bitflip", "kind=nan", "kind=bitflip,bit=40", "kind=bitflip,bit=x", "kind=bitflip,site=loss"])
def test_a_fault_that_there_is_not(text: str) -> None:
    with pytest.raises(UsageError, match="write kind=bitflip"):
        read_fault(text)


# ---------------------------------------------------------------------------------------------------------- the judgement


def report(uuid: str, digest: str = "d", outcome: str = PASSED, likeness: str = "L", **more: Any) -> DeviceReport:
    tests = [TestResult(name="t", outcome=outcome, digest=digest, reason="" if outcome == PASSED else "r")]
    return DeviceReport(uuid=uuid, outcome=SKIPPED, likeness=likeness, tests=tests, **more)


def record(digest: str, *devices: str) -> dict[str, dict[str, Known]]:
    return {record_key(report("any")): {"t": Known(digest, list(devices))}}


@pytest.mark.parametrize(
    ("digests", "known", "outcomes"),
    [
        # alone
        ("d", None, "passed"),
        ("d", ("d", "x"), "passed"),
        ("e", ("d", "x"), "skipped"),  # it or the one before: nobody knows
        ("e", ("d", "x", "y"), "failed"),
        ("e", ("d", "a"), "skipped"),  # it computed something else before
        # two like devices
        ("dd", None, "passed passed"),
        ("de", None, "skipped skipped"),
        ("de", ("d", "x"), "passed failed"),  # two against one
        ("de", ("f", "x", "y"), "skipped skipped"),
        ("ee", ("d", "x"), "passed passed"),  # the record is doubtful
        ("ee", ("d", "x", "y"), "skipped skipped"),  # two wrong ones would not agree: something else is different
        # three: the odd one out
        ("dde", None, "passed passed failed"),
        ("def", None, "skipped skipped skipped"),
    ],
)
def test_like_devices_and_the_record(digests: str, known: tuple[str, ...] | None, outcomes: str) -> None:
    reports = [report(uuid, digest) for uuid, digest in zip("abc", digests, strict=False)]
    judge(reports, record(*known) if known else {})
    assert " ".join(one.outcome for one in reports) == outcomes
    if "skipped" in outcomes:
        assert all("a skip is no pass" in one.reason for one in reports if one.outcome == SKIPPED)


def test_unlike_devices_are_not_compared() -> None:
    reports = [report("a", "d"), report("b", "e", likeness="M"), report("c", "f", likeness="N"), report("e", "g", likeness="")]
    judge(reports, record("z", "b"))
    assert [one.outcome for one in reports[1:]] == [PASSED] * 3 and reports[1].tests[0].compared_with == []


def test_a_device_that_failed_by_itself_is_no_witness() -> None:
    reports = [report("a", "d"), report("b", "e", outcome=FAILED), report("c", "e", outcome=FAILED)]
    judge(reports, {})
    assert [one.outcome for one in reports] == [PASSED, FAILED, FAILED]


def test_only_what_passed_whole_is_learned() -> None:
    good, bad, armed = report("a"), report("b", "e", outcome=FAILED), report("c", "d", injected=True)
    judge([good, bad, armed], {})
    assert armed.outcome == PASSED
    known = learned([good, bad, armed], {})
    assert known == record("d", "a")
    other = report("z", "d")
    judge([other], known)
    assert learned([other, good], known) == record("d", "a", "z")


def test_a_skip_is_no_pass() -> None:
    def one(outcome: str, **more: Any) -> TestResult:
        return TestResult(name="t", outcome=outcome, reason="why", **more)

    assert whole([one(PASSED), one(SKIPPED, is_required=False)]) == (PASSED, "")
    assert whole([one(PASSED), one(SKIPPED)])[0] == SKIPPED
    assert whole([one(SKIPPED), one(FAILED)]) == (FAILED, "t: why")
    assert whole([])[0] == whole([one(SKIPPED, is_required=False)])[0] == SKIPPED
    assert overall([]) == SKIPPED
    assert overall([report("a", outcome=PASSED), DeviceReport(uuid="b", outcome=FAILED)]) == FAILED


# ----------------------------------------------------------------------------------------- devices, sensors, and the report

HERE = [Chosen("GPU-aaaa1", "cuda", index=0, serial="s1"), Chosen("GPU-aaab2", "cuda", index=1, serial="s2")]


@pytest.mark.parametrize(
    ("words", "chosen"),
    [(["GPU-aaab"], "1"), (["0"], "0"), (["s2", "s1", "0"], "10"), (["--all"], "01"), (["GPU-aaaa1"], "0")],
)
def test_devices_by_name(words: list[str], chosen: str) -> None:
    assert [str(one.index) for one in choose(parser().parse_args(words), HERE)] == list(chosen)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["GPU-aaa"], "several devices have that name: GPU-aaaa1, GPU-aaab2"),
        (["GPU-x"], "this node has no device that name"),
        (["s"], "this node has no device"),
        ([], "which device"),
        (["--all", "GPU-aaaa1"], "name no devices with it"),
        (["--duration", "-1", "0"], "is no number of seconds"),
        (["--what"], "unrecognized"),
    ],
)
def test_names_and_options_that_there_are_not(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose(parser().parse_args(words), HERE)


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.temperatures = iter([60, 71, 66])

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> bytes:
        return uuid

    def nvmlDeviceGetSerial(self, handle: bytes) -> bytes:
        return b"165"

    def nvmlDeviceGetVbiosVersion(self, handle: bytes) -> str:
        raise self.NVMLError

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetTemperature(self, handle: bytes, sensor: int) -> int:
        return next(self.temperatures)

    def nvmlDeviceGetClockInfo(self, handle: bytes, kind: int) -> int:
        assert kind == 1
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle: bytes) -> int:
        raise self.NVMLError


def test_heat_and_clocks_are_kept_and_what_nvml_does_not_tell_is_null() -> None:
    sensors = Sensors("GPU-a", FakeNvml())
    for _ in range(3):
        sensors.read()
    assert (sensors.temperature_c, sensors.sm_clock_mhz, sensors.power_w) == (Range(60, 71), Range(1980, 1980), None)
    assert sensors.facts == {"serial": "165", "driver": "570.1"}
    stand_in = Sensors("CPU-1", SimpleNamespace())
    stand_in.read()
    assert stand_in.temperature_c is None


def test_the_report_for_people() -> None:
    listed: list[Computation | Missing] = [Computation("mm", lambda: same(0), work=1e12), Missing("fp8", "this GPU has no FP8")]
    one = DeviceReport(uuid="GPU-a", outcome=PASSED, tests=Screen(CPU, listed, clock=Clock()).run(0.0), rounds=2, injected=True)
    one.temperature_c, one.sm_clock_mhz = Range(60, 71), Range(1980, 1980)
    text = "\n".join(lines_of(one))
    assert "passed   mm " in text and "1.00 TFLOP/s" in text and "= itself" in text and "skipped  fp8" in text
    assert "60-71 C, 1980 MHz, a fault was injected" in text
