"""An audit of a healthy iteration within the rerun machine: compute another rank's data, then one's own once more, and compare.

The replay in place comes last, so that its gradients are the iteration's. Collective, all of it.
"""

from collections.abc import Sequence
from dataclasses import replace

from rsup.worker.rerun.attribution import Attribution
from rsup.worker.rerun.audit import Audit, Compared, Jump
from rsup.worker.rerun.contract import Checked, Rejection, RerunState
from rsup.worker.rerun.judging import judge_state
from rsup.worker.rerun.machine import after_judgement
from rsup.worker.rerun.parts import Parts
from rsup.worker.rerun.passes import Judged
from rsup.worker.rerun.report import differences_of
from rsup.worker.rerun.values import difference


class AuditRun:
    """The audits of a run. `audit` holds tolerances and judges."""

    def __init__(self, parts: Parts, attribution: Attribution, audit: Audit) -> None:
        self._parts = parts
        self._attribution = attribution
        self._audit = audit
        self._jumps: dict[str, Jump] = {}
        self._said: set[str] = set()

    def has_jumped(self, first: Sequence[Judged]) -> bool:
        """Whether a gradient norm of this rank has left its usual range. Not collective."""
        norms = [one.checked for one in first if one.checked.check.startswith("grad norm")]
        return any([self._jumps.setdefault(one.check, Jump()).jumped(one.value) for one in norms])

    def begin(self, jumped: bool) -> bool:
        """Audit this iteration if it is due: whether to run once more. `jumped`: agreed by all ranks."""
        parts, rotation = self._parts, self._parts.rotation
        if rotation is None or not self._audit.due(parts.iteration.number, jumped):
            return parts.finish()
        parts.iteration.is_audit = True
        corrupted = judge_state(rotation.compare_state(), rotation.axis)
        if corrupted is not None:
            parts.work.open(parts.iteration.number, [], "audit")
            return self._attribution.follow(after_judgement(corrupted))
        begun = self._audit.begin(*parts.iteration.payload())
        if isinstance(begun, str):  # not this time; the gradients are still those of the iteration
            self._say_problem(begun)
            return parts.finish()
        return parts.iteration.borrow(begun)

    def end_rotated(self, there: list[Judged]) -> bool:
        """The pass over another rank's data is over."""
        self._parts.iteration.there = [one.checked for one in there]
        return self._parts.iteration.replay(RerunState.RERUNNING_IN_PLACE)

    def end_replay(self, again: list[Judged]) -> bool:
        """The replay in place is over: judge."""
        parts, iteration, audit = self._parts, self._parts.iteration, self._audit
        own, now = [one.checked for one in iteration.first], [one.checked for one in again]
        judgement = audit.end(iteration.there, own, now)
        if judgement is None:
            self._say_problem(audit.problem)
            return parts.finish()
        mine = audit.compared[parts.agreement.rank]
        differing = audit.tolerances.mismatches(mine)
        parts.work.open(iteration.number, differences_of(iteration.first, again, mine, differing, parts.device), "audit")
        for one in own:
            if one.check in differing:
                parts.track(Rejection.INITIAL_RUN, one)
        is_settled = not parts.agreement.worst(int(not self._is_settled(mine, now)))
        judgement = replace(judgement, another_placement_may_decide=False)
        return self._attribution.follow(after_judgement(judgement), is_settled)

    def _say_problem(self, problem: str) -> None:
        if problem and problem not in self._said:
            self._said.add(problem)
            self._parts.work.say(f"iterations are not audited: {problem}")

    def _is_settled(self, mine: Compared, now: Sequence[Checked]) -> bool:
        """Whether the replay in place, whose gradients would be used, agrees with the first pass or with the other device."""
        if not mine.differs_in_place:
            return True
        seen = [(one.value, mine.values[one.check][1], one.check) for one in now if one.check in mine.values]
        return all(difference(value, other) <= self._audit.tolerances[check] for value, other, check in seen)
