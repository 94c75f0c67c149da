"""Rerun cases in the job's machine: what a report becomes, what follows when ranks leave for it, what ends in the middle."""

import msgspec
import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import FoundEvidence, Record
from rsup.supervisor.case_followup import MAX_RERUNS, MAX_RESTARTS, MAX_RETURNS
from rsup.supervisor.case_machine import MAX_OPEN
from rsup.supervisor.events import AgentHeard, AgentSilent, DevicesKnown
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.records import CaseSaved
from rsup.supervisor.rendezvous import resumed_job
from rsup.supervisor.states import Phase
from rsup.supervisor.wire import AvoidedDevice, CaseFinding, CaseReport, Device
from tests.core.job_driver import Driver, info, spec

ID = "t1.1-a1-i7"


def nodes(*devices: str, spare: str = "", **fields: object) -> Driver:
    """A job on nodes a, b, ..., whose devices are given, blank-separated; as many ranks as devices but for `+spare`."""
    names = "abcdef"[: len(devices)]
    driver = Driver(spec(min_nodes=len(devices), max_nodes=len(devices), **fields))
    for name, listed in zip(names, devices, strict=True):
        join(driver, name, listed)
    start(driver)
    if spare:
        join(driver, "s", spare)
    return driver


def join(driver: Driver, name: str, listed: str) -> None:
    words = listed.split()
    ranks = sum(not word.startswith("+") for word in words)
    driver.join(name, agent=info(name, num_ranks=ranks, devices=[Device(word.lstrip("+")) for word in words]))


def start(driver: Driver, devices: dict[int, str] | None = None) -> None:
    """Start the attempt; each rank says which device it uses, by default those of its node in order."""
    driver.start()
    for name, agent in driver.state.active:
        for local_rank in range(agent.info.num_ranks):
            rank = agent.first_rank + local_rank
            device = (devices or {}).get(rank, agent.devices[local_rank])
            driver.say(name, wire.DeviceUsed(driver.now().us, driver.state.attempt, rank, device))


def finding(rank: int, device: str, initial: str = "nan", in_place: str = "nan", **fields: object) -> CaseFinding:
    return CaseFinding(rank, device, "loss: NaN", True, initial, in_place, **fields)  # type: ignore[arg-type]


def report(verdict: str = "", action: str = "", rank: int = 1, device: str = "g1", **fields: object) -> CaseReport:
    values: dict[str, object] = {"findings": [finding(rank, device)], "reason": "because", "case_id": ID}
    if action == "elsewhere" and not verdict:
        values["tried"] = {rank: [device]}
    values |= {"iteration": 7, "fatal": True, "verdict": verdict, "action": action, **fields}
    return CaseReport(**values)  # type: ignore[arg-type]


def tell(driver: Driver, told: CaseReport, name: str = "a", attempt: int | None = None) -> None:
    driver.say(name, wire.CaseReported(driver.now().us, driver.state.attempt if attempt is None else attempt, 0, told))


def leave(driver: Driver, code: int, declared: bool = True) -> None:
    """Every rank of the attempt leaves with that code, which it has declared."""
    active = driver.state.active
    for name, agent in active:
        for rank in range(agent.first_rank, agent.first_rank + agent.info.num_ranks):
            driver.exit(name, rank, code, declared=code if declared else 0)
    for name, _ in active:
        driver.gone(name)


def saved(driver: Driver, case_id: str = ID) -> CaseSaved:
    """The case's newest record; every record of it must go to JSON."""
    found = [a.record for a in driver.actions if isinstance(a, Record) and isinstance(a.record, CaseSaved)]
    for one in found:
        msgspec.json.encode([one.findings, one.accused, one.tried, one.data_position, one.placements])
    verdicts = {one.verdict for one in found if one.verdict and one.case_id == case_id}
    assert len(verdicts) <= 1, f"more than one verdict: {verdicts}"
    return [one for one in found if one.case_id == case_id][-1]


def evidence(driver: Driver) -> list[Evidence]:
    return [action.evidence for action in driver.actions if isinstance(action, FoundEvidence)]


def avoided(driver: Driver, name: str) -> list[tuple[int | None, str, bool]]:
    command = driver.last_command(name)
    assert isinstance(command, wire.StartAttempt)
    return [(a.rank, a.device, a.quarantined) for a in command.avoid]


def ended(driver: Driver) -> wire.JobResult:
    assert driver.state.result is not None, driver.state.phase
    return driver.state.result


# ------------------------------------------------------------------------------------------------------------- a report


def test_a_case_is_opened_with_its_numbers_and_closed_once() -> None:
    driver = nodes("g0 g1")
    tell(driver, report(data_position={"consumed_samples": 42}))
    opened = saved(driver)
    assert (opened.verdict, opened.iteration, opened.attempt, opened.closed_us) == ("", 7, 1, None)
    assert opened.data_position == {"consumed_samples": 42} and opened.findings[0]["initial"] == "nan"
    story = next(event for event in driver.events() if event.kind == "CaseOpened")
    assert story.rank == 1 and "iteration 7" in story.text and "rank 1 on g1, loss: NaN: nan" in story.text
    tell(driver, report("transient", "continue", findings=[finding(1, "g1", "nan", "2.25")]))
    closed = saved(driver)
    assert (closed.verdict, closed.action, closed.opened_us) == ("transient", "continue", opened.opened_us)
    assert closed.closed_us is not None and driver.state.cases == [] and driver.state.phase is Phase.RUNNING
    text = next(event for event in driver.events() if event.kind == "CaseVerdict").text
    assert "transient" in text and "nan, then 2.25 in place" in text


def test_a_verdict_is_final() -> None:
    driver = nodes("g0 g1")
    tell(driver, report("application", "skip"))
    told = len(evidence(driver))
    for later in (report("persistent", "elsewhere", accused=["g1"]), report(), report("application", "skip")):
        tell(driver, later)
        assert saved(driver).verdict == "application" and driver.state.cases == []
    assert len(evidence(driver)) == told == 0 and driver.kinds().count("CaseVerdict") == 1
    assert driver.state.avoid == []


def test_the_same_report_again_is_told_once() -> None:
    driver = nodes("g0 g1")
    told = report("persistent", "elsewhere", accused=["g1"])
    for _ in range(3):
        tell(driver, told)
    assert driver.kinds().count("CaseVerdict") == 1 and len(evidence(driver)) == 1


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (report("persistent", "elsewhere", accused=["g1"]), [("g1", "persistent", 1.0)]),
        (report("persistent", "elsewhere", accused=["g1"], data_dependent=True), [("g1", "persistent-data-dependent", 1.0)]),
        (report("persistent", "elsewhere", accused=["g0", "g1"]), [("g0", "persistent", 1.0), ("g1", "persistent", 1.0)]),
        (
            report("persistent", "leave", accused=["g0", "g1"], suspect_of=2),
            [("g0", "suspect-1-of-n", 0.5), ("g1", "suspect-1-of-n", 0.5)],
        ),
        (report("transient", "continue"), [("g1", "transient", 1.0)]),
        (report("corrupted state", "restart", accused=["g0"]), [("g0", "corrupted-state", 1.0)]),
        (report("application", "leave", accused=["g1"]), []),
        (report("undecided", "leave"), []),
        (report("undecided", "leave", accused=["g0", "g1"]), [("g0", "undecided", 0.5), ("g1", "undecided", 0.5)]),
        (report("transient", "continue", fatal=False), []),
    ],
)
def test_what_each_verdict_says_of_devices(told: CaseReport, expected: list[tuple[str, str, float]]) -> None:
    driver = nodes("g0 g1")
    tell(driver, told)
    found = evidence(driver)
    assert [(one.subject, one.code, one.share) for one in found] == expected
    for one in found:
        assert (one.kind, one.source, one.case_id, one.iteration) == ("device", "verdict", ID, 7)
        assert one.is_held and not one.injected and one.episode == "job:local/alice/t1.1" and one.node == "node-a"
        assert told.verdict in one.text and "because" in one.text and "nan" in one.text


def test_a_device_that_the_job_does_not_hold_is_named_and_not_left_out() -> None:
    driver = nodes("g0 g1")
    tell(driver, report("persistent", "continue", accused=["elsewhere-7"], injected=True))
    (one,) = evidence(driver)
    assert (one.subject, one.is_held, one.injected) == ("elsewhere-7", False, True)
    assert driver.state.avoid == []


def test_a_cpu_stand_in_speaks_for_its_node_too() -> None:
    driver = nodes("CPU-boot-0 CPU-boot-1")
    tell(driver, report("persistent", "continue", device="CPU-boot-1", accused=["CPU-boot-1"]))
    assert [(one.kind, one.subject) for one in evidence(driver)] == [("device", "CPU-boot-1"), ("node", "node-a")]


@pytest.mark.parametrize(
    "told", [report("perhaps"), report("", "dance"), report(case_id=""), report(case_id="x" * 400), report("transient", "wait")]
)
def test_a_report_that_means_nothing_decides_nothing(told: CaseReport) -> None:
    driver = nodes("g0 g1")
    before = driver.state
    tell(driver, told)
    assert driver.state.cases == [] and driver.state.phase is before.phase and not evidence(driver)
    assert driver.events()[-1].level == "warning" and "cannot be used" in driver.events()[-1].text


def test_the_number_of_open_cases_is_bounded() -> None:
    driver = nodes("g0 g1")
    for number in range(MAX_OPEN + 3):
        tell(driver, report(case_id=f"c{number}"))
    assert len(driver.state.cases) == MAX_OPEN
    assert saved(driver, "c0").verdict == "undecided" and saved(driver, f"c{MAX_OPEN + 2}").verdict == ""


def test_a_late_verdict_is_kept_and_decides_nothing() -> None:
    """A fenced agent's spool: its report is of an attempt that is over."""
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=3))
    leave(driver, 1, declared=False)
    start(driver)
    tell(driver, report("persistent", "elsewhere", accused=["g1"]), attempt=1)
    assert saved(driver).verdict == "persistent" and [one.subject for one in evidence(driver)] == ["g1"]
    assert driver.state.phase is Phase.RUNNING and driver.state.cases == []
    assert "decides nothing" in driver.events()[-1].text
    leave(driver, 16)
    assert ended(driver).exit_code == 16 and "left on purpose" in ended(driver).reason


# ----------------------------------------------------------------------------------------------- ranks leave for a case


def test_an_open_case_goes_to_another_device_of_the_node() -> None:
    driver = nodes("g0 g1 +g2")
    tell(driver, report())
    tell(driver, report("", "elsewhere", checkpoint="/ckpt/6"))
    leave(driver, 16)
    assert driver.state.attempt == 2 and driver.state.budget.restarts == 0
    assert driver.state.free_restarts == 1
    start(driver, {1: "g2"})
    assert avoided(driver, "a") == [(1, "g1", False)]
    assert saved(driver).placements == [
        {**saved(driver).placements[0], "attempt": 2, "rank": 1, "from": "g1", "to": "g2", "how": "another device of its node"}
    ]
    kinds = driver.kinds()
    assert kinds.index("CaseElsewhere") < kinds.index("CaseMoved") < kinds.index("CasePlaced")
    incident = driver.incidents()[-1]
    assert (incident.rank, incident.device, incident.iteration) == (1, "g1", 7)
    tell(driver, report("persistent", "continue", accused=["g1"], findings=[finding(1, "g1", elsewhere="2.5")]))
    assert driver.state.phase is Phase.RUNNING and saved(driver).verdict == "persistent"
    assert [(a.rank, a.device, a.quarantined) for a in driver.state.avoid] == [(None, "g1", True)]


def test_after_a_persistent_verdict_the_job_goes_on_without_the_device() -> None:
    driver = nodes("g0 g1 +g2")
    tell(driver, report("persistent", "elsewhere", accused=["g1"]))
    leave(driver, 16)
    assert driver.state.attempt == 2 and driver.state.budget.restarts == 0
    start(driver)
    assert avoided(driver, "a") == [(None, "g1", True)] and driver.state.cases == []


def test_without_another_device_the_job_ends_and_names_the_node() -> None:
    driver = nodes("g0", "g1", policy=wire.RestartPolicy(max_restarts=3))
    tell(driver, report("persistent", "elsewhere", accused=["g1"]))
    leave(driver, 16)
    assert ended(driver).exit_code == 16 and "exclude node node-b and resume" in ended(driver).reason
    assert f"rsup cases show {ID}" in ended(driver).reason


def test_a_spare_node_takes_the_place_of_one_with_a_bad_device() -> None:
    driver = nodes("g0", "g1", spare="g2")
    tell(driver, report("persistent", "elsewhere", accused=["g1"]))
    leave(driver, 16)
    assert [name for name, _ in driver.state.active] == ["a", "s"] and driver.commands("b")[-1] == "Park"


def test_nodes_change_places_for_a_replay() -> None:
    driver = nodes("g0", "g1")
    tell(driver, report("", "elsewhere"))
    leave(driver, 16)
    assert [name for name, _ in driver.state.active] == ["b", "a"]
    start(driver)
    assert avoided(driver, "a") == [(1, "g1", False)] and saved(driver).placements[0]["how"] == "node node-a"
    tell(driver, report("persistent", "elsewhere", accused=["g1"]))
    leave(driver, 16)
    assert ended(driver).exit_code == 16 and "exclude node node-b" in ended(driver).reason


def test_a_spare_that_the_history_has_quarantined_is_no_second_device() -> None:
    driver = nodes("g0 +g1", "g2 +g3")
    for name, spare in (("a", "g1"), ("b", "g3")):
        driver.feed(DevicesKnown(name, [AvoidedDevice(spare, "quarantined", quarantined=True)]))
    tell(driver, report("", "elsewhere", device="g2"))
    leave(driver, 16)
    assert [name for name, _ in driver.state.active] == ["b", "a"], "not to g3, which its agent would not take"
    start(driver)
    assert avoided(driver, "a") == [(1, "g2", False), (None, "g1", True)]


def test_several_ranks_are_moved_at_once() -> None:
    driver = nodes("g0 g1 +g4", "g2 g3 +g5")
    both = report("", "elsewhere", tried={1: ["g1"], 2: ["g2"]}, findings=[finding(1, "g1"), finding(2, "g2")])
    tell(driver, both)
    leave(driver, 16)
    driver.start()
    assert avoided(driver, "a") == [(1, "g1", False)] and avoided(driver, "b") == [(2, "g2", False)]


def test_no_second_device_ends_16_and_a_resumed_launch_places_the_rank_elsewhere() -> None:
    driver = nodes("g0")
    tell(driver, report("", "elsewhere", rank=0, device="g0"))
    leave(driver, 16)
    assert ended(driver).exit_code == 16 and "no other device for rank 0" in ended(driver).reason
    assert "exclude node node-a" in ended(driver).reason and saved(driver).verdict == "", "open for --resume"
    driver.state = resumed_job(driver.state, spec(min_nodes=2, max_nodes=2, resume=True), driver.now())
    driver.spec = driver.state.spec
    join(driver, "n", "g0")
    join(driver, "m", "g7")
    assert [name for name, _ in driver.state.active] == ["m", "n"], "the order of joining would bring rank 0 back to g0"
    start(driver)
    assert saved(driver).placements[-1]["to"] == "g7"
    tell(driver, report("persistent", "continue", rank=0, device="g0", accused=["g0"]), name="m")
    assert saved(driver).verdict == "persistent" and evidence(driver)[-1].is_held


def test_returns_to_the_same_device_have_a_cap() -> None:
    """The agent may not move what it cannot name; a requeued job may come back to the node. Nobody has a second device."""
    driver = nodes("g0 +g1")
    for number in range(MAX_RETURNS):
        tell(driver, report("", "elsewhere", rank=0, device="g0"))
        leave(driver, 16)
        if driver.state.phase is Phase.ENDED:
            assert ended(driver).exit_code == 16 and number
            driver.state = resumed_job(driver.state, spec(resume=True), driver.now())
            join(driver, f"a{number}", "g0 +g1")
        start(driver, {0: "g0"})
    assert driver.kinds().count("CasePlaced") == MAX_RETURNS
    tell(driver, report("", "elsewhere", rank=0, device="g0"), name=driver.state.active[0][0])
    leave(driver, 16)
    assert ended(driver).exit_code == 17 and "no second device" in ended(driver).reason
    assert saved(driver).verdict == "undecided" and "no second device" in saved(driver).reason
    assert evidence(driver) == []


def test_reruns_of_a_case_have_a_cap() -> None:
    driver = nodes(" ".join(["g0", *(f"+g{i}" for i in range(1, 9))]))
    for number in range(MAX_RERUNS):
        tell(driver, report("", "elsewhere", rank=0, device=f"g{number}"))
        leave(driver, 16)
        start(driver, {0: f"g{number + 1}"})
    assert [a.device for a in driver.state.cases[0].avoid] == [f"g{i}" for i in range(MAX_RERUNS)]
    tell(driver, report("", "elsewhere", rank=0, device=f"g{MAX_RERUNS}"))
    leave(driver, 16)
    assert ended(driver).exit_code == 16 and f"{MAX_RERUNS} reruns" in ended(driver).reason and saved(driver).verdict == ""


def test_reruns_are_counted_though_no_rank_says_where_it_is() -> None:
    driver = nodes("g0 +g1")
    for _ in range(MAX_RERUNS):
        tell(driver, report("", "elsewhere", rank=0, device="g0"))
        leave(driver, 16)
        driver.start()
    tell(driver, report("", "elsewhere", rank=0, device="g0"))
    leave(driver, 16)
    assert ended(driver).exit_code == 16 and f"{MAX_RERUNS} reruns" in ended(driver).reason


def test_a_start_that_was_given_up_is_no_rerun() -> None:
    driver = nodes("g0 +g1", "g2 +g3")
    tell(driver, report("", "elsewhere", device="g2"))
    leave(driver, 16)
    driver.feed(AgentSilent("b", 20.0))
    assert driver.state.phase is Phase.FORMING and "StartAbandoned" in driver.kinds()
    driver.feed(AgentHeard("b", driver.state.epoch, 0))
    assert driver.state.attempt == 3
    start(driver, {1: "g3"})
    assert [(one["attempt"], one["to"]) for one in saved(driver).placements] == [(3, "g3")]
    assert driver.state.cases[0].num_reruns == 1


def test_an_accused_device_that_cannot_be_left_out_ends_the_job() -> None:
    driver = nodes("g0 g1 +g2")
    tell(driver, report("persistent", "elsewhere", accused=["g1"]))
    leave(driver, 16)
    start(driver)
    tell(driver, report("persistent", "elsewhere", accused=["g1"], case_id="again"))
    leave(driver, 16)
    assert ended(driver).exit_code == 16 and "no device in place of g1" in ended(driver).reason


@pytest.mark.parametrize("verdict", ["corrupted state", "transient"])
def test_restarts_from_the_last_checkpoint_are_free_and_capped(verdict: str) -> None:
    driver = nodes("g0 g1")
    for number in range(MAX_RESTARTS):
        tell(driver, report(verdict, "restart", accused=["g0"], case_id=f"c{number}"))
        leave(driver, 17)
        assert driver.state.attempt == number + 2 and driver.state.budget.restarts == 0
        start(driver)
    tell(driver, report(verdict, "restart", accused=["g0"], case_id="last"))
    leave(driver, 17)
    assert ended(driver).exit_code == 17 and f"{MAX_RESTARTS} restarts for cases" in ended(driver).reason


def test_a_newer_checkpoint_refills_the_restarts_for_cases() -> None:
    driver = nodes("g0 g1")
    for number in range(MAX_RESTARTS + 2):
        driver.say("a", wire.CheckpointCommitted(driver.now().us, driver.state.attempt, 10 * number, "/c"))
        tell(driver, report("transient", "restart", case_id=f"c{number}", iteration=10 * number + 3))
        leave(driver, 17)
        start(driver)
    assert driver.state.attempt == MAX_RESTARTS + 3


def test_leave_ends_17_with_the_verdict_and_the_command_that_tells_more() -> None:
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=3))
    tell(driver, report("application", "leave"))
    leave(driver, 17)
    result = ended(driver)
    assert result.exit_code == 17 and "application" in result.reason and f"rsup cases show {ID}" in result.reason
    assert result.rank == 1


@pytest.mark.parametrize("code", [16, 17])
def test_a_declared_exit_without_a_report_stays_what_it_was(code: int) -> None:
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=3))
    tell(driver, report("transient", "continue"))
    leave(driver, code)
    assert ended(driver).exit_code == code and "left on purpose" in ended(driver).reason


def test_an_undeclared_exit_does_not_count_for_the_case() -> None:
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=1))
    tell(driver, report("persistent", "elsewhere", accused=["g0"]))
    leave(driver, 16, declared=False)
    assert (driver.state.budget.restarts, driver.state.free_restarts) == (1, 0)


def test_a_peer_that_breaks_while_others_leave_costs_nothing() -> None:
    driver = nodes("g0 g1 +g2")
    tell(driver, report("", "elsewhere"))
    driver.exit("a", 0, 1, error="RuntimeError: Connection closed by peer")
    driver.exit("a", 1, 16, declared=16)
    driver.gone("a")
    assert driver.state.attempt == 2 and driver.state.budget.restarts == 0


# ------------------------------------------------------------------------------------------------ ends in the middle


def test_a_rank_killed_in_the_middle_closes_the_case_undecided() -> None:
    driver = nodes("g0 g1", policy=wire.RestartPolicy(max_restarts=1))
    tell(driver, report())
    driver.exit("a", 1, 137, signal=9)
    driver.exit("a", 0, 143, signal=15, by_us="attempt 1 has failed")
    driver.gone("a")
    assert driver.state.attempt == 2 and driver.state.cases == []
    assert (
        saved(driver).verdict == "undecided" and "SIGKILL" in saved(driver).reason and "in the middle" in saved(driver).reason
    )
    assert [one for one in evidence(driver) if one.source == "verdict"] == []
    start(driver)
    tell(driver, report("persistent", "elsewhere", accused=["g1"]))
    assert saved(driver).verdict == "undecided", "final, whoever gave it"


@pytest.mark.parametrize(("durable", "goes_on"), [(6, True), (3, False)])
def test_a_due_rerun_survives_another_failure_if_its_checkpoint_does(durable: int, goes_on: bool) -> None:
    driver = nodes("g0 g1 +g2", policy=wire.RestartPolicy(max_restarts=1))
    tell(driver, report("", "elsewhere"))
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, durable, "/c"))
    leave(driver, 9, declared=False)
    assert driver.state.budget.restarts == 1
    start(driver)
    assert avoided(driver, "a") == ([(1, "g1", False)] if goes_on else [])
    assert saved(driver).verdict == ("" if goes_on else "undecided")


def test_a_rerun_that_fails_otherwise_is_still_due() -> None:
    driver = nodes("g0 g1 +g2", policy=wire.RestartPolicy(max_restarts=1))
    tell(driver, report("", "elsewhere"))
    leave(driver, 16)
    start(driver, {1: "g2"})
    leave(driver, 9, declared=False)
    start(driver, {1: "g2"})
    assert avoided(driver, "a") == [(1, "g1", False)]
    assert [one["to"] for one in saved(driver).placements] == ["g2", "g2"]
    tell(driver, report("application", "skip"))
    assert saved(driver).verdict == "application"


def test_training_that_goes_past_a_case_closes_it() -> None:
    driver = nodes("g0 g1 +g2", policy=wire.RestartPolicy(max_restarts=1))
    tell(driver, report("", "elsewhere"))
    leave(driver, 16)
    start(driver, {1: "g2"})
    driver.beat("a", 20)
    leave(driver, 9, declared=False)
    assert saved(driver).verdict == "undecided" and "went past iteration 7" in saved(driver).reason


@pytest.mark.parametrize(("action", "code", "verdict"), [("", 137, "undecided"), ("elsewhere", 137, ""), ("", 0, "undecided")])
def test_the_jobs_end_closes_what_no_checkpoint_holds(action: str, code: int, verdict: str) -> None:
    driver = nodes("g0 g1")
    tell(driver, report("", action))
    for rank in (0, 1):
        driver.exit("a", rank, code, signal=9 if code else 0)
    driver.gone("a")
    assert driver.state.phase is Phase.ENDED and saved(driver).verdict == verdict


def test_a_verdict_out_of_a_dead_agents_spool_is_stored_before_its_death_is_told() -> None:
    driver = nodes("g0", "g1", policy=wire.RestartPolicy(max_restarts=1))
    tell(driver, report(), name="b")
    tell(driver, report("persistent", "elsewhere", accused=["g1"]), name="b")
    driver.say("b", wire.AgentGone(driver.now().us, "killed"))
    assert saved(driver).verdict == "persistent" and len(evidence(driver)) == 1


def test_a_durable_checkpoint_of_a_later_iteration_closes_what_nobody_decided() -> None:
    """A checkpoint resumed with other ranks, or training that goes on without the case: it must not stay open for ever."""
    driver = nodes("g0 g1 +g2", "g4", policy=wire.RestartPolicy(max_restarts=1))
    tell(driver, report("", "elsewhere"))
    leave(driver, 16)
    start(driver, {1: "g2"})
    for iteration in (6, 7):
        driver.say("a", wire.CheckpointCommitted(driver.now().us, 2, iteration, "/c"))
        assert saved(driver).verdict == ""
    driver.feed(AgentSilent("b", 20.0))
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 2, 8, "/c"))
    assert saved(driver).verdict == "", "the verdict may be on a node that is cut off"
    driver.feed(AgentHeard("b", driver.state.epoch, 0))
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 2, 9, "/c"))
    assert (saved(driver).verdict, driver.state.cases, driver.state.phase) == ("undecided", [], Phase.RUNNING)
    assert "went past iteration 7 (a checkpoint of iteration 9 is durable)" in saved(driver).reason
