"""What adds up between two log lines: steps, losses, work and time. Pure but for the clock, which is handed in.

The first line of a process comes after its first step and clears nothing, so that the first whole interval still holds all its
steps. Means are over the steps that had the number: one that is missing in a step is not a zero.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Interval:
    """What a log line says of the steps since the last one that cleared. Times in seconds, on the clock of this rank.

    `losses`: means over the steps that updated parameters and had that loss; NaN and Inf as they are. `num_non_finite`: steps
    with a loss that is NaN or Inf, whether they updated or not. `flops`: of all ranks, 0 where nobody says.
    """

    num_advanced: int
    num_skipped: int
    num_non_finite: int
    losses: Mapping[str, float]
    elapsed_s: float
    flops: float
    num_samples: int

    @property
    def num_steps(self) -> int:
        """Steps that the time was spent on."""
        return self.num_advanced + self.num_skipped

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.elapsed_s / max(1, self.num_steps)

    @property
    def samples_per_s(self) -> float:
        """Samples that all ranks together computed in a second."""
        return self.num_samples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def tflops_per_rank(self, world_size: int) -> float:
        """Trillions of floating-point operations in a second, of each rank."""
        return self.flops / (self.elapsed_s * 1e12 * world_size) if self.elapsed_s > 0 else 0.0


@dataclass
class IntervalCounters:
    """Adds up. `clock`: seconds that only go forward."""

    clock: Callable[[], float] = time.perf_counter
    num_reports: int = 0
    """Lines so far, in this process."""
    _num_advanced: int = 0
    _num_skipped: int = 0
    _num_non_finite: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _flops: float = 0.0
    _num_samples: int = 0
    _spent_s: float = 0.0
    _since_s: float = 0.0
    _reported_s: float = 0.0
    """Of the intervals that were cleared."""
    _num_pauses: int = 0
    total_flops: float = 0.0
    """Of this process's steps."""

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    # ------------------------------------------------------------------------------------------------------- each step

    def add_step(self, skipped: bool, flops: float, num_samples: int) -> None:
        """One step more. `flops`, `num_samples`: what it computed, 0 where it computed nothing."""
        if skipped:
            self._num_skipped += 1
        else:
            self._num_advanced += 1
        self._flops += flops
        self.total_flops += flops
        self._num_samples += num_samples

    def add_losses(self, losses: Mapping[str, float], skipped: bool) -> None:
        """The losses of one of these steps, over all ranks."""
        if not all(math.isfinite(loss) for loss in losses.values()):
            self._num_non_finite += 1
        if skipped:
            return
        for name, loss in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + loss
            self._counts[name] = self._counts.get(name, 0) + 1

    # ------------------------------------------------------------------------------------------------------------ time

    def pause(self) -> bool:
        """The time from here to `resume` is no step's; whether it was not stopped already. May be nested."""
        self._num_pauses += 1
        if self._num_pauses > 1:
            return False
        self._spent_s += self.clock() - self._since_s
        return True

    def resume(self) -> bool:
        """The end of `pause`; whether time counts again."""
        self._num_pauses -= 1
        if self._num_pauses:
            return False
        self._since_s = self.clock()
        return True

    @property
    def is_paused(self) -> bool:
        """Inside of `pause` and `resume`."""
        return self._num_pauses > 0

    def elapsed_s(self) -> float:
        """Time since the last line that cleared, pauses left out."""
        return self._spent_s + (0.0 if self._num_pauses else self.clock() - self._since_s)

    # ------------------------------------------------------------------------------------------------------------ lines

    def report(self, clears: bool, elapsed_s: float | None = None) -> Interval:
        """What there is to say now. `clears`: what follows is a new interval, from `elapsed_s` on (None: from now)."""
        spent_s = self.elapsed_s() if elapsed_s is None else elapsed_s
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        counts = (self._num_advanced, self._num_skipped, self._num_non_finite)
        found = Interval(*counts, means, spent_s, self._flops, self._num_samples)
        self.num_reports += 1
        if clears:
            self._clear(spent_s)
        return found

    def _clear(self, reported_s: float) -> None:
        now_s = self.clock()
        passed_s = self._spent_s + (0.0 if self._num_pauses else now_s - self._since_s) - reported_s
        self._num_advanced = self._num_skipped = self._num_non_finite = 0
        self._sums.clear()
        self._counts.clear()
        self._flops, self._num_samples = 0.0, 0
        self._spent_s, self._since_s = max(0.0, passed_s), now_s
        self._reported_s += reported_s

    def restart_clock(self) -> None:
        """Time counts from now; what was counted stays."""
        self._spent_s = self._reported_s = 0.0
        self._since_s = self.clock()

    def active_s(self) -> float:
        """All of this process's time since the last `restart_clock`, pauses left out."""
        return self._reported_s + self.elapsed_s()
