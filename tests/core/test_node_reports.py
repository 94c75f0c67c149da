"""What a node's root says of it, in the real loop: boards, evidence by key, and claims that are not believed."""

from rsup.supervisor import wire
from rsup.supervisor.hardware.node_report import NodeEvent, NodeReport, NodeReportReply
from rsup.supervisor.loop_inputs import NodeReported, RecordsToKeep
from rsup.supervisor.records import DrainNoted, EvidenceSaved, SeatSaved
from rsup.supervisor.store import StoreError
from tests.core.test_hardware_loop import Fleet, gpu


def report(fleet: Fleet, node: str, *events: NodeEvent, **fields: object) -> NodeReportReply:
    replies: list[NodeReportReply | None] = []
    given = {"boot_id": "b1", "principal": f"node:{node}", **fields}
    told = NodeReport(node=node, events=list(events), **given)  # type: ignore[arg-type]
    fleet.loop.handle([NodeReported(told, replies.append)])
    assert replies[0] is not None
    return replies[0]


def xid(fleet: Fleet, key: str, device: str = "GPU-a", code: str = "79", kind: str = "xid") -> NodeEvent:
    return NodeEvent(key=key, time_us=fleet.now_us(), kind=kind, device=device, code=code, detail="NVRM: Xid")


def seated(fleet: Fleet) -> dict[str, str]:
    return {s.uuid: s.node for s in fleet.rows(SeatSaved) if isinstance(s, SeatSaved) and s.to_us is None}


def test_an_event_counts_once_and_a_burst_is_one_episode() -> None:
    fleet = Fleet()
    first = xid(fleet, "k1", code="94")
    assert report(fleet, "n1", first, devices=[gpu("a"), gpu("b")]).kinds == {"xid": 1}
    assert seated(fleet) == {"GPU-a": "n1", "GPU-b": "n1"} and fleet.standing("GPU-a") == "watch"
    again = report(fleet, "n1", first, xid(fleet, "k2", code="94"))
    assert (again.new, again.known) == (1, 1) and fleet.standing("GPU-a") == "watch", "one boot is one episode"
    report(fleet, "n1", xid(fleet, "k3", code="94"), boot_id="b2")
    assert fleet.standing("GPU-a") == "suspect"
    fleet.restart()
    assert report(fleet, "n1", first).new == 0, "known after a restart too"
    assert len(fleet.rows(EvidenceSaved)) == 4, "three of the board, one of its node"
    assert seated(fleet) == {"GPU-a": "n1", "GPU-b": "n1"}


def test_a_node_cannot_accuse_the_boards_of_another() -> None:
    fleet = Fleet()
    report(fleet, "n1", devices=[gpu("a")])
    told = report(fleet, "n2", xid(fleet, "k1"), xid(fleet, "k2", "GPU-c"), devices=[gpu("a"), gpu("c")])
    assert told.new == 1 and len(told.lines) == 2 and all("GPU-a sits on n1" in line for line in told.lines)
    assert fleet.standing("GPU-a") == "clear" and fleet.standing("GPU-c") == "quarantined"
    assert seated(fleet) == {"GPU-a": "n1", "GPU-c": "n2"}
    other = wire.Device("GPU-new", "H200", "S-a", "900-1", "0000:1a:00")
    assert "sits on n1" in report(fleet, "n2", devices=[gpu("c"), other]).lines[0], "nor under another UUID"
    report(fleet, "n1", devices=[], missing=["GPU-a"])
    assert seated(fleet)["GPU-a"] == "n1", "a board that fell off its bus is where it was"
    report(fleet, "n1", devices=[])
    told = report(fleet, "n2", xid(fleet, "k3"), devices=[gpu("a"), gpu("c")])
    assert told.new == 1 and seated(fleet)["GPU-a"] == "n2", "a board that n1 no longer lists has moved"


def test_a_board_in_a_live_job_stays_where_the_job_has_it() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), node="n1")
    fleet.run("a")
    assert "GPU-a sits on n1" in report(fleet, "n2", xid(fleet, "k1"), devices=[gpu("a")]).lines[0]
    assert fleet.standing("GPU-a") == "clear"
    assert report(fleet, "n1", xid(fleet, "k1")).new == 1
    assert fleet.avoided("a") == [("GPU-a", True)], "its job knows at once"


def test_what_is_no_evidence_and_clocks_that_are_wrong() -> None:
    fleet = Fleet()
    odd = NodeEvent(key="k", time_us=1, kind="gossip")
    ended = NodeEvent(key="e", time_us=1, kind="job-end", code="1")
    gate = NodeEvent(key="g", time_us=1, kind="prolog-refused", device="GPU-a", detail="observe: rsup:Q-1", job="7")
    told = report(fleet, "n1", odd, ended, gate, xid(fleet, "s", "CPU-1"))
    assert told.kinds == {"prolog-refused": 1} and [line.split(" is no")[0] for line in told.lines] == ["'gossip'", "CPU-1"]
    assert fleet.standing("n1", "node") == "clear", "what a gate did moves nothing"
    for at_us in (0, fleet.now_us() + 300_000_000):
        old = NodeEvent(key=f"c{at_us}", time_us=at_us, kind="ecc", device="GPU-b", code="correctable")
        assert report(fleet, "n1", old, devices=[gpu("b")]).new == 1
    rows = [row for row in fleet.rows(EvidenceSaved) if isinstance(row, EvidenceSaved) and row.source == "ecc"]
    assert all(0 <= fleet.now_us() - row.last_us < 60_000_000 for row in rows) and fleet.standing("GPU-b") == "watch"


def test_a_store_that_fails_loses_nothing_that_was_promised() -> None:
    fleet = Fleet()
    kept: list[bool] = []
    told: list[NodeReportReply | None] = []
    fleet.store.fail_with = StoreError("full")
    note = DrainNoted("n1", 5, "drained", 0, "rsup:x")
    fleet.loop.handle(
        [RecordsToKeep([note], kept.append), NodeReported(NodeReport(node="n1", devices=[gpu("a")]), told.append)]
    )
    assert not kept and not told, "not before it is on disk"
    fleet.store.fail_with = None
    fleet.now_s += 5.0
    fleet.loop.tick()
    assert kept == [True] and told[0] is not None and fleet.rows(DrainNoted) == [note] and seated(fleet) == {"GPU-a": "n1"}
