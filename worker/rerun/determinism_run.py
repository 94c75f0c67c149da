"""The mode `report_determinism_stats` within the rerun machine: every iteration runs twice, and the differences are counted."""

from collections.abc import Sequence

from rsup.worker.rerun.contract import RerunError, RerunState
from rsup.worker.rerun.difference import difference
from rsup.worker.rerun.parts import Parts
from rsup.worker.rerun.passes import Judged
from rsup.worker.rerun.statistics import DeterminismStatistics

REPORT_EVERY = 100
"""Iterations between reports."""


class DeterminismRun:
    """Of one rank."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._statistics = DeterminismStatistics()

    def end_pass(self, judged: Sequence[Judged]) -> bool:
        """A pass is over: whether to run once more. Collective."""
        iteration = self._parts.iteration
        if iteration.state is RerunState.INITIAL_RUN:
            iteration.first = list(judged)
            return iteration.replay(RerunState.RERUNNING_IN_PLACE)
        now = {one.checked.check: one.checked for one in judged}
        for one in iteration.first:
            after = now.get(one.checked.check)
            if after is None:
                raise RerunError(
                    f"the check {one.checked.check!r} was not made in the second pass: the loop must repeat itself"
                )
            compare = after.compare or difference
            self._statistics.add(one.checked.check, compare(one.checked.value, after.value))
        if iteration.number % REPORT_EVERY == 0:
            self.report()
        return self._parts.finish()

    def report(self) -> None:
        """Print the statistics of all ranks since the last report, on rank 0. Collective."""
        states = self._parts.agreement.gather(self._statistics.state_dict())
        for line in DeterminismStatistics.merged(states).report_lines():
            self._parts.work.say(line)
        self._statistics.reset()
