"""The end that a scheduler has set, and the last moment at which leaving is still safe. Pure but for reading the environment.

`rsup launch` hands the end to its ranks in `RSUP_DEADLINE` (seconds since 1970; of `--deadline` or SLURM), and what it needs
itself after them in `RSUP_DEADLINE_MARGIN`. Without it, SLURM's own `SLURM_JOB_END_TIME` counts. An end that lies further back
than SLURM lets anything live has been moved, or was never right: it is forgotten.
"""

import math
import os
from collections import deque
from collections.abc import Mapping

OVER_AFTER_S = 30.0
"""SLURM's KillWait: nothing lives on longer than this after its end, unless the end was moved."""
WAY_OUT_S = 5.0
"""From a durable save to the end of the process: reports, and process groups that are taken down."""
SAVE_FACTOR = 2.0
"""The save of the way out may take so many times what the slowest of the last ones did: another may still be under way."""
ASSUMED_SAVE_S = 60.0
"""What a save is taken to last before one has been measured. When only this makes the end seem near, one is made to measure."""
KEPT_SAVES = 3
KEPT_ITERATIONS = 32


class Deadline:
    """The end of the job at `end_s`, in seconds since 1970, and what has been measured so far.

    `margin_s`: what has to be left after the save. `save_s`: how long one took in an earlier attempt, 0: not known.
    """

    def __init__(self, end_s: float, margin_s: float = WAY_OUT_S, save_s: float = 0.0) -> None:
        self.end_s = end_s
        self.margin_s = margin_s
        self._measuring_since_s: float | None = None
        self._saves_s: deque[float] = deque([save_s] if save_s else [], maxlen=KEPT_SAVES)
        self._iterations_s: deque[float] = deque(maxlen=KEPT_ITERATIONS)

    def saved_in(self, seconds: float) -> None:
        """A save took so long, from its beginning until it was durable."""
        self._saves_s.append(seconds)

    def iterated_in(self, seconds: float) -> None:
        """One pass of the loop took so long, with its evaluation and logging, without its save."""
        self._iterations_s.append(seconds)

    def save_s(self, now_s: float) -> float:
        """How long a save takes: the slowest of the last ones; else as long as the one takes that is to show it; else what is
        assumed."""
        if self._saves_s:
            return max(self._saves_s)
        return ASSUMED_SAVE_S if self._measuring_since_s is None else max(0.0, now_s - self._measuring_since_s)

    def last_safe_s(self, now_s: float) -> float:
        """The last moment at which one more iteration can be begun, as far as is known at `now_s`."""
        return self.end_s - self.margin_s - SAVE_FACTOR * self.save_s(now_s) - max(self._iterations_s, default=0.0)

    def is_near(self, now_s: float) -> bool:
        """Whether a save might not be durable in time after one more iteration."""
        return self.last_safe_s(now_s) <= now_s < self.end_s + OVER_AFTER_S

    def should_measure(self, now_s: float) -> bool:
        """Whether the end is near only because nobody knows how long a save takes, and there is time to find out."""
        assumed = not self._saves_s and self._measuring_since_s is None
        return assumed and self.is_near(now_s) and now_s < self.end_s - self.margin_s - max(self._iterations_s, default=0.0)

    def measure(self, now_s: float) -> None:
        """A save is made now to find out."""
        self._measuring_since_s = now_s

    def text(self, now_s: float) -> str:
        """For people: what the decision rests on."""
        measured = "measured" if self._saves_s else "not yet measured"
        slowest_s = max(self._iterations_s, default=0.0)
        left = f"{max(0.0, self.end_s - now_s):.0f} s are left"
        return f"{left}; a save takes {self.save_s(now_s):.1f} s ({measured}), an iteration {slowest_s:.1f} s"


def read_deadline(environ: Mapping[str, str] = os.environ) -> Deadline | None:
    """The deadline that this process was started with; None: it has none, or one that makes no sense."""
    end_s = _number(environ.get("RSUP_DEADLINE")) or _number(environ.get("SLURM_JOB_END_TIME"))
    if not end_s:
        return None
    margin_s = _number(environ.get("RSUP_DEADLINE_MARGIN")) or 0.0
    return Deadline(end_s, margin_s + WAY_OUT_S, _number(environ.get("RSUP_SAVE_S")))


def _number(text: str | None) -> float:
    """A positive finite number, else 0."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
