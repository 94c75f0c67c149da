"""The blast guard: which refusals of nodes may be told to gates, and become drains. Pure.

A node is refused to jobs only once it is admitted here, and stays so until nothing counts against it any more. Percent, count,
rate and rack each bound admissions, over the nodes that could be refused at all; a fleet of none is usual. It never undoes an
admission, and has no say in releases: a guard that held these up would do harm of its own.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from rsup.supervisor.hardware.policy import Guard

HOUR_US = 3_600_000_000
MAX_RACK_NODES = 72
"""A larger group of nodes is no rack, whatever the names say."""


class Admission(Struct, frozen=True):
    """What the guard says of one moment. `passed`: nodes that may be refused from now on, in order; `held`: those that may not
    now, and why."""

    passed: list[str] = []
    held: dict[str, str] = {}
    num_refused: int = 0
    """With those that have passed now."""
    num_eligible: int = 0
    limit: int = 0
    in_last_hour: int = 0

    @property
    def is_open(self) -> bool:
        """Tripped: something is held back."""
        return bool(self.held)

    @property
    def max_refused(self) -> int:
        """What a snapshot may hold: the limit, or what was admitted when the fleet was larger or a person said so."""
        return max(self.limit, self.num_refused)


def admit(
    wanted: Sequence[str],
    eligible: Collection[str],
    admitted: Collection[str],
    admitted_us: Sequence[int],
    guard: Guard,
    now_us: int,
) -> Admission:
    """Decide on `wanted`, the most urgent first. `admitted`: nodes that are refused now; `admitted_us`: when nodes were
    admitted lately, those that have been cleared since too."""
    racks = racks_of(eligible, guard.rack_pattern)
    in_rack = Counter(racks[name] for name in admitted if name in racks)
    in_last_hour = sum(1 for at_us in admitted_us if 0 <= now_us - at_us < HOUR_US)
    num_refused = len(set(admitted))
    passed, held = list[str](), dict[str, str]()
    for name in dict.fromkeys(wanted):
        if name in admitted:
            continue
        if name not in eligible:
            held[name] = "it is not among the nodes that could be refused"
            continue
        rack = racks.get(name)
        why = guard.holds_back(num_refused, len(eligible), in_last_hour, in_rack[rack] if rack else 0)
        if why:
            held[name] = why
            continue
        passed.append(name)
        num_refused, in_last_hour = num_refused + 1, in_last_hour + 1
        if rack:
            in_rack[rack] += 1
    return Admission(passed, held, num_refused, len(eligible), guard.limit(len(eligible)), in_last_hour)


def racks_of(names: Collection[str], pattern: str) -> Mapping[str, str]:
    """The rack of each node whose name tells one."""
    matcher = re.compile(pattern)
    found = {name: match.group(1) or "" for name in names if (match := matcher.match(name))}
    sizes = Counter(found.values())
    return {name: rack for name, rack in found.items() if rack and sizes[rack] <= MAX_RACK_NODES and sizes[rack] < len(names)}
