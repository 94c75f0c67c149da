"""What is known of the gates of a cluster, and how `rsup slurm status` and Prometheus tell it."""

from collections.abc import Iterator

import pytest

from rsup.supervisor.slurm.drain_plan import Plan, View
from rsup.supervisor.slurm.drain_status import Counters, metrics_of, running_nodes, status_of
from rsup.supervisor.slurm.gate_watch import SILENT_AFTER_US, GateWatch, gate_lines, gate_metrics, gates_of
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.scheduler_text import NodeSeen
from rsup.supervisor.slurm.slurm_cli import status_text

START = 1_800_000_000_000_000
NODES = [f"n{index}" for index in range(6)]
SECOND = 1_000_000


@pytest.fixture
def watch() -> Iterator[GateWatch]:
    watch = GateWatch(START)
    for node in NODES[:4]:
        watch.asked(node, START + SECOND)
    watch.told("n0", "enforce", "", START + SECOND)
    watch.told("n3", "enforce", "the snapshot was signed by key ab, not by cd", START + SECOND)
    watch.decided("n1", "gate-unknown", "enforce: rsup:unknown there is no snapshot", START + SECOND)
    watch.decided("n2", "prolog-refused", "enforce: rsup:Q-1 GPU 3 xid; rsup nodes why n2", START + SECOND)
    watch.decided("n2", "job-end", "exit 0", START + SECOND)
    yield watch


def states(watch: GateWatch, now_us: int, nodes: list[str] = NODES) -> dict[str, float]:
    return {labels["state"]: value for labels, value in gate_metrics(watch, nodes, now_us).samples}


def test_blind_gates_and_those_that_never_asked_are_named(watch: GateWatch) -> None:
    now_us = START + 60 * SECOND
    lines = gate_lines(gates_of(watch, NODES, now_us))
    assert lines == [
        "gates: 4 of 6 nodes ask (2 enforce, 2 not known yet)",
        "  not asked since this supervisor's start at 2027-01-15T08:00:00.000000Z: n[4-5]",
        "  blind n3: the snapshot was signed by key ab, not by cd",
        "  undecided n1 at 2027-01-15T08:00:01.000000Z: enforce: rsup:unknown there is no snapshot",
    ]
    assert states(watch, now_us) == {"sees": 5, "blind": 1, "silent": 0}, "so soon after a start nobody is silent"
    watch.told("n3", "enforce", "", now_us)
    watch.asked("n0", START + SILENT_AFTER_US + 2 * SECOND)
    later_us = START + SILENT_AFTER_US + 2 * SECOND
    found = gates_of(watch, NODES, later_us)
    assert found["blind"] == [] and found["never_asked"] == "n[4-5]"
    assert [one["node"] for one in found["silent"]] == ["n1", "n2"] and found["num_asking"] == 2
    assert states(watch, later_us) == {"sees": 2, "blind": 0, "silent": 4}
    assert gates_of(watch, NODES, START + 3602 * SECOND)["undecided"] == [], "an hour ago"
    assert gates_of(watch, ["n0"], later_us)["num_nodes"] == 1, "a node that SLURM has no more counts no more"
    assert gates_of(watch, [], later_us)["num_nodes"] == 4, "SLURM is not asked: those that ever did"
    assert gate_lines(gates_of(GateWatch(START), [], START)) == [] == gate_lines({})
    many = GateWatch(START)
    for index in range(30):
        many.told(f"n{index}", "observe", "no key", START)
    assert gate_lines(gates_of(many, [], START))[-1] == "  ... and 10 more; --json has them all"


def test_what_observing_gates_would_have_refused_is_named_and_is_no_refusal(watch: GateWatch) -> None:
    watch.told("n1", "observe", "", START)
    for seconds, line in ((2, "rsup:Q-2 node n1 ecc"), (1, "rsup:Q-1 GPU 3 xid")):  # a delivery that comes late is older
        watch.decided("n1", "prolog-refused", f"observe: {line}", START + seconds * SECOND)
    found = gates_of(watch, NODES, START + 60 * SECOND)
    assert gate_lines(found)[-1] == "  would refuse n1, at 2027-01-15T08:00:02.000000Z: rsup:Q-2 node n1 ecc"
    assert list(found["refused"]) == ["n2"], "it let that job in"
    assert found["modes"] == {"enforce": 2, "observe": 1} and found["num_mode_unknown"] == 1
    watch.told("n1", "enforce", "", START + 60 * SECOND)
    assert gates_of(watch, NODES, START + 60 * SECOND)["would_refuse"] == []


def test_the_words_of_before_the_start_do_not_make_a_node_one_that_asks() -> None:
    watch = GateWatch(START)
    watch.decided("gone", "prolog-refused", "enforce: rsup:Q-1", START - SECOND)
    assert gates_of(watch, [], START)["num_nodes"] == 0 and states(watch, START + 2 * SILENT_AFTER_US, []) == dict.fromkeys(
        ("sees", "blind", "silent"), 0
    )
    assert list(gates_of(watch, ["gone"], START)["refused"]) == ["gone"]


def test_the_whole_status_names_them_and_ties_a_prolog_error_to_its_refusal(watch: GateWatch) -> None:
    seen = {name: NodeSeen(name, "IDLE") for name in NODES}
    for node in ("n2", "n5"):
        seen[node] = NodeSeen(node, "IDLE", frozenset({"DRAIN"}), "Prolog error", "root")
    seen["n6"] = NodeSeen("n6", "DOWN")
    seen["n7"] = NodeSeen("n7", "IDLE", frozenset({"POWERED_DOWN"}))
    status = status_of("propose", "c", View(seen), Plan(), {}, None, "", 1)
    assert running_nodes(status) == NODES and running_nodes({}) == []
    text = status_text({**status, "gates": gates_of(watch, running_nodes(status), START + SECOND)})
    told = "(its gate refused a job at 2027-01-15T08:00:01.000000Z: enforce: rsup:Q-1 GPU 3 xid; rsup nodes why n2;"
    assert f"drained by root n2: Prolog error {told} somebody must resume it)" in text
    assert "drained by root n5: Prolog error\n" in text and "blind n3" in text
    assert "gates:" not in status_text(status), "a supervisor of before"
    counters = Counters(watch=watch)
    (family,) = (one for one in metrics_of(status, counters, START + SECOND) if one.name == "rsup_gate_nodes")
    assert dict((labels["state"], value) for labels, value in family.samples) == {"sees": 5, "blind": 1, "silent": 0}


def test_the_status_tells_whose_a_drain_is_and_what_is_reserved_or_waits_for_a_gate() -> None:
    """A reason that begins as ours may be somebody's, who wrote behind it."""
    seen = {
        name: NodeSeen(name, "IDLE", frozenset({"DRAIN"}), f"rsup:Q-1 x{more}", "ann")
        for name, more in (("n1", ""), ("n2", "; ann: RMA"), ("n3", ""))
    }
    logs = {
        "n1": NodeLog(number=1, drained="rsup:Q-1 x", reserved=True),
        "n2": NodeLog(taken_over=True),
        "n3": NodeLog(drained="rsup:Q-1 x", gate_refuses=True),
        "n4": NodeLog(reserved=True),
    }
    plan = Plan(refused={"n1": 1}, for_gates={"n3": START})
    status = status_of("act", "c", View(seen), plan, logs, None, "", 1)
    text = status_text(status)
    assert [one["node"] for one in status["drained"]["ours"]] == ["n1", "n3"] and "no ground here" not in text
    assert "drained by ann n2: rsup:Q-1 x; ann: RMA" in text and "drained by us n2" not in text
    assert "refused n1 Q-1 since 1970-01-01T00:00:00.000000Z, drained, reserved" in text
    assert "reserved by us, refused no more: n4" in text
    assert "kept off still n3: until its gate, which refuses it, knows better; at 2027-01-15T08:00:00.000000Z" in text
    values = {one.name: one.samples for one in metrics_of(status, Counters(), START)}
    assert values["rsup_drained_nodes"] == [({"owner": "rsup"}, 2), ({"owner": "other"}, 1)]
    assert values["rsup_reserved_nodes"] == [({}, 2)]
