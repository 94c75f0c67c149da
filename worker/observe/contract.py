"""What the parts of `rsup.worker.observe` hand to each other. No torch is needed to import it.

The training log makes `Point`s and gives them to every `Writer`; nobody else writes numbers of a run anywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Point(NamedTuple):
    """One number of one iteration, under its public name (`lm loss`, `learning-rate`, `iteration-time`)."""

    key: str
    value: float
    vs_samples: bool = False
    """Shown over consumed samples, too, where the writer can: TensorBoard's `KEY vs samples`."""


class Writer(Protocol):
    """A place where points go. On one rank; all calls on the training thread.

    A writer never raises and never stalls training: what it cannot do it says once, through the `warn` it was made with, and
    from then on it does nothing. NaN and infinities are written as they are.
    """

    name: str
    """For people: `TensorBoard`, `Weights & Biases`."""

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point]) -> None:
        """Take what is known of `iteration` (1-based, global). Iterations come in order; one may come in several calls."""
        ...

    def flush(self) -> None:
        """Make what was taken visible to readers. May be repeated."""
        ...

    def close(self) -> None:
        """Flush, and give up files and connections. Nothing follows it."""
        ...


class Warn(Protocol):
    """Says a line to people, once a text: `Trainer.warn` or the like."""

    def __call__(self, text: str, /) -> None: ...
