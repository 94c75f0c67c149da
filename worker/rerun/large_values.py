"""Is a loss or a gradient norm far larger than it used to be? A baseline for each place where one is checked.

A baseline is the 90th percentile of the last values that were accepted: it follows the training, a few outliers do not blind
it, and its memory is bounded. What a pass observes is kept only once its iteration is accepted (`commit`): a pass that is
replayed or rejected leaves no trace (`rollback`).

Hand in values whose size does not depend on the number of tokens or micro-batches: a mean, not a sum.
"""

import bisect
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from rsup.worker.rerun.contract import RerunError

FLOOR = 1e-6
"""A baseline is at least this large: after zeros alone nothing says what is large, and zero itself never is."""
QUANTILE = 0.9
_FORMAT = 1


class LargeValues:
    """The baselines of one rank; those of evaluation are kept apart from those of training."""

    def __init__(self) -> None:
        self.evaluating = False
        """Set while the model is evaluated. What is observed then is learned at once, since nothing replays it."""
        self._baselines: dict[str, _Baseline] = {}
        self._observed: list[_Observation] = []

    def is_unexpectedly_large(
        self, value: float, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Whether |value| is more than `threshold` times the baseline of `context`, which learns from it.

        `context` names one place: one loss, one gradient bucket. The first `num_samples` accepted values are learned and
        never flagged. `resample`: forget the baseline and learn it anew, once, however often it is given in a row. NaN and
        infinities are other checks' business: never large, never learned.
        """
        size = abs(value)
        if not math.isfinite(size):
            return False
        key = f"eval/{context}" if self.evaluating else context
        baseline = self._baselines.get(key)
        restart = resample and not self._is_resampling(key)
        large = False
        if baseline is not None and not restart and not self._restarted(key):
            large = baseline.is_learned(num_samples) and size > max(baseline.typical(), FLOOR) * threshold
        observation = _Observation(key, size, num_samples, restart, resample)
        if self.evaluating:
            self._learn(observation)
        else:
            self._observed.append(observation)
        return large

    def commit(self) -> None:
        """The iteration is accepted: learn what its last pass observed."""
        for observation in self._observed:
            self._learn(observation)
        self._observed.clear()

    def rollback(self) -> None:
        """The pass is replayed, or its iteration rejected: forget what it observed."""
        self._observed.clear()

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain numbers; what the running pass has observed is not in it."""
        contexts = {key: baseline.state_dict() for key, baseline in self._baselines.items()}
        return {"format": _FORMAT, "contexts": contexts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises `RerunError` for anything else, and then keeps what it has."""
        try:
            if state["format"] != _FORMAT:
                raise ValueError
            baselines = {str(key): _Baseline.of_state(kept) for key, kept in state["contexts"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RerunError("the baselines of large values in the checkpoint are unreadable: they are learned anew") from None
        self._baselines, self._observed = baselines, []

    def _learn(self, observation: "_Observation") -> None:
        baseline = self._baselines.get(observation.key)
        if baseline is None or observation.restart:
            baseline = self._baselines[observation.key] = _Baseline(observation.num_samples)
        baseline.resampling = observation.resample
        baseline.learn(observation.size, observation.num_samples)

    def _restarted(self, key: str) -> bool:
        return any(observation.restart for observation in self._observed if observation.key == key)

    def _is_resampling(self, key: str) -> bool:
        for observation in reversed(self._observed):
            if observation.key == key:
                return observation.resample
        baseline = self._baselines.get(key)
        return baseline is not None and baseline.resampling


@dataclass(frozen=True)
class _Observation:
    key: str
    size: float
    num_samples: int
    restart: bool
    resample: bool


class _Baseline:
    """The last accepted sizes of one place, by age and by size."""

    def __init__(self, num_samples: int) -> None:
        self.resampling = False
        self._recent: deque[float] = deque(maxlen=max(num_samples, 1))
        self._ordered: list[float] = []

    def is_learned(self, num_samples: int) -> bool:
        return len(self._recent) >= max(num_samples, 1)

    def typical(self) -> float:
        return self._ordered[math.ceil(QUANTILE * len(self._ordered)) - 1]

    def learn(self, size: float, num_samples: int) -> None:
        if self._recent.maxlen != max(num_samples, 1):
            self._recent = deque(self._recent, maxlen=max(num_samples, 1))
            self._ordered = sorted(self._recent)
        if len(self._recent) == self._recent.maxlen:
            del self._ordered[bisect.bisect_left(self._ordered, self._recent[0])]
        self._recent.append(size)
        bisect.insort(self._ordered, size)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "num_samples": self._recent.maxlen, "resampling": self.resampling}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "_Baseline":
        baseline = cls(int(state["num_samples"]))
        baseline.resampling = bool(state["resampling"])
        for size in state["recent"]:
            if not math.isfinite(float(size)):
                raise ValueError
            baseline.learn(float(size), int(state["num_samples"]))
        return baseline
