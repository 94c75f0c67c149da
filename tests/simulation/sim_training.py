"""A simulated training: the ranks of one attempt, on all agents, stepping together.

Ranks are lockstep: one that is dead or hung holds all up. Faults are addressed by (rank, iteration) and strike once, or each
time with `repeat`. Rank 0 commits a checkpoint every few iterations; the next attempt goes on from the newest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rsup.supervisor import wire
from tests.simulation.sim_cases import CaseFault, CaseScript
from tests.simulation.sim_phases import Phases
from tests.simulation.sim_restarts import Restarts

if TYPE_CHECKING:
    from tests.simulation.sim_agent import SimAgent
    from tests.simulation.sim_world import World

STEP_S = 0.5


@dataclass
class Fault:
    """`kind`: `exit`, `signal`, `hang`, `victim` (exit, and a peer that reports a closed connection first); where ranks can
    restart in their processes also `exception`, and `stuck` (an exception, and the rank never comes back)."""

    rank: int
    iteration: int
    kind: str
    exit_code: int = 1
    repeat: bool = False
    struck: bool = False


@dataclass
class Plan:
    """What the script does."""

    num_iterations: int
    save_interval: int
    faults: list[Fault] = field(default_factory=list)
    cases: list[CaseFault] = field(default_factory=list)
    takes_requests: bool = True
    shows_iterations: bool = True
    restartable: bool = False
    phases: list[wire.PhaseSpec] = field(default_factory=list)


@dataclass
class SimRank:
    """A process."""

    agent: SimAgent
    rank: int
    pid: int
    device: str = ""
    alive: bool = True
    hung: bool = False
    entry: int = 0
    """The last one that it began."""
    inside: bool = False
    """In its training function."""
    ready: bool = False
    """Waits for the others, to enter together."""
    entering: bool = False
    """All have met; it enters in a moment."""


class Training:
    """All attempts of one job's script. `checkpoint` is on the shared disk."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checkpoint = 0
        self.attempt = 0
        self.iteration = 0
        self.world_size = 0
        self.ranks: dict[int, SimRank] = {}
        self.leave_asked = False
        self.stepping = False
        self.cases = CaseScript(self)
        self.restarts = Restarts(self)
        self.phases = Phases(self)

    @property
    def world(self) -> World:
        return next(iter(self.ranks.values())).agent.world

    def add(self, attempt: int, world_size: int, new: list[SimRank], phase: wire.PhaseStart | None) -> None:
        """Ranks of an attempt have been spawned; the first ones of a new attempt begin it."""
        if attempt > self.attempt:
            self.attempt, self.iteration, self.world_size = attempt, self.checkpoint, world_size
            self.ranks = {}
            self.leave_asked = False
            self.cases.begin()
            self.phases.begin(phase)
        if attempt < self.attempt:
            return
        self.phases.joins(phase)
        for rank in new:
            self.ranks[rank.rank] = rank
        if len(self.ranks) == self.world_size:
            if self.plan.restartable:
                self.restarts.begin(attempt)
            elif not self.phases.leaves():
                self.after_step(attempt)

    def after_step(self, attempt: int, entry: int = 0) -> None:
        """The next iteration; `entry`: into which the ranks have to be for it."""
        self.world.after(STEP_S, lambda: self.step(attempt, entry))

    def running(self, rank: SimRank) -> bool:
        return self.ranks.get(rank.rank) is rank

    def step(self, attempt: int, entry: int = 0) -> None:
        """One iteration of all ranks, or nothing if one of them cannot."""
        if entry and not all(rank.inside and rank.entry == entry for rank in self.ranks.values()):
            return
        if attempt != self.attempt or not all(rank.alive and not rank.hung for rank in self.ranks.values()):
            return
        self.phases.computes(self.iteration + 1)
        self.iteration += 1
        for fault in self.plan.faults:
            if fault.iteration == self.iteration and fault.rank in self.ranks and (fault.repeat or not fault.struck):
                fault.struck = True
                self._strike(fault)
                return
        if not self.cases.strikes():
            self.finish_step(attempt, entry)

    def save(self, iteration: int) -> None:
        """Write a checkpoint of that many completed iterations, unless it is the newest one already."""
        if iteration > self.checkpoint:
            self.checkpoint = iteration
            self.ranks[0].agent.commit_checkpoint(self.attempt, 0, iteration)

    def finish_step(self, attempt: int, entry: int = 0) -> None:
        """The iteration's results are good: save where that is due, and go on."""
        is_last = any(phase.until_iteration == self.iteration for phase in self.plan.phases)
        if self.iteration % self.plan.save_interval == 0 or self.leave_asked or is_last:
            self.save(self.iteration)
        if self.iteration >= self.plan.num_iterations or self.leave_asked:
            for rank in list(self.ranks.values()):
                rank.agent.die(rank, 0, after_s=0.01 * (1 + rank.rank))
            return
        if not self.phases.leaves():
            self.after_step(attempt, entry)

    def _strike(self, fault: Fault) -> None:
        rank = self.ranks[fault.rank]
        if fault.kind in ("exception", "stuck"):
            self.restarts.faulted(rank, fault.kind)
        elif fault.kind == "hang":
            rank.hung = True
            rank.agent.world.after(3.0, lambda: self._overdue(rank))
        elif fault.kind == "signal":
            rank.agent.die(rank, 128 + fault.exit_code, signal=fault.exit_code)
        else:
            rank.agent.die(rank, fault.exit_code, error="ValueError: a bug", after_s=0.05)
        if fault.kind == "victim" and len(self.ranks) > 1:
            peer = next(r for r in self.ranks.values() if r.rank != fault.rank)
            peer.agent.die(peer, 1, error="RuntimeError: Connection closed by peer [127.0.0.1]:1234", after_s=0.01)

    def _overdue(self, hung: SimRank) -> None:
        for rank in self.ranks.values():
            if self.running(hung) and hung.alive and rank.alive:
                rank.agent.notice_overdue(rank, self.iteration, self.attempt)
