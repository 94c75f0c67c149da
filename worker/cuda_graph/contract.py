"""The words that the parts of the graph-captured step share: verdict codes, policies, errors, and where a graph is captured.

A step is *launched* (its kernels are queued), later *read* (its result buffer has come to the host, one step late) and then
*settled*: accepted, or rewound and given to the rerun machine. Sources: the seed's section 3, DESIGN.md section 7.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from rsup.supervisor.wire import RsupError


class Code(IntEnum):
    """What a check in the graph found in one step of one rank. The greatest of all ranks counts."""

    CLEAN = 0
    LARGE_GRADIENT = 1
    """A gradient norm is far above its baseline (`check_for_large_grads`)."""
    SPIKY_LOSS = 2
    """A micro-batch's loss is far above its baseline (`check_for_spiky_loss`)."""
    INF = 3
    NAN = 4


class OnChange(StrEnum):
    """What a graph does with inputs of another number, shape, dtype or constant than those it was captured with."""

    RAISE = "raise"
    EAGER = "eager"
    RECAPTURE = "recapture"


class Fallback(StrEnum):
    """What follows a step that cannot be captured."""

    RAISE = "raise"
    EAGER = "eager"


class GraphError(RsupError):
    """A step cannot be captured, or a graph cannot be replayed as asked. One line: what, where, what to change."""


class StaleResultError(GraphError):
    """A result of an earlier step is read after a later one has overwritten it."""


class ConstraintError(GraphError):
    """Options that a full-iteration graph forbids; names the option and the remedy."""

    exit_code = 2


Batches = Sequence[Sequence[Any]]
"""The inputs of one step: for each model chunk its micro-batches, each a tensor or nested dicts, lists, tuples of them."""
ForwardBackward = Callable[[Batches], Any]
"""A schedule: gets the static batches, runs forward and backward of all, leaves gradients in place, returns nested tensors."""


@dataclass(frozen=True)
class Verdict:
    """What one step's result buffer says on this rank. `values`: losses, then gradient norms, in the order of the checks."""

    code: Code
    """Of this rank."""
    agreed: Code
    """The greatest of all ranks."""
    values: tuple[float, ...]
