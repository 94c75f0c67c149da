"""The hardware's history in every store: what the loop reads back is what it wrote, and writing it again changes nothing."""

import importlib
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from store_story import holder, job_key, saved

from rsup.supervisor.events import Now
from rsup.supervisor.hardware.book import Book
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.loop_batch import Batch
from rsup.supervisor.records import EvidenceSaved, Record, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.store import Store
from tests.core.evidence_story import HOUR_US, START_US, seen


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened: Store
    if request.param == "memory":
        opened = importlib.import_module("rsup.supervisor.memory_store").MemoryStore()
    else:
        target = request.getfixturevalue("database" if request.param == "sqlite" else "postgres")
        opened = SqlStore.open(target, holder=holder(), alone_may_migrate=False)
    yield opened
    opened.close()


def subject(name: str, state: str, version: int = 1, **fields: object) -> SubjectSaved:
    return SubjectSaved("device", name, state, 5, "why", version, **fields)  # type: ignore[arg-type]


def evidence(mark: str, **fields: object) -> EvidenceSaved:
    values: dict[str, object] = {"source": "xid", "code": "79", "episode": "boot:1", "first_us": 1, "last_us": 2, **fields}
    return EvidenceSaved(kind="device", subject="GPU-b", fingerprint=mark, recorded_us=3, **values)  # type: ignore[arg-type]


def test_what_is_not_clear_comes_back_and_old_versions_do_not(store: Store) -> None:
    allowed = subject("GPU-c", "clear", override="allow", override_until_us=9, settled_us=4, may_drain="because")
    store.commit([subject("GPU-a", "clear"), subject("GPU-b", "suspect", 3, serial="S-b", score=1.5), allowed])
    store.commit([subject("GPU-b", "watch", 2)])
    found = {one.subject: one for one in store.open_subjects()}
    assert found == {"GPU-b": subject("GPU-b", "suspect", 3, serial="S-b", score=1.5), "GPU-c": allowed}
    named = store.subjects_named("device", ["GPU-a", "GPU-x"], ["S-b", ""])
    assert {one.subject for one in named} == {"GPU-a", "GPU-b"} and store.subjects_named("node", ["GPU-a"], []) == []


def test_evidence_comes_back_with_its_job_and_absolute_counts(store: Store) -> None:
    first = evidence("f1", job=job_key(), count=3, share=0.25, text="line\nraw", rank=0, weight=0.5)
    store.commit([saved(job_key()), first, evidence("f2", last_us=9)])
    again = replace(first, count=5, last_us=8)
    store.commit([again])
    store.commit([again])
    found = {one.fingerprint: one for one in store.evidence_about("device", "GPU-b")}
    assert found == {"f1": again, "f2": evidence("f2", last_us=9)}
    assert store.evidence_about("device", "GPU-x") == [] and store.evidence_about("node", "GPU-b") == []


def test_the_newest_change_and_open_seats(store: Store) -> None:
    changes = [TransitionSaved("node", "n1", v, v, "clear", "watch", f"r{v}", job=job_key()) for v in (1, 3, 2)]
    here, gone = SeatSaved("GPU-a", 1, "n1", "p", "S-a"), SeatSaved("GPU-b", 1, "n1", "q", "S-b", to_us=5)
    store.commit([saved(job_key()), *changes, here, gone, SeatSaved("GPU-b", 5, "n2", "q", "S-b")])
    last = store.last_transition("node", "n1")
    assert last == changes[1] and store.last_transition("device", "n1") is None
    assert [(one.uuid, one.node) for one in store.open_seats()] == [("GPU-a", "n1"), ("GPU-b", "n2")]


def test_a_book_goes_on_where_another_left_off(store: Store) -> None:
    """After a restart counts, versions and the score go on; a person's word is there."""
    wanted: list[Record] = []
    for number in range(3):
        book = Book(store)
        book.recover()
        batch = Batch(Now(START_US + number * HOUR_US, 1.0), {})
        turn = book.turn(batch)
        batch.evidence.append(seen("verdict", "transient", f"job:{number}", at_h=number))
        batch.evidence.append(seen("ecc", "correctable", "boot:1", at_h=number, count=number + 1, is_total=True))
        turn.weigh()
        store.commit(batch.records)
        wanted += batch.records
    (now,) = [one for one in store.open_subjects() if one.kind == "device"]
    assert now.state == "suspect" and now.version == 2
    assert sorted(one.count for one in store.evidence_about("device", "GPU-b")) == [1, 1, 1, 3]
    before = (now, store.evidence_about("device", "GPU-b"))
    store.commit(wanted)
    (again,) = [one for one in store.open_subjects() if one.kind == "device"]
    assert (again, store.evidence_about("device", "GPU-b")) == before, "the same commits again change nothing"


def test_a_verb_names_who_was_there_before(store: Store) -> None:
    for who, status in (("ann", "done"), ("bob", "conflict")):
        book = Book(store)
        book.recover()
        batch = Batch(Now(START_US, 1.0), {})
        request = VerbRequest(
            kind="node", subject="n1", verb="quarantine", principal=who, is_operator=True, reason=f"{who} says so"
        )
        verdict = book.turn(batch).ask(request)
        store.commit(batch.records)
        assert verdict.status == status
    assert "quarantine by ann" in verdict.message and "ann says so" in verdict.message


def test_names_that_no_database_takes_do_no_harm(store: Store) -> None:
    """A device may call itself what it likes: a name is no reason to take the store for broken."""
    bad = "GPU-\0\udcff"
    assert store.subjects_named("device", [bad], [bad]) == [] and store.evidence_about("device", bad) == []
    assert store.last_transition("node", bad) is None
