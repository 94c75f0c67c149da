"""Devices and nodes that fail again and again: several independent episodes within some days, and those that came back from
repair and failed again (lemons)."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select, text

from rsup.supervisor.history_jobs import chunks
from rsup.supervisor.moments import DAY_US
from rsup.supervisor.tables import COUNTED, devices, evidence, subjects, transitions
from rsup.supervisor.view_times import iso

FAILED_AGAIN = ("suspect", "quarantined", "in_repair", "retired")
REPAIRED = ("in_repair", "probation")

Json = dict[str, Any]


def offenders(connection: Connection, *, now_us: int, days: float = 30, kind: str = "device", limit: int = 100) -> Json:
    """`repeat`: subjects with evidence of at least two independent episodes (boots, jobs) seen in the last `days`, most
    episodes first; `lemons`: those that became suspect or worse in that time after a repair at any time, last failure first."""
    since_us = now_us - round(days * DAY_US)
    rows = _repeating(connection, since_us, kind, limit)
    lemons = _lemons(connection, since_us, kind, limit)
    names: list[str] = [*(row["subject"] for row in rows), *(row["subject"] for row in lemons)]
    states = _states(connection, kind, names)
    facts = _facts(connection, names) if kind == "device" else {}
    known: dict[str, Json] = {name: {kind: name, **states.get(name, _CLEAR), **facts.get(name, {})} for name in names}
    repeat = [{**known[row["subject"]], **_times(row)} for row in rows]
    return {"since": iso(since_us), "repeat": repeat, "lemons": [{**known[row.pop("subject")], **row} for row in lemons]}


_CLEAR = {"state": "clear", "reason": ""}


def _repeating(connection: Connection, since_us: int, kind: str, limit: int) -> Sequence[RowMapping]:
    episodes = func.count(evidence.c.episode.distinct()).label("episodes")
    weight = func.sum(evidence.c.weight).label("weight")
    last_us = func.max(evidence.c.last_us).label("last_us")
    query = select(evidence.c.subject, episodes, weight, last_us).where(evidence.c.last_us >= since_us, text(COUNTED))
    query = query.where(_aside(evidence.c.kind) == kind).group_by(evidence.c.subject).having(episodes >= 2)
    return connection.execute(query.order_by(episodes.desc(), weight.desc()).limit(limit)).mappings().all()


def _aside(column: Any) -> Any:
    """The column's text, so that SQLite does not look for it in an index: the time narrows more."""
    return column + ""


def _times(row: RowMapping) -> Json:
    return {"episodes": row["episodes"], "weight": round(row["weight"], 3), "last": iso(row["last_us"])}


def _lemons(connection: Connection, since_us: int, kind: str, limit: int) -> list[Json]:
    """Failures of this time that follow a return from repair, newest of each subject."""
    again, back = transitions.alias(), transitions.alias()
    returned = select(func.max(back.c.version)).where(back.c.kind == again.c.kind, back.c.subject == again.c.subject)
    returned = returned.where(
        back.c.version < again.c.version, back.c.before.in_(REPAIRED), back.c.after.in_(("probation", "clear"))
    )
    query = select(again, returned.scalar_subquery().label("returned")).where(
        again.c.at_us >= since_us, _aside(again.c.kind) == kind
    )
    query = query.where(again.c.after.in_(FAILED_AGAIN), again.c.before.in_(("clear", "watch", "probation")))
    rows = connection.execute(query.order_by(again.c.at_us.desc())).mappings()
    found: dict[str, Json] = {}
    for row in rows:
        if row["returned"] is not None and row["subject"] not in found:
            found[row["subject"]] = {
                "subject": row["subject"],
                "failed": row["at_us"],
                "returned": row["returned"],
                "why": row["reason"],
            }
            if len(found) == limit:
                break
    return _with_returns(connection, kind, list(found.values()))


def _with_returns(connection: Connection, kind: str, lemons: list[Json]) -> list[Json]:
    """Put in when they came back, and how often they did."""
    table = transitions.c
    came_back: dict[str, list[tuple[int, int]]] = {}
    for chunk in chunks([lemon["subject"] for lemon in lemons]):
        query = select(table.subject, table.version, table.at_us).where(table.kind == kind, table.subject.in_(chunk))
        query = query.where(table.before == "in_repair", table.after.in_(("probation", "clear")))
        for subject, version, at_us in connection.execute(query):
            came_back.setdefault(subject, []).append((version, at_us))
    for lemon in lemons:
        times = [at_us for version, at_us in came_back.get(lemon["subject"], []) if version <= lemon["returned"]]
        returned_us, failed_us = max(times, default=None), lemon["failed"]
        lasted = round((failed_us - returned_us) / DAY_US, 2) if returned_us is not None else None
        lemon.update(failed=iso(failed_us), returned=iso(returned_us), repairs=len(times), lasted_days=lasted)
    return lemons


def _states(connection: Connection, kind: str, names: Sequence[str]) -> dict[str, Json]:
    found = {}
    for chunk in chunks(names):
        query = select(subjects.c.subject, subjects.c.state, subjects.c.reason)
        for row in connection.execute(query.where(subjects.c.kind == kind, subjects.c.subject.in_(chunk))).mappings():
            found[row["subject"]] = {"state": row["state"], "reason": row["reason"]}
    return found


def _facts(connection: Connection, names: Sequence[str]) -> dict[str, Json]:
    found = {}
    for chunk in chunks(names):
        query = select(devices.c.uuid, devices.c.node, devices.c.model, devices.c.serial).where(devices.c.uuid.in_(chunk))
        for row in connection.execute(query).mappings():
            found[row["uuid"]] = {name: row[name] for name in ("node", "model", "serial")}
    return found
