"""The blast guard: which refusals of nodes may be told to gates, and become drains. Pure.

A node is refused to jobs only once it is admitted here, and stays so until nothing counts against it any more. Percent, count,
rate and rack each bound admissions, over the nodes that could be refused at all; a fleet of none is usual. It never undoes an
admission, and has no say in releases: a guard that held these up would do harm of its own. Nodes that are out of service anyway
(down, powered off, gone from SLURM) cost nothing: they count neither as refused nor among those that could be.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.slurm.scheduler_text import NodeSeen

HOUR_US = 3_600_000_000
MAX_RACK_NODES = 72
"""A larger group of nodes is no rack, whatever the names say."""

WITH_THOSE_BEFORE = ", counting those that come before it"
"""Said of what is held back in the round in which others have passed."""
LEAST_BELIEVED = 2
"""So many refused nodes a gate of the smallest cluster believes (`launcher.slurm.gate_decision`)."""


class Fleet(Struct, frozen=True):
    """The nodes that the guard reckons with."""

    eligible: frozenset[str] = frozenset()
    """That could be refused, or are."""
    refused: frozenset[str] = frozenset()
    """That are, and would be in service otherwise."""
    away: frozenset[str] = frozenset()
    """That are refused too, but out of service anyway."""
    num_counted: int = 0
    """Of which the percent are taken: nodes with GPUs, where SLURM knows of any."""
    num_shown: int = 0
    """The same of all nodes, whether they could be refused now or not."""


class Admission(Struct, frozen=True):
    """What the guard says of one moment. `passed`: nodes that may be refused from now on, in order; `held`: those that may not
    now, and why."""

    passed: list[str] = []
    held: dict[str, str] = {}
    num_refused: int = 0
    """With those that have passed now, without `away`."""
    num_eligible: int = 0
    limit: int = 0
    in_last_hour: int = 0
    away: frozenset[str] = frozenset()
    """Refused, and out of service anyway."""
    num_shown: int = 0
    """Nodes of the cluster, in service or not."""

    @property
    def is_open(self) -> bool:
        """Tripped: something is held back."""
        return bool(self.held)

    @property
    def max_refused(self) -> int:
        """What a snapshot may hold: the limit, or what was admitted when the fleet was larger or a person said so."""
        return max(self.limit, self.num_refused)


def fleet_of(nodes: Mapping[str, NodeSeen] | None, admitted: Collection[str], known: Collection[str] = ()) -> Fleet:
    """The fleet as SLURM shows it; where it does not, `known` nodes. `admitted`: those that are refused now. What somebody, or
    SLURM after a refusal (`Prolog error`), has drained meanwhile counts on."""
    if nodes is None:
        every = frozenset(known) | frozenset(admitted)
        return Fleet(every, frozenset(admitted), frozenset(), len(every), len(every))
    refused = frozenset(name for name in admitted if name in nodes and _counts(nodes[name]))
    eligible = frozenset(name for name, seen in nodes.items() if seen.is_eligible) | refused
    with_gpus = sum(1 for name in eligible if nodes[name].has_gpus)
    all_with_gpus = sum(1 for seen in nodes.values() if seen.has_gpus)
    return Fleet(eligible, refused, frozenset(admitted) - refused, with_gpus or len(eligible), all_with_gpus or len(nodes))


def most_believed(num_nodes: int) -> int:
    """So many refused nodes gates believe of a cluster of that many, whoever says so."""
    return max(LEAST_BELIEVED, num_nodes // 2)


def _counts(seen: NodeSeen) -> bool:
    """Whether a refused node takes anything from the fleet; one that SLURM reboots is back in minutes."""
    return seen.is_in_service or seen.is_rebooting


def admit(wanted: Sequence[str], fleet: Fleet, admitted_us: Sequence[int], guard: Guard, now_us: int) -> Admission:
    """Decide on `wanted`, the most urgent first. `admitted_us`: when nodes were admitted lately, those that have been cleared
    since too."""
    racks = racks_of(fleet.eligible, guard.rack_pattern)
    in_rack = Counter(racks[name] for name in fleet.refused if name in racks)
    in_last_hour = sum(1 for at_us in admitted_us if 0 <= now_us - at_us < HOUR_US)
    num_refused, num_counted = len(fleet.refused), fleet.num_counted
    passed, held = list[str](), dict[str, str]()
    for name in dict.fromkeys(wanted):
        if name in fleet.refused or name in fleet.away:
            continue
        if name not in fleet.eligible:
            held[name] = "it is not among the nodes that could be refused"
            continue
        rack = racks.get(name)
        why = guard.holds_back(num_refused, num_counted, in_last_hour, in_rack[rack] if rack else 0)
        if why:
            held[name] = why + (WITH_THOSE_BEFORE if passed else "")
            continue
        passed.append(name)
        num_refused, in_last_hour = num_refused + 1, in_last_hour + 1
        if rack:
            in_rack[rack] += 1
    limit = guard.limit(num_counted)
    return Admission(passed, held, num_refused, num_counted, limit, in_last_hour, fleet.away, fleet.num_shown)


def racks_of(names: Collection[str], pattern: str) -> Mapping[str, str]:
    """The rack of each node whose name tells one. By the built-in pattern a word is a rack only where there are others that
    differ from it in a number alone: `r3-n7` beside `r4-n1`, not `gpu-07` or `a100-07`."""
    matcher = re.compile(pattern)
    found = {name: match.group(1) or "" for name in names if (match := matcher.match(name))}
    sizes = Counter(found.values())
    kinds = Counter(_kind(rack) for rack in sizes)
    guessed = pattern == Guard().rack_pattern
    return {
        name: rack
        for name, rack in found.items()
        if rack
        and sizes[rack] <= MAX_RACK_NODES
        and sizes[rack] < len(names)
        and not (guessed and ("#" not in _kind(rack) or kinds[_kind(rack)] < 2))
    }


def _kind(rack: str) -> str:
    return re.sub("[0-9]+", "#", rack)
