"""What the parts of `rsup.worker.observe` hand to each other. No torch is needed to import it.

The training log makes `Point`s and gives them to every `Writer`; nobody else writes numbers of a run anywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

CLOSE_WITHIN_S = 30.0
"""All writers together, at the end of a run."""
RESTART_WITHIN_S = 5.0
"""The same where the training is entered again in this process: what is left then is written behind its back."""


class Point(NamedTuple):
    """One number of one iteration, under its public name (`lm loss`, `learning-rate`, `iteration-time`)."""

    key: str
    value: float
    vs_samples: bool = False
    """Shown over consumed samples, too, where the writer can: TensorBoard's `KEY vs samples`."""


class Writer(Protocol):
    """A place where points go. On one rank; all calls on the training thread.

    A writer never raises and never stalls training: what it cannot do it says once, through the `warn` it was made with, and
    from then on it does nothing. NaN and infinities are written as they are, where that is possible.
    """

    name: str
    """For people: `TensorBoard`, `Weights & Biases`."""

    def write(self, iteration: int, consumed_samples: int, points: Sequence[Point], *, at_s: float | None = None) -> None:
        """Take what is known of `iteration` (1-based, global). Iterations come in order; one may come in several calls.
        `at_s`: when it was true, in seconds since the epoch, where that is not now: steps are written later than they were."""
        ...

    def flush(self) -> None:
        """Make what was taken visible to readers. May be repeated."""
        ...

    def close(self) -> None:
        """Flush, and give up files and connections. Nothing follows it."""
        ...


def takes_each_point(writer: Writer) -> bool:
    """Whether it gets each log point, and all that is known there, whatever the intervals and flags of the others are: those
    that watch a run say so by an attribute of that name."""
    return bool(getattr(writer, "takes_each_point", False))


@runtime_checkable
class ClosesLater(Protocol):
    """A writer whose end takes time: all of them begin theirs before anybody waits for one (`closing.close_writers`)."""

    def begin_close(self) -> None:
        """Take no more, and begin to end. Waits for nothing."""
        ...

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """As `Writer.close`, which waits that long at most."""
        ...


class Warn(Protocol):
    """Says a line to people, once a text: `Trainer.warn` or the like."""

    def __call__(self, text: str, /) -> None: ...
