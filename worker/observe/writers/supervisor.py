"""The supervisor's table of metrics, from which `rsup status`, the page, the report and `/metrics` have a run's curves."""

from collections.abc import Sequence

import rsup.worker
from rsup.worker.observe.contract import Point, Warn

_ENERGY = ("iter-energy/gpu", "power/gpu")


def kind_of(key: str) -> str:
    """The kind of metric, of `wire.METRIC_KINDS`, that a point's public name belongs to; `training` where nothing else fits."""
    if " validation" in key:
        return "validation"
    if key.startswith("mem-"):
        return "memory"
    if key in _ENERGY:
        return "energy"
    return "timers" if key.endswith("-time") and key != "iteration-time" else "training"


class SupervisorWriter:
    """A `Writer`. Outside `rsup launch` it does nothing; the session sends, at its own pace."""

    name = "the supervisor"
    takes_each_point = True

    def __init__(self, warn: Warn | None = None) -> None:
        """`warn`: says what is left out; None: a warning of Python's."""
        self._warn = warn
        self._kinds: dict[str, str] = {}

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point], *, at_s: float | None = None) -> None:
        """See `Writer`."""
        by_kind: dict[str, dict[str, float]] = {}
        for key, value, _ in points:
            if (kind := self._kinds.get(key)) is None:
                kind = self._kinds[key] = kind_of(key)
            by_kind.setdefault(kind, {})[key] = value
        for kind, values in by_kind.items():
            rsup.worker.report_metrics(iteration, values, consumed_samples, kind, at_s=at_s, warn=self._warn)

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """Nothing is held: the session ends with the process."""
