"""All that the store knows of one device or node, merged: where it sat, which ranks used it, what spoke against it, what was
decided, the rerun cases and incidents it was part of. See `views` for what holds of every view.

Everybody with a token may see this, so of jobs that are not theirs people see what `views.PUBLIC_FIELDS` names; the numbers of
a case, its checkpoint and the text of an incident are for those who may read the job (`may_read`).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, and_, func, or_, select, text

from rsup.supervisor.device_selector import find_device, find_node
from rsup.supervisor.history_jobs import MayRead, everything, named_jobs
from rsup.supervisor.node_story import note_text
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.tables import (
    COUNTED,
    cases,
    devices,
    drain_notes,
    evidence,
    incidents,
    job_nodes,
    placements,
    seats,
    subjects,
    transitions,
)
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import UsageError

MAX_PAGE = 1000
MAX_USERS = 64

Json = dict[str, Any]
_Entry = tuple[int, str, int, Mapping[Any, Any]]
"""When (UTC microseconds), what kind of entry, its place among those of its kind, the row."""


def timeline(
    connection: Connection,
    selector: str,
    at_us: int | None = None,
    *,
    kind: str = "device",
    cursor: str = "",
    limit: int = 100,
    may_read: MayRead = everything,
    others: Collection[str] = (),
) -> Json:
    """The story of a device (a UUID or its beginning, a serial, or `NODE:PCI`) or node, newest first.

    `subject`: its identity; `then`: its state, seat and users at `at_us` (now, if None); `items`: what happened up to then,
    at most `limit`; `next_cursor`: to hand in as `cursor` for older items, None at the end. Evidence stands where it was last
    seen. `others`: nodes that are known from elsewhere, too. Raise `UnknownHardware`, or `UsageError` for a selector that names
    several devices and for a bad cursor.
    """
    names, identity = subject_of(connection, selector, kind, at_us, others)
    bound_us, skip = _read_cursor(cursor) if cursor else (at_us, 0)
    wanted = limit + skip + 1
    sources = _device_sources() if kind == "device" else _node_sources()
    entries = [entry for source in sources for entry in source(connection, names, bound_us, wanted)]
    entries.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    shown = entries[skip : skip + limit]
    more = len(entries) > skip + limit
    jobs = named_jobs(connection, (row.get("job") for _, _, _, row in shown))
    return {
        "subject": identity,
        "then": moment(connection, kind, names, at_us),
        "items": [_fields(entry, jobs, may_read) for entry in shown],
        "next_cursor": _cursor_after(shown, bound_us, skip) if more else None,
    }


def subject_of(
    connection: Connection, selector: str, kind: str, at_us: int | None = None, others: Collection[str] = ()
) -> tuple[tuple[str, ...], Json]:
    """The names under which a device or node is in the store, newest last, and its identity. Raise as `timeline`."""
    if kind == "node":
        name = find_node(connection, selector, others)
        return (name,), {"kind": "node", "node": name}
    device = find_device(connection, selector, at_us)
    row = connection.execute(select(devices).where(devices.c.uuid == device.uuid)).mappings().first()
    fields: Mapping[Any, Any] = row or {}
    same = ("model", "board", "pci_bus_id", "vbios", "driver", "node")
    seen = {"first_seen": iso(fields.get("first_us")), "last_seen": iso(fields.get("at_us"))}
    identity = {"kind": "device", "uuid": device.uuid, "serial": device.serial, **{name: fields.get(name, "") for name in same}}
    others = tuple(uuid for uuid in device.uuids if uuid != device.uuid)
    return (*others, device.uuid), {**identity, **seen, "other_uuids": list(others)}


def moment(connection: Connection, kind: str, names: Sequence[str], at_us: int | None = None) -> Json:
    """State, seat and users of a device or node at that time, or now: what held then, by what is known now."""
    return {
        "at": iso(at_us),
        **_state_at(connection, kind, names, at_us),
        "seat": _seat_at(connection, names, at_us) if kind == "device" else None,
        "used_by": _users_at(connection, placements.c.device if kind == "device" else placements.c.node, names, at_us),
        "evidence": _evidence_by(connection, kind, names, at_us),
    }


# --------------------------------------------------------------------------------------------------- what held at a time


def _state_at(connection: Connection, kind: str, names: Sequence[str], at_us: int | None) -> Json:
    if at_us is None:
        query = select(subjects).where(subjects.c.kind == kind, subjects.c.subject.in_(names))
        row = connection.execute(query.order_by(subjects.c.since_us.desc()).limit(1)).mappings().first()
        override = {"word": row["override"], "until": iso(row["override_until_us"])} if row and row["override"] else None
        named = (row["state"], row["since_us"], row["reason"], row["rule"]) if row else ("clear", None, "", "")
    else:
        query = select(transitions).where(transitions.c.kind == kind, transitions.c.subject.in_(names))
        query = query.where(transitions.c.at_us <= at_us).order_by(transitions.c.at_us.desc(), transitions.c.version.desc())
        row, override = connection.execute(query.limit(1)).mappings().first(), None
        named = (row["after"], row["at_us"], row["reason"], row["rule"]) if row else ("clear", None, "", "")
    state, since_us, reason, rule = named
    return {"state": state, "since": iso(since_us), "reason": reason, "rule": rule, "override": override}


def _seat_at(connection: Connection, names: Sequence[str], at_us: int | None) -> Json | None:
    query = select(seats).where(seats.c.uuid.in_(names), _spans(seats, at_us)).order_by(seats.c.from_us.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return _seat_fields(row) if row else None


def _seat_fields(row: Mapping[Any, Any]) -> Json:
    place = {name: row[name] for name in ("uuid", "node", "pci_bus_id", "serial", "board", "boot_id")}
    return {**place, "from": iso(row["from_us"]), "to": iso(row["to_us"])}


def _users_at(connection: Connection, column: Column[str], names: Sequence[str], at_us: int | None) -> list[Json]:
    query = select(placements).where(column.in_(names), _spans(placements, at_us))
    rows = connection.execute(query.order_by(placements.c.from_us.desc()).limit(MAX_USERS)).mappings().all()
    jobs = named_jobs(connection, (row["job"] for row in rows))
    return [{"job": jobs.get(row["job"]), **{name: row[name] for name in ("attempt", "rank", "device")}} for row in rows]


def _spans(table: Any, at_us: int | None) -> ColumnElement[bool]:
    """Rows that held at that time, or hold now."""
    if at_us is None:
        return table.c.to_us.is_(None)  # type: ignore[no-any-return]
    return and_(table.c.from_us <= at_us, or_(table.c.to_us.is_(None), table.c.to_us > at_us))


def _evidence_by(connection: Connection, kind: str, names: Sequence[str], at_us: int | None) -> Json:
    """How much had been seen by then, and since when."""
    query = select(func.count(), func.count().filter(text(COUNTED)), func.min(evidence.c.first_us).filter(text(COUNTED)))
    query = query.where(evidence.c.kind == kind, evidence.c.subject.in_(names))
    if at_us is not None:
        query = query.where(evidence.c.first_us <= at_us)
    known, counted, first_us = connection.execute(query).one()
    return {"known": known, "counted": counted, "first_counted": iso(first_us)}


# ----------------------------------------------------------------------------------------------------------- the sources

_Source = Callable[[Connection, Sequence[str], int | None, int], list[_Entry]]


def _device_sources() -> list[_Source]:
    return [
        _of_subject(evidence, "evidence", "device", evidence.c.last_us, ("fingerprint",)),
        _of_subject(transitions, "transition", "device", transitions.c.at_us, ("subject", "version")),
        _of_column(seats, "seat", seats.c.uuid, seats.c.from_us, ("uuid",)),
        _of_column(placements, "placement", placements.c.device, placements.c.from_us, ("job", "attempt", "rank")),
        _of_column(incidents, "incident", incidents.c.device, incidents.c.at_us, ("job", "incident")),
        _device_cases,
    ]


def _node_sources() -> list[_Source]:
    return [
        _of_subject(evidence, "evidence", "node", evidence.c.last_us, ("fingerprint",)),
        _of_subject(transitions, "transition", "node", transitions.c.at_us, ("subject", "version")),
        _of_column(seats, "seat", seats.c.node, seats.c.from_us, ("uuid",)),
        _of_column(job_nodes, "participation", job_nodes.c.node, job_nodes.c.first_us, ("job",)),
        _of_column(incidents, "incident", incidents.c.node, incidents.c.at_us, ("job", "incident")),
        _of_column(drain_notes, "slurm", drain_notes.c.node, drain_notes.c.at_us, ("what",)),
    ]


def _of_subject(table: Any, name: str, kind: str, at: Column[int], key: tuple[str, ...]) -> _Source:
    def read(connection: Connection, names: Sequence[str], bound_us: int | None, wanted: int) -> list[_Entry]:
        query = select(table).where(table.c.kind == kind, table.c.subject.in_(names))
        return _newest(connection, query, name, at, key, bound_us, wanted)

    return read


def _of_column(table: Any, name: str, column: Column[str], at: Column[int], key: tuple[str, ...]) -> _Source:
    columns = [entry for entry in table.c if entry.name != "stacks"]

    def read(connection: Connection, names: Sequence[str], bound_us: int | None, wanted: int) -> list[_Entry]:
        query: Any = select(*columns).where(column.in_(names))
        return _newest(connection, query, name, at, key, bound_us, wanted)

    return read


def _newest(
    connection: Connection,
    query: Select[Any],
    name: str,
    at: Column[int],
    key: tuple[str, ...],
    bound_us: int | None,
    wanted: int,
) -> list[_Entry]:
    if bound_us is not None:
        query = query.where(at <= bound_us)
    rows = connection.execute(query.order_by(at.desc(), *(query.selected_columns[part] for part in key)).limit(wanted))
    return [(row[at.key], name, number, row) for number, row in enumerate(rows.mappings())]


def _device_cases(connection: Connection, names: Sequence[str], bound_us: int | None, wanted: int) -> list[_Entry]:
    """Cases of attempts that used the device, and speak of it."""
    used = select(placements.c.job).where(placements.c.device.in_(names))
    query = select(cases).where(cases.c.job.in_(used))
    if bound_us is not None:
        query = query.where(cases.c.opened_us <= bound_us)
    rows = connection.execute(query.order_by(cases.c.opened_us.desc(), cases.c.job, cases.c.case_id)).mappings()
    about = [row for row in rows if not set(names).isdisjoint(devices_of_case(row))]
    return [(row["opened_us"], "case", number, row) for number, row in enumerate(about[:wanted])]


def devices_of_case(row: Mapping[Any, Any]) -> set[str]:
    """UUIDs that a case speaks of."""
    found = set(row["accused"])
    for finding in row["findings"]:
        found |= {str(finding.get("device", "")), str(finding.get("elsewhere_device", ""))}
    for tried in dict(row["tried"]).values():
        found |= set(tried)
    return found - {""}


# ------------------------------------------------------------------------------------------------------------- as fields


def _fields(entry: _Entry, jobs: Mapping[int, Json], may_read: MayRead) -> Json:
    at_us, name, _, row = entry
    job = jobs.get(row["job"]) if row.get("job") is not None else None
    readable = job is None or may_read(job["owner"])
    more = _FIELDS[name](row, readable)
    return {"at": iso(at_us), "what": name, "text": more.pop("text"), "job": job, **more}


def _evidence_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    return {**evidence_fields(row), "text": row["text"].split("\n", 1)[0]}


def evidence_fields(row: Mapping[Any, Any]) -> Json:
    """One row of `evidence`, but for its job. `text`: one sentence, and (after a newline) the raw line."""
    same = ("fingerprint", "source", "code", "episode", "count", "weight", "effect", "rule", "serial", "node", "attempt")
    more = ("rank", "iteration", "case_id", "principal", "text")
    times = {"first": iso(row["first_us"]), "last": iso(row["last_us"]), "recorded": iso(row["recorded_us"])}
    return {**{name: row[name] for name in (*same, *more)}, **times, "injected": bool(row["injected"])}


def _transition_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    same = ("version", "before", "after", "reason", "principal", "verb", "rule", "fingerprint")
    by = f" by {row['principal']}" if row["principal"] else ""
    reason = f": {row['reason']}" if row["reason"] else ""
    return {**{name: row[name] for name in same}, "text": f"{row['before']} -> {row['after']} ({row['verb']}{by}){reason}"}


def _stay_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    place = f"{row['node']}:{row['pci_bus_id']}" if row["pci_bus_id"] else row["node"]
    until = f"until {iso(row['to_us'])}" if row["to_us"] is not None else "and does still"
    return {**_seat_fields(row), "text": f"{row['uuid']} sat at {place}, {until}"}


def _placement_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    same = {name: row[name] for name in ("attempt", "rank", "device", "node")}
    return {**same, "to": iso(row["to_us"]), "text": f"used by rank {row['rank']} of attempt {row['attempt']} on {row['node']}"}


def _incident_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    public = {"incident": row["incident"], "kind": row["kind"], "attempt": row["attempt"], "rank": row["rank"]}
    if not readable:
        return {**public, "text": row["kind"]}
    return {**public, "iteration": row["iteration"], "found_by": row["found_by"], "text": f"{row['kind']}: {row['text']}"}


def _case_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    public = {name: row[name] for name in ("case_id", "attempt", "iteration", "verdict", "accused", "found_by")}
    public |= {"closed": iso(row["closed_us"]), "injected": bool(row["injected"])}
    line = f"case of iteration {row['iteration']}: {row['verdict'] or 'open'}"
    if not readable:
        return {**public, "text": line}
    private = {name: row[name] for name in ("reason", "action", "findings", "tried", "checkpoint", "data_position")}
    return {**public, **private, "text": f"{line}: {row['reason']}" if row["reason"] else line}


def _participation_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    return {"role": row["role"], "to": iso(row["at_us"]), "text": f"took part as {row['role']}"}


def _note_fields(row: Mapping[Any, Any], readable: bool) -> Json:
    note = DrainNoted(**row)
    return {"note": note.what, "principal": note.principal, "reason": note.reason, "text": note_text(note)}


_FIELDS: dict[str, Callable[[Mapping[Any, Any], bool], Json]] = {
    "evidence": _evidence_fields,
    "transition": _transition_fields,
    "seat": _stay_fields,
    "placement": _placement_fields,
    "incident": _incident_fields,
    "case": _case_fields,
    "participation": _participation_fields,
    "slurm": _note_fields,
}


# --------------------------------------------------------------------------------------------------------------- cursors


def _read_cursor(cursor: str) -> tuple[int, int]:
    """`TIME-N`: go on at that time, after the first N entries of it."""
    parts = re.fullmatch(r"([0-9]{1,17})-([0-9]{1,6})", cursor)
    if parts is None:
        raise UsageError(f"{cursor[:60]!r} is no cursor of this list; begin without one")
    return int(parts[1]), int(parts[2])


def _cursor_after(shown: Sequence[_Entry], bound_us: int | None, skip: int) -> str:
    last_us = shown[-1][0]
    same = sum(1 for entry in shown if entry[0] == last_us)
    return f"{last_us}-{same + (skip if last_us == bound_us else 0)}"
