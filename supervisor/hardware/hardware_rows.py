"""Reads of the hardware's history that the supervisor's loop needs, from any database."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Table, and_, or_, select

from rsup.supervisor import tables
from rsup.supervisor.record_rows import clean
from rsup.supervisor.records import EvidenceSaved, JobKey, SeatSaved, SubjectSaved, TransitionSaved

MAX_ROWS = 512
"""Pieces of evidence of one subject that are read, the newest."""

_subjects, _evidence, _seats, _transitions = (
    tables.subjects.c,
    tables.evidence.c,
    tables.seats.c,
    tables.transitions.c,
)


def open_subjects(connection: Connection) -> list[SubjectSaved]:
    """Every subject that is not clear, or has an override."""
    query = select(tables.subjects).where(or_(_subjects.state != "clear", _subjects.override != ""))
    return [_subject(row) for row in connection.execute(query).mappings()]


def subjects_named(connection: Connection, kind: str, names: Sequence[str], serials: Sequence[str]) -> list[SubjectSaved]:
    """Subjects of these names or serials, clear ones too."""
    known = _texts(serial for serial in serials if serial)
    of_serial = and_(_subjects.serial.in_(known), _subjects.serial != "", _subjects.kind + "" == kind)
    wanted = or_(and_(_subjects.kind == kind, _subjects.subject.in_(_texts(names))), of_serial)  # each half finds its index
    query = select(tables.subjects).where(wanted)
    return [_subject(row) for row in connection.execute(query).mappings()]


def evidence_about(connection: Connection, kind: str, subject: str) -> list[EvidenceSaved]:
    """The newest evidence about one subject."""
    query = _with_job(tables.evidence).where(_evidence.kind == kind, _evidence.subject == clean(subject))
    rows = connection.execute(query.order_by(_evidence.last_us.desc()).limit(MAX_ROWS)).mappings()
    return [evidence_of(row) for row in rows]


def last_transition(connection: Connection, kind: str, subject: str) -> TransitionSaved | None:
    """The newest change of a subject."""
    query = _with_job(tables.transitions).where(_transitions.kind == kind, _transitions.subject == clean(subject))
    row = connection.execute(query.order_by(_transitions.version.desc()).limit(1)).mappings().first()
    return None if row is None else transition_of(row)


def open_seats(connection: Connection) -> list[SeatSaved]:
    """Every stay that is not over: one for each device of the cluster."""
    query = select(tables.seats).where(_seats.to_us.is_(None)).order_by(_seats.uuid, _seats.from_us)
    return [SeatSaved(**row) for row in connection.execute(query).mappings()]


def node_of(connection: Connection, uuid: str) -> str:
    """Where a device was last seen, empty if nowhere."""
    devices = tables.devices.c
    return connection.execute(select(devices.node).where(devices.uuid == uuid)).scalar() or ""


def evidence_of(row: RowMapping) -> EvidenceSaved:
    """From a row of `_with_job(evidence)`."""
    return EvidenceSaved(**_of_job(row))


def transition_of(row: RowMapping) -> TransitionSaved:
    """From a row of `_with_job(transitions)`."""
    return TransitionSaved(**_of_job(row))


def _texts(words: Iterable[str]) -> list[str]:
    """As they are stored: agents may send what no database takes."""
    return [clean(word) for word in words]


def _subject(row: RowMapping) -> SubjectSaved:
    return SubjectSaved(**row)


_JOB = ("cluster", "owner", "job_id", "run")


def _with_job(table: Table) -> Any:
    """All columns of `table`, and the key of the job that it names."""
    jobs = tables.jobs.c
    columns = [jobs[name].label(f"job_{name}") for name in _JOB]
    return select(table, *columns).select_from(table.outerjoin(tables.jobs, jobs.id == table.c.job))


def _of_job(row: RowMapping) -> dict[str, Any]:
    values = dict(row)
    parts = [values.pop(f"job_{name}") for name in _JOB]
    values["job"] = None if parts[0] is None else JobKey(*parts)
    return values
