"""What drains read of the store, on each database."""

from collections.abc import Callable
from pathlib import Path

import pytest
from store_story import job_key, saved

from rsup.supervisor.database import reader_engine
from rsup.supervisor.device_selector import find_node
from rsup.supervisor.hardware.why_text import WhyStory, why_text
from rsup.supervisor.hardware.why_view import why
from rsup.supervisor.hardware_views import UnknownHardware, list_nodes
from rsup.supervisor.history_views import timeline
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


def test_what_gates_have_said_is_read_back(open_store: Callable[..., SqlStore], sql_target: Path | str) -> None:
    """Within a month, oldest first."""

    def said(fingerprint: str, kind: str, code: str, at_us: int, text: str) -> EvidenceSaved:
        return EvidenceSaved("node", "n1", fingerprint, kind, code, "e", at_us, at_us, at_us, node="n1", text=text)

    records: list[Record] = [
        said("f1", "gate", "prolog-refused", NOW - 5, "gate prolog-refused on n1\nenforce: rsup:Q-1 GPU 3"),
        said("f2", "gate", "gate-unknown", NOW - 9, "gate gate-unknown on n1\nenforce: rsup:unknown"),
        said("f3", "gate", "prolog-refused", NOW - 40 * 86_400_000_000, "gate prolog-refused on n1\nenforce: rsup:Q-1 GPU 3"),
        said("f4", "xid", "79", NOW - 5, "xid 79 on n1\nfallen off"),
    ]
    open_store(sql_target).commit(records)
    engine = reader_engine(sql_target)
    with engine.connect() as connection:
        words = drain_rows.read_gate_words(connection, NOW)
    engine.dispose()
    assert words == [
        ("n1", "gate-unknown", "enforce: rsup:unknown", NOW - 9),
        ("n1", "prolog-refused", "enforce: rsup:Q-1 GPU 3", NOW - 5),
    ]


def test_a_node_that_only_told_of_its_boards_or_that_slurm_knows_has_a_story(
    open_store: Callable[..., SqlStore], sql_target: Path | str
) -> None:
    records: list[Record] = [
        SubjectSaved("device", "GPU-bad", "quarantined", 5, "wrong results", 2, may_drain="the word of ann"),
        SubjectSaved("node", "n4", "watch", 5, "2 refusals", 1),
        SeatSaved("GPU-bad", 3, "n3", "a", "", "", None, NOW - 5),
        SeatSaved("GPU-good", 3, "n9", "a", "", "", None, NOW - 5),
        DrainNoted("n3", 7, "admitted", 3, "why"),
        DrainNoted("n3", 8, "drained", 0, "rsup:Q-3 GPU-bad quarantined"),
        DrainNoted("n5", 9, "weighted", 1),
    ]
    newest = NodeSeen("n9", NOW - 5, job_key(), "active", ["CPU-n9-0"])
    open_store(sql_target).commit([saved(job_key()), newest, *records])
    engine, others = reader_engine(sql_target), ("n1", "n9", "n4")
    with engine.connect() as connection:
        listed, after = list_nodes(connection, others=others)
        pages = [list_nodes(connection, after=name, limit=1, others=others) for name in ("", "n3", "n5")]
        clear, _ = list_nodes(connection, state="clear", others=others)
        story = why(connection, "node", "n3")
        told = timeline(connection, "n3", kind="node")
        assert find_node(connection, "n1", others) == why(connection, "node", "n1", others=others)["node"] == "n1"
        for ask in (find_node, lambda one, name: why(one, "node", name)):
            with pytest.raises(UnknownHardware, match="no node 'n1'"):
                ask(connection, "n1")
    engine.dispose()
    assert ([one["node"] for one in listed], after) == (["n1", "n3", "n4", "n5", "n9"], None)
    assert [([one["node"] for one in page], following) for page, following in pages] == [
        (["n1"], "n1"), (["n4"], "n4"), (["n9"], None),
    ]  # fmt: skip
    assert [one["node"] for one in clear] == ["n1", "n3", "n5", "n9"]
    assert listed[4]["devices"] == ["GPU-good"], "its boards, not what its newest job used of them"
    assert listed[1]["devices"] == ["GPU-bad"] and listed[1]["first_seen"] and listed[0]["first_seen"] is None
    assert [one["what"] for one in story["notes"]] == ["drained", "admitted"]
    text = why_text(WhyStory("node", story, story["newest_evidence"], {}))
    for line in (
        "GPU-bad quarantined: wrong results",
        "drained in SLURM: rsup:Q-3 GPU-bad quarantined",
        "the gate refuses it to jobs since",
        "once nothing counts against GPU-bad: `rsup devices why GPU-bad` says how",
    ):
        assert line in text, text
    assert "nothing to end" not in text and "as before" not in text
    assert [(one["what"], one["text"]) for one in told["items"]][:2] == [
        ("slurm", "drained in SLURM: rsup:Q-3 GPU-bad quarantined"), ("slurm", "refused to jobs as Q-3: why"),
    ]  # fmt: skip


def test_why_tells_whose_a_drain_is_what_the_guard_holds_and_what_a_release_waits_for(
    open_store: Callable[..., SqlStore], sql_target: Path | str
) -> None:
    let_run = [
        DrainNoted("n1", 7, "admitted", 1),
        DrainNoted("n1", 8, "resumed", 0, "", "root"),
        DrainNoted("n1", 9, "cleared"),
    ]
    records: list[Record] = [
        SubjectSaved("device", "GPU-a", "quarantined", 5, "wrong results", 2, may_drain="second"),
        SeatSaved("GPU-a", 3, "n1", "a", "", "", None, NOW - 5),
        *let_run,
        *(DrainNoted(name, 8, "drained", 0, "rsup:Q-3 x") for name in ("n2", "n3")),
        DrainNoted("n2", 9, "yielded", 0, "rsup:Q-3 x; ann: RMA", "ann"),
        DrainNoted("n3", 9, "told"),
        SubjectSaved("node", "n2", "watch", 5, "2 refusals", 1),
        SubjectSaved("node", "n3", "watch", 5, "2 refusals", 1),
    ]
    store = open_store(sql_target)
    store.commit(records)
    engine = reader_engine(sql_target)

    def text(node: str) -> str:
        with engine.connect() as connection:
            story = why(connection, "node", node)
        return why_text(WhyStory("node", story, story["newest_evidence"], {}))

    assert "root let it run" in text("n1") and "guard" not in text("n1")
    store.commit([TransitionSaved("device", "GPU-a", 3, 50, "clear", "quarantined", "why", "ann", "quarantine")])
    assert "root let it run: it is left alone" not in text("n1") and "the guard holds it back" in text("n1")
    assert "somebody else has made the drain theirs" in text("n2") and "as before" not in text("n2")
    assert "once its gate knows that nothing counts against it" in text("n3")
    engine.dispose()
