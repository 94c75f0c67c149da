"""The pure parts of drains: what the guard lets pass, what is done to which node, what SLURM's text means."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from rsup.supervisor.hardware.policy import Guard
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_plan import Plan, decide
from rsup.supervisor.slurm.drain_steps import take
from rsup.supervisor.slurm.drain_terms import Ground, PlanSettings, Step, View
from rsup.supervisor.slurm.drain_words import Answer, Word, answer, outcome
from rsup.supervisor.slurm.gate_watch import BELIEVED_US, TAKEN_UP_US, GatesSeen, GateWatch
from rsup.supervisor.slurm.guard import HOUR_US, Fleet, admit, fleet_of, racks_of
from rsup.supervisor.slurm.node_log import NodeLog, logs_of
from rsup.supervisor.slurm.scheduler import Scontrol
from rsup.supervisor.slurm.scheduler_text import MAX_REASON_CHARS, NodeSeen, read_nodes, read_reservations, reason_text

NOW = 10 * HOUR_US
GUARD = Guard()
FLEET = [f"r{rack}-n{node}" for rack in range(10) for node in range(10)]


def seen(*names: str, state: str = "IDLE", flags: str = "", reason: str = "") -> dict[str, NodeSeen]:
    return {name: NodeSeen(name, state, frozenset(flags.split()), reason, "root", 1) for name in names}


def ground(node: str, may_drain: str = "second", at_us: int = NOW - 5, **fields: object) -> Ground:
    made = Ground("device", f"GPU-{node}", node, "quarantined", "wrong results", True, may_drain, at_us, at_us)
    return replace(made, **fields)


class Story:
    """A fleet over several rounds. The notes of each are remembered, as the store does."""

    def __init__(self, mode: str = "act", guard: Guard = GUARD, **settings: object) -> None:
        self.settings = PlanSettings(mode, **settings)  # type: ignore[arg-type]
        self.guard, self.now_us = guard, NOW
        self.notes: list[DrainNoted] = []
        self.logs: dict[str, NodeLog] = {}
        self.reasons: dict[str, str] = {}
        """What the last steps would have SLURM show."""
        self.watch = GateWatch(NOW)

    def round(self, grounds: list[Ground], nodes: dict[str, NodeSeen] | None, stale: bool = False, **more: object) -> Plan:
        self.now_us += 1000
        admissions = [note for note in self.notes if note.what == "admitted"]
        lately, number = [note.at_us for note in admissions], 1 + max((n.number for n in admissions), default=0)
        view = View(nodes, is_stale=stale, **more)  # type: ignore[arg-type]
        known, gates = ["n0", "n1", "n2"], self.watch.seen()
        plan = decide(grounds, view, self.logs, lately, number, self.settings, self.guard, known, self.now_us, gates)
        self.keep(*plan.notes)
        self.reasons |= {node: step.reason for step in plan.steps for node in step.nodes}
        assert self.logs == {node: log for node, log in plan.logs.items() if node in self.logs or log != NodeLog()}
        return plan

    def keep(self, *notes: DrainNoted) -> None:
        self.notes += notes
        self.logs = logs_of(self.notes)

    def done(self, node: str, what: str) -> None:
        self.now_us += 1000
        self.keep(DrainNoted(node, self.now_us, what, 0, self.reasons.get(node, "rsup:x")))

    def told(self) -> list[tuple[str, str]]:
        return [(note.node, note.what) for note in self.notes]


def kinds(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(step.kind, step.nodes) for step in plan.steps]


# ------------------------------------------------------------------------------------------------------------- the guard


def test_percent_count_rate_and_rack_bound_admissions_each() -> None:
    lots = replace(GUARD, max_fraction=1.0, most_nodes=1000, max_per_hour=1000, max_per_rack=1000)

    def num(guard: Guard, wanted: list[str], eligible: list[str] = FLEET, **more: object) -> int:
        given = {"refused": [], "admitted_us": [], **more}
        refused, admitted_us = frozenset(given["refused"]), given["admitted_us"]  # type: ignore[call-overload]
        fleet = Fleet(frozenset(eligible), refused, frozenset(), len(eligible))
        return len(admit(wanted, fleet, admitted_us, guard, NOW).passed)  # type: ignore[arg-type]

    assert num(lots, FLEET) == 100
    assert num(replace(lots, max_fraction=0.05), FLEET) == 5
    assert num(replace(lots, max_fraction=0.05), FLEET[:10], FLEET[:10]) == 2, "small clusters may lose two"
    assert num(replace(lots, most_nodes=7), FLEET) == 7
    assert num(replace(lots, max_per_hour=4), FLEET) == 4
    hour = [NOW - HOUR_US, NOW - HOUR_US + 1, NOW - 1, NOW + 5]
    assert num(replace(lots, max_per_hour=4), FLEET, admitted_us=hour) == 2, "older ones, and a stepped clock's, do not count"
    assert num(replace(lots, max_per_rack=2), FLEET) == 20
    assert num(replace(lots, max_per_rack=2), FLEET, refused=["r0-n0"]) == 19, "what is admitted already counts, once"
    assert num(lots, ["x"], FLEET) == num(lots, FLEET[:1], []) == num(lots, [], []) == 0, "zero nodes is a usual fleet"
    held = admit(["b", "a"], Fleet(frozenset("abcd"), frozenset("cd"), frozenset("e"), 3), [], lots, NOW)
    assert held.passed == ["b"] and held.is_open and held.max_refused == 3
    assert held.held == {"a": "3 of at most 3 nodes are refused already (3 could be), counting those that come before it"}
    assert held.away == {"e"} and held.num_eligible == 3


def test_names_without_racks_have_no_limit_by_rack() -> None:
    pattern = GUARD.rack_pattern
    assert racks_of(FLEET, pattern)["r3-n7"] == "r3"
    gpus, cpus = [f"gpu-{i:02}" for i in range(1, 61)], [f"cpu-{i:03}" for i in range(100)]
    a100, h100 = [f"a100-{i}" for i in range(9)], [f"h100-{i}" for i in range(9)]
    for names in (["n0", "n1"], [f"gpu-node-{i}" for i in range(500)], ["login"], [], gpus + cpus, a100 + h100 + cpus):
        assert not racks_of(names, pattern)
    assert racks_of([*FLEET, *gpus], pattern) == racks_of(FLEET, pattern) != {}
    assert racks_of([*gpus, *cpus], "^([a-z]+)-")["gpu-07"] == "gpu", "a site's own pattern is taken at its word"


def test_nodes_that_are_out_of_service_anyway_use_up_nothing() -> None:
    nodes = seen("n0", "n1", "n2", "n3") | seen("down", state="DOWN") | seen("off", flags="POWERED_DOWN")
    nodes |= seen("ours", flags="DRAIN", reason="rsup:Q-1 x") | seen("prolog", flags="DRAIN", reason="Prolog error")
    nodes |= seen("boots", state="DOWN", flags="DRAIN REBOOT_ISSUED", reason="rsup:Q-2 x")
    fleet = fleet_of(nodes, {"down", "off", "gone", "ours", "prolog", "boots"})
    assert fleet.refused == {"ours", "prolog", "boots"}, "a drain that a refusal of ours has led to counts on"
    assert fleet.away == {"down", "off", "gone"} and fleet.num_counted == len(fleet.eligible) == 7
    gpus = {name: replace(one, has_gpus=name in ("n0", "n1", "down")) for name, one in nodes.items()}
    assert fleet_of(gpus, set()).num_counted == 2, "CPU nodes are no ground to refuse more GPU nodes"
    assert fleet_of(None, {"x"}, ["y"]).num_counted == 2

    story, against = Story(), [ground("n1"), ground("n2")]
    story.round(against, seen("n0", "n1", "n2", "n3", "n4"))
    plan = story.round([*against, ground("n3")], seen("n0", "n3", "n4") | seen("n1", "n2", state="DOWN", reason="ann: RMA"))
    assert plan.refused.keys() == {"n1", "n2", "n3"} and not plan.admission.held
    assert (plan.admission.num_refused, plan.admission.max_refused) == (1, 2)


# --------------------------------------------------------------------------------------------------------------- the plan


def test_a_node_is_refused_at_once_and_drained_where_the_history_allows_it() -> None:
    story = Story()
    plan = story.round([ground("n1"), ground("n2", may_drain="")], seen("n0", "n1", "n2"))
    assert plan.refused == {"n1": 1, "n2": 2} and kinds(plan) == [("drain", ("n1",))]
    assert plan.steps[0].reason == "rsup:Q-1 GPU-n1 quarantined: wrong results; rsup nodes why n1"
    story.done("n1", "drained")
    ours = seen("n1", flags="DRAIN", reason=story.reasons["n1"]) | seen("n0", "n2")
    assert kinds(story.round([ground("n1"), ground("n2", may_drain="")], ours)) == []
    plan = story.round([ground("n2", may_drain="")], ours)
    assert kinds(plan) == [("undrain", ("n1",))] and plan.refused == {"n2": 2}


def test_each_mode_and_setting() -> None:
    nodes, against = seen("n0", "n1"), [ground("n1")]
    for mode, steps, proposals in (("act", 1, 0), ("propose", 0, 1), ("off", 0, 0)):
        plan = Story(mode).round(against, nodes)
        assert (len(plan.steps), len(plan.proposals), plan.refused) == (steps, proposals, {"n1": 1}), mode
    assert kinds(Story(bad_gpu="refuse").round(against, nodes)) == []
    assert kinds(Story(bad_gpu="refuse").round([ground("n1", kind="node", subject="n1")], nodes)) == [("drain", ("n1",))]
    assert kinds(Story(quarantine_by="reservation").round(against, nodes)) == [("reserve", ("n1",))]
    assert Story().round(against, None).refused == {"n1": 1}, "known nodes stand for SLURM's"
    story = Story()
    story.round(against, nodes)
    assert kinds(story.round(against, nodes, stale=True)) == [], "an old answer is no ground for steps"


def test_nobody_elses_hand_is_overruled() -> None:
    drained = {"flags": "DRAIN", "reason": "ann: dimm"}
    plan = Story().round([ground("n1")], seen("n0", "n2") | seen("n1", **drained))
    assert plan.waiting == {"n1": "IDLE+DRAIN: ann: dimm [root]"} and not plan.steps and not plan.admission.is_open
    for state, flags in (("DOWN", ""), ("FUTURE", ""), ("WONDERFUL", ""), ("IDLE", "POWERED_DOWN")):
        plan = Story().round([ground("n1")], seen("n0") | seen("n1", state=state, flags=flags))
        assert list(plan.waiting) == ["n1"] and not plan.steps, state
    assert kinds(Story().round([ground("n1")], seen("n1", state="ALLOCATED", flags="SHINY"))) == [("drain", ("n1",))]

    story, against = Story(), [ground("n1")]
    story.round(against, seen("n1"))
    story.done("n1", "drained")
    plan = story.round(against, seen("n1"))  # somebody has resumed it
    assert (
        plan.left_alone == {"n1": "somebody else"}
        and not plan.refused
        and story.told()[-2:] == [("n1", "resumed"), ("n1", "cleared")]
    )
    assert not story.round(against, seen("n1")).notes, "said and counted once"
    plan = story.round([ground("n1", at_us=story.now_us + 500)], seen("n1"))
    assert plan.refused == {"n1": 2} and kinds(plan) == [("drain", ("n1",))], "new evidence"

    story = Story()
    story.round(against, seen("n1"))
    story.done("n1", "drained")
    plan = story.round(against, seen("n1"), has_forgotten=True)
    assert kinds(plan) == [("drain", ("n1",))] and not plan.left_alone, "SLURM has lost it with its state"

    story = Story()
    story.round(against, seen("n1"))
    story.done("n1", "drained")
    story.round(against, seen("n1", **drained))  # somebody has put a reason of theirs in its place
    assert story.told()[-1] == ("n1", "yielded")
    assert not kinds(story.round([], seen("n1", **drained))), "theirs to end"
    assert story.round(against, seen("n1")).left_alone, "they have ended it, and with it ours"


def a_drained_node_whose_gate_refuses(mode: str = "", **settings: object) -> tuple[Story, dict[str, NodeSeen]]:
    """n1: it is drained, its gate has the snapshot that refuses it, and the supervisor has seen that."""
    story = Story(**settings)  # type: ignore[arg-type]
    story.round([ground("n1")], seen("n0", "n1"))
    story.done("n1", "drained")
    shown = seen("n0") | seen("n1", flags="DRAIN", reason=story.reasons["n1"])
    if mode:
        story.watch.told("n1", mode, "", story.now_us)
    story.watch.asked("n1", story.now_us, refuses=True)
    story.round([ground("n1")], shown)
    return story, shown


def test_a_release_waits_until_the_gate_there_refuses_no_more() -> None:
    """Its prolog would refuse the first job, and SLURM drain the node for good."""
    story, shown = a_drained_node_whose_gate_refuses()
    for _ in range(2):
        plan = story.round([], shown)
        assert not plan.steps and not plan.refused and list(plan.for_gates) == ["n1"]
    story.watch.told("n1", "enforce", "", story.now_us)  # a word is no question
    story.watch.asked("n1", story.now_us)
    assert not story.round([], shown).steps, "it may be writing what it got"
    story.now_us += TAKEN_UP_US
    plan = story.round([], shown)
    assert kinds(plan) == [("undrain", ("n1",))] and not plan.for_gates and story.told()[-1] == ("n1", "untold")

    story, shown = a_drained_node_whose_gate_refuses("observe")
    assert kinds(story.round([], shown)) == [("undrain", ("n1",))], "it refuses nothing"
    story, shown = a_drained_node_whose_gate_refuses()
    story.settings = PlanSettings("act", "reservation")
    assert not story.round([], shown).steps
    story.logs = {"n1": replace(story.logs["n1"], drained="", reserved=True)}
    plan = decide([], View(seen("n1")), story.logs, [], 2, story.settings, GUARD, [], story.now_us, story.watch.seen())
    assert not plan.steps and list(plan.for_gates) == ["n1"], "a reservation keeps them off as well"


def test_a_release_waits_no_longer_than_a_gate_believes_what_it_has() -> None:
    story, shown = a_drained_node_whose_gate_refuses()
    asked_us = story.watch.seen().gates["n1"].got_us
    assert story.round([], shown).for_gates == {"n1": asked_us + BELIEVED_US}
    story.now_us = asked_us + BELIEVED_US - 5000
    assert not story.round([], shown).steps
    story.now_us = asked_us + BELIEVED_US
    assert kinds(story.round([], shown)) == [("undrain", ("n1",))]
    assert not story.round([], shown).notes, "noted once"

    story, shown = a_drained_node_whose_gate_refuses()  # and over a restart of the supervisor
    story.watch = GateWatch(story.now_us)
    assert not story.round([], shown).steps and GatesSeen().believes_until_us("n1") == BELIEVED_US
    story.now_us += BELIEVED_US
    assert kinds(story.round([], shown)) == [("undrain", ("n1",))]


def test_an_operator_who_undrains_hears_that_the_gate_is_waited_for() -> None:
    story, shown = a_drained_node_whose_gate_refuses()
    word = Word(verb="undrain", nodes=("n1",), reason="fixed", principal="ann")
    told = answer(word, View(shown), story.logs, [], 2, GUARD, "act", "", story.now_us)
    story.keep(*told.notes)
    assert not story.round([ground("n1")], shown).steps
    said = outcome(word, told, story.logs, "")
    assert "SLURM starts none on n1 before the gate there knows of it" in said.message and not said.undone


def test_an_end_of_ours_that_a_crash_kept_from_being_noted_is_nobodys_word() -> None:
    story, against = Story(), [ground("n1")]
    story.round(against, seen("n0", "n1"))
    story.done("n1", "drained")
    assert kinds(story.round([], seen("n0") | seen("n1", flags="DRAIN", reason=story.reasons["n1"]))) == [("undrain", ("n1",))]
    story.round([], seen("n0", "n1"))
    assert story.told()[-1] == ("n1", "undrained") and not story.logs["n1"].left_alone_us


def test_a_drain_that_nobody_could_note_is_taken_up_again_only_with_a_ground() -> None:
    ours = seen("n1", flags="DRAIN", reason="rsup:Q-9 by the gate")
    story = Story()
    story.round([ground("n1")], ours)
    assert ("n1", "drained") in story.told() and kinds(story.round([], ours)) == [("undrain", ("n1",))]
    assert kinds(Story().round([], ours)) == [], "a new and empty store releases nothing"


class FakeScheduler(Scontrol):
    """Shows these nodes, and remembers what it was told."""

    def __init__(self, nodes: dict[str, NodeSeen]) -> None:
        super().__init__("scontrol")
        self.shown, self.told = nodes, list[tuple[str, ...]]()

    def nodes(self, names: Sequence[str] = ()) -> dict[str, NodeSeen]:
        return {name: self.shown[name] for name in names}

    def explain(self, names: Sequence[str], reason: str) -> None:
        self.told.append(("explain", *names, reason))

    def undrain(self, names: Sequence[str]) -> None:
        self.told.append(("undrain", *names))


def test_who_adds_to_our_reason_owns_the_drain() -> None:
    ours, edited = "rsup:Q-1 wrong results", "rsup:Q-1 wrong results; bob: do not touch, RMA"
    logs = {name: NodeLog(number=1, drained=ours) for name in ("n1", "n2", "n3", "n4")}
    shown = seen("n1", flags="DRAIN", reason=ours) | seen("n2", flags="DRAIN", reason=edited)
    shown |= seen("n3", flags="DRAIN", reason=f"{ours} : reboot issued : reboot complete")
    shown |= seen("n4", flags="DRAIN", reason="rsup:Q-1 new")
    scheduler = FakeScheduler(shown)
    notes = take(Step("renew", ("n1", "n2", "n3", "n4"), "rsup:Q-1 new"), scheduler, logs, NOW)
    assert scheduler.told == [("explain", "n1", "n3", "rsup:Q-1 new")], "n4 shows it already: that could not be noted"
    assert [(note.node, note.what, note.reason) for note in notes] == [
        ("n1", "renewed", "rsup:Q-1 new"),
        ("n2", "yielded", edited),
        ("n3", "renewed", "rsup:Q-1 new"),
        ("n4", "renewed", "rsup:Q-1 new"),
    ]
    scheduler.told.clear()
    notes = take(Step("undrain", ("n1", "n2", "n3")), scheduler, logs, NOW)
    assert scheduler.told == [("undrain", "n1", "n3")]
    assert [(note.node, note.what, note.principal) for note in notes][1] == ("n2", "yielded", "root")
    assert not take(Step("undrain", ("n2",)), FakeScheduler(seen("n2")), logs, NOW), "not drained any more"

    story, theirs = Story(), seen("n2", flags="DRAIN", reason=edited)
    story.round([ground("n2")], seen("n0", "n2"))
    story.done("n2", "drained")
    story.keep(DrainNoted("n2", story.now_us + 1, "yielded", 0, edited, "root"))
    for grounds in ([ground("n2")], [ground("n2"), ground("n2", subject="GPU-b")], []):
        plan = story.round(grounds, seen("n0") | theirs)
        assert not kinds(plan) and story.told().count(("n2", "drained")) == 1, "not taken back"
    word = Word(verb="undrain", nodes=("n2",), reason="fixed", principal="ann")
    told = answer(word, View(theirs), story.logs, [], 1, GUARD, "act", "", story.now_us + 2)
    assert [note.what for note in told.notes] == ["drained", "unwanted"], "an operator means what is shown now"
    assert outcome(word, told, story.logs, "").undone == ["n2"], "a drain of somebody else's still stands"


def test_a_node_that_is_gone_from_slurm_is_named_and_not_forgotten() -> None:
    story, against = Story(), [ground("n1")]
    story.round(against, seen("n0", "n1"))
    story.done("n1", "drained")
    plan = story.round(against, seen("n0"))
    assert plan.unknown == ["n1"] and not plan.steps and not plan.left_alone
    assert not story.round(against, seen("n0") | seen("n1", flags="DRAIN", reason="rsup:x")).notes


def test_a_reboot_by_slurm_is_nobodys_word() -> None:
    story, against = Story(), [ground("n1")]

    def look(**node: str) -> Plan:
        return story.round(against, seen("n0") | seen("n1", **node))

    def drained_again() -> None:
        look()
        story.done("n1", "drained")
        look(flags="DRAIN", reason=story.reasons["n1"])

    drained_again()
    look(flags="DRAIN REBOOT_REQUESTED", reason=story.reasons["n1"])
    look(state="DOWN", flags="DRAIN REBOOT_ISSUED", reason="firmware")
    assert [what for _, what in story.told()][-2:] == ["drained", "rebooting"], "its reason is the reboot's, not somebody's"
    plan = look()
    assert kinds(plan) == [("drain", ("n1",))] and not plan.left_alone and story.told()[-1] == ("n1", "undrained")

    drained_again()
    look(state="DOWN", flags="DRAIN REBOOT_ISSUED", reason=story.reasons["n1"])
    assert not kinds(look(flags="DRAIN", reason=story.reasons["n1"])) and story.told()[-1] == ("n1", "rebooted")
    assert look().left_alone == {"n1": "somebody else"}, "a resume after it is a person's"


def test_a_drain_shows_what_counts_now() -> None:
    story, both = Story(), [ground("n1", at_us=NOW - 9), ground("n1", subject="GPU-b")]
    plan = story.round(both[::-1], seen("n0", "n1"))
    assert plan.steps[0].reason == "rsup:Q-1 GPU-n1 quarantined: wrong results (+1); rsup nodes why n1"
    story.done("n1", "drained")
    ours = seen("n0") | seen("n1", flags="DRAIN", reason=story.reasons["n1"])
    assert not kinds(story.round(both, ours))
    plan = story.round(both[1:], ours)
    assert kinds(plan) == [("renew", ("n1",))] and plan.steps[0].reason.startswith("rsup:Q-1 GPU-b quarantined: wrong results;")
    story.done("n1", "renewed")
    assert not kinds(story.round(both[1:], ours)), "once, whatever SLURM makes of it"
    story.settings = PlanSettings("propose")
    assert not story.round(both, ours).proposals, "nothing that a person need do"


def test_one_means_takes_the_place_of_the_other_without_a_gap() -> None:
    story, against = Story(quarantine_by="reservation"), [ground("n1")]
    story.round(against, seen("n0", "n1"), reservations=frozenset())
    story.done("n1", "reserved")
    reserved: dict[str, Any] = {"reservations": frozenset({"rsup_q_n1"})}
    story.settings = PlanSettings("act")
    assert kinds(story.round(against, seen("n0", "n1"), **reserved)) == [("drain", ("n1",))]
    story.done("n1", "drained")
    drained = seen("n0") | seen("n1", flags="DRAIN", reason=story.reasons["n1"])
    (step,) = story.round(against, drained, **reserved).steps
    assert (step.kind, step.why) == ("unreserve", "it is drained in its place")
    story.done("n1", "unreserved")
    story.settings = PlanSettings("act", "reservation")
    assert kinds(story.round(against, drained, reservations=frozenset())) == [("reserve", ("n1",))]
    story.done("n1", "reserved")
    (step,) = story.round(against, drained, **reserved).steps
    assert (step.kind, step.why) == ("undrain", "it is reserved in its place")
    story.done("n1", "undrained")
    (step,) = story.round([], seen("n0", "n1"), **reserved).steps
    assert (step.kind, step.why) == ("unreserve", "nothing counts against it any more")


def test_suspects_come_last_by_a_weight_that_is_taken_back() -> None:
    story, soft = Story(avoid_suspects=True), [ground("n1", refuses=False, may_drain="")]
    plan = story.round(soft, seen("n0", "n1"))
    assert [(step.kind, step.weight) for step in plan.steps] == [("weigh", 1001)] and not plan.refused
    story.keep(DrainNoted("n1", story.now_us + 1, "weighted", 1))
    heavy = {"n1": replace(seen("n1")["n1"], weight=1001)}
    assert not story.round(soft, heavy).steps
    assert [(step.kind, step.weight) for step in story.round([], heavy).steps] == [("unweigh", 1)]
    changed = {"n1": replace(seen("n1")["n1"], weight=7)}
    assert not story.round([], changed).steps and story.told()[-1] == ("n1", "unweighted"), "somebody has changed it"


def test_a_reservation_that_somebody_has_ended_is_left_alone() -> None:
    story, against = Story(quarantine_by="reservation"), [ground("n1")]
    story.round(against, seen("n1"), reservations=frozenset())
    story.done("n1", "reserved")
    assert not story.round(against, seen("n1"), reservations=frozenset({"rsup_q_n1"})).steps
    assert list(story.round(against, seen("n1"), reservations=frozenset()).left_alone) == ["n1"]


def test_releases_pass_a_tripped_guard_and_come_first_in_one_call() -> None:
    story = Story(guard=replace(GUARD, max_per_hour=3))
    names = ("n1", "n2", "n3")
    story.guard = replace(story.guard, max_nodes=3)
    nodes = seen("n0", "n4", *names)
    story.round([ground(name) for name in names], nodes)
    for name in names:
        story.done(name, "drained")
    ours = seen("n0", "n4") | seen(*names, flags="DRAIN", reason="rsup:x")
    plan = story.round([ground("n3"), ground("n4")], ours)
    assert plan.admission.is_open
    assert plan.admission.held["n4"] == "3 nodes were refused within the hour (max_per_hour 3)"
    assert kinds(plan) == [("undrain", ("n1", "n2"))]


# ------------------------------------------------------------------------------------------------------- people, and text


def test_what_an_operator_says_is_done_for_all_nodes_or_none() -> None:
    nodes = seen("n0", "n1", "n2", "n3") | seen("n4", flags="DRAIN", reason="ann: dimm")

    def say(verb: str, *names: str, mode: str = "act", logs: dict[str, NodeLog] | None = None, **more: bool) -> str:
        word = Word(verb=verb, nodes=names, reason="fan", principal="bob", **more)
        told = answer(word, View(nodes), logs or {}, [], 1, GUARD, mode, "", NOW)
        return told.refused or " ".join(f"{note.node}:{note.what}" for note in told.notes)

    assert say("drain", "n1", "n2") == "n1:wanted n2:wanted n1:admitted n2:admitted"
    assert "the guard holds back n2: 2 of at most 2" in say("drain", "n0", "n1", "n2")
    assert say("drain", "n0", "n1", "n2", beyond_guard=True).count("wanted") == 3
    plan = decide(
        [], View(nodes), {n: NodeLog(number=1, wanted="x") for n in ("n1", "n4")}, [], 2, PlanSettings(), GUARD, [], NOW
    )
    assert set(plan.refused) == {"n1", "n4"} and plan.kept_off == {"n4"}, "whoever has drained it"
    assert replace(ground("n1"), subject="GPU-11aa-0000").text.startswith("GPU-11aa-0000 quarantined"), "nothing is cut off"
    assert replace(ground("n1"), subject="GPU-3f2a19bc-1111-2222").text.startswith("GPU-3f2a19bc... quarantined")
    many = Word(verb="drain", nodes=("n0", "n1", "n2"), reason="fan", principal="bob", beyond_guard=True)
    warned = answer(many, View(nodes), {}, [], 1, GUARD, "act", "", NOW).message
    assert "more than half of 5 nodes, which no gate believes: gates refuse 2 of them" in warned
    few = Word(verb="drain", nodes=("n1", "n2"), reason="fan", principal="bob", beyond_guard=True)
    assert answer(few, View(nodes), {}, [], 1, GUARD, "act", "", NOW).message == "n[1-2]: drained"
    assert "node n4 is drained by root: ann: dimm" in say("drain", "n1", "n4")
    assert "not ours to end" in say("undrain", "n4") and "not drained by rsup" in say("undrain", "n1")
    assert "knows no node n9" in say("drain", "n1", "n9") and "drains are off" in say("drain", "n1", mode="off")
    assert say("undrain", "n1", logs={"n1": NodeLog(number=3)}) == "n1:unwanted"
    word = Word(verb="drain", nodes=("n1", "n2"), reason="x", principal="bob")
    told = Answer("", "n[1-2]: drained")
    assert outcome(word, told, {"n1": NodeLog(drained="x"), "n2": NodeLog(reserved=True)}, "") == told
    half = outcome(word, told, {"n1": NodeLog(drained="x")}, "scontrol hangs")
    assert half.undone == ["n2"] and half.message.startswith("n1: drained; n2: not drained: scontrol hangs; it is tried again")
    assert "SLURM does not answer: it hangs" in answer(word, View(), {}, [], 1, GUARD, "act", "it hangs", NOW).refused

    story = Story("propose")
    story.keep(
        *answer(
            Word(verb="drain", nodes=("n1", "n2"), reason="fan", principal="bob"),
            View(nodes),
            {},
            [],
            1,
            GUARD,
            "propose",
            "",
            NOW,
        ).notes
    )
    plan = story.round([], nodes)
    assert kinds(plan) == [("drain", ("n1", "n2"))] and plan.steps[0].reason == "rsup:bob: fan", "in mode propose too"


def test_what_slurm_shows_is_read_with_all_that_is_odd_in_it() -> None:
    when = "2026-11-30T14:46:22"
    lines = [
        f"NodeName=n0 State=IDLE+DRAIN+SHINY Weight=3 Partitions=a,b  Reason=bad [x] State=DOWN y [ann@{when}]",
        f"NodeName=n1 State=DOWN*+NOT_RESPONDING Weight=x Reason=Not responding [slurm@{when}] Comment=mine",
        "NodeName=n2 State=WONDERFUL",
        "NodeName=n3 State=IDLE Weight=1 Comment=ticket 12 Reason=disk swap Weight=7 ",
        f"NodeName=n4 State=IDLE+DRAIN Reason=rsup:Q-1 x [root@{when}] Comment=ticket 12 Reason=disk swap",
        f"NodeName=n5 State=IDLE+DRAIN Comment=ticket 12 Reason=disk swap Reason=dimm [ann@{when}]",
        "Node n9 not found",
        "NodeName= State=IDLE",
    ]
    nodes = read_nodes("\n".join(lines))
    assert list(nodes) == [f"n{index}" for index in range(6)]
    assert (nodes["n3"].reason, nodes["n3"].weight, nodes["n3"].is_eligible) == ("", 1, True), "a comment is no reason"
    assert [(nodes[name].reason, nodes[name].reason_by) for name in ("n4", "n5")] == [("rsup:Q-1 x", "root"), ("dimm", "ann")]
    first = nodes["n0"]
    assert (first.state, first.reason, first.reason_by, first.weight) == ("IDLE", "bad [x] State=DOWN y", "ann", 3)
    assert first.is_drained and first.has_foreign_reason and first.unknown == ["SHINY"] and first.partitions == ("a", "b")
    assert (nodes["n1"].state, nodes["n1"].reason, nodes["n1"].weight) == ("DOWN", "Not responding", None)
    assert not nodes["n2"].is_eligible and nodes["n2"].unknown == ["WONDERFUL"]
    assert read_reservations("ReservationName=rsup_q_n1 Nodes=n1\nReservationName=other Nodes=n2\nNo reservations") == {
        "rsup_q_n1"
    }
    long = reason_text(17, "GPU-1 quarantined: " + "x='\"\n" * 80, "n17")
    assert len(long) <= MAX_REASON_CHARS and long.startswith("rsup:Q-17 GPU-1 ") and long.endswith("; rsup nodes why n17")
    assert not set("\"'=\n") & set(long)
