"""How deterministic is the training? Differences between two passes over the same iteration, counted by check.

Sizes are counted in logarithmic buckets, 2 % wide: a percentile is within 1 % of the true one however many there are, and the
counts of several ranks are merged by adding them. (The idea: Masson, Rim, Lee, "DDSketch", VLDB 2019.)
"""

import math
from collections.abc import Iterable
from typing import Any

_ACCURACY = 0.01
_GAMMA = (1 + _ACCURACY) / (1 - _ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)
_FORMAT = 1
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Sketch:
    """The differences of one check. Those that are infinite or NaN have no size: they are counted apart."""

    def __init__(self) -> None:
        self.num_zeros = 0
        self.num_infinite = 0
        self.max = 0.0
        self._sum = 0.0
        self._buckets: dict[int, int] = {}
        self._num_sized = 0

    @property
    def count(self) -> int:
        """All differences."""
        return self.num_zeros + self._num_sized + self.num_infinite

    @property
    def average(self) -> float:
        """Of those with a size, zeros included; never infinite."""
        finite = self.num_zeros + self._num_sized
        return self._sum / finite if finite else 0.0

    def add(self, difference: float) -> None:
        """One difference more; 0 is the same."""
        if not math.isfinite(difference):
            self.num_infinite += 1
        elif difference == 0:
            self.num_zeros += 1
        else:
            size = min(abs(difference), 1e300)  # the sum stays finite
            bucket = math.ceil(math.log(size) / _LOG_GAMMA)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
            self._num_sized += 1
            self._sum += size
            self.max = max(self.max, size)

    def merge(self, other: "Sketch") -> None:
        """Count what `other` has counted too."""
        self.num_zeros += other.num_zeros
        self.num_infinite += other.num_infinite
        self.max = max(self.max, other.max)
        self._sum += other._sum
        self._num_sized += other._num_sized
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def percentile(self, percent: float) -> float:
        """The size that `percent` of the differences with a size do not exceed."""
        left = max(math.ceil((self.num_zeros + self._num_sized) * percent / 100), 1) - self.num_zeros
        if left <= 0:
            return 0.0
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(2 * _GAMMA**bucket / (_GAMMA + 1), self.max)
        return self.max

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        buckets = [[bucket, count] for bucket, count in sorted(self._buckets.items())]
        return {
            "zeros": self.num_zeros,
            "infinite": self.num_infinite,
            "max": self.max,
            "sum": self._sum,
            "buckets": buckets,
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Sketch":
        """What `state_dict` gave."""
        sketch = cls()
        sketch.num_zeros, sketch.num_infinite = int(state["zeros"]), int(state["infinite"])
        sketch.max, sketch._sum = float(state["max"]), float(state["sum"])
        sketch._buckets = {int(bucket): int(count) for bucket, count in state["buckets"]}
        sketch._num_sized = sum(sketch._buckets.values())
        return sketch


class DeterminismStatistics:
    """The sketches of all checks over one window of iterations.

    At a window's end each rank hands its `state_dict()` to the one that reports and calls `reset()`, the reporting one too:
        merged = DeterminismStatistics.merged(states); lines = merged.report_lines()
    """

    def __init__(self) -> None:
        self.checks: dict[str, Sketch] = {}

    def add(self, check: str, difference: float) -> None:
        """The two passes of an iteration differ by `difference` in `check`; 0: not at all."""
        sketch = self.checks.get(check)
        if sketch is None:
            sketch = self.checks[check] = Sketch()
        sketch.add(difference)

    def merge(self, other: "DeterminismStatistics") -> None:
        """Count what `other` has counted too."""
        for check, sketch in other.checks.items():
            self.checks.setdefault(check, Sketch()).merge(sketch)

    @classmethod
    def merged(cls, states: Iterable[dict[str, Any]]) -> "DeterminismStatistics":
        """The statistics of several ranks, from their `state_dict()`."""
        together = cls()
        for state in states:
            together.merge(cls.of_state(state))
        return together

    def reset(self) -> None:
        """Begin a new window."""
        self.checks = {}

    def report_lines(self) -> list[str]:
        """One line for each check."""
        return [f"determinism of {check!r}: {_describe(sketch)}" for check, sketch in sorted(self.checks.items())]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a gather or a checkpoint."""
        return {"format": _FORMAT, "checks": {check: sketch.state_dict() for check, sketch in self.checks.items()}}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "DeterminismStatistics":
        """What `state_dict` gave. Raises `ValueError` for what another release wrote."""
        if state.get("format") != _FORMAT:
            raise ValueError("determinism statistics of another release")
        statistics = cls()
        statistics.checks = {str(check): Sketch.of_state(kept) for check, kept in state["checks"].items()}
        return statistics


def _describe(sketch: Sketch) -> str:
    if sketch.num_zeros == sketch.count:
        return f"{sketch.count} samples, all identical"
    percentiles = " ".join(f"p{percent:g} {sketch.percentile(percent):.3e}" for percent in PERCENTILES)
    infinite = f", {sketch.num_infinite} not finite in one pass only" if sketch.num_infinite else ""
    return (
        f"{sketch.count} samples, {sketch.num_zeros} identical{infinite}, average {sketch.average:.3e}, {percentiles}, "
        f"max {sketch.max:.3e}"
    )
