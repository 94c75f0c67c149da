"""Rotation replay: every rank computes the iteration of another one, so that data and device can be told apart.

A case goes: `compare_state`, `begin` (agree on a shift, hand the data on), the machine runs the iteration once more with what
arrived, `end` (values go back to the data's owners, who compare; all judge alike). Its gradients must never be used.
Everything that says so is collective over the group; what it returns is the same on all ranks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from rsup.worker.rerun.checksums import Difference, differing
from rsup.worker.rerun.contract import (
    Checked,
    Judgement,
    Payload,
    RankDevice,
    RankFinding,
    RerunError,
    RotatedOutcome,
)
from rsup.worker.rerun.echoes import NO_LIMIT, earliest, is_echo
from rsup.worker.rerun.exchange import gather, move
from rsup.worker.rerun.judging import choose_shift, judge, judge_state
from rsup.worker.rerun.replica_axis import ReplicaAxis
from rsup.worker.rerun.values import is_same

__all__ = ["Rotation", "choose_shift", "judge", "judge_state"]


class Rotation:
    """One rank's part in the rotations of a run. `findings` and `outcomes` are those of the last one, by all ranks."""

    def __init__(
        self,
        axis: ReplicaAxis,
        group: dist.ProcessGroup | None,
        device: RankDevice,
        state_tensors: Callable[[], Mapping[str, torch.Tensor]],
        torch_device: torch.device | None = None,
    ) -> None:
        """`group`: a gloo group of all ranks of the axis. `state_tensors`: parameters, buffers and optimizer state by name.
        `torch_device`: where batches that were on an accelerator are put; the current CUDA device where there is one.
        """
        self.axis = axis
        self.findings: list[RankFinding] = []
        self.outcomes: list[RotatedOutcome] = []
        self.own_elsewhere: dict[str, float] = {}
        """All that came out of this rank's own data in the last one, on `elsewhere_device`."""
        self.elsewhere_device: RankDevice | None = None
        self.shift = 0
        self._group = group
        self._device = device
        self._state_tensors = state_tensors
        self._torch_device = torch_device or _current_device()
        self._not_replicated: set[str] = set()

    def why_impossible(self) -> str:
        """Why no rotation can be run at all, empty where one can. Not collective, and the same on all ranks."""
        if not dist.is_initialized() or dist.get_world_size(self._group) < 2:
            return "this job has one rank: there is no peer to run its data"
        if self.axis.size < 2:
            return "no two ranks hold the same parameters: the data-parallel axis has one replica"
        missing = set(range(dist.get_world_size())) - set(self.axis.ranks)
        return f"ranks {sorted(missing)} are not on the data-parallel axis" if missing else ""

    def learn_state(self, differences: Collection[Difference] | None = None) -> None:
        """Take tensors that differ between replicas now, in a healthy moment, for not replicated (as BatchNorm's running
        statistics are on the way). Collective, unless the differences are handed in. May be repeated.
        """
        found = differing(self._state_tensors(), self.axis, self._group) if differences is None else differences
        self._not_replicated |= {difference.name for difference in found}

    def compare_state(self) -> list[Difference]:
        """Tensors that should be equal on all replicas and are not. Collective."""
        found = differing(self._state_tensors(), self.axis, self._group)
        return [difference for difference in found if difference.name not in self._not_replicated]

    def begin(self, finding: RankFinding, payload: Payload) -> Payload | Judgement:
        """Gather what every rank found and hand the data on: the payload to run here, or why it cannot be. Collective."""
        self.findings = without_echoes(gather(finding, self._group))
        self.outcomes = []
        self.own_elsewhere, self.elsewhere_device = {}, None
        chosen = choose_shift(self.findings, self.axis)
        if isinstance(chosen, str):
            return Judgement("undecided", chosen, another_placement_may_decide=True)
        self.shift = chosen
        try:
            return move(payload, self.axis, chosen, self._group, self._torch_device)
        except RerunError as error:
            return Judgement("undecided", str(error), another_placement_may_decide=True)

    def end(self, checked_there: Sequence[Checked], own: Sequence[Checked], flagged: Collection[str]) -> Judgement:
        """Judge the rotated replay. Collective.

        `checked_there`: what this rank's pass over the other rank's data gave. `own`: this rank's values of its replay in
        place; they are compared with what came out of its data elsewhere, by its own rules. `flagged`: the names of its checks
        that had failed and came out the same again.
        """
        sent = [(one.check, one.value, one.rejected and one.fatal) for one in checked_there]
        came_out = dict(gather((dist.get_rank(), sent), self._group))
        rank = dist.get_rank()
        ran_on = self.axis.next_of(rank, self.shift)
        self.own_elsewhere = {check: value for check, value, _ in came_out[ran_on]}
        self.elsewhere_device = next((one.device for one in self.findings if one.rank == ran_on), None)
        first_bad = min(gather(_first_bad(own, came_out[ran_on]), self._group))
        known = {check for finding in self.findings if finding.rank == rank for check in finding.flagged}
        outcome = compare_values(rank, ran_on, own, came_out[ran_on], known.intersection(flagged), first_bad)
        outcome = replace(outcome, unmoved=is_unmoved(own, checked_there))
        self.outcomes = gather(outcome, self._group)
        return judge(self.findings, self.outcomes, self.axis)


Sent = Sequence[tuple[str, float, bool]]
"""Name, value, and whether a fatal check rejects it, of a pass elsewhere."""


def without_echoes(findings: Sequence[RankFinding]) -> list[RankFinding]:
    """The findings without those that other ranks' bad gradients explain. Pure."""
    first_bad = earliest(check for finding in findings for check in finding.flagged)
    return [
        replace(finding, flagged=tuple(check for check in finding.flagged if not is_echo(check, first_bad)))
        for finding in findings
    ]


def compare_values(
    rank: int, ran_on: int, own: Sequence[Checked], there: Sent, flagged: Collection[str], first_bad: int = NO_LIMIT
) -> RotatedOutcome:
    """What became of a rank's data elsewhere. Pure. Checks of reductions after `first_bad` prove nothing and are left out."""
    values = {check: value for check, value, _ in there}
    failed = [one for one in own if one.check in flagged and not is_echo(one.check, first_bad)]
    compared = failed or [one for one in own if not is_echo(one.check, first_bad)]
    return RotatedOutcome(
        rank=rank,
        ran_on=ran_on,
        same=all(one.check in values and _is_same(one, values[one.check]) for one in compared),
        rejected_there=any(rejected and not is_echo(check, first_bad) for check, _, rejected in there),
        complete=sorted(one.check for one in own) == sorted(values) and bool(failed or not flagged),
        values={one.check: values[one.check] for one in compared if one.check in values},
    )


def is_unmoved(own: Sequence[Checked], there: Sequence[Checked]) -> bool:
    """Whether other data gave exactly the values of one's own: it cannot have been other data. Pure."""
    return bool(own) and [(one.check, repr(one.value)) for one in own] == [(one.check, repr(one.value)) for one in there]


def _first_bad(own: Sequence[Checked], there: Sent) -> int:
    """The first reduction in which a value failed, here or there, or is another one there."""
    values = {check: value for check, value, _ in there}
    bad = [one.check for one in own if one.rejected or not _is_same(one, values.get(one.check, one.value))]
    return earliest(bad + [check for check, _, rejected in there if rejected])


def _is_same(one: Checked, there: float) -> bool:
    return is_same(one.value, there, one.tolerance, one.compare)


def _current_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
