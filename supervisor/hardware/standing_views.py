"""State of devices and nodes from the store, with what led to it. See `views` for what holds of every view."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, func, or_, select, text

from rsup.supervisor.hardware.states import Standing
from rsup.supervisor.history_jobs import MayRead, everything, named_jobs
from rsup.supervisor.tables import COUNTED, evidence, subjects, transitions
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import UsageError

MAX_SHOWN = 20
"""Pieces of evidence and changes in a detail, the newest."""

Json = dict[str, Any]


def only(query: Select[Any], kind: str, name: ColumnElement[str], state: str) -> Select[Any]:
    """`query` over devices or nodes with only those in `state`, all if empty. Raise `UsageError` for another word."""
    if not state:
        return query
    if state not in set(Standing):
        raise UsageError(f"there is no state {state[:40]!r}; there are {', '.join(Standing)}")
    joined = query.outerjoin(subjects, and_(subjects.c.kind == kind, subjects.c.subject == name))
    if state == Standing.CLEAR:
        return joined.where(or_(subjects.c.state == state, subjects.c.state.is_(None)))
    return joined.where(subjects.c.state == state)


def is_known(connection: Connection, kind: str, name: str) -> bool:
    """Whether somebody or something has spoken about it, though it was never seen in a job."""
    query = select(subjects.c.subject).where(subjects.c.kind == kind, subjects.c.subject == name)
    return connection.execute(query).scalar() is not None


def standings(connection: Connection, kind: str, named: Sequence[tuple[str, str]]) -> dict[str, Json]:
    """The state of each (name, serial). A board whose record is kept under another UUID has that."""
    names = [name for name, _ in named]
    serials = [serial for _, serial in named if serial]
    of_serial = and_(subjects.c.serial.in_(serials), subjects.c.serial != "", subjects.c.kind + "" == kind)
    known = or_(and_(subjects.c.kind == kind, subjects.c.subject.in_(names)), of_serial)  # so each half finds its index
    rows = connection.execute(select(subjects).where(known)).mappings().all()
    by_name = {row["subject"]: row for row in rows}
    by_serial = {row["serial"]: row for row in rows if row["serial"]}
    found = {name: by_name.get(name) or by_serial.get(serial) for name, serial in named}
    kept_as = {name: row["subject"] if row is not None else name for name, row in found.items()}
    counts = _counts(connection, kind, list(kept_as.values()))
    return {name: {**_fields(row), "evidence": counts.get(kept_as[name], _NONE)} for name, row in found.items()}


def record_of(connection: Connection, kind: str, name: str, serial: str) -> str:
    """The name under which the record is kept."""
    of_serial = and_(subjects.c.serial == serial, subjects.c.serial != "", subjects.c.kind + "" == kind)
    known = or_(and_(subjects.c.kind == kind, subjects.c.subject == name), of_serial)  # so each half finds its index
    rows = connection.execute(select(subjects.c.subject, subjects.c.serial).where(known)).all()
    return name if not rows or any(row.subject == name for row in rows) else str(rows[0].subject)


def standing_detail(connection: Connection, kind: str, name: str, serial: str, may_read: MayRead = everything) -> Json:
    """The state, its latest changes and its newest evidence, without the raw lines of jobs that `may_read` denies."""
    (standing,) = standings(connection, kind, [(name, serial)]).values()
    kept_as = record_of(connection, kind, name, serial)
    query = select(transitions).where(transitions.c.kind == kind, transitions.c.subject == kept_as)
    changes = connection.execute(query.order_by(transitions.c.version.desc()).limit(MAX_SHOWN)).mappings().all()
    items, _ = list_evidence(connection, kind, kept_as, limit=MAX_SHOWN, may_read=may_read)
    return {**standing, "record": kept_as, "changes": [_change(row) for row in changes], "newest_evidence": items}


def list_evidence(
    connection: Connection, kind: str, name: str, *, cursor: str = "", limit: int = 100, may_read: MayRead = everything
) -> tuple[list[Json], str | None]:
    """Evidence about one subject, the newest first, and where to go on (None at the end). The raw lines of another's job are
    left out. Raise `UsageError` for a bad cursor."""
    query = select(evidence).where(evidence.c.kind == kind, evidence.c.subject == name)
    if cursor:
        at_us, _, last = cursor.partition("-")
        if not at_us.isdecimal() or len(at_us) > 18 or not last:
            raise UsageError(f"{cursor[:60]!r} is no cursor of this list; begin without one")
        older = and_(evidence.c.last_us == int(at_us), evidence.c.fingerprint > last)
        query = query.where(or_(evidence.c.last_us < int(at_us), older))
    query = query.order_by(evidence.c.last_us.desc(), evidence.c.fingerprint).limit(limit + 1)
    rows = connection.execute(query).mappings().all()
    shown = rows[:limit]
    jobs = named_jobs(connection, (row["job"] for row in shown))
    following = f"{shown[-1]['last_us']}-{shown[-1]['fingerprint']}" if len(rows) > limit else None
    return [_evidence(row, jobs.get(row["job"]), may_read) for row in shown], following


def _evidence(row: RowMapping, job: Json | None, may_read: MayRead) -> Json:
    same = ("fingerprint", "source", "code", "episode", "count", "weight", "share", "effect", "rule", "serial", "node")
    more = ("attempt", "rank", "iteration", "case_id", "principal", "injected")
    first_line, _, raw = row["text"].partition("\n")
    times = {"first": iso(row["first_us"]), "last": iso(row["last_us"]), "recorded": iso(row["recorded_us"])}
    told = {"text": first_line, "raw": raw if job is None or may_read(job["owner"]) else ""}
    return {**{name: row[name] for name in (*same, *more)}, **times, **told, "job": job}


def _change(row: RowMapping) -> Json:
    same = ("version", "before", "after", "reason", "principal", "verb", "rule", "fingerprint")
    return {"at": iso(row["at_us"]), **{name: row[name] for name in same}}


_NONE = {"known": 0, "counted": 0, "first_counted": None}


def _counts(connection: Connection, kind: str, names: Sequence[str]) -> dict[str, Json]:
    counted = func.count().filter(text(COUNTED))
    query = select(evidence.c.subject, func.count(), counted, func.min(evidence.c.first_us).filter(text(COUNTED)))
    query = query.where(evidence.c.kind == kind, evidence.c.subject.in_(names)).group_by(evidence.c.subject)
    return {
        name: {"known": known, "counted": num, "first_counted": iso(first_us)}
        for name, known, num, first_us in connection.execute(query)
    }


def _fields(row: RowMapping | None) -> Json:
    if row is None:
        nothing = {"state": "clear", "since": None, "reason": "", "rule": "", "version": 0, "score": 0.0, "expires": None}
        return {**nothing, "override": None, "may_drain": "", "ticket": "", "held_by_test": False, "clean_hours": 0.0}
    same = ("state", "reason", "rule", "version", "score", "may_drain", "ticket")
    override = None
    if row["override"]:
        override = {
            "word": row["override"],
            "by": row["override_actor"],
            "reason": row["override_reason"],
            "until": iso(row["override_until_us"]),
        }
    times = {"since": iso(row["since_us"]), "expires": iso(row["expires_us"])}
    more = {"held_by_test": bool(row["held_by_test"]), "clean_hours": round(row["clean_us"] / 3.6e9, 2)}
    return {**{name: row[name] for name in same}, **times, **more, "override": override}
