"""Answers a rank that told of a rerun case: its report is kept.

A verdict must be stored before anything is done that follows from it, so the rank waits for `CaseStored`. It comes as soon as
the supervisor has acknowledged the fact, which it does once that is committed. Where the supervisor does not answer in time, a
report that is in the spool's file is as good: agent and supervisor may both die, and the keeper still delivers it. A report
that is in memory only is never called stored; the rank's own patience ends its waiting.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rsup.launcher.spool import Spool
from rsup.supervisor.wire import AnyFact, CaseReported, CaseStored

Send = Callable[[int, int, CaseStored], object]
"""To a rank, of an attempt; nothing happens where it is gone."""

ANSWER_WITHIN_S = 5.0
"""How long the supervisor has, until the spool stands in."""
MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class _Waiting:
    rank: int
    attempt: int
    number: int
    """The fact's, in a count that no renumbering of the spool changes."""
    answer: CaseStored
    since_s: float


class CaseRelay:
    """The reports of one agent's ranks that have no answer yet. `clock` is monotonic, in seconds."""

    def __init__(self, send: Send, spool: Spool, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._spool = spool
        self._clock = clock
        self._waiting: list[_Waiting] = []

    def told(self, sequence: int, fact: AnyFact) -> None:
        """That fact has just gone into the spool under `sequence`; only those about cases matter here."""
        if isinstance(fact, CaseReported):
            answer = CaseStored(fact.report.case_id, fact.report.verdict)
            number = sequence - self._spool.shift
            one = _Waiting(fact.rank, fact.attempt, number, answer, self._clock())
            self._waiting = [*self._waiting, one][-MAX_WAITING:]

    def answer(self) -> None:
        """Answer what is kept by now. Call it whenever the supervisor was heard, and now and then."""
        if not self._waiting:
            return
        now_s, spool = self._clock(), self._spool
        still = []
        for one in self._waiting:
            committed = one.number <= spool.acked - spool.shift
            if committed or (now_s - one.since_s >= ANSWER_WITHIN_S and spool.is_on_disk):
                self._send(one.rank, one.attempt, one.answer)
            else:
                still.append(one)
        self._waiting = still
