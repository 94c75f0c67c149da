"""Timers on a real device: events wait for nothing and measure the device's own time, also inside of a graph."""

import os
import time

import pytest
import torch

from rsup.worker.cuda_graph.capture import SharedCapture
from rsup.worker.cuda_graph.contract import GraphError
from rsup.worker.observe.event_timers import EventTimer, Marks
from rsup.worker.observe.straggler import StragglerDetector
from rsup.worker.observe.timers import Timers
from rsup.worker.rerun.contract import RankDevice

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

DEVICE = torch.device("cuda", 0)


def work(matrix: torch.Tensor, times: int = 30) -> torch.Tensor:
    """Some milliseconds of it."""
    for _ in range(times):
        matrix = torch.mm(matrix, matrix).clamp_(-1, 1)
    return matrix


def test_event_timers_measure_what_is_queued_and_never_wait() -> None:
    matrix = torch.rand(2048, 2048, device=DEVICE)
    work(matrix)
    torch.cuda.synchronize()
    timers = Timers(2, device=DEVICE, mode="event", warn=pytest.fail)
    torch.cuda.set_sync_debug_mode("error")
    try:
        began_s = time.perf_counter()
        for _ in range(100):
            with timers("optimizer", 1), timers("forward-compute", 2):
                work(matrix, 3)
        queued_s = time.perf_counter() - began_s
        timers.maxima()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began_s
    found = timers.maxima()
    assert queued_s < took_s
    assert 0 < found["forward-compute"] <= found["optimizer"] <= took_s
    assert found["forward-compute"] > 0.3 * took_s, "the device did little else"


def test_in_a_graph_events_are_nodes_and_a_waiting_timer_is_refused() -> None:
    matrix = torch.rand(2048, 2048, device=DEVICE)
    work(matrix)
    capture = SharedCapture(DEVICE)
    inside, around = (EventTimer(name, Marks(), pytest.fail, 64) for name in ("inside", "around"))

    def step() -> torch.Tensor:
        inside.begin_pass()
        with inside:
            half = work(matrix)
        return work(half)

    captured = capture.capture(step, "the step")
    assert inside.elapsed_s() == 0
    with capture.on_stream():
        for _ in range(5):
            with around:
                captured.replay()
            inside.replayed()
        torch.cuda.synchronize()
    inside_s, around_s = inside.elapsed_s(reset=False), around.elapsed_s()
    assert 0.3 * around_s < inside_s < 0.7 * around_s, (inside_s, around_s)
    median_s, num_calls = inside.take_calls()
    assert num_calls == 5 and 0 < median_s < around_s / 5
    captured.destroy()
    waiting = Timers(2, device=DEVICE, warn=pytest.fail)

    def waits() -> torch.Tensor:
        with waiting("forward-compute", 2):
            return work(matrix)

    with pytest.raises(GraphError, match='use mode="event"'):
        capture.capture(waits, "the step")
    again = capture.capture(lambda: work(matrix), "the step")
    again.replay()
    torch.cuda.synchronize()
    again.destroy()


def test_the_detector_reads_the_devices_sensors_while_it_computes() -> None:
    device = RankDevice(f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}", "n0")
    detector = StragglerDetector(rank=0, device=device, torch_device=DEVICE, group=None, warn=pytest.fail, enabled=True)
    timer = detector.timer("forward-compute")
    assert timer is not None
    matrix = torch.rand(2048, 2048, device=DEVICE)
    detector.report(1)
    report = None
    for iteration in range(2, 400):
        with timer:
            work(matrix)
        if iteration % 20 == 0:
            torch.cuda.synchronize()
            report = detector.report(iteration)
            if report is not None and report.slowest[0].sensors is not None:
                break
    detector.close()
    assert report is not None and report.stragglers == []
    sensors = report.slowest[0].sensors
    assert sensors is not None and sensors.max_sm_clock_mhz and sensors.sm_clock_mhz
    assert sensors.power_w and sensors.power_w > 10 and sensors.temperature_c
    assert report.slowest[0].sections[0].time_s > 0
