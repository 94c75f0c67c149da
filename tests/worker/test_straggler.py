"""The straggler detector of one rank, its sensors, and NVRx's kernel scores. Over real ranks: `observed_ranks.py`."""

import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rsup.worker.observe.nvrx_straggler as nvrx
import rsup.worker.observe.straggler as straggler
from rsup.supervisor import heartbeat_board
from rsup.supervisor.heartbeat_board import Board
from rsup.supervisor.wire import DeviceSensors, StragglerReport
from rsup.worker.observe.nvrx_straggler import KernelScores, load_kernel_scores
from rsup.worker.observe.straggler import StragglerDetector
from rsup.worker.observe.straggler_scores import Interval, RankTimes, make_report
from rsup.worker.observe.straggler_sensors import SensorReader, SensorWatch
from rsup.worker.observe.timers import Timers
from rsup.worker.reference.observed import NO_STRAGGLER, Observed
from rsup.worker.rerun.contract import RankDevice

CPU = torch.device("cpu")


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += round(ms * 1e6)


class Nvml:
    """NVML's bindings, of a device that answers what it is told to."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.clock, self.power, self.temperature, self.reasons = 1200, 500_000, 80, 0x44
        self.is_gone = False
        self.num_read = 0
        self.read_twice = threading.Event()

    def _answer(self, value: int) -> int:
        if self.is_gone:
            raise self.NVMLError("GPU is lost")
        return value

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid != b"GPU-1":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", 1)
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert kind == 1
        return self._answer(self.clock)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._answer(self.power)

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return self._answer(self.temperature)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        self.num_read += 1
        if self.num_read >= 2:
            self.read_twice.set()
        return self._answer(self.reasons)


def detector(clock: Clock, **more: Any) -> StragglerDetector:
    settings: dict[str, Any] = {"requested": dict, "section_totals": dict, "warn": pytest.fail, "enabled": True} | more
    return StragglerDetector(rank=0, device=RankDevice("CPU-x", "n0"), torch_device=CPU, group=None, now_ns=clock, **settings)


def timed(one: StragglerDetector, clock: Clock, name: str, *calls_ms: float) -> None:
    timer = one.timer(name)
    assert timer is not None
    for ms in calls_ms:
        with timer:
            clock.pass_ms(ms)


def test_an_interval_has_the_median_of_calls_and_the_best_of_earlier_ones() -> None:
    clock, board = Clock(), {"step": (1, 5_000_000)}
    one = detector(clock, section_totals=lambda: dict(board))
    timed(one, clock, "forward-compute", 900)
    assert one.report(1) is None, "the first step shows how slow a first step is"
    timed(one, clock, "forward-compute", 4, 4, 90, 4)
    board["step"] = (3, 25_000_000)
    report = one.report(3)
    assert report is not None and (report.first, report.iteration, report.num_ranks) == (2, 3, 1)
    scores = {score.section: score for score in report.slowest[0].sections}
    assert scores["forward-compute"].time_s == pytest.approx(0.008), "4 calls in 2 iterations"
    assert scores["step"].time_s == pytest.approx(0.010)
    assert scores["forward-compute"].individual == 1.0
    timed(one, clock, "forward-compute", 8, 8)
    report = one.report(4)
    assert report is not None
    (score,) = report.slowest[0].sections
    assert score.time_s == pytest.approx(0.016) and score.individual == pytest.approx(0.5)
    assert one.report(4) is None, "no iteration has passed"
    report = one.report(5)
    assert report is not None and report.slowest[0].sections == [], "nothing was measured"


def test_what_is_paused_is_no_iterations_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations and saves: neither the interval's, nor its sections', nor what the thread waited for a processor."""
    clock, board, waited_ns = Clock(), {"data": (1, 5_000_000)}, [0]
    intervals, waits = list[Interval](), list[float]()

    def keep(interval: Interval, ranks: Sequence[RankTimes], *others: Any) -> StragglerReport:
        intervals.append(interval)
        waits.append(ranks[0].host_wait_s)
        return make_report(interval, ranks, *others)

    monkeypatch.setattr(straggler, "make_report", keep)
    monkeypatch.setattr(straggler, "_waited_for_processor_ns", lambda: waited_ns[0])
    one = detector(clock, section_totals=lambda: dict(board))

    def passes(ms: int) -> None:
        clock.pass_ms(ms)
        waited_ns[0] += ms * 100_000
        entered, total_ns = board["data"]
        board["data"] = (entered + 1, total_ns + ms * 500_000)

    one.pause()
    one.report(1)  # an interval that begins in a pause
    passes(25_000)
    one.resume()
    passes(10)
    one.pause()
    one.pause()
    passes(25_000)
    board["of a save"] = (1, 20_000_000_000)
    one.resume()
    one.resume()
    passes(10)
    one.pause()
    passes(25_000)
    report = one.report(3)  # and one that ends in it
    assert report is not None
    assert intervals[0].step_s == pytest.approx(0.010) and waits == [pytest.approx(0.001)]
    scores = {score.section: score.time_s for score in report.slowest[0].sections}
    assert scores == {"data": pytest.approx(0.005)}
    one.close()
    one.resume()


def test_it_is_switched_by_what_people_ask_and_costs_nothing_while_off() -> None:
    clock, asked = Clock(), dict[str, bool]()
    one = detector(clock, enabled=False, requested=lambda: asked, sections=("forward-compute",))
    assert one.timer("optimizer") is None
    timed(one, clock, "forward-compute", 5)
    assert one.report(1) is None and not one.is_on
    asked["stragglers"] = True
    assert one.report(2) is None and one.is_on
    timed(one, clock, "forward-compute", 7)
    report = one.report(3)
    assert report is not None and report.slowest[0].sections[0].time_s == pytest.approx(0.007)
    asked["stragglers"] = False
    assert one.report(4) is not None and not one.is_on, "the interval that ends is told"
    assert one.report(5) is None
    one.close()
    one.close()


def test_totals_of_sections_are_those_on_the_board(own_directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.create(1, own_directories / "run")
    slot, clock = board.slot(0), Clock()
    monkeypatch.setattr(heartbeat_board, "monotonic_ns", clock)
    one = detector(clock, section_totals=slot.section_totals)
    one.report(1)
    for ms in (3, 5):
        with slot.section("forward"):
            clock.pass_ms(ms)
    slot.section("forward").enter()
    assert slot.section_totals() == {"forward": (3, 8_000_000)}, "what is open counts when it closes"
    report = one.report(2)
    assert report is not None and report.slowest[0].sections[0].time_s == pytest.approx(0.008)
    board.close()
    board.unlink()


def test_a_place_has_one_timer_for_timers_and_detector() -> None:
    clock = Clock()
    one = detector(clock)
    timers = Timers(1, warn=pytest.fail)
    both = Observed(timers, one)
    place = both.timer("optimizer", 1)
    with place:
        clock.pass_ms(3)
    assert place.elapsed_s(reset=False) > 0 and place.active_s() > 0
    place.start()
    place.stop()
    place.set_elapsed(4.0)
    assert timers("optimizer").elapsed_s() == 4.0
    assert both.timer("forward-compute", 2) is one.timer("forward-compute"), "that timer is off"
    assert Observed(timers).timer("optimizer", 1) is timers("optimizer")
    assert NO_STRAGGLER.report(1) is None
    one.report(1)
    with pytest.raises(KeyError), place:
        raise KeyError
    report = one.report(2)
    assert report is not None and report.slowest[0].sections == [], "what failed took no time"
    both.begin_pass()
    both.replayed()


def test_sensors_are_read_in_the_background_and_summed_up() -> None:
    nvml = Nvml()
    reader = SensorReader("GPU-1", nvml)
    assert reader.take() is None
    reader.read()
    nvml.clock, nvml.power, nvml.temperature, nvml.reasons = 1300, 600_000, 70, 0x04
    reader.read()
    nvml.reasons = 0x04
    reader.read()
    taken = reader.take()
    assert taken is not None and taken.power_w is not None and round(taken.power_w, 2) == 566.67
    assert taken == DeviceSensors(1267, 1980, taken.power_w, 80, ["sw-power-cap"])
    watch = SensorWatch("GPU-1", pytest.fail, nvml, read_every_s=0.001)
    nvml.read_twice.clear()
    nvml.num_read = 0
    watch.start()
    watch.start()
    thread = watch._thread
    assert thread is not None and nvml.read_twice.wait(30)
    watch.stop()
    thread.join(30)
    taken = watch.take()
    assert taken is not None and taken.sm_clock_mhz == 1300


def test_sensors_are_not_read_in_a_pause() -> None:
    nvml = Nvml()
    watch = SensorWatch("GPU-1", pytest.fail, nvml, read_every_s=0.001)
    watch.pause()
    watch.start()
    thread = watch._thread
    assert thread is not None and not nvml.read_twice.wait(0.1) and watch.take() is None
    watch.resume()
    assert nvml.read_twice.wait(30) and watch.take() is not None
    watch.stop()
    thread.join(30)


def test_sensors_that_are_missing_or_fail_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def over(watch: SensorWatch) -> None:
        watch.start()
        assert watch._thread is not None
        watch._thread.join(30)
        for _ in range(2):
            watch.take()

    over(SensorWatch("GPU-2", said.append, Nvml()))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    over(SensorWatch("GPU-1", said.append))
    nvml = Nvml()
    nvml.is_gone = True
    over(SensorWatch("GPU-1", said.append, nvml))
    older = Nvml()  # a library without a function: the bindings raise what ctypes does
    older.nvmlDeviceGetClockInfo = older.nvmlDeviceGetTemperature = None  # type: ignore[assignment, method-assign]
    old = SensorReader("GPU-1", older)
    assert old.read() and (taken := old.take()) is not None
    assert (taken.sm_clock_mhz, taken.temperature_c, taken.power_w) == (None, None, 500.0)
    broken = Nvml()
    broken.nvmlInit = None  # type: ignore[assignment, method-assign]
    with pytest.raises(LookupError, match="does not give GPU-1"):
        SensorReader("GPU-1", broken)
    assert said == [
        "stragglers are reported without sensors: NVML does not give GPU-2: Not Found",
        "stragglers are reported without sensors: NVML's Python bindings (nvidia-ml-py) are not installed",
        "the sensors of GPU-1 answer no more: stragglers are reported without them",
    ]
    on_cpu = SensorWatch("CPU-x", pytest.fail)
    on_cpu.start()
    assert on_cpu._thread is None and on_cpu.take() is None


class Detector:
    """NVRx's, of a machine with CUPTI."""

    initialized = False
    calls: list[str] = []  # noqa: RUF012 - a class is what NVRx has
    failing = ""

    @classmethod
    def initialize(cls, **settings: Any) -> None:
        cls.initialized = True
        cls.calls.append(f"initialize {settings['profiling_interval']}")

    @classmethod
    def shutdown(cls) -> None:
        cls.initialized = False
        cls.calls.append("shutdown")

    @classmethod
    def detection_section(cls, name: str, profile_cuda: bool) -> "Detector":
        assert profile_cuda
        if cls.failing == "section":
            raise RuntimeError("no section")
        return cls()

    def __enter__(self) -> None:
        self.calls.append("enter")
        if self.failing:
            raise RuntimeError(self.failing)

    def __exit__(self, *_: object) -> None:
        self.calls.append("exit")

    @classmethod
    def generate_report(cls) -> Any:
        if cls.failing == "scores":
            return types.SimpleNamespace(gpu_relative_perf_scores=[1.0, 0.5])
        return types.SimpleNamespace(gpu_relative_perf_scores={0: 1.0, 1: 0.5}, gpu_individual_perf_scores={0: 0.9})


@pytest.fixture
def nvrx_detector(monkeypatch: pytest.MonkeyPatch) -> type[Detector]:
    monkeypatch.setattr(Detector, "calls", [])
    monkeypatch.setattr(Detector, "initialized", False)
    monkeypatch.setattr(Detector, "failing", "")
    return Detector


def test_nvrx_scores_join_where_they_load(nvrx_detector: type[Detector], monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(nvrx._MODULES[0])
    module.Detector = nvrx_detector  # type: ignore[attr-defined]
    imported: Callable[[str], Any] = lambda name: module  # noqa: E731
    monkeypatch.setattr(nvrx.importlib, "import_module", imported)
    kernels = load_kernel_scores(torch.device("cuda"), "n0", pytest.fail)
    assert kernels is not None
    clock = Clock()
    one = detector(clock, kernels=kernels)
    timed(one, clock, "forward-compute", 4)
    assert one.report(1) is None and nvrx_detector.calls == ["initialize 10"], "it begins when all ranks have it"
    timed(one, clock, "forward-compute", 4)
    report = one.report(2)
    assert report is not None
    (kernel_score,) = [score for score in report.slowest[0].sections if score.section == "gpu kernels"]
    assert (kernel_score.relative, kernel_score.individual) == (1.0, 0.9)
    timed(one, clock, "optimizer", 4)
    one.close()
    assert nvrx_detector.calls == ["initialize 10", "enter", "exit", "shutdown"]


def test_nvrx_that_fails_is_one_warning_and_training_goes_on(
    nvrx_detector: type[Detector], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(nvrx_detector, "failing", "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    kernels = KernelScores(nvrx_detector, said.append)
    for _ in range(2):
        kernels.start()
        kernels.stop()
    assert not kernels.works and kernels.scores() == {}
    assert said == ["NVRx's kernel scores end here: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"]
    kernels.close()
    for failing, call in (("section", KernelScores.start), ("scores", KernelScores.scores)):
        monkeypatch.setattr(nvrx_detector, "failing", failing)
        kernels = KernelScores(nvrx_detector, said.append)
        for _ in range(2):
            call(kernels)
        kernels.stop()
        assert not kernels.works
    assert said.pop().startswith("NVRx's kernel scores end here: AttributeError: ")
    assert said.pop() == "NVRx's kernel scores end here: RuntimeError: no section" and len(said) == 1
    assert load_kernel_scores(CPU, "n0", pytest.fail) is None
    if torch.cuda.is_available():
        return
    assert load_kernel_scores(torch.device("cuda"), "n0", said.append) is None
    assert said[1].startswith("kernels are not compared, sections are: NVRx's straggler detector does not load (")
