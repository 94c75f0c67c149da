"""Whether trouble clusters: devices by VBIOS, driver, model, node or rack, and how many of each group are in trouble compared
with what their number would let expect (`rate_ratio`). A device's firmware, driver and node are those it was last seen with."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from sqlalchemy import Connection, func, select

from rsup.supervisor.moments import DAY_US
from rsup.supervisor.rate_ratio import log_bayes_factor, probabilities, rate_ratio
from rsup.supervisor.tables import devices, subjects, transitions
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import UsageError

BY = ("vbios", "driver", "model", "node", "rack")
IN_TROUBLE = ("suspect", "quarantined", "in_repair", "retired")
RACK_OF_NODE = r"^(.*?)[^0-9a-zA-Z]*[a-zA-Z]*[0-9]+$"
"""The rack in a node's name: what stands before its last number. `r12-n03` is in `r12`."""

Json = dict[str, Any]


def clusters(
    connection: Connection,
    by: str,
    *,
    now_us: int,
    days: float = 30,
    rack_pattern: str = RACK_OF_NODE,
    limit: int = 50,
) -> Json:
    """Groups of devices by `by` (one of `BY`), the most conspicuous first: `devices`, how many of them are `in_trouble`
    (suspect or worse now, or at some time in the last `days`), `expected`, `ratio`, `above_one`, and `probability` that this
    group alone is the cause. `rack_pattern`: a regular expression whose first group is the rack in a node's name.
    Raise `UsageError`."""
    if by not in BY:
        raise UsageError(f"cannot group by {by[:60]!r}; use one of {', '.join(BY)}")
    column = devices.c.node if by == "rack" else devices.c[by]
    group_of = _rack_finder(rack_pattern) if by == "rack" else str
    since_us = now_us - round(days * DAY_US)
    sizes = _grouped(connection.execute(select(column, func.count()).group_by(column)), group_of)
    troubled = devices.c.uuid.in_(_in_trouble(since_us))
    hit = _grouped(connection.execute(select(column, func.count()).where(troubled).group_by(column)), group_of)
    total, failures = sum(sizes.values()), sum(hit.values())
    group = cache(partial(_group, total=total, failures=failures))
    rows = [{by: name, **group(sizes[name], hit[name])} for name in hit]
    found, none = (
        probabilities([row.pop("log_factor") for row in rows], len(sizes)) if len(sizes) > 1 else ([0.0] * len(rows), 1.0)
    )
    for row, probability in zip(rows, found, strict=True):
        row["probability"] = probability
    rows.sort(key=lambda row: (-row["probability"], -row["in_trouble"], row[by]))
    sound = [(name, size) for name, size in sizes.most_common(limit + len(hit)) if name not in hit][: max(0, limit - len(rows))]
    rows += [{by: name, **group(size, 0), "log_factor": None, "probability": None} for name, size in sound]
    for row in rows:
        row.pop("log_factor", None)
    counts = {"devices": total, "in_trouble": failures, "groups": len(sizes)}
    return {"by": by, "since": iso(since_us), **counts, "groups_shown": rows[:limit], "none": none}


def _group(size: int, in_trouble: int, total: int, failures: int) -> Json:
    """The figures of a group, the same for groups that are alike."""
    expected = failures * size / total
    found, factor = rate_ratio(in_trouble, expected), log_bayes_factor([1] * in_trouble, failures, size / total)
    counted = {"devices": size, "in_trouble": in_trouble, "expected": expected}
    return {**counted, "ratio": found.ratio, "above_one": found.above_one, "log_factor": factor}


def _in_trouble(since_us: int) -> Any:
    """UUIDs of devices that are suspect or worse, or were since then."""
    now = select(subjects.c.subject).where(subjects.c.kind == "device", subjects.c.state.in_(IN_TROUBLE))
    then = select(transitions.c.subject).where(transitions.c.kind + "" == "device", transitions.c.at_us >= since_us)
    return now.union(then.where(transitions.c.after.in_(IN_TROUBLE)))


def _grouped(counts: Iterable[Any], group_of: Callable[[str], str]) -> Counter[str]:
    sizes = Counter[str]()
    for value, count in counts:
        sizes[group_of(value)] += count
    return sizes


def _rack_finder(pattern: str) -> Callable[[str], str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"the rack pattern {pattern[:60]!r} is no regular expression: {error}") from None
    if not compiled.groups:
        raise UsageError(f"the rack pattern {pattern[:60]!r} has no group; put the rack in parentheses, as in '^(r[0-9]+)-'")

    def rack_of(node: str) -> str:
        found = compiled.search(node)
        return (found[1] or "") if found else ""

    return rack_of
