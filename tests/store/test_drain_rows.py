"""What drains read of the store, on each database."""

from collections.abc import Callable
from pathlib import Path

from store_story import job_key, saved

from rsup.supervisor.database import reader_engine
from rsup.supervisor.records import DrainNoted, EvidenceSaved, NodeSeen, Record, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.slurm import drain_rows
from rsup.supervisor.sql_store import SqlStore

NOW = 1_800_000_000_000_000


def test_grounds_say_where_a_board_sits_and_what_is_new(open_store: Callable[..., SqlStore], sql_target: Path | str) -> None:
    def device(uuid: str, state: str = "quarantined", serial: str = "", **more: object) -> SubjectSaved:
        return SubjectSaved("device", uuid, state, 5, "why", 2, serial=serial, may_drain="second", **more)  # type: ignore[arg-type]

    def seat(uuid: str, node: str, bus: str, serial: str = "", to_us: int | None = None) -> SeatSaved:
        return SeatSaved(uuid, 1, node, bus, serial, "", to_us, NOW - 5)

    records: list[Record] = [
        saved(job_key()),
        NodeSeen("n9", NOW - 5, job_key(), "active"),
        *(device(uuid) for uuid in ("GPU-sits", "GPU-fell", "GPU-gone", "GPU-nowhere")),
        device("GPU-old", serial="77"),
        device("GPU-soft", "suspect"),
        device("GPU-allowed", override="allow", override_until_us=NOW + 5),
        device("GPU-back", "probation"),
        SubjectSaved("node", "n8", "quarantined", 5, "two", 1),
        seat("GPU-sits", "n1", "a"),
        seat("GPU-fell", "n2", "a", to_us=9),
        seat("GPU-gone", "n3", "a", to_us=9),
        seat("GPU-other", "n3", "a"),
        seat("GPU-new", "n4", "a", serial="77"),
        seat("GPU-soft", "n5", "a"),
        EvidenceSaved("device", "GPU-sits", "f1", "xid", "79", "e", 10, 900, 20, weight=1.0),
        EvidenceSaved("device", "GPU-sits", "f2", "person", "flag", "e", 30, 30, 30, weight=1.0),
        EvidenceSaved("device", "GPU-sits", "f3", "xid", "79", "e", 40, 40, 40, weight=1.0, effect="inert: injected"),
        TransitionSaved("node", "n8", 1, 50, "clear", "quarantined", "two", "ann", "quarantine"),
        TransitionSaved("device", "GPU-sits", 1, 60, "clear", "quarantined", "why", "", "evidence"),
        DrainNoted("n1", 7, "drained", 0, "rsup:x"),
        DrainNoted("n1", 7, "admitted", 3, "why"),
    ]
    open_store(sql_target).commit(records)
    engine = reader_engine(sql_target)
    with engine.connect() as connection:
        grounds = {ground.subject: ground for ground in drain_rows.read_grounds(connection, NOW)}
        notes = drain_rows.read_notes(connection)
        known = drain_rows.known_nodes(connection, NOW)
    engine.dispose()
    where = {subject: (ground.node, ground.refuses, bool(ground.may_drain)) for subject, ground in grounds.items()}
    assert where == {
        "GPU-sits": ("n1", True, True),
        "GPU-fell": ("n2", True, True),
        "GPU-gone": ("", True, True),
        "GPU-nowhere": ("", True, True),
        "GPU-new": ("n4", True, True),
        "GPU-soft": ("n5", False, False),
        "n8": ("n8", True, False),
    }
    assert grounds["GPU-sits"].newest_us == 20, "seen again, flags, and what does not count are nothing new"
    assert grounds["n8"].newest_us == 50, "an operator's word is"
    assert {(note.what, note.number) for note in notes} == {("drained", 0), ("admitted", 3)} and len(notes) == 2
    assert known == ["n1", "n3", "n4", "n5", "n9"]
