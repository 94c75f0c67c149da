"""Times of steps that take turns, and how much of them the device is busy."""

import gc
import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType

from tests.bench.graph_ranks import World
from tests.bench.graph_steps import Training

LEAD_IN = 2
"""Steps of a turn that are not counted: the device was idle before them."""


@dataclass
class Times:
    """Of one training's steps, in milliseconds: `device` between events, `host` between the ends of a turn of the loop."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    """Medians of `device`, by turn."""
    reserved_mib: float = 0.0
    """What torch reserved from its making to its steady state."""
    used_mib: float = 0.0
    """The same as the driver sees it, graphs themselves included."""


class _Mark:
    """A point in the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()
        self._at = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def ms_until(self, later: "_Mark") -> float:
        if self._event is None or later._event is None:
            return (later._at - self._at) * 1e3
        return float(self._event.elapsed_time(later._event))


class Memory:
    """What has been taken since."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        if self._device.type != "cuda":
            return 0.0, 0.0
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_reserved() / 2**20, (total - free) / 2**20

    def taken_mib(self) -> tuple[float, float]:
        """By torch's allocator, and as the driver counts."""
        return self._now()[0] - self._before[0], self._now()[1] - self._before[1]


def turn(training: Training, batches: list[Any], num_steps: int, times: Times, world: World) -> None:
    """Run so many steps one behind the other and add their times. The host is never more than one step ahead: it waits for the
    step before the one just launched, as a loop that looks at anything does. Collective."""
    device = training.device
    world.wait()
    for number in range(LEAD_IN):
        training.run(batches[number % len(batches)])
    marks, ends = [_Mark(device)], [time.perf_counter()]
    for number in range(num_steps):
        training.run(batches[(LEAD_IN + number) % len(batches)])
        marks.append(_Mark(device))
        marks[-2].wait()
        ends.append(time.perf_counter())
    training.finish()
    marks[-1].wait()
    device_ms = [one.ms_until(other) for one, other in itertools.pairwise(marks)]
    times.device += device_ms
    times.turns.append(statistics.median(device_ms))
    times.host += [(other - one) * 1e3 for one, other in itertools.pairwise(ends[1:])]


@dataclass(frozen=True)
class Busy:
    """What a profile of some steps shows: time in which any kernel or copy runs, and how many of them, a step."""

    busy_ms: float
    span_ms: float
    num_kernels: int


def profile(training: Training, batches: list[Any], world: World, num_steps: int = 5) -> Busy | None:
    """Kernel time of a step, overlapping streams counted once. None without CUDA. Collective."""
    if training.device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    world.wait()
    with torch.profiler.profile(activities=activities):  # starts the profiler's own machinery
        training.run(batches[0])
        training.finish()
    world.wait()
    with torch.profiler.profile(activities=activities) as profiled:
        for number in range(num_steps):
            training.run(batches[number % len(batches)])
        training.finish()
        torch.cuda.synchronize()
    intervals = _kernels(profiled)
    if not intervals:
        return None
    busy_ns, until = 0, 0
    for start, end in intervals:
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
    span_ns = until - intervals[0][0]
    return Busy(busy_ns / 1e6 / num_steps, span_ns / 1e6 / num_steps, len(intervals) // num_steps)


def _kernels(profiled: Any) -> list[tuple[int, int]]:
    found = []
    for event in profiled.profiler.kineto_results.events():
        kind = event.activity_type() if hasattr(event, "activity_type") else ""
        is_work = not event.is_user_annotation() and "annotation" not in kind and "sync" not in kind
        if event.device_type() == DeviceType.CUDA and is_work:
            found.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return sorted(found)
