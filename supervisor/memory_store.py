"""A store in this process's memory: what tests run against, with the rules of the real one."""

from collections.abc import Sequence
from typing import TypeVar

from rsup.supervisor import records
from rsup.supervisor.records import (
    DeviceSeen,
    EventLogged,
    EvidenceSaved,
    JobKey,
    JobSaved,
    Record,
    SeatSaved,
    SubjectSaved,
    TransitionSaved,
)
from rsup.supervisor.store import StoreError

Kept = TypeVar("Kept")


def natural_key(record: Record) -> tuple[object, ...]:
    """What an upsert replaces. Events have their number."""
    match record:
        case records.JobSaved():
            return (record.job,)
        case records.EventLogged():
            return record.job, record.number
        case records.AttemptSaved():
            return record.job, record.attempt
        case records.RankSaved():
            return record.job, record.attempt, record.rank
        case records.IncidentSaved():
            return record.job, record.incident
        case records.SectionSaved():
            return record.job, record.section
        case records.CheckpointSaved():
            return record.job, record.attempt, record.iteration, record.path
        case records.ResumeSaved():
            return record.job, record.attempt, record.iteration
        case records.NodeSeen():
            return record.node, record.job
        case records.DeviceSeen():
            return record.uuid, record.job, record.attempt, record.rank
        case records.BeatsSaved():
            return (record.job,)
        case records.CaseSaved():
            return record.job, record.case_id
        case records.MetricsSaved():
            first = min((bins[0].first for bins in record.series.values() if bins), default=0)
            return record.job, record.attempt, record.rank, record.kind, first
        case records.StragglerSaved():
            return record.job, record.episode
        case records.EvidenceSaved():
            return (record.fingerprint,)
        case records.SubjectSaved():
            return record.kind, record.subject
        case records.TransitionSaved():
            return record.kind, record.subject, record.version
        case records.SeatSaved():
            return record.uuid, record.from_us
        case records.DrainNoted():
            return record.node, record.at_us, record.what


def _is_older(record: Record, kept: Record | None) -> bool:
    """Whether the kept one is not written over, as in `record_rows`."""
    if isinstance(record, SubjectSaved) and isinstance(kept, SubjectSaved):
        return record.version < kept.version
    if isinstance(record, EvidenceSaved) and isinstance(kept, EvidenceSaved):
        return record.count < kept.count
    if isinstance(record, SeatSaved) and isinstance(kept, SeatSaved):
        return record.seen_us < kept.seen_us
    return isinstance(record, TransitionSaved) and kept is not None


class MemoryStore:
    """Satisfies `store.Store`. `fail_with` makes the next commits fail; `rows` and `events` are for tests to look at."""

    def __init__(self) -> None:
        self.rows: dict[type, dict[tuple[object, ...], Record]] = {}
        self.events: list[EventLogged] = []
        self.fail_with: StoreError | None = None
        self.num_commits = 0

    def live_jobs(self) -> list[tuple[JobKey, bytes]]:
        """Key and state of every job that has not ended, oldest first."""
        saved = [row for row in self.rows.get(JobSaved, {}).values() if isinstance(row, JobSaved) and row.phase != "ended"]
        return [(row.job, row.state) for row in sorted(saved, key=lambda row: row.created_us)]

    def last_run(self, cluster: str, owner: str, job_id: str) -> tuple[JobKey, bytes] | None:
        """The newest run of that job."""
        if self.fail_with is not None:
            raise self.fail_with
        name = (cluster, owner, job_id)
        runs = [
            row
            for row in self.rows.get(JobSaved, {}).values()
            if isinstance(row, JobSaved) and (row.job.cluster, row.job.owner, row.job.job_id) == name
        ]
        newest = max(runs, key=lambda row: row.job.run, default=None)
        return None if newest is None else (newest.job, newest.state)

    def _kept(self, kind: type[Kept]) -> list[Kept]:
        if self.fail_with is not None:
            raise self.fail_with
        return [row for row in self.rows.get(kind, {}).values() if isinstance(row, kind)]

    def open_subjects(self) -> list[SubjectSaved]:
        """Those that are not clear, or of which a person has spoken."""
        saved = [row for row in self.rows.get(SubjectSaved, {}).values() if isinstance(row, SubjectSaved)]
        return [row for row in saved if row.state != "clear" or row.override]

    def subjects_named(self, kind: str, names: Sequence[str], serials: Sequence[str]) -> list[SubjectSaved]:
        """Those of these names or serials."""
        rows = [row for row in self._kept(SubjectSaved) if row.kind == kind]
        return [row for row in rows if row.subject in names or (row.serial and row.serial in serials)]

    def evidence_about(self, kind: str, subject: str) -> list[EvidenceSaved]:
        """The evidence about one."""
        return [row for row in self._kept(EvidenceSaved) if (row.kind, row.subject) == (kind, subject)]

    def last_transition(self, kind: str, subject: str) -> TransitionSaved | None:
        """The newest change of one."""
        rows = [row for row in self._kept(TransitionSaved) if (row.kind, row.subject) == (kind, subject)]
        return max(rows, key=lambda row: row.version, default=None)

    def open_seats(self) -> list[SeatSaved]:
        """Stays that are not over."""
        rows = self.rows.get(SeatSaved, {}).values()
        return [row for row in rows if isinstance(row, SeatSaved) and row.to_us is None]

    def last_node(self, uuid: str) -> str:
        """Where a device was last seen."""
        rows = [row for row in self._kept(DeviceSeen) if row.uuid == uuid]
        return rows[-1].node if rows else ""

    def commit(self, new: Sequence[Record]) -> None:
        """Keep all records, or none if one is bad."""
        if self.fail_with is not None:
            raise self.fail_with
        events = [record for record in new if isinstance(record, EventLogged)]
        known = self.rows.get(EventLogged, {})
        if any(natural_key(event) in known and known[natural_key(event)] != event for event in events):
            raise StoreError("an event number was used twice")
        self.num_commits += 1
        for record in new:
            key = natural_key(record)
            table = self.rows.setdefault(type(record), {})
            if isinstance(record, EventLogged) and key not in table:
                self.events.append(record)
            if not _is_older(record, table.get(key)):
                table[key] = record

    def probe(self) -> None:
        """Fail as a commit would."""
        if self.fail_with is not None:
            raise self.fail_with

    def close(self) -> None:
        """Nothing to give back."""
