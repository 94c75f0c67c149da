"""Where the time of an in-process restart goes: the seconds of each step, for benchmarks and for whoever asks why."""

import time


class RestartTimings:
    """The steps of one restart on this rank's training thread, one after the other; see `Entry.restart_timings`.

    `begin` may be called by any thread, the rest by the one that carries the restart out.
    """

    def __init__(self) -> None:
        self.began_s = 0.0
        """On the monotonic clock, when this rank met its fault or heard of one; 0 outside of a restart."""
        self._last_s = 0.0
        self._steps: dict[str, float] = {}

    def begin(self) -> None:
        """The fault. Further calls in the same restart change nothing."""
        if not self.began_s:
            self._steps = {}
            self._last_s = self.began_s = time.monotonic()

    def mark(self, step: str) -> None:
        """`step` has ended; it began where the one before it ended."""
        if self.began_s:
            now_s = time.monotonic()
            self._steps[step] = self._steps.get(step, 0.0) + now_s - self._last_s
            self._last_s = now_s

    def beside(self, step: str, took_s: float) -> None:
        """A step that ran beside the others, in a thread of its own."""
        self._steps[f"({step})"] = took_s

    def end(self) -> tuple[float, dict[str, float]]:
        """Seconds since the fault, and of each step; 0 and nothing where there was none."""
        took_s = time.monotonic() - self.began_s if self.began_s else 0.0
        steps, self._steps, self.began_s = self._steps, {}, 0.0
        return took_s, steps
