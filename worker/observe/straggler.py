"""Finds the ranks that hold the others up: times of sections on each rank, compared over ranks now and then.

    detector = StragglerDetector(rank=rank, device=device, torch_device=torch_device, group=group, warn=warn, enabled=True)
    forward = detector.timer("forward-compute")            # ask once, keep; costs next to nothing while the detector is off
    with forward: ...
    report = detector.report(iteration)                    # every log interval, on all ranks
    detector.pause(); ...; detector.resume()               # evaluation, saves; `TrainingLog(pausable=[detector])` does it

Sections come from its own timers (events on a GPU, which wait for nothing) and from the heartbeat board, where every
`rsup.worker.section` counts. What of it is the device's own work is comparable; see `straggler_scores.py`. People switch it on
and off in the running job (`rsup stragglers JOB on`); ranks hear of that at different moments, and act on it together.
"""

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import rsup.worker
from rsup.supervisor.wire import StragglerReport
from rsup.worker.observe.contract import Warn
from rsup.worker.observe.event_timers import EventTimer, Marks
from rsup.worker.observe.nvrx_straggler import KernelScores
from rsup.worker.observe.straggler_scores import SHARED_SECTIONS, THRESHOLD, Interval, RankTimes, make_report
from rsup.worker.observe.straggler_sensors import SensorWatch
from rsup.worker.observe.timer_contract import TimerLike
from rsup.worker.rerun.contract import RankDevice

SWITCH = "stragglers"
"""Its name in `rsup.worker.requested_switches()`."""
PROFILED = "forward-compute"
"""The section whose kernels NVRx looks at, where it loads: it reduces nothing, so that a rank's kernels are its own."""
_MOST_CALLS = 1 << 16
"""Whose times are kept between two reports."""


class CallTimer:
    """A `TimerLike` that keeps the time of each call, by the host's clock."""

    __slots__ = ("_now_ns", "_since_ns", "_times")

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._since_ns = 0
        self._times: collections.deque[int] = collections.deque(maxlen=_MOST_CALLS)

    def start(self, barrier: bool | None = None) -> None:
        self._since_ns = self._now_ns()

    def stop(self, barrier: bool | None = None) -> None:
        if self._since_ns:
            self._times.append(self._now_ns() - self._since_ns)
            self._since_ns = 0

    def cancel(self) -> None:
        """The call that runs does not count."""
        self._since_ns = 0

    def take_calls(self) -> tuple[float, int]:
        """See `EventTimer.take_calls`."""
        times = list(self._times)
        self._times.clear()
        return (statistics.median(times) / 1e9, len(times)) if times else (0.0, 0)

    def drop(self) -> None:
        """Forget what was measured."""
        self._since_ns = 0
        self._times.clear()


class SwitchedTimer:
    """A `TimerLike` of one section, for the detector alone; does nothing while that is off."""

    __slots__ = ("_timer", "kernels", "measuring")

    def __init__(self, measuring: CallTimer | EventTimer) -> None:
        self.measuring = measuring
        self.kernels: KernelScores | None = None
        self._timer: CallTimer | EventTimer | None = None

    def switch(self, on: bool) -> None:
        """Between steps."""
        self.measuring.drop()
        self._timer = self.measuring if on else None

    def start(self, barrier: bool | None = None) -> None:
        if self._timer is not None:
            self._timer.start()
            if self.kernels is not None:
                self.kernels.start()

    def stop(self, barrier: bool | None = None) -> None:
        if self._timer is not None:
            if self.kernels is not None:
                self.kernels.stop()
            self._timer.stop()

    def elapsed_s(self, reset: bool = True, barrier: bool = False) -> float:
        return 0.0

    def active_s(self) -> float:
        return 0.0

    def set_elapsed(self, elapsed_s: float) -> None:
        pass

    __enter__ = start

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if kind is None:
            self.stop()
        elif self._timer is not None:
            if self.kernels is not None:
                self.kernels.stop()
            self._timer.cancel()


class _Moment(NamedTuple):
    """Where an interval or a pause begins: by the clock, and what the thread had waited and its sections had taken by then."""

    at_ns: int
    waited_ns: int
    board: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others at a report. `asked`: what people asked since its last one. `times`: None while off."""

    asked: bool | None
    has_kernels: bool
    times: RankTimes | None


class StragglerDetector:
    """The detector of one rank. Training thread; `report` is collective.

    `group`: where reports are gathered (gloo; None: all ranks, or this one alone). `sections`: the names that `timer` measures;
    None: all. `shared`: sections that wait for other ranks. `kernels`: NVRx's detector, used where every rank has one.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: RankDevice,
        torch_device: torch.device,
        group: dist.ProcessGroup | None,
        warn: Warn,
        enabled: bool = False,
        sections: Collection[str] | None = None,
        shared: Collection[str] = SHARED_SECTIONS,
        num_listed: int = 3,
        threshold: float = THRESHOLD,
        marks: Marks | None = None,
        sensors: SensorWatch | None = None,
        kernels: KernelScores | None = None,
        requested: Callable[[], Mapping[str, bool]] = rsup.worker.requested_switches,
        section_totals: Callable[[], Mapping[str, tuple[int, int]]] = rsup.worker.section_totals,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._rank = rank
        self._device = device
        self._group = group
        self._warn = warn
        self._sections = None if sections is None else frozenset(sections)
        self.shared = frozenset(shared)
        self._num_listed = num_listed
        self._threshold = threshold
        self._marks = Marks() if marks is None and torch_device.type == "cuda" else marks
        self._sensors = SensorWatch(device.uuid, warn) if sensors is None else sensors
        self._kernels = kernels
        self._requested = requested
        self._section_totals = section_totals
        self._now_ns = now_ns
        self._timers: dict[str, SwitchedTimer] = {}
        self._best: dict[str, float] = {}
        self._heard: bool | None = None
        self._first: int | None = None
        self._since = _Moment(0, 0, {})
        """Where the interval begins, later by what was paused in it."""
        self._paused: _Moment | None = None
        self.is_on = False
        if enabled:
            self._switch(True)

    def timer(self, name: str) -> TimerLike | None:
        """What measures that section; None for one that is not looked at. The same object at every call."""
        if self._sections is not None and name not in self._sections:
            return None
        timer = self._timers.get(name)
        if timer is None:
            measuring = (
                CallTimer(self._now_ns) if self._marks is None else EventTimer(name, self._marks, self._warn, _MOST_CALLS)
            )
            timer = self._timers[name] = SwitchedTimer(measuring)
            timer.switch(self.is_on)
        return timer

    def report(self, iteration: int) -> StragglerReport | None:
        """How evenly the ranks ran since the last report, the same on all of them; `iteration` is the newest that is done.

        None while it is off, and at the first call after it was switched on: there an interval begins. Collective, on or off:
        what people have asked for takes effect here.
        """
        works = self._kernels is not None and self._kernels.works
        told = self._exchange(_Told(self._asked(), works, self._measured(iteration)))
        all_work = all(one.has_kernels for one in told)
        ranks = [one.times for one in told if one.times is not None]
        report = None
        if len(ranks) == len(told) and self._first is not None:
            now_ns = self._now_ns() if self._paused is None else self._paused.at_ns
            step_s = (now_ns - self._since.at_ns) / 1e9 / (iteration - self._first + 1)
            interval = Interval(self._first, iteration, step_s, self.shared)
            kernels = self._kernels.scores() if self._kernels is not None and self._profiles and all_work else None
            report = make_report(interval, ranks, self._num_listed, self._threshold, kernels)
        asked = next((one.asked for one in told if one.asked is not None), None)
        if asked is not None and asked != self.is_on:
            self._switch(asked)
        self._profile(self.is_on and all_work)
        if self.is_on:
            self._begin(iteration + 1)
        return report

    def pause(self) -> None:
        """What follows, up to `resume`, is no iteration's: evaluation, saves. Has no effect while it is paused, or off."""
        if self.is_on and self._paused is None:
            self._paused = self._moment()
            self._sensors.pause()

    def resume(self) -> None:
        """The end of `pause`. Has no effect elsewhere."""
        paused, self._paused = self._paused, None
        if paused is None:
            return
        self._sensors.resume()
        now, since = self._moment(), self._since
        board = dict(since.board)
        for name, (entered, total_ns) in now.board.items():
            entered_before, before_ns = paused.board.get(name, (0, 0))
            entered_first, first_ns = board.get(name, (0, 0))
            board[name] = (entered_first + entered - entered_before, first_ns + total_ns - before_ns)
        self._since = _Moment(since.at_ns + now.at_ns - paused.at_ns, since.waited_ns + now.waited_ns - paused.waited_ns, board)

    def begin_pass(self) -> None:
        """See `Timers.begin_pass`."""
        for timer in self._timers.values():
            if isinstance(timer.measuring, EventTimer):
                timer.measuring.begin_pass()

    def replayed(self) -> None:
        """See `Timers.replayed`."""
        for timer in self._timers.values():
            if isinstance(timer.measuring, EventTimer):
                timer.measuring.replayed()

    def close(self) -> None:
        """Measure no more. May be repeated."""
        self._profile(False)
        self._switch(False)
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None

    # ------------------------------------------------------------------------------------------------------- measuring

    @property
    def _profiles(self) -> bool:
        return any(timer.kernels is not None for timer in self._timers.values())

    def _profile(self, on: bool) -> None:
        if PROFILED in self._timers:
            self._timers[PROFILED].kernels = self._kernels if on else None

    def _switch(self, on: bool) -> None:
        self.is_on = on
        self._first = self._paused = None
        self._sensors.resume()
        for timer in self._timers.values():
            timer.switch(on)
        if on:
            self._sensors.start()
        else:
            self._sensors.stop()

    def _begin(self, first: int) -> None:
        self._first = first
        self._since = self._moment()
        if self._paused is not None:
            self._paused = self._since

    def _moment(self) -> _Moment:
        return _Moment(self._now_ns(), _waited_for_processor_ns(), dict(self._section_totals()))

    def _measured(self, iteration: int) -> RankTimes | None:
        """What this rank tells of the interval that ends here; None where none has begun."""
        calls = {name: timer.measuring.take_calls() for name, timer in self._timers.items()} if self.is_on else {}
        sensors = self._sensors.take() if self.is_on else None
        if not self.is_on or self._first is None or iteration < self._first:
            return None
        num_iterations = iteration - self._first + 1
        times: dict[str, float] = {}
        now = self._paused or self._moment()
        for name, (entered, total_ns) in now.board.items():
            entered_before, before_ns = self._since.board.get(name, (0, 0))
            if entered > entered_before and total_ns > before_ns:
                times[name] = (total_ns - before_ns) / 1e9 / num_iterations
        times |= {name: median_s * num_calls / num_iterations for name, (median_s, num_calls) in calls.items() if num_calls}
        best = dict(self._best)
        for name, time_s in times.items():
            self._best[name] = min(time_s, self._best.get(name, time_s))
        waited_s = max(0, now.waited_ns - self._since.waited_ns) / 1e9 / num_iterations
        return RankTimes(self._rank, self._device.uuid, self._device.node, times, best, sensors, waited_s)

    def _asked(self) -> bool | None:
        """What people have asked for since the last call; a rank that hears late says so late, and nobody goes back for it."""
        asked = self._requested().get(SWITCH)
        is_news, self._heard = asked is not None and asked != self._heard, asked
        return asked if is_news else None

    def _exchange(self, mine: _Told) -> list[_Told]:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self._group) == 1:
            return [mine]
        told: list[_Told] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(told, mine, group=self._group)
        return told


def _waited_for_processor_ns() -> int:
    """How long this thread was ready to run and had no processor, since it began; 0 where Linux does not count it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return 0
