"""What a suspicious device may have spoiled: from which iteration on, which checkpoints, and what was made from them."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection

from rsup.supervisor.contamination import touched
from rsup.supervisor.database import reader_engine
from rsup.supervisor.records import Record
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.view_times import iso
from tests.rest.history_story import A, B, C, at, attempt, case, checkpoint, device, evidence, job, key, moves, resume

Open = Callable[..., Connection]
LATEST = "/shared/latest"
ONE, TWO, OLD, EARLY = key("one"), key("two", "bob"), key("old", "bob"), key("early")


@pytest.fixture
def told(store: SqlStore) -> Iterator[Open]:
    """Commit records, and open a connection to read them."""
    engines = []

    def commit(*groups: list[Record]) -> Connection:
        store.commit([record for group in groups for record in group])
        engines.append(reader_engine(store.database))
        return engines[-1].connect()

    yield commit
    for engine in engines:
        engine.dispose()


def boards() -> list[Record]:
    return [*device(A, 0), *device(B, 0, pci="3d"), *device(C, 0, node="n2")]


def family() -> list[Record]:
    """`one` runs on A and B, then on A and C from its checkpoint of iteration 20; `two` goes on from `one`'s, `old` from an
    early one; `early` used B before anything was known."""
    return [
        job(EARLY, 1, 5),
        *attempt(EARLY, 1, 1, 5, [B], last_iteration=9),
        checkpoint(EARLY, 1, 9, 4),
        job(ONE, 6, 60),
        *attempt(ONE, 1, 6, 30, [A, B], "failed", last_iteration=29),
        *(checkpoint(ONE, 1, iteration, 6 + iteration) for iteration in (5, 10, 20)),
        *attempt(ONE, 2, 31, 60, [A, f"{C}@n2"], start_iteration=20, last_iteration=40),
        resume(ONE, 2, 20, 31, "/ann/one/20"),
        *(checkpoint(ONE, 2, iteration, 20 + iteration) for iteration in (30, 40)),
        job(TWO, 61, 90),
        *attempt(TWO, 1, 61, 90, [f"{C}@n2"], start_iteration=40, last_iteration=50),
        resume(TWO, 1, 40, 61, "/ann/one/40"),
        checkpoint(TWO, 1, 50, 85),
        job(OLD, 62, 90),
        *attempt(OLD, 1, 62, 90, [f"{C}@n2"], start_iteration=10, last_iteration=60),
        resume(OLD, 1, 10, 62, "/ann/one/10"),
        checkpoint(OLD, 1, 60, 89),
    ]


def spoiled(answer: dict[str, object]) -> dict[str, list[int]]:
    """Iterations to verify again, by job."""
    jobs: list[dict[str, object]] = answer["jobs"]  # type: ignore[assignment]
    return {entry["job"]["name"]: [row["iteration"] for row in entry["reverify"]] for entry in jobs}  # type: ignore[index,attr-defined]


def test_from_the_first_evidence_on_with_all_descendants(told: Open) -> None:
    answer = touched(told(boards(), family(), [evidence(B, 20)]), B)
    assert answer["since"] == iso(at(20)) and answer["why"] == "xid 94: xid 94 seen"
    assert spoiled(answer) == {"one": [20, 30, 40], "two": [50]}
    one, two = answer["jobs"]
    first, second = one["attempts"]
    assert (first["first_iteration"], first["last_iteration"], first["how"]) == (11, 29, "computed on it")
    assert [(rank["rank"], rank["device"]) for rank in first["ranks"]] == [(1, B)]
    assert (second["first_iteration"], second["how"], second["ranks"]) == (21, "resumed from /ann/one/20", [])
    assert one["last_clean"]["path"] == "/ann/one/10"
    assert two["attempts"][0]["how"] == "resumed from /ann/one/40" and two["last_clean"] is None
    assert answer["counts"] == {"jobs": 2, "attempts": 3, "checkpoints": 4} and not answer["truncated"]


def test_a_rejected_iteration_never_reached_the_parameters(told: Open) -> None:
    """The checkpoint that the ranks write of the iterations before the rejected one, to go on elsewhere, is sound."""
    verdict = evidence(B, 28, "verdict", "persistent", job=ONE, attempt=1, iteration=25, case_id="one-a1-i25", weight=2.0)
    written = checkpoint(ONE, 1, 24, 27.5, "/ann/one/24")
    answer = touched(told(boards(), family(), [case(ONE, 1, 25, 27, B), verdict, written]), B)
    assert answer["since"] == iso(at(27)) and answer["why"] == "case of iteration 25: persistent"
    assert spoiled(answer) == {"one": []}
    assert answer["jobs"][0]["attempts"][0]["first_iteration"] == 25
    assert answer["jobs"][0]["last_clean"]["path"] == "/ann/one/24", "not 40, which attempt 2 made later on other boards"
    known = [evidence(B, 26.5, "verdict", "transient", job=ONE, attempt=1, iteration=22, weight=0.6)]
    assert touched(told(known), B)["jobs"][0]["last_clean"]["path"] == "/ann/one/20", "before that moment"


@pytest.mark.parametrize("how", [{"found_by": "audit"}, {"verdict": "corrupted state"}])
def test_silent_corruption_reaches_back_to_the_attempts_start(told: Open, how: dict[str, object]) -> None:
    verdict = evidence(B, 28, "verdict", "persistent", job=ONE, attempt=1, iteration=25, case_id="one-a1-i25", weight=2.0)
    answer = touched(told(boards(), family(), [case(ONE, 1, 25, 27, B, **how), verdict]), B)
    assert answer["since"] == iso(at(6)) and "may have begun with attempt 1" in answer["why"]
    assert spoiled(answer) == {"one": [5, 10, 20, 30, 40], "two": [50], "old": [60]}


def test_since_a_time_of_ones_own(told: Open) -> None:
    connection = told(boards(), family(), [evidence(B, 20)])
    assert spoiled(touched(connection, B, at(0)))["early"] == [9]
    assert spoiled(touched(connection, B, at(29.5))) == {"one": []}, "iterations that no checkpoint holds"
    assert touched(connection, B, at(40))["jobs"] == []


def test_paths_are_read_as_they_were_at_the_time(told: Open) -> None:
    """`latest` was written by the spoiled job, then by a sound one."""
    bad, good, quick, late = key("bad"), key("good"), key("quick"), key("late")
    records = [
        *(job(one, 1, 99) for one in (bad, good, quick, late)),
        *attempt(bad, 1, 1, 30, [B]),
        checkpoint(bad, 1, 5, 10, LATEST),
        *attempt(quick, 1, 11, 40, [C], start_iteration=5),
        resume(quick, 1, 5, 12, LATEST),
        *attempt(good, 1, 1, 50, [A]),
        checkpoint(good, 1, 7, 20, LATEST),
        *attempt(late, 1, 21, 60, [C], start_iteration=7),
        resume(late, 1, 7, 22, LATEST),
    ]
    assert set(spoiled(touched(told(boards(), records, [evidence(B, 2)]), B))) == {"bad", "quick"}


def test_a_job_that_does_not_say_what_it_resumed_from_is_on_the_list(told: Open) -> None:
    silent, scratch = key("silent"), key("scratch")
    records = [
        job(silent, 1, 99),
        *attempt(silent, 1, 1, 30, [B], "failed"),
        *attempt(silent, 2, 31, 60, [A]),
        job(scratch, 1, 99),
        *attempt(scratch, 1, 1, 30, [B], "failed"),
        checkpoint(scratch, 1, 5, 20),
        *attempt(scratch, 2, 31, 60, [A]),
    ]
    answer = touched(told(boards(), records, [evidence(B, 2)]), B)
    attempts = {entry["job"]["name"]: [one["attempt"] for one in entry["attempts"]] for entry in answer["jobs"]}
    assert attempts == {"silent": [1, 2], "scratch": [1]}, "one that saves, and began at 0, began anew"
    assert "does not say" in str(answer["jobs"])


@pytest.mark.parametrize(
    "records",
    [[], [evidence(B, 20, weight=0.0)], [evidence(B, 20, effect="inert: injected", injected=True)]],
    ids=["none", "a note", "injected"],
)
def test_what_does_not_count_spoils_nothing(told: Open, records: list[Record]) -> None:
    answer = touched(told(boards(), family(), records), B)
    assert answer["jobs"] == [] and answer["since"] is None and "no evidence counts" in answer["why"]


def test_a_repair_settles_what_was_before(told: Open) -> None:
    repaired = moves(B, (21, "quarantined", "evidence"), (40, "in_repair", "repair"), (50, "probation", "release"))
    connection = told(boards(), family(), [evidence(B, 20), evidence(B, 70)], repaired)
    assert touched(connection, B)["since"] == iso(at(70))
    assert set(spoiled(touched(connection, B, at(20)))) == {"one", "two"}


def test_suspicion_without_weight_counts_from_its_state(told: Open) -> None:
    """Rules without weight (an Xid of programs) lead to suspicion by repetition."""
    answer = touched(
        told(boards(), family(), [evidence(B, 7, "xid", "13", weight=0.0)], moves(B, (20, "suspect", "evidence"))), B
    )
    assert answer["since"] == iso(at(20)) and answer["why"] == "suspect: because of evidence"


def test_of_jobs_of_others_only_the_number_is_told(told: Open) -> None:
    answer = touched(told(boards(), family(), [evidence(B, 20)]), B, may_read=lambda owner: owner == "bob")
    one, two = answer["jobs"]
    assert set(one) == {"job", "num_attempts", "num_checkpoints"} and one["num_checkpoints"] == 3
    assert [row["path"] for row in two["reverify"]] == ["/bob/two/50"]


def test_many_generations_and_a_circle_come_to_an_end(told: Open) -> None:
    records: list[Record] = []
    for number in range(60):
        one = key(f"g{number:02}")
        records += [job(one, number, 999), *attempt(one, 1, 10 * number + 1, 10 * number + 9, [B if number == 0 else A])]
        records += [checkpoint(one, 1, number + 1, 10 * number + 8, f"/g/{number}")]
        if number:
            records.append(resume(one, 1, number, 10 * number + 2, f"/g/{number - 1}"))
    records.append(resume(key("g00"), 1, 60, 5, "/g/59"))
    answer = touched(told(boards(), records, [evidence(B, 0.5)]), B)
    assert answer["counts"] == {"jobs": 60, "attempts": 60, "checkpoints": 60}
