"""Phases of a simulated training, as its ranks go by them: they leave at the end of theirs once they have saved, and before
they compute anything where the checkpoint that they find is of another one. Looks at what the supervisor makes of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsup.launcher import process_events as ev
from rsup.supervisor import wire
from rsup.supervisor.phases import phase_at

if TYPE_CHECKING:
    from tests.simulation.sim_training import Training

SAMPLES_AN_ITERATION = 8


class Phases:
    """Of one job's script. `current`: what the attempt's ranks were told; None for a job without phases."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.current: wire.PhaseStart | None = None
        self.left_after: dict[int, int] = {}
        """Samples consumed, by the iteration after which ranks have reported that their phase is over."""
        self._computed = 0

    def begin(self, told: wire.PhaseStart | None) -> None:
        """An attempt begins: every rank of it is told the same, and what the ranks before have reported."""
        planned = self.training.plan.phases
        assert (told is not None) == bool(planned)
        self.current = told
        if told is None:
            return
        assert told.until_iteration == planned[told.number].until_iteration and told.count == len(planned)
        begins = planned[told.number - 1].until_iteration if told.number else 0
        assert told.iteration_offset == begins
        assert told.sample_offset in (-1, self.left_after.get(begins, 0)), f"{told}, left {self.left_after}"

    def joins(self, told: wire.PhaseStart | None) -> None:
        """A rank of another node, or a new process, of the same attempt."""
        assert told == self.current, f"ranks of one attempt were told {told} and {self.current}"

    def computes(self, iteration: int) -> None:
        """The ranks are about to compute that iteration, which must be of the phase that they were told."""
        if self.current is not None:
            number = phase_at(self.training.plan.phases, iteration - 1)
            assert number == self.current.number, f"iteration {iteration} is of phase {number}, computed in {self.current}"
            assert number >= self._computed, f"phase {number} after phase {self._computed}"
            self._computed = number

    def leaves(self) -> bool:
        """Let the ranks leave if what they have done ends their phase, or is not in it; False: they stay."""
        current, training = self.current, self.training
        done = training.iteration
        if current is None or (done >= current.iteration_offset and not 0 < current.until_iteration <= done):
            return False
        if done >= training.plan.num_iterations:
            return False  # the training ends with it
        samples = self.left_after[done] = done * SAMPLES_AN_ITERATION
        why = f"iteration {done} is not of phase {current.number}, or its last"
        leaving = wire.RankLeaving(done, "phase", why, training.checkpoint == done, samples, current.number)
        rank = training.ranks[0]
        rank.agent.feed(ev.RankMessage(training.attempt, rank.agent.ranks.index(rank), leaving))
        for one in list(training.ranks.values()):
            one.agent.die(one, 0, after_s=0.01 * (1 + one.rank))
        return True
