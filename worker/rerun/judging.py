"""What a rotated replay proves: the outcome table of DESIGN.md 6. Pure: every rank hands in the same and gets the same.

Each flagged replica (one that found its failed value again in place) is judged by itself, by two questions: what came of its
data on another, healthy, like device, and what came of other, healthy data on its own device.

The first alone can accuse. Were the flagged device healthy, its data would have failed because of the data, and so on every
device; a healthy value elsewhere therefore proves the device (or the state, which checksums cleared before) at fault, whatever
else is broken. The second says whether it fails for all data. What does not fit exactly one explanation is `undecided`, with
the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsup.worker.rerun.contract import Judgement, RankFinding, RotatedOutcome
from rsup.worker.rerun.replica_axis import ReplicaAxis

NO_FINDING = "no rank found its failed value again"
UNEVEN = "the ranks took different numbers of batches, so none can run the data of another"
NO_DATA = "a rank took no data from a RerunDataIterator, so what it computes cannot be handed on"
NO_LIKE_DEVICE = "no like device: the other ranks run on the same device, or on one of another model, VBIOS or driver"


def choose_shift(findings: Sequence[RankFinding], axis: ReplicaAxis) -> int | str:
    """How far to rotate, such that as many flagged replicas as possible land on healthy, like devices; or why none can.

    Among equals, the shift that also brings healthy data to the flagged ones, then the smallest.
    """
    known = _by_rank(findings)
    missing = [rank for rank in axis.ranks if rank not in known]
    if missing:
        return f"there is no finding of {_named(missing)}"
    flagged = _flagged(known, axis)
    if not flagged:
        return NO_FINDING
    if len(flagged) == axis.size:
        return _all_failed(axis)
    if any(not any(sum(known[rank].num_batches) for rank in replica) for replica in axis.replicas):
        return NO_DATA
    shifts = [shift for shift in range(1, axis.size) if _batches_match(known, axis, shift)]
    if not shifts:
        return UNEVEN
    gains = {shift: _gain(known, axis, flagged, shift) for shift in shifts}
    best = max(shifts, key=lambda shift: (gains[shift], -shift))
    return best if gains[best][0] else NO_LIKE_DEVICE


def judge(findings: Sequence[RankFinding], outcomes: Sequence[RotatedOutcome], axis: ReplicaAxis) -> Judgement:
    """The verdict on all flagged replicas together. `outcomes`: one for each rank of the axis, all of one rotation.

    A device is accused even while the cause elsewhere stays open; `application` needs that it holds for every flagged replica.
    """
    known = _by_rank(findings)
    came_out = {outcome.rank: outcome for outcome in outcomes}
    missing = [rank for rank in axis.ranks if rank not in came_out or rank not in known]
    if missing:
        return _open(f"the rotated replay says nothing about {_named(missing)}")
    flagged = _flagged(known, axis)
    if not flagged:
        return Judgement("undecided", NO_FINDING)
    if len(flagged) == axis.size:
        return _open(_all_failed(axis))
    return _together([_Suspect(known, came_out, axis, flagged, replica).judge() for replica in sorted(flagged)])


def judge_state(differences: Sequence[tuple[str, tuple[int, ...]]], axis: ReplicaAxis) -> Judgement | None:
    """`corrupted state` where replicated tensors differ between replicas; None where none does.

    `differences`: as of `checksums.differing`. `accused`: the ranks outvoted by the others, nobody where there is no majority.
    """
    if not differences:
        return None
    outvoted: set[int] = set()
    for _, ranks in differences:
        for rank in ranks:
            if not set(axis.counterparts_of(rank)) <= set(ranks):
                outvoted.add(rank)
    names = [name for name, _ in differences]
    what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    who = _named(sorted({rank for _, ranks in differences for rank in ranks}))
    how = "from the majority" if outvoted else "from one another, without a majority"
    return Judgement("corrupted state", f"{what} of {who} differ {how}", tuple(sorted(outvoted)))


@dataclass(frozen=True)
class _Suspect:
    """A flagged replica."""

    findings: Mapping[int, RankFinding]
    outcomes: Mapping[int, RotatedOutcome]
    axis: ReplicaAxis
    flagged: set[int]
    replica: int

    def judge(self) -> Judgement:
        """The verdict on this replica alone."""
        witness = self._host_of(self.replica)
        if doubt := self._doubt(witness):
            return _open(f"{self._name}: {doubt}")
        members = self.axis.replicas[self.replica]
        there = [self.outcomes[rank] for rank in members]
        failed = [self.outcomes[rank] for rank in members if self.findings[rank].flagged]
        where = _named(self.axis.replicas[witness])
        others = self._other_data()
        if all(outcome.same for outcome in failed):
            return self._same_there(where, others)
        if any(outcome.rejected_there or outcome.same for outcome in failed) or any(one.rejected_there for one in there):
            return _open(f"{self._name}: its data gave other values on {where}, and was rejected there too")
        return self._healthy_there(where, others)

    def _doubt(self, witness: int) -> str:
        """Why the device where the data ran proves nothing; empty if it does."""
        where = _named(self.axis.replicas[witness])
        if not all(self.outcomes[rank].complete for rank in self.axis.replicas[self.replica]):
            return f"on {where} its data made other checks"
        if witness in self.flagged:
            return f"its data ran on {where}, which failed as well"
        if not _alike(self.findings, self.axis, self.replica, witness):
            return NO_LIKE_DEVICE
        if any(self.outcomes[rank].unmoved for rank in self.axis.replicas[witness]):
            return f"{where} got its own values out of other data: what it computes does not come from the batches alone"
        checked_by = self._host_of(witness)
        if checked_by not in self.flagged and self._data_of(witness) != "healthy":
            return f"{where} and {_named(self.axis.replicas[checked_by])} do not reproduce each other"
        return ""

    def _healthy_there(self, where: str, others: str) -> Judgement:
        accused = self.axis.replicas[self.replica]
        text = f"{self._name}: its data gave healthy values on {where}"
        size = self.axis.replica_size
        if others == "failed":
            return Judgement("persistent", f"{text}, and other data failed on it too", accused, suspect_of=size)
        here = {
            "healthy": "other data is healthy on it",
            "different": "other data came out differently on it, without being rejected",
            "": "no healthy data ran on it",
        }[others]
        return Judgement("persistent", f"{text}, and {here}", accused, data_dependent=True, suspect_of=size)

    def _same_there(self, where: str, others: str) -> Judgement:
        text = f"{self._name}: its data gave the same rejected values on {where}"
        if others == "healthy":
            return Judgement("application", f"{text}, and other data is healthy on it")
        here = {
            "failed": "other data failed on it too",
            "different": "other data came out differently on it",
            "": "no healthy data ran on it",
        }[others]
        return _open(f"{text}, but {here}: cannot tell apart")

    def _other_data(self) -> str:
        """What came of the data that ran on this replica: `healthy`, `failed`, `different`, or empty: it proves nothing."""
        source = next(index for index in range(self.axis.size) if self._host_of(index) == self.replica)
        if source in self.flagged or not _alike(self.findings, self.axis, self.replica, source):
            return ""
        return self._data_of(source)

    def _data_of(self, replica: int) -> str:
        outcomes = [self.outcomes[rank] for rank in self.axis.replicas[replica]]
        if not all(outcome.complete for outcome in outcomes):
            return ""
        if any(outcome.rejected_there for outcome in outcomes):
            return "failed"
        return "healthy" if all(outcome.same for outcome in outcomes) else "different"

    def _host_of(self, replica: int) -> int:
        return self.axis.replica_of(self.outcomes[self.axis.replicas[replica][0]].ran_on)

    @property
    def _name(self) -> str:
        return _named(self.axis.replicas[self.replica])


def _together(each: Sequence[Judgement]) -> Judgement:
    reason = "; ".join(one.reason for one in each)
    sure = [one for one in each if one.verdict == "persistent" and not one.data_dependent]
    likely = [one for one in each if one.verdict == "persistent" and one.data_dependent]
    if proven := sure or likely:
        accused = tuple(sorted(rank for one in proven for rank in one.accused))
        return Judgement("persistent", reason, accused, data_dependent=not sure, suspect_of=proven[0].suspect_of)
    if all(one.verdict == "application" for one in each):
        return Judgement("application", reason)
    return _open(reason)


def _gain(findings: Mapping[int, RankFinding], axis: ReplicaAxis, flagged: set[int], shift: int) -> tuple[int, int, int]:
    """What a shift is good for: flagged replicas that can be judged, how many of these get healthy data, how many of their
    witnesses are checked by a third replica."""
    judged = [
        replica
        for replica in flagged
        if (replica + shift) % axis.size not in flagged and _alike(findings, axis, replica, (replica + shift) % axis.size)
    ]
    fed = [
        replica
        for replica in judged
        if (replica - shift) % axis.size not in flagged and _alike(findings, axis, replica, (replica - shift) % axis.size)
    ]
    checked = [replica for replica in judged if (replica + 2 * shift) % axis.size not in flagged]
    return len(judged), len(fed), len(checked)


def _batches_match(findings: Mapping[int, RankFinding], axis: ReplicaAxis, shift: int) -> bool:
    return all(findings[rank].num_batches == findings[axis.next_of(rank, shift)].num_batches for rank in axis.ranks)


def _alike(findings: Mapping[int, RankFinding], axis: ReplicaAxis, one: int, other: int) -> bool:
    """Another device for every rank of the replica, and a like one."""
    pairs = zip(axis.replicas[one], axis.replicas[other], strict=True)
    devices = [(findings[rank].device, findings[counterpart].device) for rank, counterpart in pairs]
    return all(here.uuid != there.uuid and here.likeness == there.likeness for here, there in devices)


def _flagged(findings: Mapping[int, RankFinding], axis: ReplicaAxis) -> set[int]:
    return {axis.replica_of(rank) for rank in axis.ranks if findings[rank].flagged}


def _by_rank(findings: Sequence[RankFinding]) -> dict[int, RankFinding]:
    return {finding.rank: finding for finding in findings}


def _all_failed(axis: ReplicaAxis) -> str:
    return f"all {axis.size} replicas failed: no healthy device is left to compare with"


def _open(reason: str) -> Judgement:
    return Judgement("undecided", reason, another_placement_may_decide=True)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
