"""Whether a slow rank speaks against its device. Pure.

A rank is slow for many reasons, few of which are its device's: its share of the model or of the data, a busy host, the network.
So this is slow to accuse. An episode speaks against a device only

* if nothing else explains it: not where the sensors or the section say host, data or work;
* not where the slowness went with the rank to another device, or the device was fine under another rank;
* together with enough independent ones before: `APART_S` after the end of the one before, or under another rank in another
  attempt. A new attempt alone is none: what made the rank slow may well have outlived the old one;
* and, unless the device's own sensors named the cause, only where the device had been faster before in the same attempt, more
  than the others had (when the batch grows all are slower than they were), or was slow under two ranks: a rank that has always
  had more to do is as slow on any device.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.case_evidence import is_stand_in
from rsup.supervisor.records import StragglerSaved
from rsup.supervisor.wire import DEVICE_CAUSES, Straggler

APART_S = 1800.0
NEEDED = 3
"""Independent episodes that speak against a device of which the sensors say nothing."""
NEEDED_WITH_CAUSE = 2
"""The same where the device's own sensors named the cause, in this one and in those before."""
WAS_FASTER = 0.8
"""An individual score below it, against the median of all ranks': the device did the same work faster before."""
TRUSTED_AFTER = 10
"""Reports of an attempt after which a device without an episode counts as fine."""


class Verdict(Struct, frozen=True):
    """`text` says why; for people."""

    accuses: bool
    text: str


def judge(new: StragglerSaved, before: Sequence[StragglerSaved], cleared: Mapping[str, int]) -> Verdict:
    """What the new episode, which has just begun, means for its device. `before`: those of the job, in the order in which they
    began. `cleared`: of a device, up to which episode nothing counts."""
    if not new.device or is_stand_in(new.device):
        return Verdict(False, "no device is known that it could be")
    named = new.cause in DEVICE_CAUSES
    if new.cause and not named:
        return Verdict(False, f"not the device: {new.cause}")
    if not named and (moved := _elsewhere(new, before)):
        return Verdict(False, f"not the device: rank {new.rank} was as slow on {moved}")
    counting = [one for one in before if _is_like(new, one, cleared, named)]
    independent = _independent([*counting, new])
    needed = NEEDED_WITH_CAUSE if named else NEEDED
    if len(independent) < needed:
        return Verdict(False, f"independent episode {len(independent)} of {needed} that would speak against the device")
    if all(one.episode != new.episode for one in independent):
        return Verdict(False, "not independent of the one before, which has spoken for both")
    ranks = {one.rank for one in independent}
    if not named and len(ranks) < 2 and not all(pace(one) < WAS_FASTER for one in independent):
        return Verdict(
            False, f"rank {new.rank} may have more to do: it was never faster, nor the device slow under another rank"
        )
    why = f", by its sensors: {new.cause}" if named else f" under ranks {_listed(ranks)}" if len(ranks) > 1 else ""
    return Verdict(True, f"{len(independent)} independent episodes on this device{why}")


def found_fine(past: Sequence[StragglerSaved], now: Sequence[StragglerSaved], users: Mapping[str, int]) -> list[str]:
    """Devices that were slow in `past`, have another rank now, and no episode. `users`: which rank a device has now."""
    slow_now = {one.device for one in now}
    blamed: dict[str, set[int]] = {}
    for one in past:
        if one.cause not in DEVICE_CAUSES:
            blamed.setdefault(one.device, set()).add(one.rank)
    return sorted(d for d, ranks in blamed.items() if d in users and users[d] not in ranks and d not in slow_now)


def _elsewhere(new: StragglerSaved, before: Sequence[StragglerSaved]) -> str:
    """Another device on which the same rank was slow: the slowness went with the rank."""
    found = [one.device for one in before if one.rank == new.rank and one.device and one.device != new.device]
    return found[-1] if found else ""


def _is_like(new: StragglerSaved, one: StragglerSaved, cleared: Mapping[str, int], named: bool) -> bool:
    if one.device != new.device or one.episode <= cleared.get(one.device, 0):
        return False
    return one.cause in DEVICE_CAUSES if named else not one.cause or one.cause in DEVICE_CAUSES


def _independent(episodes: Sequence[StragglerSaved]) -> list[StragglerSaved]:
    """Of these the ones that lie apart."""
    kept: list[StragglerSaved] = []
    for one in episodes:
        near = [place for place, other in enumerate(kept) if one.from_us - other.seen_us < APART_S * 1e6]
        same = [place for place in near if kept[place].attempt == one.attempt or kept[place].rank == one.rank]
        if not same:
            kept.append(one)
        else:
            kept[same[-1]] = _as_one(kept[same[-1]], one)
    return kept


def _as_one(first: StragglerSaved, later: StragglerSaved) -> StragglerSaved:
    """Episodes that are not independent: what they say together is what the weaker says."""
    weaker = max(first, later, key=pace)
    seen_us = max(first.seen_us, later.seen_us)
    return replace(first, attempt=later.attempt, seen_us=seen_us, individual=weaker.individual, usual=weaker.usual)


def pace(one: StragglerSaved | Straggler) -> float:
    """How fast a rank was against what it had been, as the others are: below 1 it alone has become slower."""
    return one.individual / max(one.usual, 1e-9)


def _listed(ranks: set[int]) -> str:
    return " and ".join(map(str, sorted(ranks)))
