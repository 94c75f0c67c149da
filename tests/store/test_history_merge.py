"""What devices and nodes are known for survives a merge, a copy and retention; and `rsup db check` sees disagreement."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Row, Table, select, update
from store_story import event, holder, job_key, saved, story

from rsup.supervisor import tables
from rsup.supervisor.database import reader_engine, split_target, sqlite_writer
from rsup.supervisor.db_cli import main
from rsup.supervisor.history_merge import join_stays
from rsup.supervisor.records import (
    CaseSaved,
    CheckpointSaved,
    DeviceSeen,
    EvidenceSaved,
    NodeSeen,
    Record,
    ResumeSaved,
    SeatSaved,
    SubjectSaved,
    TransitionSaved,
)
from rsup.supervisor.retention import DAY_US, Limits
from rsup.supervisor.sql_store import SqlStore

G = "GPU-1"


@pytest.fixture
def state(own_directories: Path) -> Path:
    (own_directories / "state").mkdir()
    return own_directories / "state"


def fill(target: Path | str, *records: Record) -> None:
    store = SqlStore.open(target, holder=holder(), alone_may_migrate=False)
    store.commit(records)
    store.close()


def rows(target: Path | str, table: Table) -> list[Row[tuple[object, ...]]]:
    engine = reader_engine(target)
    with engine.connect() as connection:
        found = connection.execute(select(table).order_by(*table.primary_key)).all()
    engine.dispose()
    return list(found)


def url_of(target: Path | str) -> str:
    return target if isinstance(target, str) else f"sqlite:///{target}"


def merge(target: Path | str, other: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    main(["merge", str(other), "--database-url", url_of(target), "--json"])
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def check(target: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    main(["check", "--database-url", url_of(target), "--json"])
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def evidence(number: int = 1, **more: object) -> EvidenceSaved:
    values = {"first_us": 10, "last_us": 20, "recorded_us": 20, "count": 2, "weight": 0.8, "text": "seen"} | more
    return EvidenceSaved("device", G, f"f{number}", "xid", "94", f"boot:{number}", **values)  # type: ignore[arg-type]


def history(*steps: tuple[int, str, str], subject: str = G, **more: object) -> list[Record]:
    """Transitions (when, state, verb) from clear on, with the state that follows."""
    records: list[Record] = []
    before = "clear"
    for version, (at_us, after, verb) in enumerate(steps, 1):
        person = "root" if verb in ("quarantine", "release", "repair") else ""
        records.append(TransitionSaved("device", subject, version, at_us, before, after, f"by {verb}", person, verb))
        before = after
    return [*records, SubjectSaved("device", subject, before, steps[-1][0], f"by {steps[-1][2]}", len(steps), **more)]  # type: ignore[arg-type]


def states(target: Path | str) -> dict[str, tuple[str, int]]:
    return {row.subject: (row.state, row.version) for row in rows(target, tables.subjects)}


def line_of(target: Path | str, subject: str = G) -> list[tuple[int, int, str, str, str]]:
    found = [row for row in rows(target, tables.transitions) if row.subject == subject]
    return [(row.version, row.at_us, row.before, row.after, row.verb) for row in found]


# ---------------------------------------------------------------------------------------------------------------- merge


def test_the_whole_history_comes_over_and_once_only(sql_target: Path | str, tmp_path: Path, capsys) -> None:
    other, key = tmp_path / "other.db", job_key("a")
    ended = [saved(key, "ended", created_us=1000, ended_us=5000), *story(key)[1:]]
    told = [
        CaseSaved(key, "a-a1-i7", 1, 7, 30, True, [{"device": G}], 40, "persistent", accused=[G]),
        CheckpointSaved(key, 1, 5, "/c/5", 25),
        ResumeSaved(key, 1, 5, "/c/5", 26),
        evidence(job=key, case_id="a-a1-i7"),
        *history((20, "quarantined", "evidence"), serial="77"),
        SeatSaved(G, 5, "n1", "00000000:1b:00.0", "77", seen_us=30),
        DeviceSeen(G, 5, "n1", serial="77"),
        NodeSeen("n1", 5, key, "active", [G]),
    ]
    fill(sql_target, *story(job_key("ours")))
    fill(other, *ended, *told)
    first = merge(sql_target, other, capsys)
    assert (first["new_jobs"], first["new_evidence"], first["changed_subjects"]) == (1, 1, 1)
    names = (tables.cases, tables.evidence, tables.subjects, tables.transitions, tables.seats, tables.resumes)
    before = {table.name: rows(sql_target, table) for table in names}
    assert all(len(found) == 1 for found in before.values())
    (merged,) = [row.id for row in rows(sql_target, tables.jobs) if row.job_id == "a"]
    assert before["evidence"][0].job == before["cases"][0].job == merged
    again = merge(sql_target, other, capsys)
    assert (again["new_evidence"], again["changed_subjects"]) == (0, 0)
    assert {table.name: rows(sql_target, table) for table in names} == before
    assert check(sql_target, capsys)["problems"] == []


def test_evidence_keeps_its_first_sighting_and_the_larger_count(sql_target: Path | str, tmp_path: Path, capsys) -> None:
    fill(sql_target, evidence(1, count=5, last_us=50, text="ours"), evidence(2, count=1, first_us=9))
    fill(tmp_path / "other.db", evidence(1, count=2, first_us=4, last_us=90, text="theirs"), evidence(2, count=9), evidence(3))
    assert merge(sql_target, tmp_path / "other.db", capsys)["new_evidence"] == 1
    found = {row.fingerprint: (row.text, row.count, row.first_us, row.last_us) for row in rows(sql_target, tables.evidence)}
    assert found == {"f1": ("ours", 5, 4, 90), "f2": ("seen", 9, 9, 20), "f3": ("seen", 2, 10, 20)}


def test_a_longer_story_of_the_same_device_replaces_the_shorter(sql_target: Path | str, tmp_path: Path, capsys) -> None:
    steps = [(10, "watch", "evidence"), (20, "quarantined", "evidence"), (30, "in_repair", "repair")]
    fill(sql_target, *history(*steps[:2]))
    fill(tmp_path / "other.db", *history(*steps))
    assert merge(sql_target, tmp_path / "other.db", capsys)["changed_subjects"] == 1
    assert states(sql_target) == {G: ("in_repair", 3)}
    assert [after for _, _, _, after, _ in line_of(sql_target)] == ["watch", "quarantined", "in_repair"]
    shorter = tmp_path / "shorter.db"
    fill(shorter, *history(*steps[:1]))
    assert merge(sql_target, shorter, capsys)["changed_subjects"] == 0
    assert states(sql_target) == {G: ("in_repair", 3)}


def test_two_stories_of_one_device_are_told_in_order_of_time(sql_target: Path | str, tmp_path: Path, capsys) -> None:
    fill(sql_target, *history((10, "watch", "evidence"), (40, "quarantined", "evidence")))
    fill(tmp_path / "other.db", *history((20, "suspect", "evidence"), (50, "in_repair", "repair"), (60, "retired", "repair")))
    merge(sql_target, tmp_path / "other.db", capsys)
    assert states(sql_target) == {G: ("retired", 5)}, "newer, and stricter"
    assert [(version, at_us) for version, at_us, *_ in line_of(sql_target)] == [(1, 10), (2, 20), (3, 40), (4, 50), (5, 60)]
    assert merge(sql_target, tmp_path / "other.db", capsys)["changed_subjects"] == 0
    assert check(sql_target, capsys)["ok"]


def test_a_merge_never_releases_what_is_held_here(sql_target: Path | str, tmp_path: Path, capsys) -> None:
    """The other store's word was about another story: its newer `clear` knew nothing of our quarantine."""
    lasts = {"G1": (90, "clear", "expiry"), "G2": (90, "clear", "release"), "G3": (90, "suspect", "evidence")}
    ours = [
        record for one in lasts for record in history((10, "watch", "evidence"), (40, "quarantined", "evidence"), subject=one)
    ]
    fill(sql_target, *ours)
    fill(
        tmp_path / "other.db",
        *(r for one, last in lasts.items() for r in history((20, "watch", "evidence"), last, subject=one)),
    )
    assert merge(sql_target, tmp_path / "other.db", capsys)["changed_subjects"] == 3
    for one, last in lasts.items():
        version, _, before, after, verb = line_of(sql_target, one)[-1]
        assert (before, after, verb) == (last[1], "quarantined", "merge") and states(sql_target)[one] == (
            "quarantined",
            version,
        )
    assert merge(sql_target, tmp_path / "other.db", capsys)["changed_subjects"] == 0
    assert check(sql_target, capsys)["ok"]


def test_injected_faults_accuse_nobody_in_another_store(database: Path, tmp_path: Path, capsys) -> None:
    """An embedded store lets injected evidence move states; a shared one does not."""
    real = replace(evidence(2), subject="GPU-2")
    fill(
        tmp_path / "other.db",
        evidence(1, injected=True),
        real,
        *history((20, "quarantined", "evidence")),
        *history((20, "quarantined", "evidence"), subject="GPU-2"),
    )
    assert merge(database, tmp_path / "other.db", capsys)["changed_subjects"] == 1
    assert states(database) == {"GPU-2": ("quarantined", 1)}
    effects = {row.fingerprint: row.effect for row in rows(database, tables.evidence)}
    assert effects["f2"] == "counted" and effects["f1"].startswith("inert: injected")


def test_stays_of_one_board_do_not_overlap(database: Path, tmp_path: Path, capsys) -> None:
    place = ("n1", "00000000:1b:00.0", "77")
    fill(database, SeatSaved(G, 10, *place, seen_us=30), SeatSaved("GPU-2", 10, "n1", "00000000:2b:00.0", "78", seen_us=10))
    fill(
        tmp_path / "other.db",
        SeatSaved(G, 20, *place, to_us=50, seen_us=50),
        SeatSaved(G, 60, "n2", "00000000:1b:00.0", "77", seen_us=90),
    )
    for _ in range(2):
        merge(database, tmp_path / "other.db", capsys)
        stays = [(row.uuid, row.node, row.from_us, row.to_us) for row in rows(database, tables.seats)]
        assert stays == [(G, "n1", 10, 50), (G, "n2", 60, None), ("GPU-2", "n1", 10, None)]


def test_stays_are_joined_by_place_and_time() -> None:
    def stay(node: str, from_us: int, to_us: int | None) -> dict[str, Any]:
        unknown = dict.fromkeys(("serial", "board", "boot_id"), "")
        return {
            "uuid": G,
            "from_us": from_us,
            "node": node,
            "pci_bus_id": "p",
            "to_us": to_us,
            "seen_us": to_us or from_us,
            **unknown,
        }

    def joined(*stays: dict[str, Any]) -> list[tuple[object, object, object]]:
        return [(one["node"], one["from_us"], one["to_us"]) for one in join_stays(stays)]

    assert joined(stay("a", 1, 5), stay("a", 3, 9)) == [("a", 1, 9)]
    assert joined(stay("a", 1, 5), stay("a", 7, 9)) == [("a", 1, 5), ("a", 7, 9)]
    assert joined(stay("a", 1, None), stay("b", 7, None)) == [("a", 1, 7), ("b", 7, None)]
    assert joined(stay("a", 1, None), stay("a", 7, 9)) == [("a", 1, 9)]


def test_sightings_keep_their_first_time(sql_target: Path | str, tmp_path: Path, capsys) -> None:
    fill(sql_target, DeviceSeen(G, 50, "n2", "new model"))
    fill(tmp_path / "other.db", DeviceSeen(G, 10, "n1", "old model"))
    merge(sql_target, tmp_path / "other.db", capsys)
    (row,) = rows(sql_target, tables.devices)
    assert (row.first_us, row.at_us, row.node, row.model) == (10, 50, "n2", "new model")


def test_a_backup_of_a_server_has_the_history_as_it_was(postgres: str, state: Path, capsys) -> None:
    records = [
        evidence(1, injected=True),
        *history((20, "quarantined", "evidence")),
        SeatSaved(G, 1, "n", "p"),
        *story(job_key()),
    ]
    fill(postgres, *records)
    main(["backup", str(state / "copy.db"), "--database-url", postgres])
    capsys.readouterr()
    for table in (tables.evidence, tables.subjects, tables.transitions, tables.seats):
        assert rows(state / "copy.db", table) == rows(postgres, table), table.name


# ---------------------------------------------------------------------------------------------------- check and retention


def test_check_counts_the_history_and_finds_disagreement(open_store, database: Path, capsys) -> None:
    fill(database, evidence(), *history((10, "watch", "evidence"), (20, "suspect", "evidence")), SeatSaved(G, 1, "n", "p"))
    sound = check(database, capsys)
    assert (sound["ok"], sound["evidence"], sound["subjects"], sound["cases"]) == (True, 1, 1, 0)
    engine = sqlite_writer(Path(str(split_target(database))))
    with engine.begin() as connection:
        connection.execute(update(tables.subjects).values(state="odd", version=1))
    engine.dispose()
    fill(database, SeatSaved(G, 5, "n2", "p"), TransitionSaved("device", "GPU-9", 1, 1, "clear", "watch", "no state"))
    found = check(database, capsys)
    assert not found["ok"]
    told = "\n".join(found["problems"])  # type: ignore[arg-type]
    for part in (
        "unknown state 'odd'",
        "its history goes to 2",
        "its history ends in watch",
        "GPU-9",
        "sits in 2 places at once",
    ):
        assert part in told, part


def test_retention_never_touches_the_history(open_store, sql_target: Path | str) -> None:
    """Evidence, cases, states, transitions and seats never go, however old they are and however little room is allowed."""
    store: SqlStore = open_store(sql_target)
    key = job_key()
    store.commit(
        [
            saved(key, "ended", created_us=1, ended_us=2),
            *(event(key, number, recorded_us=number) for number in range(1, 20)),
            CaseSaved(key, "c", 1, 7, 30, True, [], 40, "persistent"),
            ResumeSaved(key, 1, 5, "/c/5", 26),
            CheckpointSaved(key, 1, 5, "/c/5", 26),
            evidence(job=key),
            *history((20, "quarantined", "evidence")),
            SeatSaved(G, 1, "n", "p", to_us=2),
            DeviceSeen(G, 5, "n1", job=key, attempt=1, rank=0),
        ]
    )
    kept = ("cases", "evidence", "subjects", "transitions", "seats", "placements", "devices", "resumes", "checkpoints")
    before = {name: rows(sql_target, tables.metadata.tables[name]) for name in kept}
    assert all(before.values())
    for _ in range(50):
        if not store.prune(900 * DAY_US, Limits(age_us=0, size_bytes=0)):
            break
    assert rows(sql_target, tables.events) == []
    assert {name: rows(sql_target, tables.metadata.tables[name]) for name in kept} == before
