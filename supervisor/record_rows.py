"""Turns records into rows: one prepared statement a kind of record, run for all records of that kind at once.

Every statement is an upsert by the table's key, so that the same records can be committed again: an event that is there
stays as it is, other rows are written over. What is only a latest sighting (nodes, devices, beats) is not written over by
an older one. Texts lose what PostgreSQL cannot hold: NUL, and surrogates that stand for bytes which are no UTF-8.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Table, bindparam, case, select, update
from sqlalchemy.dialects import postgresql, sqlite

from rsup.supervisor import tables
from rsup.supervisor.metric_rows import MetricWriter
from rsup.supervisor.records import (
    AttemptSaved,
    BeatsSaved,
    CaseSaved,
    CheckpointSaved,
    DeviceSeen,
    DrainNoted,
    EventLogged,
    EvidenceSaved,
    IncidentSaved,
    JobKey,
    JobSaved,
    MetricsSaved,
    NodeSeen,
    RankSaved,
    Record,
    ResumeSaved,
    SeatSaved,
    SectionSaved,
    StragglerSaved,
    SubjectSaved,
    TransitionSaved,
)

Row = dict[str, Any]

_PLAIN: dict[type, Table] = {
    AttemptSaved: tables.attempts,
    RankSaved: tables.ranks,
    IncidentSaved: tables.incidents,
    SectionSaved: tables.sections,
    CheckpointSaved: tables.checkpoints,
    ResumeSaved: tables.resumes,
    BeatsSaved: tables.beats,
    CaseSaved: tables.cases,
    StragglerSaved: tables.stragglers,
    EvidenceSaved: tables.evidence,
    SubjectSaved: tables.subjects,
    TransitionSaved: tables.transitions,
    SeatSaved: tables.seats,
    DrainNoted: tables.drain_notes,
}
"""Records whose fields are the columns."""

_FIRST_SIGHTING = tuple(
    column.name for column in tables.evidence.c if column.name not in ("last_us", "count", "weight", "effect", "rule")
)
_GROWING: tuple[tuple[Table, tuple[str, ...], str], ...] = (
    (tables.evidence, _FIRST_SIGHTING, "count"),
    (tables.subjects, (), "version"),
    (tables.cases, ("opened_us", "attempt", "iteration"), ""),
    (tables.seats, (), "seen_us"),
)
"""Tables of which some columns keep what they had first, or which an older record does not write over."""

_IDENTITY = ("model", "serial", "board", "pci_bus_id", "vbios", "driver")
"""What a rank that says which device it uses does not tell again."""

_jobs = tables.jobs.c
_find_job = select(_jobs.id).where(
    _jobs.cluster == bindparam("k_cluster"),
    _jobs.owner == bindparam("k_owner"),
    _jobs.job_id == bindparam("k_job_id"),
    _jobs.run == bindparam("k_run"),
)
_update_job = (
    update(tables.jobs)
    .where(_jobs.id == bindparam("k_id"))
    .values({name: bindparam(name) for name in _jobs.keys() if name not in ("id", "cluster", "owner", "job_id", "run")})  # noqa: SIM118
)
_end_placements = (
    update(tables.placements)
    .where(
        tables.placements.c.job == bindparam("k_job"),
        tables.placements.c.attempt == bindparam("k_attempt"),
        tables.placements.c.to_us.is_(None),
    )
    .values(to_us=bindparam("k_to_us"))
)


class RecordWriter:
    """Writes records through one database's connection. Remembers the ids of jobs between transactions."""

    def __init__(self, dialect: str) -> None:
        self._insert = sqlite.insert if dialect == "sqlite" else postgresql.insert
        self._ids: dict[JobKey, int] = {}
        self._metrics = MetricWriter(self._insert)
        self._add_job = self._insert(tables.jobs).on_conflict_do_nothing()
        self._statements: dict[Table, Any] = {table: self._upsert(table) for table in _PLAIN.values()}
        self._statements[tables.beats] = self._upsert(tables.beats, newer="at_us")
        for table in (tables.events, tables.transitions, tables.drain_notes):
            self._statements[table] = self._insert(table).on_conflict_do_nothing()
        for table, keep, newer in _GROWING:
            self._statements[table] = self._upsert(table, keep=keep, newer=newer)
        for table in (tables.nodes, tables.job_nodes, tables.devices):
            filled = _IDENTITY if table is tables.devices else ()
            self._statements[table] = self._upsert(table, keep=("first_us",), newer="at_us", filled=filled)
        self._statements[tables.placements] = self._upsert(tables.placements, keep=("from_us", "to_us"))

    def write(self, connection: Connection, records: Sequence[Record]) -> dict[JobKey, int]:
        """Write `records` in the open transaction. Return the job ids to `remember` once it is committed."""
        new_ids: dict[JobKey, int] = {}
        rows: dict[Table, list[Row]] = {}
        self._metrics.begin()
        saved = [record for record in records if isinstance(record, JobSaved)]
        if saved:
            self._write_jobs(connection, saved, new_ids)
        for record in records:
            if isinstance(record, MetricsSaved):
                job = self._id_of(connection, record.job, new_ids)
                assert job is not None, f"metrics of job {record.job}, which was never saved"
                self._metrics.write(connection, job, record)
            elif not isinstance(record, JobSaved):
                self._add_rows(connection, record, new_ids, rows)
        self._metrics.finish(connection)
        for table, table_rows in rows.items():
            connection.execute(self._statements[table], table_rows)
        ends = [_end_of(row) for row in rows.get(tables.attempts, []) if row["stopped_us"] is not None]
        if ends:
            connection.execute(_end_placements, ends)
        return new_ids

    def remember(self, ids: dict[JobKey, int]) -> None:
        """The transaction of `write` was committed."""
        self._ids.update(ids)
        self._metrics.committed()

    def _write_jobs(self, connection: Connection, records: list[JobSaved], new_ids: dict[JobKey, int]) -> None:
        updates = []
        for record in records:
            row = _row_of(record)
            job = self._id_of(connection, record.job, new_ids)
            if job is None:
                key = msgspec.structs.asdict(record.job)
                connection.execute(self._add_job, {**row, **{name: clean(value) for name, value in key.items()}})
                self._id_of(connection, record.job, new_ids)
            else:
                row["k_id"] = job
                updates.append(row)
        if updates:
            connection.execute(_update_job, updates)

    def _id_of(self, connection: Connection, key: JobKey, new_ids: dict[JobKey, int]) -> int | None:
        job = self._ids.get(key) or new_ids.get(key)
        if job is None:
            names = {f"k_{name}": clean(value) for name, value in msgspec.structs.asdict(key).items()}
            job = connection.execute(_find_job, names).scalar()
            if job is not None:
                new_ids[key] = job
        return job

    def _add_rows(
        self, connection: Connection, record: Record, new_ids: dict[JobKey, int], rows: dict[Table, list[Row]]
    ) -> None:
        key = getattr(record, "job", None)
        job = None if key is None else self._id_of(connection, key, new_ids)
        assert job is not None or key is None, f"{type(record).__name__} of job {key}, which was never saved"
        row = _row_of(record)
        if not isinstance(record, (SubjectSaved, SeatSaved, DrainNoted)):
            row["job"] = job
        if isinstance(record, EventLogged):
            rows.setdefault(tables.events, []).append(row)
        elif isinstance(record, NodeSeen):
            row["first_us"] = record.at_us
            rows.setdefault(tables.nodes, []).append(row)
            rows.setdefault(tables.job_nodes, []).append(row)
        elif isinstance(record, DeviceSeen):
            _add_device(record, row, rows)
        else:
            rows.setdefault(_PLAIN[type(record)], []).append(row)

    def _upsert(self, table: Table, keep: tuple[str, ...] = (), newer: str = "", filled: tuple[str, ...] = ()) -> Any:
        """Insert, or write over all columns but `keep`; with `newer` only if that column does not shrink. An empty text does
        not write over what stands in a column of `filled`."""
        statement = self._insert(table)
        keys = [column.name for column in table.primary_key]
        values: dict[str, Any] = {column.name: statement.excluded[column.name] for column in table.c}
        for name in filled:
            values[name] = case((statement.excluded[name] == "", table.c[name]), else_=statement.excluded[name])
        values = {name: value for name, value in values.items() if name not in keys and name not in keep}
        condition = statement.excluded[newer] >= table.c[newer] if newer else None
        return statement.on_conflict_do_update(index_elements=keys, set_=values, where=condition)


def save_meta(connection: Connection, key: str, value: str) -> None:
    """Write one row of `meta`."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = insert(tables.meta).values(key=key, value=value)
    connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_={"value": value}))


def _add_device(record: DeviceSeen, row: Row, rows: dict[Table, list[Row]]) -> None:
    job, attempt, rank = row.pop("job"), row.pop("attempt"), row.pop("rank")
    row["first_us"] = record.at_us
    rows.setdefault(tables.devices, []).append(row)
    if job is not None and rank is not None:
        placement = {"job": job, "attempt": attempt, "rank": rank, "device": row["uuid"], "node": row["node"]}
        rows.setdefault(tables.placements, []).append({**placement, "from_us": record.at_us, "to_us": None})


def _end_of(attempt: Row) -> Row:
    return {"k_job": attempt["job"], "k_attempt": attempt["attempt"], "k_to_us": attempt["stopped_us"]}


def _row_of(record: Record) -> Row:
    """Columns of the record but those of its job."""
    row = {}
    for name in record.__struct_fields__:
        if name != "job":
            value = getattr(record, name)
            row[name] = clean(value) if isinstance(value, str) else value
    return row


def clean(value: Any) -> Any:
    """`value` with every text in it such that any database takes it; what needs no change is returned as it is."""
    if isinstance(value, str):
        if "\0" in value or not (value.isascii() or _is_unicode(value)):
            return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    elif isinstance(value, dict):
        return {clean(name): clean(item) for name, item in value.items()}
    elif isinstance(value, list):
        return [clean(item) for item in value]
    return value


def to_json(value: object) -> str:
    """JSON text of a JSON column."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = ""
    if not text or "\\u0000" in text:
        text = msgspec.json.encode(clean(value)).decode()
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
