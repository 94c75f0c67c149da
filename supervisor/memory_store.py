"""A store in this process's memory: what tests run against, with the rules of the real one."""

from collections.abc import Sequence

from rsup.supervisor import records
from rsup.supervisor.records import EventLogged, JobKey, JobSaved, Record
from rsup.supervisor.store import StoreError


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
        case records.NodeSeen():
            return record.node, record.job
        case records.DeviceSeen():
            return record.uuid, record.job, record.attempt, record.rank
        case records.BeatsSaved():
            return (record.job,)
        case records.CaseSaved():
            return record.job, record.case_id
        case records.EvidenceSaved():
            return (record.fingerprint,)
        case records.SubjectSaved():
            return record.kind, record.subject
        case records.TransitionSaved():
            return record.kind, record.subject, record.version
        case records.SeatSaved():
            return record.uuid, record.from_us


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
            table[key] = record

    def probe(self) -> None:
        """Fail as a commit would."""
        if self.fail_with is not None:
            raise self.fail_with

    def close(self) -> None:
        """Nothing to give back."""
