"""Audit: healthy iterations, now and then, run once more on the next device, and the numbers must agree.

Corruption that betrays itself by no NaN shows only so. One device that computes wrongly differs in two comparisons: its data
runs elsewhere, and other data runs on it. Where fewer comparisons differ, or more than one device explains them, the audit says
so and accuses nobody. Collective methods say so; what they return is the same on all ranks.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from rsup.worker.rerun.contract import Checked, Judgement, Payload, RerunError
from rsup.worker.rerun.echoes import NO_LIMIT, earliest, is_echo, reduction_of
from rsup.worker.rerun.exchange import gather, move
from rsup.worker.rerun.judging import NO_DATA
from rsup.worker.rerun.replica_axis import ReplicaAxis
from rsup.worker.rerun.rotation import is_unmoved
from rsup.worker.rerun.values import difference

TOLERANCE_FACTOR = 4.0
"""A check may differ by so many times what healthy devices were seen to differ by."""
LEARN_AT_MOST = 0.01
"""Relative difference beyond which a mismatch is never taken for a property of healthy devices."""
NUM_CALIBRATIONS = 2
"""Audits at the start that only learn."""
JUMP_FACTOR = 3.0
JUMP_MEMORY = 32


@dataclass(frozen=True)
class Compared:
    """One rank's data, computed by itself and by another rank; `differences`: relative, by check; inf where one is missing."""

    rank: int
    ran_on: int
    differences: dict[str, float]
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Own value and the other's, of each check."""
    in_place: dict[str, float] = field(default_factory=dict)
    """Relative differences between two computations by the rank itself."""
    differs_in_place: bool = False
    """These are beyond the tolerances too."""


class Tolerances:
    """By how much each check may differ between two healthy devices: learned at start, equal on all ranks."""

    def __init__(self, floor: float = 0.0) -> None:
        """`floor`: what is allowed at least. 0 where kernels are deterministic: then like devices agree bit for bit."""
        self._floor = floor
        self._seen: dict[str, float] = {}

    def __getitem__(self, check: str) -> float:
        return max(self._floor, TOLERANCE_FACTOR * self._seen.get(check, 0.0))

    def learn(self, compared: Sequence[Compared]) -> bool:
        """Learn from one audit of all ranks; whether something in it is too far off to be learned from, and must be judged.

        Of each check the comparisons count that differ by at most `LEARN_AT_MOST`, and not by far more than most of them do.
        What a device differs by from itself counts alike.
        """
        first_odd = NO_LIMIT
        is_odd = False
        for check in sorted(dict.fromkeys(name for one in compared for name in one.differences), key=reduction_of):
            if is_echo(check, first_odd):
                continue
            known = [each[check] for one in compared for each in (one.differences, one.in_place) if check in each]
            seen = [math.inf if math.isnan(value) else value for value in known]
            limit = min(LEARN_AT_MOST, 10 * max(statistics.median_low(seen), self[check], 1e-6))
            self._seen[check] = max([self._seen.get(check, 0.0), *(value for value in seen if value <= limit)])
            if any(value > limit for value in seen):
                is_odd = True
                first_odd = min(first_odd, earliest([check]))
        return is_odd

    def mismatches(self, one: Compared) -> list[str]:
        """The checks of it that differ by more than they may. A NaN difference is one."""
        return [check for check, value in one.differences.items() if not value <= self[check]]

    def state(self) -> dict[str, float]:
        """What was learned, to be kept with a checkpoint."""
        return dict(self._seen)

    def load(self, state: Mapping[str, float]) -> None:
        """Go on with what another process learned."""
        self._seen = {str(check): float(value) for check, value in state.items() if 0 <= float(value) <= LEARN_AT_MOST}


def judge_audit(compared: Sequence[Compared], tolerances: Tolerances, axis: ReplicaAxis) -> Judgement | None:
    """None when all agree; else who differs. Pure. `compared`: of one audit or several, with different shifts.

    One replica is named when it is in every comparison that differs, these are with at least two others, no comparison with it
    agrees, and others agree with one another. Or when it alone does not reproduce its own values in place.
    """
    mismatches = _without_echoes([(one, tolerances.mismatches(one)) for one in compared])
    off = [(one, checks) for one, checks in mismatches if checks]
    if not off:
        return None
    reason = _what_differs(off)
    pairs: dict[tuple[int, int], bool] = {}  # data's replica, and where it ran -> all its members agree
    for one, checks in mismatches:
        pair = (axis.replica_of(one.rank), axis.replica_of(one.ran_on))
        pairs[pair] = pairs.get(pair, True) and not checks
    bad = [set(pair) for pair, agrees in pairs.items() if not agrees]
    agreeing = {replica for pair, agrees in pairs.items() if agrees for replica in pair}
    common = set.intersection(*bad)
    restless = {axis.replica_of(one.rank) for one in compared if one.differs_in_place}
    if len(restless) == 1 and restless <= common:
        accused = axis.replicas[restless.pop()]
        text = f"{reason}; {_named(accused)} does not reproduce its own values in place"
        return Judgement("transient", text, accused, suspect_of=axis.replica_size)
    if restless:
        return Judgement("undecided", f"{reason}; values differ in place too, not on one device alone")
    others = set().union(*bad) - common
    if len(common) == 1 and len(others) >= 2 and common.isdisjoint(agreeing) and others & agreeing:
        accused = axis.replicas[common.pop()]
        text = f"{reason}; {_named(accused)} differs in each comparison, and the others agree"
        return Judgement("persistent", text, accused, suspect_of=axis.replica_size)
    if axis.size == 2:
        return Judgement(
            "undecided",
            f"{reason}; of two devices, it cannot be said which one",
            axis.ranks,
            another_placement_may_decide=True,
        )
    return Judgement("undecided", f"{reason}; no single device explains it", another_placement_may_decide=True)


class Audit:
    """One rank's part in the audits of a run."""

    def __init__(
        self,
        axis: ReplicaAxis,
        group: dist.ProcessGroup | None,
        interval: int,
        torch_device: torch.device,
        floor: float | None = None,
    ) -> None:
        """`interval`: audit every so many iterations; 0: only when something jumps. `floor`: of the tolerances; None: 0 with
        deterministic kernels or on the CPU, else 1e-6."""
        if floor is None:
            exact = torch_device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
            floor = 0.0 if exact else 1e-6
        self.axis = axis
        self.tolerances = Tolerances(floor)
        self.compared: list[Compared] = []
        self.num_done = 0
        self.problem = ""
        """Why audits say nothing in this run."""
        self._group = group
        self._interval = interval
        self._torch_device = torch_device
        self._shift = 0

    @property
    def is_calibrating(self) -> bool:
        """The next audit only learns tolerances (and judges what is far off)."""
        return self.num_done < NUM_CALIBRATIONS

    def due(self, iteration: int, jumped: bool = False) -> bool:
        """Whether that iteration (1-based) is to be audited. `jumped` must be agreed by all ranks."""
        if self.axis.size < 2:
            return False
        at_start = self._interval > 0 and self.is_calibrating
        return at_start or jumped or (self._interval > 0 and iteration % self._interval == 0)

    def begin(self, payload: Payload, num_batches: tuple[int, ...]) -> Payload | str:
        """Hand the data on, each time to another device: the payload to run here, or why it cannot be. Collective."""
        counts = dict(gather((dist.get_rank(), num_batches), self._group))
        self._shift = audit_shift(self.axis.size, self.num_done)
        if any(not any(sum(counts[rank]) for rank in replica) for replica in self.axis.replicas):
            return NO_DATA
        if any(counts[rank] != counts[self.axis.next_of(rank, self._shift)] for rank in self.axis.ranks):
            return "the ranks took different numbers of batches"
        try:
            return move(payload, self.axis, self._shift, self._group, self._torch_device)
        except RerunError as error:
            return str(error)

    def end(
        self, checked_there: Sequence[Checked], own: Sequence[Checked], in_place: Sequence[Checked] | None = None
    ) -> Judgement | None:
        """Judge the pass: None when the devices agree. Collective.

        `checked_there`: what the other rank's data gave here; `own`: what this rank's gave here; `in_place`: what it gave when
        it was replayed here.
        """
        if any(gather(is_unmoved(own, checked_there), self._group)):
            self.problem = "a rank got its own values out of other data: what it computes does not come from the batches alone"
            return None
        sent = {one.check: one.value for one in checked_there}
        came_out = dict(gather((dist.get_rank(), sent), self._group))
        rank = dist.get_rank()
        ran_on = self.axis.next_of(rank, self._shift)
        mine = compare(rank, ran_on, own, came_out[ran_on], in_place)
        compared = gather(mine, self._group)
        only_learns = self.is_calibrating and not self.tolerances.learn(compared)
        self.num_done += 1
        self.compared = [replace(one, differs_in_place=self._differs(one.in_place)) for one in compared]
        return None if only_learns else judge_audit(self.compared, self.tolerances, self.axis)

    def _differs(self, in_place: Mapping[str, float]) -> bool:
        return any(not value <= self.tolerances[check] for check, value in in_place.items())


def audit_shift(size: int, number: int) -> int:
    """How far the number-th audit (from 0) moves data along an axis of that size: each time to other devices, never such that
    two devices swap theirs, if that can be helped: both comparisons of a broken one would then be with the same peer.
    """
    shifts = [shift for shift in range(1, size) if 2 * shift != size] or [1]
    return shifts[number % len(shifts)]


def compare(
    rank: int,
    ran_on: int,
    own: Iterable[Checked],
    there: Mapping[str, float],
    in_place: Iterable[Checked] | None = None,
) -> Compared:
    """A rank's values beside those of another device. Pure."""
    values = {one.check: (one.value, there.get(one.check, math.nan)) for one in own}
    differences = {check: difference(mine, other) if check in there else math.inf for check, (mine, other) in values.items()}
    differences |= {check: math.inf for check in there if check not in values}
    again = {one.check: one.value for one in in_place or ()}
    return Compared(
        rank,
        ran_on,
        differences,
        values,
        {check: difference(values[check][0], again[check]) for check in values if check in again},
    )


class Jump:
    """Tells when a number leaves its usual range: one a quantity (gradient norm, RMS of the updates)."""

    def __init__(self, factor: float = JUMP_FACTOR) -> None:
        self._factor = factor
        self._last: list[float] = []

    def jumped(self, value: float) -> bool:
        """Whether `value` exceeds the median of the last ones by the factor, or is not finite; False until eight are known.

        Numbers that jumped are remembered as well: a new level is usual after a while.
        """
        usual = statistics.median(self._last) if len(self._last) >= 8 else math.inf
        if math.isfinite(value):
            self._last = [*self._last[1 - JUMP_MEMORY :], abs(value)]
        return not math.isfinite(value) or abs(value) > self._factor * usual


def _without_echoes(mismatches: Sequence[tuple[Compared, list[str]]]) -> list[tuple[Compared, list[str]]]:
    """A bad gradient spoils the later reductions of the pass on all ranks: only its own one counts."""
    first_bad = earliest(check for _, checks in mismatches for check in checks)
    return [(one, [check for check in checks if not is_echo(check, first_bad)]) for one, checks in mismatches]


def _what_differs(off: Sequence[tuple[Compared, list[str]]]) -> str:
    parts = []
    for one, checks in off:
        check = max(checks, key=lambda name: one.differences[name])
        mine, other = one.values.get(check, (math.nan, math.nan))
        parts.append(f"{check} of rank {one.rank}'s data: {mine!r}, on rank {one.ran_on} {other!r}")
    return "; ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
