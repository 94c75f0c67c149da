"""What saves cost, and what they made productive: training counts only as far as a durable checkpoint holds it."""

from dataclasses import dataclass, field

from rsup.worker.observe.end_to_end_facts import Counters

MAX_OPEN = 16
"""Saves that are remembered until they are known to be durable or failed; of more the oldest are forgotten."""


@dataclass
class _Save:
    began_s: float
    then: Counters
    returned_s: float | None = None
    sync_total_s: float = 0.0
    """What training had stood still for saves when this one returned, itself included."""


@dataclass
class SaveRecord:
    """The saves of one run. Moments are seconds since the epoch."""

    num_begun: int = 0
    num_durable: int = 0
    """Those that are overtaken when it is known are among them."""
    num_failed: int = 0
    last_iteration: int | None = None
    num_returned: int = 0
    sync_total_s: float = 0.0
    sync_min_s: float = 0.0
    sync_max_s: float = 0.0
    first_durable_returned_s: float | None = None
    productive: Counters | None = None
    """What had been done when the newest of the durable checkpoints was begun."""
    productive_returned_s: float = 0.0
    productive_sync_total_s: float = 0.0
    _open: dict[int, _Save] = field(default_factory=dict)

    def began(self, iteration: int, at_s: float, then: Counters) -> None:
        """A save of `iteration` begins, at which `then` had been done."""
        self.num_begun += 1
        self.last_iteration = iteration
        self._open[iteration] = _Save(at_s, then)
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]

    def returned(self, iteration: int, at_s: float) -> bool:
        """The training thread goes on; whether that is news."""
        save = self._open.get(iteration)
        if save is None or save.returned_s is not None:
            return False
        took_s = at_s - save.began_s
        self.sync_min_s = min(self.sync_min_s, took_s) if self.num_returned else took_s
        self.sync_max_s = max(self.sync_max_s, took_s)
        self.num_returned += 1
        self.sync_total_s += took_s
        save.returned_s, save.sync_total_s = at_s, self.sync_total_s
        return True

    def durable(self, iteration: int, at_s: float) -> bool:
        """It is durable; whether that is news. One that is overtaken by a newer one makes nothing productive any more."""
        if (save := self._open.get(iteration)) is None:
            return False
        self.returned(iteration, at_s)
        returned_s = at_s if save.returned_s is None else save.returned_s
        del self._open[iteration]
        self.num_durable += 1
        if self.first_durable_returned_s is None:
            self.first_durable_returned_s = returned_s
        if self.productive is None or save.then.iteration > self.productive.iteration:
            self.productive, self.productive_returned_s = save.then, returned_s
            self.productive_sync_total_s = save.sync_total_s
        return True

    def failed(self, iteration: int, at_s: float) -> bool:
        """It never will be durable; whether that is news."""
        if iteration not in self._open:
            return False
        self.returned(iteration, at_s)
        del self._open[iteration]
        self.num_failed += 1
        return True
