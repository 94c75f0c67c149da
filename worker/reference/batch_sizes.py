"""The global batch size of each iteration: the same for all, or ramped up by the samples consumed. Pure.

The ramp is Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`: SAMPLES are divided evenly among the increments that
lead from START to `--global-batch-size`, and an iteration has the size that belongs to the samples consumed before it. So the
size follows from the position in the data alone, and a run goes on in the middle of its ramp wherever it was interrupted.
Counts are global, over all ranks; all arithmetic is in whole numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RAMP = "--rampup-batch-size"


@dataclass(frozen=True)
class BatchSizes:
    """`full`: `--global-batch-size`. `ramp`: start, increment and samples of the ramp; None: there is none."""

    full: int
    ramp: tuple[int, int, int] | None = None

    def at(self, consumed_samples: int) -> int:
        """Samples of the iteration that follows after so many."""
        if self.ramp is None:
            return self.full
        start, increment, samples = self.ramp
        if consumed_samples >= samples:
            return self.full
        return start + increment * (consumed_samples * self._num_increments // samples)

    def consumed_after(self, iterations: int) -> int:
        """Samples that so many iterations take from the beginning on."""
        consumed = 0
        while iterations:
            size, end = self.at(consumed), self._next_growth(consumed)
            if end is None:
                return consumed + iterations * size
            alike = min(iterations, _divided_up(end - consumed, size))
            consumed += alike * size
            iterations -= alike
        return consumed

    def growth_text(self, before: int, after: int) -> str:
        """What happens to the size between two counts of consumed samples, in words; empty: nothing."""
        old, new = self.at(before), self.at(after)
        return f"the global batch size grows from {old} to {new}" if old != new else ""

    @property
    def _num_increments(self) -> int:
        assert self.ramp is not None
        start, increment, _ = self.ramp
        return (self.full - start) // increment

    def _next_growth(self, consumed_samples: int) -> int | None:
        """The fewest samples with which an iteration is greater than after `consumed_samples`; None: it stays as it is."""
        if self.ramp is None or self.at(consumed_samples) == self.full:
            return None
        start, increment, samples = self.ramp
        reached = (self.at(consumed_samples) - start) // increment
        return _divided_up((reached + 1) * samples, self._num_increments)


def _divided_up(count: int, by: int) -> int:
    return -(-count // by)


def problem_of_ramp(ramp: Sequence[int], full: int, samples_per_pass: int, passes: str) -> str:
    """What is wrong with a ramp, in one sentence; empty: nothing. `passes`: how `samples_per_pass` comes about, in words."""
    start, increment, _ = ramp
    if start > full:
        return f"{RAMP} starts with {start} samples, and --global-batch-size is {full}"
    if (full - start) % increment:
        return f"{RAMP}: from {start} to --global-batch-size {full} it is no whole number of increments of {increment}"
    sizes = (start, start + increment) if start < full else (start,)
    for size in sizes:
        if size % samples_per_pass:
            return f"{RAMP} makes a batch of {size} samples, which is not divisible by {passes}"
    return ""
