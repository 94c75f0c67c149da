"""A device's record for the vendor's ticket: identity, where it sat, raw evidence, tests, decisions, use, as one JSON document.

Nothing of users is in it: jobs are named by a hash that is the same throughout the document, people by another, in texts too;
paths, data positions, programs' output and numbers of whole iterations stay out, except with `with_jobs`.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from rsup.supervisor import tables
from rsup.supervisor.history_jobs import named_jobs
from rsup.supervisor.history_views import devices_of_case, evidence_fields, moment, subject_of
from rsup.supervisor.moments import HOUR_US
from rsup.supervisor.render import clean, pieces, plural
from rsup.supervisor.render import moment as moment_text
from rsup.supervisor.tables import cases, evidence, incidents, placements, seats, transitions
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import RELEASE

FORMAT = "rsup-device-record"
FORMAT_VERSION = 1
MAX_EVIDENCE = 2000
MAX_OTHERS = 1000
MIN_NAME_CHARS = 3
MIN_NUMBER_CHARS = 5
"""Names and numbers shorter than these are hidden in texts only where the text says that they are a job or a person."""

Json = dict[str, Any]


def device_record(connection: Connection, selector: str, *, now_us: int, with_jobs: bool = False, kind: str = "device") -> Json:
    """Everything a vendor may want to know of the device `selector` (as `history_views.timeline`), or of a node, newest first.

    `identity`, `state`, `stays`, `evidence` (with raw lines; at most the newest `MAX_EVIDENCE`), `tests`, `decisions`,
    `cases` about it, `incidents` with it, `use` (total hours, and each placement). Raise `UnknownHardware` or `UsageError`.
    """
    names, identity = subject_of(connection, selector, kind)
    is_node = kind == "node"
    about = (evidence.c.kind == kind, evidence.c.subject.in_(names))
    found = _rows(connection, select(evidence).where(*about).order_by(evidence.c.last_us.desc()).limit(MAX_EVIDENCE))
    total = connection.execute(select(func.count()).where(*about)).scalar() or 0
    used = _rows(
        connection,
        _newest(placements, (placements.c.node if is_node else placements.c.device).in_(names), placements.c.from_us),
    )
    decided = select(transitions).where(transitions.c.kind == kind, transitions.c.subject.in_(names))
    decisions = _rows(connection, decided.order_by(transitions.c.at_us.desc()).limit(MAX_OTHERS))
    sat = _rows(connection, _newest(seats, (seats.c.node if is_node else seats.c.uuid).in_(names), seats.c.from_us))
    incident_rows = _rows(
        connection, _newest(incidents, (incidents.c.node if is_node else incidents.c.device).in_(names), incidents.c.at_us)
    )
    case_rows = _cases(connection, {row["job"] for row in used} | {row["job"] for row in found}, names)
    jobs = named_jobs(connection, (row["job"] for row in (*found, *used, *incident_rows, *case_rows)))
    name_of = _job_namer(connection, jobs, with_jobs)
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "exported": iso(now_us),
        "release": RELEASE,
        "identity": identity,
        "state": {name: value for name, value in moment(connection, kind, names).items() if name != "used_by"},
        "stays": [_stay(row) for row in sat],
        "evidence": [{**evidence_fields(row), "job": name_of(row["job"])} for row in found],
        "num_evidence": total,
        "tests": [_test(row) for row in found if row["source"] == "test"],
        "decisions": [_decision(row) for row in decisions],
        "cases": [_case(row, name_of, with_jobs) for row in case_rows],
        "incidents": [_incident(row, name_of, with_jobs) for row in incident_rows],
        "use": {"hours": _hours(used, now_us), "placements": [_placement(row, name_of) for row in used]},
    }
    if with_jobs:
        return record
    people = {row["principal"] for row in (*found, *decisions)} | {job["owner"] for job in jobs.values()}
    hidden: Json = _hide(record, _redactor(jobs, name_of, people - {""}, _salt(connection)))
    return hidden


def _rows(connection: Connection, query: Any) -> list[Mapping[Any, Any]]:
    return list(connection.execute(query).mappings())


def _newest(table: Any, condition: Any, at: Any) -> Any:
    columns = [column for column in table.c if column.name not in ("stacks", "victims")]
    return select(*columns).where(condition).order_by(at.desc()).limit(MAX_OTHERS)


def _cases(connection: Connection, numbers: set[int | None], names: Sequence[str]) -> list[Mapping[Any, Any]]:
    wanted = sorted(number for number in numbers if number is not None)[-MAX_OTHERS:]
    rows = _rows(connection, select(cases).where(cases.c.job.in_(wanted)).order_by(cases.c.opened_us.desc()))
    return [row for row in rows if not (devices_of_case(row) | _nodes_of_case(row)).isdisjoint(names)]


def _nodes_of_case(row: Mapping[Any, Any]) -> set[str]:
    return {str(finding.get("node", "")) for finding in row["findings"]} - {""}


# ---------------------------------------------------------------------------------------------------------------- fields


def _stay(row: Mapping[Any, Any]) -> Json:
    place = {name: row[name] for name in ("uuid", "node", "pci_bus_id", "serial", "board")}
    return {**place, "from": iso(row["from_us"]), "to": iso(row["to_us"])}


def _test(row: Mapping[Any, Any]) -> Json:
    return {"at": iso(row["last_us"]), "result": row["code"], "text": row["text"]}


def _decision(row: Mapping[Any, Any]) -> Json:
    same = ("before", "after", "reason", "principal", "verb", "rule")
    return {"at": iso(row["at_us"]), **{name: row[name] for name in same}}


def _case(row: Mapping[Any, Any], name_of: "_Namer", with_jobs: bool) -> Json:
    same = ("verdict", "reason", "data_dependent", "accused", "suspect_of", "findings", "found_by")
    more = ("case_id", "iteration", "checkpoint", "data_position") if with_jobs else ()
    times = {"opened": iso(row["opened_us"]), "closed": iso(row["closed_us"])}
    return {**times, "job": name_of(row["job"]), **{name: row[name] for name in (*same, *more)}}


def _incident(row: Mapping[Any, Any], name_of: "_Namer", with_jobs: bool) -> Json:
    same = ("kind", "signal_name", "exit_code", "node", *(("text", "iteration") if with_jobs else ()))
    return {"at": iso(row["at_us"]), "job": name_of(row["job"]), **{name: row[name] for name in same}}


def _placement(row: Mapping[Any, Any], name_of: "_Namer") -> Json:
    same = {name: row[name] for name in ("attempt", "rank", "device", "node")}
    return {"job": name_of(row["job"]), **same, "from": iso(row["from_us"]), "to": iso(row["to_us"])}


def _hours(rows: Sequence[Mapping[Any, Any]], now_us: int) -> float:
    ends: list[int] = [max(0, (now_us if row["to_us"] is None else row["to_us"]) - row["from_us"]) for row in rows]
    return round(sum(ends) / HOUR_US, 3)


# --------------------------------------------------------------------------------------------------------------- privacy

_Namer = Callable[[int | None], str | None]


def _salt(connection: Connection) -> str:
    """The store's own random id: hashes of two stores are not to be compared."""
    return connection.execute(select(tables.meta.c.value).where(tables.meta.c.key == "store")).scalar() or ""


def _job_namer(connection: Connection, jobs: Mapping[int, Json], with_jobs: bool) -> _Namer:
    salt = _salt(connection)

    def name_of(number: int | None) -> str | None:
        job = jobs.get(number) if number is not None else None
        if job is None:
            return None
        full = f"{job['cluster']}/{job['owner']}/{job['id']}.{job['run']}"
        return full if with_jobs else f"job-{_hash(salt, full)}"

    return name_of


def _hash(salt: str, text: str) -> str:
    return hashlib.sha256(f"{salt}\0{text}".encode("utf-8", "replace")).hexdigest()[:12]


def _redactor(jobs: Mapping[int, Json], name_of: _Namer, people: Iterable[str], salt: str) -> Callable[[str], str]:
    """What replaces names of jobs and people in a text by their hashes."""
    hidden: dict[str, str] = {}
    for number, job in jobs.items():
        name = str(name_of(number))
        for word in (f"{job['cluster']}/{job['owner']}/{job['id']}.{job['run']}", f"{job['id']}.{job['run']}"):
            hidden[word] = name
        hidden.setdefault(job["id"], name)
    hidden |= {person: f"person-{_hash(salt, person)}" for person in people if person not in hidden}
    if not hidden:
        return str
    plain = [word for word in hidden if len(word) >= (MIN_NUMBER_CHARS if word.isdigit() else MIN_NAME_CHARS)]
    told = [word for word in hidden if word not in plain]
    parts = [rf"(?<![\w.-])(?:{_any_of(plain)})(?![\w])"] if plain else []
    parts += [rf"(?<=\bjob[ :])(?:{_any_of(told)})(?![\w])", rf"(?<=\bby )(?:{_any_of(told)})(?![\w])"] if told else []
    pattern = re.compile("|".join(parts))
    return lambda text: pattern.sub(lambda found: hidden[found[0]], text)


def _any_of(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_KEPT = frozenset(("format", "release", "identity", "stays", "job"))
"""Parts that hold nothing of users, or their hashes already."""


def _hide(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_hide(item, redact) for item in value]
    if isinstance(value, dict):
        return {name: item if name in _KEPT else _hide(item, redact) for name, item in value.items()}
    return value


# ------------------------------------------------------------------------------------------------------------ for people


def _identity_lines(record: Json) -> list[str]:
    identity, seat = record["identity"], record["state"]["seat"] or {}
    if identity["kind"] == "node":
        here = [stay["uuid"] for stay in record["stays"] if stay["to"] is None]
        return [f"node {identity['node']}", f"with {', '.join(here) or 'no board that is known'}"]
    return [
        f"GPU {identity['model'] or 'of unknown model'}, serial {identity['serial'] or 'unknown'}, {identity['uuid']}",
        f"board {identity['board'] or '-'}, VBIOS {identity['vbios'] or '-'}, driver {identity['driver'] or '-'}",
        f"in {seat.get('node') or identity['node'] or '-'} at {seat.get('pci_bus_id') or identity['pci_bus_id'] or '-'}",
    ]


def record_text(record: Json, max_lines: int = 40) -> str:
    """The record in short, for the body of a ticket."""
    state = record["state"]
    lines = [
        *_identity_lines(record),
        f"state {state['state'].replace('_', ' ')} since {moment_text(state['since'])}: {state['reason'] or '-'}",
        f"used for {record['use']['hours']:g} h; {pieces(record['num_evidence'])}, {plural(len(record['cases']), 'case')}",
        "",
        "Evidence (newest first):",
    ]
    for row in record["evidence"][:max_lines]:
        first, _, raw = row["text"].partition("\n")
        times = f" x{row['count']}" if row["count"] > 1 else ""
        lines.append(f"  {moment_text(row['last'])}  {row['source']} {row['code']}{times}: {clean(first)}")
        lines += [f"      {clean(line)}" for line in raw.splitlines()]
    left = record["num_evidence"] - min(max_lines, len(record["evidence"]))
    lines += [f"  ... and {left} more"] if left > 0 else []
    lines += ["", "Tests:"] if record["tests"] else ["", "No active test was recorded."]
    lines += [f"  {moment_text(test['at'])}  {test['result']}: {clean(test['text'])}" for test in record["tests"][:max_lines]]
    lines += ["", "Decisions (newest first):"] if record["decisions"] else []
    for row in record["decisions"][:max_lines]:
        lines.append(f"  {moment_text(row['at'])}  {row['before']} -> {row['after']} ({row['verb']}): {clean(row['reason'])}")
    return "\n".join(line.rstrip() for line in lines)
