"""Figures about the history itself: how many devices are in which state, how long repairs take, how often quarantine was right,
and what ends by itself soon."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, RowMapping, func, or_, select

from rsup.supervisor.moments import DAY_US
from rsup.supervisor.tables import devices, nodes, subjects, transitions
from rsup.supervisor.view_times import iso

OUT = ("quarantined", "in_repair")
EXPIRES = ("watch", "suspect", "probation")

Json = dict[str, Any]


def expiring(connection: Connection, *, now_us: int, days: float = 7, limit: int = 200) -> Json:
    """What ends by itself within `days`: suspicion, and people's overrides, soonest first; what is overdue is in it."""
    until_us = now_us + round(days * DAY_US)
    soon = or_(
        subjects.c.expires_us <= until_us,
        subjects.c.override_until_us <= until_us,
    )
    rows = connection.execute(select(subjects).where(soon)).mappings().all()
    items = [entry for row in rows for entry in _endings(row, until_us)]
    items.sort(key=lambda entry: (entry["ends"], entry["subject"]))
    return {"until": iso(until_us), "items": items[:limit], "count": len(items)}


def _endings(row: RowMapping, until_us: int) -> Iterable[Json]:
    same = {"kind": row["kind"], "subject": row["subject"], "state": row["state"]}
    if row["expires_us"] is not None and row["expires_us"] <= until_us and row["state"] in EXPIRES:
        yield {**same, "what": row["state"], "ends": iso(row["expires_us"]), "reason": row["reason"], "actor": ""}
    if row["override"] and row["override_until_us"] is not None and row["override_until_us"] <= until_us:
        word = {"what": row["override"], "ends": iso(row["override_until_us"])}
        yield {**same, **word, "reason": row["override_reason"], "actor": row["override_actor"]}


def history_stats(connection: Connection, *, now_us: int, days: float = 90, kind: str = "device") -> Json:
    """`states`: how many are in each state now; `repairs`: of those that came back in the last `days`, hours from going out of
    use to being back (mean, median, longest), and how many were repaired or released; `outcomes`: what became of the
    quarantines that ended in that time (see `quarantine_outcomes`), and how long the refuted ones stood idle."""
    since_us = now_us - round(days * DAY_US)
    states = select(subjects.c.state, func.count()).where(subjects.c.kind == kind).group_by(subjects.c.state)
    counted: dict[str, int] = {state: number for state, number in connection.execute(states)}
    known = connection.execute(select(func.count()).select_from(devices if kind == "device" else nodes)).scalar() or 0
    counted["clear"] = max(0, known - sum(number for state, number in counted.items() if state != "clear"))
    outages = _outages(connection, since_us, kind)
    hours = [(outage["end_us"] - outage["begin_us"]) / 3.6e9 for outage in outages if outage["repaired"]]
    outcomes = Counter(outage["outcome"] for outage in outages)
    idle = sum(outage["end_us"] - outage["begin_us"] for outage in outages if outage["outcome"] == "refuted") / 3.6e9
    decided = outcomes["confirmed"] + outcomes["refuted"]
    return {
        "since": iso(since_us),
        "kind": kind,
        "known": known,
        "states": counted,
        "repairs": {"count": len(hours), **_spread(hours)},
        "outcomes": {
            **{name: outcomes[name] for name in ("confirmed", "refuted", "unknown")},
            "precision": outcomes["confirmed"] / decided if decided else None,
            "refuted_hours": round(idle, 3),
        },
        "by_rule": _by_rule(outages),
    }


def _spread(hours: Sequence[float]) -> Json:
    if not hours:
        return {"mean_hours": None, "median_hours": None, "longest_hours": None}
    figures = (statistics.fmean(hours), statistics.median(hours), max(hours))
    return dict(zip(("mean_hours", "median_hours", "longest_hours"), (round(figure, 3) for figure in figures), strict=True))


def _by_rule(outages: Sequence[Json]) -> list[Json]:
    """Rules of the policy by how often what they put out of use was sound."""
    counts: dict[str, Counter[str]] = {}
    for outage in outages:
        counts.setdefault(outage["rule"], Counter())[outage["outcome"]] += 1
    rows = [
        {"rule": rule, **{name: found[name] for name in ("confirmed", "refuted", "unknown")}} for rule, found in counts.items()
    ]
    return sorted(rows, key=lambda row: (-row["refuted"], -row["confirmed"], row["rule"]))


def _outages(connection: Connection, since_us: int, kind: str) -> list[Json]:
    """Stays out of use that ended since then."""
    table = transitions.c
    ended = select(table.subject).where(table.at_us >= since_us, table.kind + "" == kind)  # so the time finds its index
    ended = ended.where(table.before.in_(OUT), table.after.not_in(OUT)).distinct()
    query = select(table.subject, table.at_us, table.after, table.verb, table.rule)
    query = query.where(table.kind == kind, table.subject.in_(ended)).order_by(table.subject, table.version)
    query = query.where(or_(table.before.in_(OUT), table.after.in_(OUT)))
    found: list[Json] = []
    for _, rows in groupby(connection.execute(query), key=itemgetter(0)):
        found += [outage for outage in outages_of(rows) if outage["end_us"] is not None and outage["end_us"] >= since_us]
    return found


def outages_of(history: Iterable[Any]) -> list[Json]:
    """The stays out of use in one subject's transitions (`at_us`, `after`, `verb`, `rule`): begin, end (None: not yet), rule,
    whether it was in repair, outcome.

    `confirmed`: it was repaired or retired. `refuted`: it came back without: released, or passed a test, and did not go out of
    use again within 30 days. `unknown`: the rest.
    """
    found: list[Json] = []
    for row in history:
        open_one = found[-1] if found and found[-1]["end_us"] is None else None
        if open_one is None and row.after in OUT:
            found.append({"begin_us": row.at_us, "end_us": None, "rule": row.rule or row.verb, "repaired": False})
            open_one = found[-1]
        if open_one is None:
            continue
        open_one["repaired"] |= row.after == "in_repair"
        if row.after not in OUT:
            open_one["end_us"], open_one["after"] = row.at_us, row.after
    for number, outage in enumerate(found):
        following = found[number + 1]["begin_us"] if number + 1 < len(found) else None
        outage["outcome"] = _outcome(outage, following)
    return found


def _outcome(outage: Json, next_us: int | None) -> str:
    if outage["repaired"] or outage.get("after") == "retired":
        return "confirmed"
    if outage["end_us"] is None or (next_us is not None and next_us - outage["end_us"] < 30 * DAY_US):
        return "unknown"
    return "refuted"
