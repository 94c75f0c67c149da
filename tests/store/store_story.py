"""Records and lease holders for the tests of the store."""

import uuid

from rsup.supervisor.lease import LeaseHolder
from rsup.supervisor.records import AttemptSaved, EventLogged, JobKey, JobSaved, Record


def holder(host: str = "", **fields: object) -> LeaseHolder:
    """This process as a lease's holder, as if on `host`."""
    own = LeaseHolder.this_process(uuid.uuid4().hex[:12])
    values = {name: getattr(own, name) for name in own.__dataclass_fields__} | fields
    if host:
        values |= {"host": host, "boot_id": f"boot-of-{host}"}
    return LeaseHolder(**values)


def job_key(job_id: str = "t1", run: int = 1) -> JobKey:
    return JobKey("local", "ann", job_id, run)


def saved(key: JobKey, phase: str = "running", **fields: object) -> JobSaved:
    values = {"state": b"\x00\xffstate", "epoch": 1, "attempt": 1, "created_us": 1000, "updated_us": 2000} | fields
    return JobSaved(key, phase=phase, **values)


def event(key: JobKey, number: int, **fields: object) -> EventLogged:
    values = {"at_us": 10 * number, "recorded_us": 10 * number + 1, "kind": "RankExited", "text": f"event {number}"} | fields
    return EventLogged(key, number, **values)


def story(key: JobKey, num_events: int = 3) -> list[Record]:
    """A job with some events and an attempt."""
    return [saved(key), *(event(key, number) for number in range(1, num_events + 1)), AttemptSaved(key, 1, 1, 1500)]
