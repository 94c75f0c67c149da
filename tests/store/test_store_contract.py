"""One suite for every store: what `store.Store` promises, in memory, in SQLite and in PostgreSQL."""

import importlib
import importlib.util
from collections.abc import Iterator

import pytest
from store_story import event, holder, job_key, saved, story

from rsup.supervisor.records import BeatsSaved, CheckpointSaved, DeviceSeen, IncidentSaved, NodeSeen, RankSaved, SectionSaved
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import Store

STORES = ["sqlite", "postgres"]
if importlib.util.find_spec("rsup.supervisor.memory_store"):
    STORES.insert(0, "memory")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened: Store
    if request.param == "memory":
        opened = importlib.import_module("rsup.supervisor.memory_store").MemoryStore()
    else:
        target = request.getfixturevalue("database" if request.param == "sqlite" else "postgres")
        opened = SqlStore.open(target, holder=holder(), alone_may_migrate=False)
    yield opened
    opened.close()


def test_a_new_store_knows_nothing(store: Store) -> None:
    assert store.live_jobs() == []
    assert store.last_run("local", "ann", "t1") is None


def test_live_jobs_come_oldest_first_and_without_the_ended(store: Store) -> None:
    young, old, ended = job_key("young"), job_key("old"), job_key("ended")
    store.commit([saved(young, created_us=300), saved(old, created_us=100), saved(ended, "ended", created_us=50, ended_us=90)])
    assert [key for key, _ in store.live_jobs()] == [old, young]


def test_the_state_of_a_job_is_the_last_one_committed(store: Store) -> None:
    store.commit([saved(job_key(), state=b"one")])
    store.commit([saved(job_key(), state=b"two\x00\xfe", epoch=2)])
    assert store.live_jobs() == [(job_key(), b"two\x00\xfe")]
    store.commit([saved(job_key(), "ended", state=b"three", ended_us=5)])
    assert store.live_jobs() == []
    assert store.last_run("local", "ann", "t1") == (job_key(), b"three")


def test_last_run_is_the_newest_of_that_owner(store: Store) -> None:
    store.commit([saved(job_key(run=run), "ended", state=b"%d" % run, ended_us=run) for run in (1, 11, 2)])
    assert store.last_run("local", "ann", "t1") == (job_key(run=11), b"11")
    assert store.last_run("local", "bob", "t1") is None
    assert store.last_run("other", "ann", "t1") is None


def test_every_kind_of_record_is_taken_and_again(store: Store) -> None:
    key = job_key()
    records = [
        *story(key),
        RankSaved(key, 1, 0, "n1", pid=4),
        IncidentSaved(key, 1, 1, 50, "signal", rank=1, victims=[0, 2], stacks=[{"ranks": [1], "text": "at f"}]),
        SectionSaved(key, "step", 3.5, True, 0.25, 12),
        CheckpointSaved(key, 1, 10, "/ckpt/10", 60),
        NodeSeen("n1", 70, key, "active", ["GPU-1"]),
        DeviceSeen("GPU-1", 80, "n1", model="H200", job=key, attempt=1, rank=0),
        DeviceSeen("GPU-2", 80, "n1"),
        BeatsSaved(key, 90, [{"rank": 0, "iteration": 7}]),
    ]
    store.commit(records)
    store.commit(records)
    assert [key for key, _ in store.live_jobs()] == [key]


def test_a_commit_of_nothing_is_nothing(store: Store) -> None:
    store.commit([])
    assert store.live_jobs() == []


def test_two_jobs_in_one_commit(store: Store) -> None:
    one, two = job_key("one"), job_key("two")
    store.commit([*story(one), *story(two), event(one, 4)])
    assert {key for key, _ in store.live_jobs()} == {one, two}
