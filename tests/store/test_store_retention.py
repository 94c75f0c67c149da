"""What is forgotten, and what never is."""

from pathlib import Path

import pytest
from sqlalchemy import func, select
from store_story import event, job_key, saved

from rsup.supervisor import tables
from rsup.supervisor.database import reader_engine
from rsup.supervisor.records import AttemptSaved, BeatsSaved, IncidentSaved, JobKey, Record
from rsup.supervisor.retention import DAY_US, Limits
from rsup.supervisor.sql_store import SqlStore

NOW_US = 100 * DAY_US
TEXT = "x" * 1000


def old_story(key: JobKey, day: int, phase: str, num_events: int = 10) -> list[Record]:
    at_us = day * DAY_US
    times = {"created_us": at_us, "updated_us": at_us, "ended_us": at_us if phase == "ended" else None}
    events = [event(key, n, at_us=at_us, recorded_us=at_us + n, text=TEXT) for n in range(1, num_events + 1)]
    incident = IncidentSaved(key, 1, 1, at_us, "hang", text="hung", stacks=[{"ranks": [0], "text": TEXT}])
    return [saved(key, phase, **times), *events, AttemptSaved(key, 1, 1, at_us), incident, BeatsSaved(key, at_us, [])]


def prune_all(store: SqlStore, limits: Limits) -> int:
    calls = 1
    while store.prune(NOW_US, limits):
        calls += 1
        assert calls < 200, "it must come to an end"
    return calls


def left(target: Path | str) -> dict[str, dict[str, int]]:
    """Rows of each table by job id, and the incidents that still have stacks."""
    engine = reader_engine(target)
    found = {}
    with engine.connect() as connection:
        for table in (tables.events, tables.attempts, tables.incidents, tables.beats):
            count = select(tables.jobs.c.job_id, func.count()).join(table).group_by(tables.jobs.c.job_id)
            found[table.name] = {job: number for job, number in connection.execute(count)}
        rows = connection.execute(select(tables.jobs.c.job_id, tables.incidents.c.stacks).join(tables.incidents)).all()
        found["stacks"] = {job: len(stacks) for job, stacks in rows}
    engine.dispose()
    return found


@pytest.fixture
def store(open_store, sql_target: Path | str) -> SqlStore:
    store: SqlStore = open_store(sql_target)
    for name, day, phase in (("old", 60, "ended"), ("older", 50, "ended"), ("live", 40, "running"), ("new", 99, "ended")):
        store.commit(old_story(job_key(name), day, phase))
    return store


def test_age(store: SqlStore, sql_target: Path | str) -> None:
    calls = prune_all(store, Limits(age_us=30 * DAY_US, batch_events=4))
    assert calls >= 2 * 3, "small batches"
    after = left(sql_target)
    assert after["events"] == {"live": 10, "new": 10}
    assert after["beats"] == {"live": 1, "new": 1}
    assert after["attempts"] == after["incidents"] == {"old": 1, "older": 1, "live": 1, "new": 1}
    assert after["stacks"] == {"old": 0, "older": 0, "live": 1, "new": 1}


def test_size_drops_the_oldest_ended_jobs_first(store: SqlStore, sql_target: Path | str) -> None:
    prune_all(store, Limits(age_us=90 * DAY_US, size_bytes=25_000, batch_events=100))
    assert left(sql_target)["events"] == {"old": 10, "live": 10, "new": 10}
    prune_all(store, Limits(age_us=90 * DAY_US, size_bytes=0, batch_events=3))
    after = left(sql_target)
    assert after["events"] == {"live": 10}
    assert after["stacks"] == {"old": 0, "older": 0, "live": 1, "new": 0}
    assert after["incidents"] == {"old": 1, "older": 1, "live": 1, "new": 1}


def test_nothing_to_drop(store: SqlStore, sql_target: Path | str) -> None:
    before = left(sql_target)
    assert not store.prune(NOW_US, Limits(age_us=90 * DAY_US))
    assert left(sql_target) == before


def test_part_of_a_long_job_is_old(open_store, database: Path) -> None:
    store: SqlStore = open_store(database)
    key = job_key()
    events = [event(key, n, recorded_us=n * DAY_US) for n in range(50, 100)]
    store.commit([saved(key, "ended", created_us=50 * DAY_US, ended_us=99 * DAY_US), *events])
    prune_all(store, Limits(age_us=30 * DAY_US))
    engine = reader_engine(database)
    with engine.connect() as connection:
        assert connection.execute(select(tables.events.c.number)).scalars().all() == list(range(70, 100))
    engine.dispose()


def test_the_file_shrinks(open_store, database: Path) -> None:
    store: SqlStore = open_store(database)
    key = job_key()
    store.commit([saved(key, "ended", created_us=1, ended_us=2)])
    for start in range(1, 16001, 2000):
        store.commit([event(key, n, recorded_us=n, text=TEXT) for n in range(start, start + 2000)])
    store._run(lambda connection: None)
    before = used_bytes(store)
    prune_all(store, Limits())
    assert used_bytes(store) < 0.6 * before


def used_bytes(store: SqlStore) -> int:
    return int(store._run(lambda connection: connection.exec_driver_sql("PRAGMA page_count").scalar())) * 4096
