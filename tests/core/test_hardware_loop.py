"""The hardware's history in the loop: who holds what, what is believed, what jobs are told, what survives a restart."""

from dataclasses import dataclass, field

import pytest

from rsup.supervisor import wire
from rsup.supervisor.hardware.book import Book
from rsup.supervisor.hardware.identity import normal_pci
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.loop import Loop
from rsup.supervisor.loop_inputs import HardwareReply, HardwareRequest
from rsup.supervisor.memory_store import MemoryStore
from rsup.supervisor.records import EvidenceSaved, SeatSaved, SubjectSaved, TransitionSaved
from rsup.supervisor.store import StoreError
from tests.core.job_driver import info, spec
from tests.core.test_supervisor_loop import Bench, _raise


def gpu(letter: str, **fields: str) -> wire.Device:
    values = {"model": "NVIDIA H200", "serial": f"S-{letter}", "board": "900-1", "pci_bus_id": f"0000:1{letter}:00", **fields}
    return wire.Device(f"GPU-{letter}", **values)


@dataclass
class Fleet(Bench):
    """A shared supervisor, and what it knows of hardware."""

    store: MemoryStore = field(default_factory=MemoryStore)
    embedded: bool = False
    numbers: dict[str, int] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        self.instance += 1
        where = wire.SupervisorInfo(f"i{self.instance}", self.instance, "host", self.embedded)
        book = Book(self.store, accepts_injected=self.embedded)
        self.loop = Loop(self.store, self, self, where, self.listening.append, lambda: "generated", book)
        self.loop.on_fault = _raise
        self.loop.recover()

    def enter(self, name: str, *devices: wire.Device, job_id: str = "t1", node: str = "", **fields: object) -> None:
        agent = info(name, devices=list(devices), num_ranks=min(2, len(devices)) or 1)
        if node:
            agent = wire.AgentInfo(agent.agent_id, node, "h", 1, agent.boot_id, -1, agent.num_ranks, agent.devices)
        self.join(name, spec(job_id=job_id, **fields), agent=agent)

    def say(self, name: str, *facts: wire.AnyFact) -> wire.Order:
        first = self.numbers.get(name, 0) + 1
        self.numbers[name] = first + len(facts) - 1
        report = wire.Report(name, 1, self.acked.get(name, 0), first, list(facts))
        *earlier, order = [m for m in self.hear(name, report) if isinstance(m, wire.Order)]
        if not order.commands and earlier:
            order = earlier[-1]
        if order.commands:
            self.acked[name] = order.commands[-1].sequence
        return order

    def run(self, name: str, attempt: int = 1) -> wire.StartAttempt:
        """Bind the store and start the ranks of a job of one node."""
        self.acked[name] = self.acked.get(name, 0) + 1
        order = self.say(name, wire.StoreBound(1, attempt, "h", 1))
        start = next(c for c in order.commands if isinstance(c, wire.StartAttempt))
        self.say(name, wire.AttemptStarted(1, attempt, [11, 12]))
        return start

    def verdict(self, name: str, device: str, verdict: str = "persistent", **fields: object) -> wire.CaseReported:
        attempt = int(str(fields.pop("attempt", 1)))
        finding = wire.CaseFinding(0, device, "loss", True, "nan", "nan", "2.5", 1, "GPU-x", node="a-node-of-others")
        report = wire.CaseReport(
            f"{name}-a{attempt}-i7",
            7,
            True,
            [finding],
            verdict=verdict,
            reason="nan here, 2.5 elsewhere",
            action="continue",
            accused=[device],
            **fields,  # type: ignore[arg-type]
        )
        self.say(name, fact := wire.CaseReported(self.now_us(), attempt, 0, report))
        return fact

    def rows(self, kind: type) -> list[object]:
        return list(self.store.rows.get(kind, {}).values())

    def subject(self, name: str, kind: str = "device") -> SubjectSaved | None:
        found = self.store.subjects_named(kind, [name], [])
        return found[0] if found else None

    def standing(self, name: str, kind: str = "device") -> str:
        saved = self.subject(name, kind)
        return saved.state if saved else "clear"

    def effects(self) -> list[str]:
        return [row.effect for row in self.rows(EvidenceSaved) if isinstance(row, EvidenceSaved)]

    def change(self, subject: str, verb: str, **fields: object) -> HardwareReply:
        values: dict[str, object] = {"kind": "device", "principal": "root", "is_operator": True, "reason": "why", **fields}
        replies: list[HardwareReply] = []
        request = VerbRequest(subject=subject, verb=verb, **values)  # type: ignore[arg-type]
        self.loop.handle([HardwareRequest(request, replies.append)])
        return replies[0]

    def avoided(self, name: str, job_id: str = "t1") -> list[tuple[str, bool]]:
        """What that agent's next attempt would be told."""
        (state,) = [state for state in self.loop.jobs() if name in state.agents]
        return [(one.device, one.quarantined) for one in state.agents[name].known]


def test_a_verdict_quarantines_the_device_for_this_job_and_the_next() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"), gpu("c"))
    fleet.run("a")
    commits = fleet.store.num_commits
    fleet.verdict("a", "GPU-b")
    assert fleet.store.num_commits == commits + 1, "case, evidence and state in one transaction"
    saved = fleet.subject("GPU-b")
    assert saved is not None and (saved.state, saved.serial, saved.may_drain) == ("quarantined", "S-b", "")
    assert fleet.avoided("a") == [("GPU-b", True)]
    changes = [row for row in fleet.rows(TransitionSaved) if isinstance(row, TransitionSaved)]
    (change,) = [row for row in changes if row.kind == "device"]
    assert change.job is not None and change.job.job_id == "t1"
    fleet.enter("z", gpu("a"), gpu("b"), gpu("c"), job_id="t2", node="node-a")
    start = fleet.run("z")
    assert [(one.device, one.quarantined) for one in start.avoid] == [("GPU-b", True)]
    assert "quarantined" in start.avoid[0].reason and "DevicesKnown" in fleet.kinds()
    assert fleet.standing("node-a", "node") == "watch", "one device of the node speaks against it, which is not enough"


def test_states_and_counts_go_on_after_a_restart() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"))
    fleet.run("a")
    reading = wire.HealthReading("GPU-b", "xid", "94", 1, "NVRM: Xid 94")
    first_us = fleet.now_us()
    fleet.say("a", wire.HealthSeen(first_us, [reading], "boot-1"))
    fleet.restart()
    fleet.now_s += 1
    fleet.say("a", wire.HealthSeen(fleet.now_us() + 10**15, [reading, reading], "boot-1"))
    (row,) = [row for row in fleet.rows(EvidenceSaved) if isinstance(row, EvidenceSaved) and row.kind == "device"]
    assert (row.count, row.first_us, row.last_us) == (3, first_us, fleet.now_us()) and row.text.endswith("NVRM: Xid 94")
    assert fleet.standing("GPU-b") == "watch"


def test_readings_of_the_driver_are_evidence_of_the_boot() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"))
    fleet.run("a")
    now = fleet.now_us()
    fleet.say("a", wire.HealthSeen(now, [wire.HealthReading("GPU-b", "xid", "79")], "boot-1"))
    fleet.say("a", wire.HealthSeen(now, [wire.HealthReading("GPU-a", "ecc", "correctable", 5)], "boot-1"))
    fleet.say("a", wire.HealthSeen(now, [wire.HealthReading("GPU-zzz", "xid", "64")], "boot-1"))
    assert (fleet.standing("GPU-b"), fleet.standing("GPU-a"), fleet.standing("GPU-zzz")) == ("quarantined", "watch", "clear")
    refused = [one for one in fleet.effects() if one != "counted"]
    assert refused == ["refused: job t1 does not hold the device"]


@pytest.mark.parametrize(("embedded", "state"), [(False, "clear"), (True, "quarantined")])
def test_injected_evidence_is_inert_in_a_shared_store(embedded: bool, state: str) -> None:
    """DESIGN section 6: evidence of a run with an armed injector is marked, and changes states only in an embedded store."""
    fleet = Fleet(embedded=embedded)
    fleet.enter("a", gpu("a"), gpu("b"))
    fleet.run("a")
    fleet.verdict("a", "GPU-b", injected=True)
    assert fleet.standing("GPU-b") == state
    assert fleet.effects()[0] == ("counted" if embedded else "inert: injected")
    assert all(row.injected for row in fleet.rows(EvidenceSaved) if isinstance(row, EvidenceSaved))


def test_a_job_is_not_believed_about_what_it_does_not_hold() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"))
    fleet.enter("v", gpu("v"), job_id="victim")
    fleet.run("a")
    fleet.verdict("a", "GPU-v")
    assert fleet.standing("GPU-v") == "clear" and fleet.effects() == ["refused: job t1 does not hold the device"]
    assert fleet.avoided("v") == []


def test_a_forged_serial_or_uuid_moves_no_seat_and_harms_nobody() -> None:
    """The same board cannot be alive on two nodes: the later claim is recorded, and not believed."""
    fleet = Fleet()
    fleet.enter("v", gpu("v"), job_id="victim")
    seats = fleet.rows(SeatSaved)
    forged = wire.Device("GPU-mine", "NVIDIA H200", "S-v", "900-1", "0000:1f:00")
    fleet.enter("m", forged, gpu("v"), job_id="t2")
    assert fleet.rows(SeatSaved) == seats and fleet.kinds().count("DeviceContested") == 2
    fleet.run("m")
    fleet.verdict("m", "GPU-mine")
    fleet.verdict("m", "GPU-v", attempt=1, found_by="audit")
    fleet.say("m", wire.HealthSeen(1, [wire.HealthReading("GPU-v", "xid", "64")], "boot"))
    assert fleet.standing("GPU-v") == "clear" and fleet.standing("GPU-mine") == "clear"
    assert set(fleet.effects()) == {
        "refused: serial S-v is that of GPU-v, alive on node node-v",
        "refused: GPU-v is alive on node node-v",
    }


def test_another_board_number_for_a_known_serial_is_not_believed() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), job_id="t1")
    fleet.enter("b", gpu("a", board="900-2"), job_id="t2", node="node-a")
    (seat,) = fleet.rows(SeatSaved)
    assert isinstance(seat, SeatSaved) and seat.board == "900-1" and "DeviceContested" in fleet.kinds()


def test_a_board_that_moves_closes_its_seat_and_keeps_its_record() -> None:
    """NH9: the record follows the serial, to another node and under another UUID; the node keeps only what is the node's."""
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"))
    fleet.run("a")
    fleet.verdict("a", "GPU-b")
    fleet.hear("a", wire.Bye("a"))
    fleet.now_s += 60
    moved = wire.Device("GPU-new", "NVIDIA H200", "S-b", "900-1", "PCI:0000:3b:00")
    fleet.enter("n", moved, job_id="t2", node="node-n")
    assert fleet.avoided("n") == [("GPU-new", True)]
    seats = {(s.uuid, s.node, s.pci_bus_id, s.to_us is None) for s in fleet.rows(SeatSaved) if isinstance(s, SeatSaved)}
    assert ("GPU-b", "node-a", "00000000:1b:00.0", False) in seats and ("GPU-new", "node-n", "00000000:3b:00.0", True) in seats
    fleet.run("n")
    fleet.verdict("n", "GPU-new")
    assert fleet.subject("GPU-new") is None
    saved = fleet.subject("GPU-b")
    assert saved is not None and saved.may_drain == "2 independent episodes", "one board, one record"


def test_a_new_board_in_the_same_place_ends_the_stay_of_the_old_one() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"))
    fleet.hear("a", wire.Bye("a"))
    fleet.now_s += 60
    fleet.enter("b", wire.Device("GPU-q", serial="S-q", pci_bus_id="00000000:1A:00.0"), job_id="t2", node="node-a")
    seats = {s.uuid: s.to_us for s in fleet.rows(SeatSaved) if isinstance(s, SeatSaved)}
    assert seats["GPU-a"] is not None and seats["GPU-q"] is None


def test_gpus_of_one_board_are_apart_though_they_share_its_serial() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a", serial="S"), gpu("b", serial="S"))
    fleet.run("a")
    fleet.verdict("a", "GPU-b")
    assert fleet.standing("GPU-b") == "quarantined" and fleet.avoided("a") == [("GPU-b", True)]
    assert len(fleet.rows(SeatSaved)) == 2


def test_an_operators_word_concerns_the_next_attempt() -> None:
    """NH23: running ranks are not killed because somebody quarantines their device."""
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"), gpu("c"), policy=wire.RestartPolicy(max_restarts=3))
    fleet.run("a")
    assert fleet.change("GPU-a", "quarantine").status == "done"
    order = fleet.say("a")
    assert order.commands == [] and fleet.saved.phase == "running" and fleet.avoided("a") == [("GPU-a", True)]
    now = fleet.now_us()
    fleet.say("a", wire.RankExited(now, 1, 0, 1), wire.RanksGone(now, 1))
    start = fleet.run("a", attempt=2)
    assert [one.device for one in start.avoid] == ["GPU-a"]
    assert fleet.change("GPU-a", "allow").status == "done" and fleet.avoided("a") == []
    fleet.wait(1)
    assert fleet.change("GPU-a", "quarantine").status == "conflict"


def test_a_commit_that_fails_leaves_no_trace_and_is_made_up_for() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"))
    fleet.run("a")
    real_commit, failing = fleet.store.commit, [True]

    def commit(records):  # type: ignore[no-untyped-def]
        if failing:
            raise StoreError("disk full")
        real_commit(records)

    fleet.store.commit = commit  # type: ignore[method-assign]
    fleet.verdict("a", "GPU-b")
    assert fleet.loop.store_error and fleet.standing("GPU-b") == "clear" and fleet.avoided("a") == []
    failing.clear()
    fleet.wait(3)
    assert not fleet.loop.store_error and fleet.standing("GPU-b") == "quarantined"
    saved = fleet.subject("GPU-b")
    (row,) = [r for r in fleet.rows(EvidenceSaved) if isinstance(r, EvidenceSaved) and r.kind == "device"]
    assert row.count == 1 and saved is not None and saved.version == 1 and fleet.avoided("a") == [("GPU-b", True)]


def test_two_devices_or_device_less_faults_make_a_node_suspect_and_spares_come_first() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"), node="n1")
    fleet.run("a")
    fleet.verdict("a", "GPU-a")
    assert fleet.standing("n1", "node") == "watch"
    fleet.say("a", wire.HealthSeen(fleet.now_us(), [wire.HealthReading("GPU-b", "xid", "79")], "boot-1"))
    assert fleet.standing("n1", "node") == "suspect"
    (state,) = fleet.loop.jobs()
    assert state.agents["a"].node_known is not None and not state.agents["a"].node_known.quarantined


def test_a_quarantined_node_stays_out_where_another_can_take_its_place() -> None:
    fleet = Fleet()
    assert fleet.change("n1", "quarantine", kind="node").status == "done"
    for name, node in (("a", "n1"), ("b", "n2"), ("c", "n3")):
        restarts = wire.RestartPolicy(max_restarts=3)
        fleet.enter(name, gpu(name), node=node, min_nodes=2, max_nodes=2, policy=restarts)
    assert "SuspectNodeUsed" in fleet.kinds(), "no other node was there in time: said, not refused"
    now = fleet.now_us()
    fleet.acked |= {"a": 1}
    fleet.say("a", wire.StoreBound(now, 1, "h", 1))
    for name in ("a", "b"):
        fleet.say(name, wire.AttemptStarted(now, 1, [1]))
    fleet.say("b", wire.RankExited(now, 1, 1, 1))
    for name in ("a", "b"):
        fleet.say(name, wire.RanksGone(now, 1))
    assert fleet.state.current is not None and fleet.state.current.nodes == ["n2", "n3"] and fleet.state.attempt == 2
    assert fleet.kinds().count("SuspectNodeUsed") == 1


def test_a_rank_without_gpu_speaks_of_its_node() -> None:
    fleet = Fleet()
    cpu = wire.Device("CPU-boot-0", "CPU")
    for number in (1, 2):
        name = f"a{number}"
        fleet.enter(name, cpu, job_id=f"t{number}", node="n1")
        fleet.run(name)
        fleet.verdict(name, "CPU-boot-0")
        assert fleet.standing("n1", "node") == ("watch" if number == 1 else "suspect")
    assert fleet.rows(SeatSaved) == [], "a stand-in sits nowhere"


def test_time_ends_suspicion_and_overrides_and_clean_running_ends_probation() -> None:
    fleet = Fleet()
    fleet.enter("a", gpu("a"), gpu("b"), gpu("c"))
    fleet.run("a")
    fleet.verdict("a", "GPU-a", suspect_of=4)
    assert fleet.avoided("a") == [("GPU-a", False)]
    assert fleet.change("GPU-b", "quarantine").status == "done"
    assert fleet.change("GPU-b", "release", without_test=True).status == "done"
    for _ in range(49):
        fleet.now_s += 3599
        fleet.report("a")
        fleet.wait(1)
    assert fleet.standing("GPU-a") == "watch" and fleet.avoided("a") == []
    assert fleet.standing("GPU-b") == "probation", "hours that nobody watched are no clean running"
    for _ in range(25 * 60):
        fleet.now_s += 59
        fleet.report("a")
        fleet.wait(1)
    assert fleet.standing("GPU-b") == "clear"


@pytest.mark.parametrize(
    "text", ["0000:1B:00", "PCI:0000:1b:00", "00000000:1B:00.0", "1b:00.0", "0:1b:00", "pci:00000000:1b:00", " 1B:00 "]
)
def test_pci_bus_ids_have_one_form(text: str) -> None:
    """NH8: an Xid line, NVML and sysfs write the same address in different ways."""
    assert normal_pci(text) == "00000000:1b:00.0"
    assert normal_pci("usb-1") == "usb-1" and normal_pci("") == ""
