"""Energy of this rank's GPU, with NVML's answers played."""

import threading
from collections.abc import Callable

import pytest

from rsup.worker.observe.energy import MAX_FAILURES, EnergyMeter, PowerIntegral

UUID = "GPU-5d3e0f6a-0000-4000-8000-000000000001"


class Nvml:
    """The bindings, for one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.energy_mj = 7_000_000
        self.power_mw = 300_000
        self.asked_for: list[bytes] = []
        self.has_counter = True
        self.has_power = True
        self.is_lost = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        self.asked_for.append(uuid)
        if self.is_lost:
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle"
        if self.is_lost:
            raise self.NVMLError("GPU is lost")
        if not self.has_counter:
            raise self.NVMLError("Not Supported")
        return self.energy_mj

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self.has_power:
            raise self.NVMLError("Not Supported")
        return self.power_mw

    def takes_j(self, joules: float) -> None:
        self.energy_mj += int(joules * 1000)


def test_laps_hold_what_was_taken_while_it_ran_and_a_peek_ends_none() -> None:
    nvml, said = Nvml(), list[str]()
    meter = EnergyMeter(UUID, said.append, nvml=nvml)
    nvml.takes_j(1000)  # setting up
    assert meter.lap_j() == 0
    meter.resume()
    nvml.takes_j(5)
    assert meter.peek_j() == pytest.approx(5)  # the report after the first step
    nvml.takes_j(7)
    meter.pause()
    nvml.takes_j(500)  # a save
    meter.pause()
    meter.resume()
    meter.resume()
    nvml.takes_j(8)
    assert meter.lap_j() == pytest.approx(20)
    nvml.takes_j(3)
    assert meter.total_j() == pytest.approx(23)
    assert meter.lap_j() == pytest.approx(3)
    assert meter.lap_j() == 0
    assert nvml.asked_for == [UUID.encode()] and said == []
    meter.close()
    assert (meter.lap_j(), meter.total_j(), meter.works) == (None, None, False)


def test_a_counter_that_begins_anew_takes_nothing_away() -> None:
    nvml, said = Nvml(), list[str]()
    meter = EnergyMeter(UUID, said.append, nvml=nvml)
    meter.resume()
    nvml.takes_j(10)
    assert meter.peek_j() == pytest.approx(10)
    nvml.energy_mj = 0
    assert meter.peek_j() == pytest.approx(10)
    nvml.takes_j(2)
    assert meter.lap_j() == pytest.approx(12)


def test_a_failure_in_the_middle_is_said_once_and_loses_nothing_but_what_a_pause_hides() -> None:
    nvml, said = Nvml(), list[str]()
    meter = EnergyMeter(UUID, said.append, nvml=nvml)
    meter.resume()
    nvml.takes_j(3)
    for _ in range(2):
        nvml.is_lost = True
        for _ in range(MAX_FAILURES - 1):
            assert meter.peek_j() is not None
        nvml.is_lost = False
        assert meter.peek_j() == pytest.approx(3)
    nvml.takes_j(4)
    assert meter.lap_j() == pytest.approx(7)
    meter.pause()
    nvml.takes_j(500)  # a save
    nvml.is_lost = True
    meter.resume()
    assert meter.peek_j() == 0
    nvml.is_lost = False
    nvml.takes_j(6)
    assert meter.peek_j() == 0, "nobody knows what of it was the save's"
    nvml.takes_j(2)
    assert meter.lap_j() == pytest.approx(2)
    assert said == ["energy: NVML says GPU is lost; the last reading counts again"]


def test_failures_in_a_row_end_it_with_one_line_and_there_are_no_readings_from_then_on() -> None:
    nvml, said = Nvml(), list[str]()
    meter = EnergyMeter(UUID, said.append, nvml=nvml)
    meter.resume()
    nvml.is_lost = True
    assert [meter.lap_j() for _ in range(MAX_FAILURES)] == [0.0] * (MAX_FAILURES - 1) + [None]
    nvml.is_lost = False
    meter.pause()
    meter.resume()
    assert (meter.lap_j(), meter.peek_j(), meter.total_j()) == (None, None, None)
    assert said[1:] == [f"energy is not measured any more: NVML says GPU is lost, {MAX_FAILURES} times in a row"]


@pytest.mark.parametrize(
    ("uuid", "change", "text"),
    [
        (None, lambda nvml: None, "energy is not measured: this rank has no GPU"),
        ("CPU-1-0", lambda nvml: None, "energy is not measured: this rank has no GPU"),
        (UUID, lambda nvml: setattr(nvml, "is_lost", True), f"energy of {UUID} is not measured: NVML says Not Found"),
        (
            UUID,
            lambda nvml: nvml.__dict__.update(has_counter=False, has_power=False),
            f"energy of {UUID} is not measured: NVML has no counter (Not Supported), no power (Not Supported)",
        ),
    ],
)
def test_where_nothing_can_be_measured_it_is_said_and_every_call_does_nothing(
    uuid: str | None, change: Callable[[Nvml], object], text: str
) -> None:
    nvml, said = Nvml(), list[str]()
    change(nvml)
    meter = EnergyMeter(uuid, said.append, nvml=nvml)
    meter.pause()
    meter.resume()
    assert (meter.peek_j(), meter.lap_j(), meter.total_j()) == (None, None, None)
    meter.close()
    meter.close()
    assert said == [text]


def test_power_that_answers_once_and_then_fails_ends_no_training() -> None:
    nvml, said = Nvml(), list[str]()
    nvml.has_counter = False
    answers = iter([300_000])

    def answer(handle: str) -> int:
        for power_mw in answers:
            return power_mw
        raise RuntimeError("GPU is lost")

    nvml.nvmlDeviceGetPowerUsage = answer  # type: ignore[method-assign]
    meter = EnergyMeter(UUID, said.append, nvml=nvml)
    meter.resume()
    for _ in range(MAX_FAILURES):
        meter.lap_j()
    assert not meter.works and "5 times in a row" in said[-1]
    never = EnergyMeter(UUID, said.append, nvml=nvml)
    assert not never.works and said[-1].endswith("NVML has no counter (Not Supported), no power (GPU is lost)")


def test_without_a_counter_power_is_integrated() -> None:
    nvml, said = Nvml(), list[str]()
    nvml.has_counter = False
    meter = EnergyMeter(UUID, said.append, nvml=nvml)
    assert meter.works and said == [f"{UUID} has no energy counter (Not Supported): its power is sampled every 0.1 s instead"]
    meter.close()

    now_s, power_w = [10.0], [100.0]
    integral = PowerIntegral(lambda: power_w[0], every_s=1e6, clock=lambda: now_s[0])
    now_s[0], power_w[0] = 12.0, 300.0
    assert integral.read_j() == 400.0
    now_s[0] = 13.0
    assert integral.read_j() == 700.0
    integral.close()

    num_read, goes_on = 0, threading.Event()

    def read_w() -> float:
        nonlocal num_read
        num_read += 1
        if num_read == 2:
            raise Nvml.NVMLError("Unknown Error")
        if num_read > 2:
            goes_on.set()
        return 100.0

    integral = PowerIntegral(read_w, every_s=0.001, clock=lambda: now_s[0])
    assert goes_on.wait(60), "the thread that samples has met the error"
    now_s[0] = 15.0
    assert integral.read_j() == pytest.approx(200.0)
    integral.close()
