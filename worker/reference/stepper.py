"""What the training loop asks of a step, whether it is run kernel by kernel or replayed as a graph.

An iteration is *launched*, and *settled* when its numbers are known to be good and its update is made. Without a graph both
happen in one call; with one an iteration may be settled by the call that launches the next. Only what is settled is progress.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from rsup.worker.faults import FaultPlan, StrikeMarks
from rsup.worker.reference.hooks import Sections
from rsup.worker.reference.loss_scale import LossScale
from rsup.worker.reference.model import GPT
from rsup.worker.reference.observed import Observed
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.rerun.contract import Exit
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.machine import GO_ON
from rsup.worker.rerun.state_machine import RerunStateMachine

Scalar = torch.Tensor | float
"""This rank's; a tensor is [], float32, on its device."""


NUM_ZEROS, PARAMS_NORM, LOSS_SCALE = "num zeros", "params norm", "loss scale"
"""Names among `figures` that are no losses."""
LOAD_BALANCING_LOSS = "load_balancing_loss"
NO_FIGURES: Mapping[str, Scalar] = MappingProxyType({})


class SettledIteration(Protocol):
    """One iteration that is done. `loss` and `grad_norm` are None where its numbers are not used.

    `skipped`: parameters are as they were before it; with a loss where it was computed for nothing (a loss scale that was too
    high). `figures`: what else is logged of it: `NUM_ZEROS`, `PARAMS_NORM`, `LOSS_SCALE`; any other name is a further loss.
    """

    @property
    def iteration(self) -> int: ...
    @property
    def loss(self) -> Scalar | None: ...
    @property
    def grad_norm(self) -> Scalar | None: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def figures(self) -> Mapping[str, Scalar]: ...


class Report(Protocol):
    """What a call has settled, in order. Where `exit` says to leave, the iteration behind the last settled one was rejected,
    and parameters are as they were before it."""

    @property
    def exit(self) -> Exit: ...
    @property
    def settled(self) -> Sequence[SettledIteration]: ...


class Stepper(Protocol):
    """The iterations of one rank; all calls on the training thread, and collective."""

    def run(self, iteration: int, lr: float) -> Report:
        """Launch `iteration`, which follows the one launched before."""
        ...

    def settle(self) -> Report:
        """Settle what is launched: then parameters, optimizer and random numbers are those behind a whole iteration."""
        ...

    def skip(self, iteration: int) -> Report:
        """Take an iteration's data and compute nothing."""
        ...

    def evaluated(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of validation samples, [], float32. `text`: [batch, sequence + 1], int64, on the CPU. Inside
        `no_grad`, the module in evaluation mode, everything settled."""
        ...

    def optimizer_moves(self) -> None:
        """The optimizer's state is about to move, everything settled: give up what holds its addresses."""
        ...


class Settled(NamedTuple):
    """See `SettledIteration`."""

    iteration: int
    loss: Scalar | None = None
    grad_norm: Scalar | None = None
    skipped: bool = False
    figures: Mapping[str, Scalar] = NO_FIGURES


class StepReport(NamedTuple):
    """See `Report`."""

    exit: Exit = GO_ON
    settled: tuple[Settled, ...] = ()


@dataclass(frozen=True)
class StepParts:
    """What a stepper is made of. `device`: the UUID of this rank's device."""

    options: Options
    ranks: Ranks
    module: GPT
    optimizer: torch.optim.Optimizer
    rerun: RerunStateMachine
    data: RerunDataIterator
    faults: FaultPlan
    marks: StrikeMarks
    sections: Sections
    device: str
    deterministic: bool
    consumed_before: Callable[[int], int]
    """Samples consumed before an iteration that is not completed."""
    observed: Observed = field(default_factory=Observed)
    loss_scale: LossScale | None = None
    """Of float16; None: gradients are not scaled."""

    def num_microbatches(self, iteration: int) -> int:
        """Forward and backward passes of an iteration that is not completed."""
        options = self.options
        return options.batch_sizes.at(self.consumed_before(iteration)) // options.samples_per_pass
