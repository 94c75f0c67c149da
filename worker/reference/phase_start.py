"""Where the phase of the training that is under way began: its data are counted from there. Pure.

Phases come from `rsup launch --phases` (the environment), or from `--phase-transition-iterations`, whose next phase somebody
starts by hand. What the supervisor does not know, the checkpoint does.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rsup.worker.phases import JobPhase


@dataclass(frozen=True)
class PhaseStart:
    """Iterations done and samples consumed, of the whole job, where a phase began."""

    iteration: int = 0
    samples: int = 0


FROM_THE_BEGINNING = PhaseStart()


def begin_of_phase(
    phase: JobPhase | None,
    transitions: Sequence[int],
    iteration: int,
    consumed_samples: int,
    saved: PhaseStart,
    consumed_after: Callable[[int], int],
) -> PhaseStart:
    """Where the phase began that the training is in after `iteration` iterations and `consumed_samples`.

    `saved`: what the checkpoint says of the phase in which it was made. Without any word of it, batch sizes are taken to have
    been the same all along, as Megatron-LM demands: `consumed_after` so many iterations are that many samples.
    """
    if phase is not None:
        begun, samples = phase.iteration_offset, phase.sample_offset
    else:
        number = bisect_right(transitions, iteration)
        begun, samples = (transitions[number - 1] if number else 0), None
    if samples is not None:
        return PhaseStart(begun, samples)
    if begun == iteration:
        return PhaseStart(begun, consumed_samples)
    if begun == saved.iteration:
        return saved
    return PhaseStart(begun, consumed_after(begun))
