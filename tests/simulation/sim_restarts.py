"""In-process restart of a simulated training, as the ranks do it by themselves: leave after a fault, wait until every rank of
the attempt is there, enter again from the newest checkpoint. They hear of a death a second late, as from NVRx's monitors, or
at once from their agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsup.launcher import process_events as ev
from rsup.supervisor import wire

if TYPE_CHECKING:
    from tests.simulation.sim_training import SimRank, Training

NOTICED_AFTER_S = 1.0
STARTS_S = (0.5, 3.0)
"""How long a new process takes until it can join."""


class Restarts:
    """Of one job's script. `plan.restartable` says whether it is made for that."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.entry = 0
        """The highest that a rank of the attempt has begun."""

    @property
    def on(self) -> bool:
        return self.training.plan.restartable

    def begin(self, attempt: int) -> None:
        """All ranks of an attempt have been spawned."""
        self.entry = 0
        for rank in self.training.ranks.values():
            rank.ready = True
        self._enter_when_all_are_ready(attempt)

    def joins(self, attempt: int, rank: SimRank) -> None:
        """A new process in the place of a dead one: it joins once it has started."""
        if attempt != self.training.attempt:
            return
        self.training.ranks[rank.rank] = rank

        def ready() -> None:
            rank.ready = rank.alive
            self._enter_when_all_are_ready(attempt)

        self._after(self.training.world.random.uniform(*STARTS_S), ready)

    def faulted(self, rank: SimRank, kind: str) -> None:
        """A rank's entry ends with an exception; `stuck`: and nothing comes of that rank any more."""
        attempt = self.training.attempt
        rank.inside = False
        self._report(rank, wire.RankFault(rank.entry, "exception", f"ValueError: a bug ({kind})", signature=kind))
        rank.hung = kind == "stuck"
        rank.ready = not rank.hung
        self._after(NOTICED_AFTER_S, lambda: self.leave(attempt))

    def died(self, attempt: int) -> None:
        """Of a process; the others find out."""
        if self.on:
            self._after(NOTICED_AFTER_S, lambda: self.leave(attempt))

    def leave(self, attempt: int) -> None:
        """Every rank that can leaves its training function, if another one has failed."""
        training = self.training
        ranks = list(training.ranks.values())
        if not self.on or attempt != training.attempt or all(rank.alive and (rank.inside or rank.entering) for rank in ranks):
            return
        for rank in ranks:
            if rank.alive and rank.inside and not rank.hung:
                rank.inside, rank.ready = False, True
                if training.world.random.random() < 0.7:
                    fault = wire.RankFault(rank.entry, "exception", "interrupted by a fault of another rank", victim=True)
                    self._report(rank, fault)
        self._enter_when_all_are_ready(attempt)

    def _enter_when_all_are_ready(self, attempt: int) -> None:
        training = self.training
        ranks = list(training.ranks.values())
        if attempt != training.attempt or len(ranks) < training.world_size:
            return
        if all(rank.alive and rank.ready and not rank.hung for rank in ranks):
            self.entry += 1
            for rank in ranks:
                rank.ready, rank.entering = False, True
                self._after(
                    training.world.random.uniform(0.0, 0.3), lambda rank=rank, n=self.entry: self._enter(attempt, rank, n)
                )

    def _enter(self, attempt: int, rank: SimRank, entry: int) -> None:
        training = self.training
        if attempt != training.attempt or not rank.alive or entry != self.entry:
            return
        rank.entering = False
        joined = rank.entry == 0 and entry > 1
        rank.entry, rank.inside = entry, True
        self._report(rank, wire.RankEntered(entry, joined))
        ranks = training.ranks.values()
        if any(not one.alive for one in ranks):
            self.died(attempt)
        elif all(one.inside for one in ranks):
            training.iteration = training.checkpoint
            if not training.phases.leaves():
                training.after_step(attempt, entry)

    def _report(self, rank: SimRank, message: wire.RankToAgent) -> None:
        local_rank = rank.agent.ranks.index(rank)
        rank.agent.feed(ev.RankMessage(self.training.attempt, local_rank, message))

    def _after(self, delay_s: float, call: object) -> None:
        self.training.world.after(delay_s, call)  # type: ignore[arg-type]
