"""Whether trouble clusters: devices by VBIOS, driver, model, node or rack, and how many of each group are in trouble compared
with what their number would let expect (`rate_ratio`). A device's firmware, driver and node are those it was last seen with."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, func, select

from rsup.supervisor.history_jobs import chunks
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
    counted = {value: count for value, count in connection.execute(select(column, func.count()).group_by(column))}
    sizes = _grouped(counted, group_of)
    troubled = _in_trouble(connection, since_us)
    hit = Counter[str]()
    for chunk in chunks(sorted(troubled)):
        hit.update(group_of(value) for value in connection.execute(select(column).where(devices.c.uuid.in_(chunk))).scalars())
    total, failures = sum(sizes.values()), sum(hit.values())
    rows = [_group(by, name, sizes[name], hit[name], total, failures) for name in hit]
    found, none = (
        probabilities([row.pop("log_factor") for row in rows], len(sizes)) if len(sizes) > 1 else ([0.0] * len(rows), 1.0)
    )
    for row, probability in zip(rows, found, strict=True):
        row["probability"] = probability
    rows.sort(key=lambda row: (-row["probability"], -row["in_trouble"], row[by]))
    sound = [_group(by, name, size, 0, total, failures) for name, size in sizes.most_common(limit) if not hit[name]]
    for row in sound:
        row.pop("log_factor")
        row["probability"] = None
    counts = {"devices": total, "in_trouble": failures, "groups": len(sizes)}
    return {"by": by, "since": iso(since_us), **counts, "groups_shown": [*rows, *sound][:limit], "none": none}


def _group(by: str, name: str, size: int, in_trouble: int, total: int, failures: int) -> Json:
    expected = failures * size / total
    factor = log_bayes_factor([1] * in_trouble, failures, size / total)
    counted = {"devices": size, "in_trouble": in_trouble, "expected": expected}
    return {by: name, **counted, **asdict(rate_ratio(in_trouble, expected)), "log_factor": factor}


def _in_trouble(connection: Connection, since_us: int) -> set[str]:
    now = select(subjects.c.subject).where(subjects.c.kind == "device", subjects.c.state.in_(IN_TROUBLE))
    then = select(transitions.c.subject).where(transitions.c.kind == "device", transitions.c.at_us >= since_us)
    then = then.where(transitions.c.after.in_(IN_TROUBLE)).distinct()
    return {*connection.execute(now).scalars(), *connection.execute(then).scalars()}


def _grouped(counts: Mapping[str, int], group_of: Callable[[str], str]) -> Counter[str]:
    sizes = Counter[str]()
    for value, count in counts.items():
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
