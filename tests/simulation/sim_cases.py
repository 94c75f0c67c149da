"""The ranks' side of rerun cases in a simulated training: what `worker/rerun` does, as a script of reports and exits.

A fault strikes an iteration; the ranks open a case, replay, and tell the supervisor step by step. Nothing is done that follows
from a report before it is stored, or ten seconds are over. What a checkpoint holds of a case (`Pending`) is on the shared disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rsup.launcher import process_events as ev
from rsup.supervisor import wire

if TYPE_CHECKING:
    from tests.simulation.sim_training import Training

REPLAY_S = 1.5
STORED_WITHIN_S = 10.0
KINDS = ("persistent", "application", "skip", "transient", "transient-restart", "corrupted", "stubborn", "follows")


@dataclass
class CaseFault:
    """A result that is rejected: `persistent` wherever `device` computes `iteration`, else once, on `rank`. `stubborn`: every
    device gives another bad value, so nothing ever decides it. `follows`: on `rank` wherever it runs, and every replay on a
    neighbour is right, so that board after board looks faulty. `dies`: the rank is killed in the middle, each time."""

    kind: str
    rank: int
    iteration: int
    device: str = ""
    dies: bool = False
    struck: bool = False


@dataclass
class Pending:
    """A case in a checkpoint: another device has to decide it."""

    fault: CaseFault
    case_id: str
    rank: int
    iteration: int
    tried: list[str] = field(default_factory=list)


class CaseScript:
    """Plays the cases of one training. An answer, or its absence, counts only while its attempt goes on."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.pending: Pending | None = None
        self._waits: tuple[str, str] | None = None
        self._then: Callable[[], None] | None = None

    def begin(self) -> None:
        """A new attempt: nobody waits any more."""
        self._waits = self._then = None

    def strikes(self) -> bool:
        """Whether this iteration is rejected, or repeats one that was; then the case takes its course."""
        training, pending = self.training, self.pending
        if pending is not None and pending.iteration == training.iteration and pending.rank in training.ranks:
            self._replay_elsewhere(pending)
            return True
        for fault in training.plan.cases:
            if fault.iteration == training.iteration and (rank := self._struck(fault)) is not None:
                fault.struck = True
                self._open(fault, rank)
                return True
        return False

    def stored(self, attempt: int, answer: wire.CaseStored) -> None:
        """A rank hears that its report is kept."""
        if attempt == self.training.attempt and (answer.case_id, answer.verdict) == self._waits:
            self._go_on()

    def _struck(self, fault: CaseFault) -> int | None:
        ranks = self.training.ranks
        if fault.kind == "persistent":
            return next((rank for rank, one in ranks.items() if one.device == fault.device), None)
        again = fault.kind == "follows"
        return fault.rank if (again or not fault.struck) and fault.rank in ranks else None

    # ---------------------------------------------------------------------------------------------------- its course

    def _open(self, fault: CaseFault, rank: int) -> None:
        training = self.training
        start = training.ranks[0].agent.state.start
        assert start is not None
        case_id = f"job.{start.run}-a{training.attempt}-i{training.iteration}"
        pending = Pending(fault, case_id, rank, training.iteration)
        self._tell(self._report(pending))
        if fault.dies:
            victim = training.ranks[rank]
            victim.agent.die(victim, 137, signal=9, after_s=REPLAY_S / 2)
        self._later(REPLAY_S, lambda: self._replayed(pending))

    def _replayed(self, pending: Pending) -> None:
        kind = pending.fault.kind
        if kind.startswith("transient"):
            restarts = kind == "transient-restart"
            report = self._report(pending, "transient", "restart" if restarts else "continue")
            self._tell(report, lambda: self._leave(17) if restarts else self._next_step())
        elif kind == "corrupted":
            device = self.training.ranks[pending.rank].device
            self._tell(self._report(pending, "corrupted state", "restart", [device]), lambda: self._leave(17))
        elif kind == "follows":

            def save_and_leave() -> None:
                self.training.save(pending.iteration - 1)
                self._leave(16)

            device = self.training.ranks[pending.rank].device
            self._tell(self._report(pending, "persistent", "elsewhere", [device]), save_and_leave)
        else:
            self._ask_elsewhere(pending)

    def _ask_elsewhere(self, pending: Pending) -> None:
        device = self.training.ranks[pending.rank].device
        pending.tried = list(dict.fromkeys([*pending.tried, device]))

        def save_and_leave() -> None:
            self.pending = pending
            self.training.save(pending.iteration - 1)
            self._leave(16)

        self._tell(self._report(pending, "", "elsewhere"), save_and_leave)

    def _replay_elsewhere(self, pending: Pending) -> None:
        training, kind = self.training, pending.fault.kind
        device = training.ranks[pending.rank].device
        if device in pending.tried or kind == "stubborn":
            self._later(REPLAY_S, lambda: self._ask_elsewhere(pending))
            return
        self.pending = None  # whatever comes now, no checkpoint asks for it again
        if kind == "persistent":
            accused = pending.tried[-1]
            in_use = any(rank.device == accused for rank in training.ranks.values())

            def go_on() -> None:
                if in_use:
                    training.save(pending.iteration - 1)
                    self._leave(16)
                else:
                    self._next_step()

            self._tell(self._report(pending, "persistent", "elsewhere" if in_use else "continue", [accused]), go_on)
        elif kind == "skip":
            self._tell(self._report(pending, "application", "skip"), self._next_step)
        else:
            self._tell(self._report(pending, "application", "leave"), lambda: self._leave(17))

    # ---------------------------------------------------------------------------------------------------------- means

    def _report(
        self, pending: Pending, verdict: str = "", action: str = "", accused: list[str] | None = None
    ) -> wire.CaseReport:
        device = pending.tried[0] if pending.tried else self.training.ranks[pending.rank].device
        finding = wire.CaseFinding(pending.rank, device, "loss: NaN", True, "nan", "nan")
        tried = {pending.rank: pending.tried} if pending.tried else {}
        return wire.CaseReport(
            pending.case_id,
            pending.iteration,
            True,
            [finding],
            verdict,
            "as played",
            action,
            accused=accused or [],
            tried=tried,
        )

    def _tell(self, report: wire.CaseReport, then: Callable[[], None] | None = None) -> None:
        training = self.training
        attempt, first = training.attempt, training.ranks[0]
        self._waits, self._then = (report.case_id, report.verdict), then
        local_rank = first.agent.ranks.index(first)
        first.agent.feed(ev.RankMessage(attempt, local_rank, wire.RankCase(report)))
        if then is not None:
            self._later(STORED_WITHIN_S, lambda: self._go_on() if self._then is then else None)

    def _go_on(self) -> None:
        then, self._waits, self._then = self._then, None, None
        if then is not None and self._can_go_on():
            then()

    def _can_go_on(self) -> bool:
        return all(rank.alive and not rank.hung for rank in self.training.ranks.values())

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        attempt = self.training.attempt
        world = self.training.ranks[0].agent.world

        def now() -> None:
            if attempt == self.training.attempt and self._can_go_on():
                call()

        world.after(delay_s, now)

    def _next_step(self) -> None:
        self.training.finish_step(self.training.attempt)

    def _leave(self, code: int) -> None:
        training = self.training
        for rank in list(training.ranks.values()):
            agent = rank.agent
            local_rank = agent.ranks.index(rank)
            agent.feed(ev.RankMessage(training.attempt, local_rank, wire.RankDeclares(code, "rerun case")))
            agent.die(rank, code, after_s=0.01 * (1 + rank.rank))
