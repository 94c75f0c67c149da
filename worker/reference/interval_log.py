"""Loss and time between two log lines."""

import contextlib
import time
from collections.abc import Iterator

import torch


class IntervalLog:
    """Loss and time since the last log line; saves and evaluations do not count as time."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._num_logged = 0
        self._num_skipped = 0
        self._count = 0
        self._spent_s = 0.0
        self._since_s = time.monotonic()

    def restart(self) -> None:
        """Begin an interval now."""
        self._spent_s, self._count = 0.0, 0
        self._since_s = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of what is inside."""
        self._spent_s += time.monotonic() - self._since_s
        try:
            yield
        finally:
            self._since_s = time.monotonic()

    def add(self, loss: torch.Tensor | float | None) -> None:
        """One iteration more; None: its computation was skipped."""
        if loss is None:
            self._num_skipped += 1
        else:
            self._losses.append(loss if isinstance(loss, torch.Tensor) else torch.tensor(loss))
        self._count += 1

    @property
    def is_first(self) -> bool:
        """Nothing has been logged by this process."""
        return self._num_logged == 0

    def take_loss(self) -> float:
        """Mean loss of this rank since the last call, NaN where all was skipped; waits for the device."""
        mean = float(torch.stack(self._losses).double().mean()) if self._losses else float("nan")
        self._losses.clear()
        self._num_logged += 1
        return mean

    def take_num_skipped(self) -> int:
        """Skipped iterations since the last call."""
        skipped, self._num_skipped = self._num_skipped, 0
        return skipped

    def take_elapsed_ms(self) -> float:
        """Mean time of an iteration since the last call, in milliseconds."""
        elapsed_s = self._spent_s + time.monotonic() - self._since_s
        count = max(self._count, 1)
        self.restart()
        return elapsed_s / count * 1e3
