"""The gate's answer as a pure function: who is refused, and what is not known well enough for that."""

from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from rsup.launcher.slurm import gate_decision
from rsup.launcher.slurm.gate_decision import ACCEPT, REFUSED, UNDECIDED, IndexMap, Limits, Question, decide
from rsup.launcher.slurm.node_inventory import merged, missing, sure_boards
from rsup.launcher.slurm.snapshot_file import AVOID, REFUSE, Listed, Snapshot
from rsup.supervisor.slurm import scheduler_text

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
LIMITS = Limits(age_s=60, max_age_s=3600, max_restarts=3)
BAD = Listed(REFUSE, "Q-17", "SDC vote 3/3 jobs", "quarantined", node="n17", serial="1650")
EMPTY = Snapshot("c", 7, 0, 40, 2, False, {}, {})
BOARDS = IndexMap({str(index): (f"GPU-{index}",) for index in range(4)})
ASKED = Question("n17", "c", ("2", "3"), job="9")


Record = TypeVar("Record", Question, Listed, Snapshot, Limits)


def replace(one: Record, **changes: Any) -> Record:
    return one._replace(**changes)


def against(**devices: Listed) -> Snapshot:
    return replace(EMPTY, devices={name.replace("_", "-"): one for name, one in devices.items()})


@pytest.mark.parametrize(
    ("asked", "snapshot", "boards", "limits", "verdict", "why"),
    [
        (ASKED, EMPTY, BOARDS, LIMITS, ACCEPT, "clear"),
        (ASKED, against(GPU_3=BAD), BOARDS, LIMITS, REFUSED, "device"),
        (replace(ASKED, indexes=("0", "1")), against(GPU_3=BAD), BOARDS, LIMITS, ACCEPT, "clear"),
        (replace(ASKED, indexes=()), against(GPU_3=BAD), BOARDS, LIMITS, ACCEPT, "clear"),
        (replace(ASKED, indexes=(), uuids=("GPU-3",)), against(GPU_3=BAD), IndexMap(problem="none"), LIMITS, REFUSED, "device"),
        # The board was moved to this node after the supervisor saw it elsewhere: it is the same board.
        (ASKED, against(GPU_3=replace(BAD, node="n1")), BOARDS, LIMITS, REFUSED, "device"),
        (ASKED, against(GPU_3=replace(BAD, verdict=AVOID)), BOARDS, LIMITS, ACCEPT, "suspect"),
        (ASKED, against(GPU_3=replace(BAD, verdict="new word")), BOARDS, LIMITS, ACCEPT, "clear"),
        # Which boards the job has is not known: of interest only where one of this node is refused.
        (ASKED, against(GPU_9=BAD), IndexMap(problem="no inventory"), LIMITS, UNDECIDED, "index"),
        (ASKED, against(GPU_9=replace(BAD, node="n1")), IndexMap(problem="no inventory"), LIMITS, ACCEPT, "clear"),
        (ASKED, against(GPU_3=BAD), IndexMap({"2": ("GPU-2", "GPU-3"), "3": ("GPU-4",)}), LIMITS, UNDECIDED, "index"),
        (ASKED, against(GPU_3=BAD, GPU_2=BAD), IndexMap({"2": ("GPU-2", "GPU-3")}), LIMITS, REFUSED, "device"),
        # No gres: the job has all of the node's GPUs.
        (replace(ASKED, indexes=(), has_all=True), against(GPU_3=BAD), BOARDS, LIMITS, REFUSED, "device"),
        (replace(ASKED, indexes=(), has_all=True), against(GPU_9=replace(BAD, node="n1")), BOARDS, LIMITS, ACCEPT, "clear"),
        (replace(ASKED, indexes=(), has_all=True), against(GPU_9=BAD), BOARDS, LIMITS, UNDECIDED, "index"),
        (replace(ASKED, indexes=(), has_all=True), against(GPU_3=BAD), IndexMap(problem="none"), LIMITS, UNDECIDED, "index"),
        # Nodes.
        (ASKED, replace(EMPTY, nodes={"n17": BAD}), BOARDS, LIMITS, REFUSED, "node"),
        (replace(ASKED, indexes=()), replace(EMPTY, nodes={"n17": BAD}), BOARDS, LIMITS, REFUSED, "node"),
        (ASKED, replace(EMPTY, nodes={"n1": BAD}), BOARDS, LIMITS, ACCEPT, "clear"),
        (ASKED, replace(EMPTY, nodes={"n17": replace(BAD, verdict=AVOID)}), BOARDS, LIMITS, ACCEPT, "suspect"),
        # A verdict that has ended; where its end cannot be read nobody knows, but another may still stand.
        (ASKED, against(GPU_3=replace(BAD, until="2026-11-30T11:59:59Z")), BOARDS, LIMITS, ACCEPT, "clear"),
        (ASKED, against(GPU_3=replace(BAD, until="2026-11-30T12:00:01Z")), BOARDS, LIMITS, REFUSED, "device"),
        (ASKED, against(GPU_3=replace(BAD, until="whenever")), BOARDS, LIMITS, UNDECIDED, "end"),
        (ASKED, against(GPU_3=BAD, GPU_2=replace(BAD, until="whenever")), BOARDS, LIMITS, REFUSED, "device"),
        (ASKED, against(GPU_0=replace(BAD, until="whenever")), BOARDS, LIMITS, ACCEPT, "clear"),
        (ASKED, replace(EMPTY, nodes={"n17": replace(BAD, until="whenever")}), BOARDS, LIMITS, UNDECIDED, "end"),
        (ASKED, replace(against(GPU_3=BAD), nodes={"n17": replace(BAD, until="?")}), BOARDS, LIMITS, REFUSED, "device"),
        (replace(ASKED, indexes=(), has_all=True), against(GPU_3=replace(BAD, until="?")), BOARDS, LIMITS, UNDECIDED, "end"),
        # Doubts about the snapshot.
        (replace(ASKED, cluster="d"), against(GPU_3=BAD), BOARDS, LIMITS, UNDECIDED, "other cluster"),
        (replace(ASKED, cluster=""), against(GPU_3=BAD), BOARDS, LIMITS, REFUSED, "device"),
        (ASKED, replace(against(GPU_3=BAD), cluster=""), BOARDS, LIMITS, UNDECIDED, "other cluster"),
        (ASKED, against(GPU_3=BAD), BOARDS, replace(LIMITS, age_s=3601), UNDECIDED, "old"),
        (ASKED, against(GPU_3=BAD), BOARDS, replace(LIMITS, age_s=None), UNDECIDED, "old"),
        (ASKED, replace(against(GPU_3=BAD), max_refused=0), BOARDS, LIMITS, UNDECIDED, "too many"),
        (ASKED, replace(against(GPU_3=BAD), guard_open=True), BOARDS, LIMITS, REFUSED, "device"),
        # One job is sent away three times, not for ever.
        (replace(ASKED, num_restarts=2), against(GPU_3=BAD), BOARDS, LIMITS, REFUSED, "device"),
        (replace(ASKED, num_restarts=3), against(GPU_3=BAD), BOARDS, LIMITS, ACCEPT, "refused enough"),
    ],
)
def test_answers(asked: Question, snapshot: Snapshot, boards: IndexMap, limits: Limits, verdict: str, why: str) -> None:
    answer = decide(asked, snapshot, boards, limits, NOW)
    assert (answer.verdict, answer.why) == (verdict, why)
    assert answer.is_alarm == (verdict == UNDECIDED or why == "refused enough")


@pytest.mark.parametrize(("num_nodes", "max_refused", "most"), [(40, 2, 2), (40, 40, 20), (4, 4, 2), (1, 2, 2), (0, 0, 0)])
def test_half_of_a_cluster_is_never_believed(num_nodes: int, max_refused: int, most: int) -> None:
    """A signed snapshot may name any limit: it is the gate's last guard."""
    for num in (most, most + 1):
        nodes = {"n17": BAD, **{f"m{index}": BAD for index in range(num - 1)}} if num else {}
        snapshot = replace(EMPTY, num_nodes=num_nodes, max_refused=max_refused, nodes=nodes)
        expected = UNDECIDED if num > most else REFUSED if num else ACCEPT
        assert decide(ASKED, snapshot, BOARDS, LIMITS, NOW).verdict == expected, num


def test_the_jobs_of_the_quarantines_reservation_are_let_in() -> None:
    assert gate_decision.RESERVATION == scheduler_text.RESERVATION
    assert replace(ASKED, reservation="rsup_q_n17").is_test
    assert not any(replace(ASKED, reservation=name).is_test for name in ("", "rsup_q_n1", "rsup_q_n177", "n17"))


def test_eight_bad_gpus_of_one_node_are_one_node() -> None:
    snapshot = against(**{f"GPU_{index}": BAD for index in range(8)})
    assert snapshot.refused_nodes == {"n17"} and decide(ASKED, snapshot, BOARDS, LIMITS, NOW).verdict == REFUSED


def test_the_line_is_short_and_slurm_can_take_it() -> None:
    """At most 120 characters whatever the reason; it loses its end, not the way to the whole story."""
    by_rsup = decide(ASKED, against(GPU_3=replace(BAD, reason="rsup: gone")), BOARDS, LIMITS, NOW).line
    assert by_rsup == "rsup:Q-17 GPU 3 serial 1650 gone; rsup nodes why n17", "the daemon's user is rsup itself"
    bad = replace(BAD, reason='a "quoted" reason=\nof ' + "many words " * 40, until="2026-12-01T00:00:00Z")
    line = decide(ASKED, against(GPU_3=bad), BOARDS, LIMITS, NOW).line
    assert len(line) <= 120 and not set(line) & set("\n\"'=")
    assert line.startswith("rsup:Q-17 GPU 3 serial 1650 a quoted reason") and line.endswith(
        "; until 2026-12-01; rsup nodes why n17"
    )
    for one in (EMPTY, against(GPU_3=replace(bad, id="Q" * 200, serial="9" * 200))):
        assert len(decide(replace(ASKED, node="n" * 300), one, BOARDS, LIMITS, NOW).line) <= 120


def test_an_acceptance_names_what_is_refused_to_others() -> None:
    """Who asks about a node by hand must not read that all is well there."""
    by_hand = replace(ASKED, indexes=())
    told = "refused to jobs that get it: GPU-3 and 1 more, Q-17 SDC vote 3/3 jobs"
    snapshot = against(GPU_3=BAD, GPU_9=BAD, GPU_8=replace(BAD, node="n1"))
    assert decide(by_hand, snapshot, BOARDS, LIMITS, NOW).line == f"rsup:ok nothing against n17 itself; {told}"
    line = decide(replace(ASKED, indexes=("0",)), snapshot, BOARDS, LIMITS, NOW).line
    assert line == f"rsup:ok nothing against n17 or the GPUs in question; {told}"[:120]
    other = decide(replace(by_hand, node="nope", is_here=False), EMPTY, BOARDS, LIMITS, NOW)
    assert other.line == "rsup:ok nothing known against nope, if there is such a node"


def test_the_wall_clock_only_moves_ends() -> None:
    """Five minutes more or less change nothing about a verdict without an end: age is measured elsewhere, by the boot clock."""
    for skew in (timedelta(minutes=-5), timedelta(minutes=5)):
        assert decide(ASKED, against(GPU_3=BAD), BOARDS, LIMITS, NOW + skew).verdict == REFUSED


def test_an_inventory_remembers_what_each_index_stood_for_in_this_boot() -> None:
    def listed(*uuids: str) -> list[dict[str, object]]:
        return [{"index": index, "uuid": uuid} for index, uuid in enumerate(uuids)]

    first = merged(None, "boot", listed("a", "b", "c"))
    assert first["boards"] == {"0": ["a"], "1": ["b"], "2": ["c"]} and missing(first) == []
    shifted = merged(first, "boot", listed("a", "c"))  # b fell off the bus, c moved up
    assert shifted["boards"] == {"0": ["a"], "1": ["b", "c"], "2": ["c"]} and missing(shifted) == ["b"]
    assert merged(shifted, "boot", listed("a", "c")) == shifted, "the same again"
    boards = IndexMap({index: tuple(uuids) for index, uuids in shifted["boards"].items()})
    assert sure_boards(boards, ("0", "1", "2", "3")) == ("a", "c")
    assert merged(shifted, "next", listed("a", "c"))["boards"] == {"0": ["a"], "1": ["c"]}, "a boot begins anew"
    assert missing(merged(shifted, "boot", listed("a", "b", "c"))) == []
