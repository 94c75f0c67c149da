"""Named timers of a run, in levels, and their times over all ranks.

    timers = Timers(log_level=2, group=group, device=device)
    forward = timers("forward-compute", log_level=2)       # ask once, keep
    with forward: ...
    text = timers.log(normalizer=num_steps)                # collective

`mode="sync"` measures wall time as Megatron-LM does: a start and a stop wait for all that the device has queued, so the parts
of a step no longer overlap. `mode="event"` marks the device's own time line and waits for nothing (`event_timers.py`); timers
of level 0, around what the host does, are then by the host's clock alone. A timer above `log_level` is one shared object that
does nothing. Names and levels: Megatron-LM's `timers.py`, as the seed lists them.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from rsup.worker.observe.contract import Warn
from rsup.worker.observe.event_timers import EventTimer, Marks
from rsup.worker.observe.timer_contract import HIGHEST_LEVEL, LOWEST_LEVEL, OFF, TimerError, TimerLike
from rsup.worker.observe.timer_report import NOTHING, OPTIONS, GatheredTimes, merged, table

MODES = ("sync", "event")


class WallTimer:
    """A `TimerLike`, by the host's clock. `settle(name, barrier)`: called before the clock is read where there is a barrier,
    and with `waits` always. `has_barrier`: at each start."""

    __slots__ = ("_active_ns", "_elapsed_ns", "_has_barrier", "_now_ns", "_settle", "_since_ns", "_waits", "_warn", "name")

    def __init__(
        self,
        name: str,
        warn: Callable[[str], None],
        settle: Callable[[str, bool], None] | None = None,
        has_barrier: bool = False,
        waits: bool = False,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.name = name
        self._warn = warn
        self._settle = settle
        self._has_barrier = has_barrier
        self._waits = waits
        self._now_ns = now_ns
        self._since_ns = 0
        self._elapsed_ns = self._active_ns = 0

    def start(self, barrier: bool | None = None) -> None:
        """Begin to count. One that runs begins anew, with a warning: its stop was left out by an exception, maybe."""
        if self._since_ns:
            self._warn(f"timer {self.name!r} was started twice: it counts from the second start")
        meets = self._has_barrier if barrier is None else barrier
        if (meets or self._waits) and self._settle is not None:
            self._settle(self.name, meets)
        self._since_ns = self._now_ns()

    def stop(self, barrier: bool | None = None) -> None:
        """Count what has passed since the start."""
        if not self._since_ns:
            self._warn(f"timer {self.name!r} was stopped before it was started: that counts for nothing")
            return
        if (barrier or self._waits) and self._settle is not None:
            self._settle(self.name, bool(barrier))
        passed_ns, self._since_ns = self._now_ns() - self._since_ns, 0
        self._elapsed_ns += passed_ns
        self._active_ns += passed_ns

    def elapsed_s(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset; a timer that runs is stopped for it, and started again. See `TimerLike`."""
        runs = self._since_ns != 0
        if runs:
            self.stop(barrier)
        elapsed_ns = self._elapsed_ns
        if reset:
            self._elapsed_ns = 0
        if runs:
            self.start(barrier)
        return elapsed_ns / 1e9

    def active_s(self) -> float:
        """Seconds since it was made."""
        return (self._active_ns + (self._now_ns() - self._since_ns if self._since_ns else 0)) / 1e9

    def set_elapsed(self, elapsed_s: float) -> None:
        """Count what was measured elsewhere."""
        self._elapsed_ns = round(elapsed_s * 1e9)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if kind is None:
            self.stop()
        else:
            self._since_ns = 0  # what failed took no time; and its device may never answer


class Timers:
    """The timers of one rank. One thread; what is collective says so.

    `log_option`: what `log` prints, one of `timer_report.OPTIONS`. `device`: the rank's; None: the CPU. `group`: the ranks
    whose times are gathered; None: all, or this one where there is no process group. `barrier_with_level_1`: timers of level 1
    meet the other ranks at their start, in mode `sync`. `warn`: each text is said once. `marks`: in place of CUDA's events.
    """

    def __init__(
        self,
        log_level: int = 0,
        log_option: str = "minmax",
        *,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        barrier_with_level_1: bool = True,
        mode: str = "sync",
        warn: Warn,
        marks: Marks | None = None,
    ) -> None:
        if not LOWEST_LEVEL <= log_level <= HIGHEST_LEVEL or log_option not in OPTIONS or mode not in MODES:
            raise ValueError(
                f"timers of level {log_level}, option {log_option!r}, mode {mode!r}: none of 0 to 2, {OPTIONS}, {MODES}"
            )
        self._log_level = log_level
        self.log_option = log_option
        self._device = torch.device("cpu") if device is None else device
        self._group = group
        self._barrier_with_level_1 = barrier_with_level_1
        self._mode = mode
        self._warn = warn
        self._warned: set[str] = set()
        on_device = mode == "event" and (marks is not None or self._device.type == "cuda")
        self._marks = (marks or Marks()) if on_device else None
        self._timers: dict[str, WallTimer | EventTimer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> TimerLike:
        """The timer of that name, made at its first use. `log_level`: 0 to 2; None: its own, or 2 where none was given."""
        level = self._levels.get(name)
        if level is None:
            level = self._add(name, HIGHEST_LEVEL if log_level is None else log_level)
        elif log_level is not None and log_level != level:
            self._warn_once(
                f"timer {name!r} is of level {level}, and is asked for as one of level {log_level}: that is ignored"
            )
        return self._timers.get(name, OFF)

    def _add(self, name: str, level: int) -> int:
        if not LOWEST_LEVEL <= level <= HIGHEST_LEVEL:
            raise ValueError(f"timer {name!r} of level {level}: none of 0 to {HIGHEST_LEVEL}")
        self._levels[name] = level
        if level > self._log_level:
            return level
        if self._mode == "event" and (self._marks is None or level == LOWEST_LEVEL):
            self._timers[name] = WallTimer(name, self._warn_once)
        elif self._marks is not None:
            self._timers[name] = EventTimer(name, self._marks, self._warn_once)
        else:
            meets = level == 1 and self._barrier_with_level_1
            self._timers[name] = WallTimer(name, self._warn_once, self._settle, meets, self._device.type == "cuda")
        return level

    # ---------------------------------------------------------------------------------------------------------- readings

    def gather(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> GatheredTimes:
        """Times of all ranks, divided by `normalizer` (the number of steps since the last reset). Collective: one all-gather.

        `names`: the same on all ranks, and none means no collective; None: all timers of each rank, which may differ: that
        gathers objects, and takes several times as long. `barrier`: meet the other ranks once before the times are read,
        whether this rank's timers run or not.
        """
        if names is not None and not names:
            return NOTHING
        if barrier:  # once for all: a timer may run on some ranks only
            self._settle("gather", True)
        mine = {name: timer.elapsed_s(reset) for name, timer in self._timers.items() if names is None or name in names}
        if not self._is_distributed():
            return merged([mine], normalizer)
        if names is None:
            of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size(self._group)
            dist.all_gather_object(of_ranks, mine, group=self._group)
            return merged(of_ranks, normalizer)
        return table(names, self._rows([mine.get(name, 0.0) for name in names]), normalizer)

    def log(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """What is to be printed of them, in milliseconds a step, on every rank; None for nothing. Collective, as `gather`."""
        return self.gather(names, normalizer, reset, barrier).text(self.log_option)

    def maxima(self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = False) -> dict[str, float]:
        """The longest time of each over ranks, in seconds a step. Collective, as `gather`."""
        return self.gather(names, normalizer, reset).maxima()

    def _rows(self, mine: Sequence[float]) -> list[list[float]]:
        where = self._device if "nccl" in dist.get_backend(self._group) else torch.device("cpu")
        row = torch.tensor(mine, dtype=torch.float64, device=where)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, row, group=self._group)
        found: list[list[float]] = torch.stack(rows).tolist()
        return found

    # -------------------------------------------------------------------------------------------------------- graphs

    def begin_pass(self) -> None:
        """Called first in a step that may be captured: marks of an earlier capture are given up. Only in mode `event`."""
        for timer in self._timers.values():
            if isinstance(timer, EventTimer):
                timer.begin_pass()

    def replayed(self) -> None:
        """A captured step was launched once more: what its timers last measured counts once more. Only in mode `event`."""
        for timer in self._timers.values():
            if isinstance(timer, EventTimer):
                timer.replayed()

    # -------------------------------------------------------------------------------------------------------- waiting

    def _settle(self, name: str, barrier: bool) -> None:
        """Wait for the device, and with `barrier` for the other ranks."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            if torch.cuda.is_current_stream_capturing():
                raise TimerError(
                    f"timer {name!r} waits for the device, which no capture of a graph allows, and a replay would not run it:"
                    ' use mode="event", a lower log level, or time around the graph'
                )
            torch.cuda.synchronize(self._device)
        if not barrier or not self._is_distributed():
            return
        dist.barrier(group=self._group)
        if on_gpu and "nccl" in dist.get_backend(self._group):
            torch.cuda.synchronize(self._device)

    def _is_distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self._group) > 1

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
