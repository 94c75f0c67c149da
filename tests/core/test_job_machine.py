"""The job's machine as tables: what each (phase, event or fact) does, and the ways through a job."""

import itertools
import typing

import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import AnswerOperator, FoundEvidence, SendNotice, SendOrder, SendRefusal, SendWelcome
from rsup.supervisor.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentSilent,
    Event,
    FactArrived,
    OperatorAsked,
    Recovered,
    StartedAgain,
    Tick,
)
from rsup.supervisor.job_machine import EVENTS, FACTS
from rsup.supervisor.records import GIVEN_UP, AttemptSaved, RankSaved
from rsup.supervisor.states import Phase, Role
from tests.core.job_driver import Driver, hello, info, spec

FACT_KINDS = typing.get_args(wire.AnyFact)
ONE_RESTART = wire.RestartPolicy(max_restarts=1)
COUNT_3 = wire.RestartPolicy(max_restarts=3)
CASE = wire.CaseReport("t1.1-a1-i7", 7, True, [wire.CaseFinding(0, "GPU-1", "loss", True, "nan", "nan")])

SERIES = {"lm loss": [wire.MetricBin.of(7, 1, 56, 2.5)]}
SILENT_WHEN_LATE = (wire.MetricsReported, wire.StragglersReported)
"""Too frequent for a line each."""


def in_phase(phase: Phase) -> Driver:
    """A job of two nodes and a spare, in that phase."""
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=wire.RestartPolicy(max_restarts=3, backoff_first_s=2.0)))
    if phase is Phase.FORMING:
        driver.join("a")
        return driver
    driver.join("a")
    driver.join("b")
    driver.join("c")
    if phase is Phase.STARTING:
        return driver
    driver.start()
    if phase is Phase.COLLECTING:
        driver.say("a", wire.RankOverdue(0, 1, 0, "step", 3.1, 3.0))
    elif phase in (Phase.STOPPING, Phase.WAITING):
        driver.exit("a", 0, 1)
        if phase is Phase.WAITING:
            driver.gone("a")
            driver.gone("b")
    elif phase is Phase.ENDED:
        for name, rank in (("a", 0), ("a", 1), ("b", 2), ("b", 3)):
            driver.exit(name, rank, 0)
    assert driver.state.phase is phase
    return driver


def some_fact(kind: type[wire.Fact], attempt: int) -> wire.AnyFact:
    values = {
        wire.StoreBound: {"attempt": attempt, "host": "h", "port": 1},
        wire.StartFailed: {"attempt": attempt, "message": "no"},
        wire.AttemptStarted: {"attempt": attempt, "pids": [1, 2]},
        wire.RankExited: {"attempt": attempt, "rank": 0, "exit_code": 1},
        wire.RanksGone: {"attempt": attempt},
        wire.RankOverdue: {"attempt": attempt, "rank": 0, "limit": "step", "age_s": 2.0, "limit_s": 1.0},
        wire.StacksTaken: {"attempt": attempt, "stacks": []},
        wire.SectionsObserved: {"attempt": attempt, "sections": {"step": wire.SectionSeen(0.1, 20)}},
        wire.CheckpointCommitted: {"attempt": attempt, "iteration": 5, "path": "/c"},
        wire.DeviceUsed: {"attempt": attempt, "rank": 0, "uuid": "GPU-1"},
        wire.ResumedFrom: {"attempt": attempt, "iteration": 5, "path": "/c"},
        wire.EntryBegun: {"attempt": attempt, "rank": 0, "entry": 1},
        wire.RankFaulted: {"attempt": attempt, "rank": 0, "entry": 1, "kind": "exception", "text": "ValueError: no"},
        wire.SaveSeen: {"attempt": attempt, "iteration": 5, "stage": "local"},
        wire.RankLeaves: {"attempt": attempt, "iteration": 5, "kind": "interval", "reason": "enough", "durable": True},
        wire.LimitsLoaded: {"attempt": attempt, "limits": wire.Limits(sections={"step": 3.0}, calculated=["step"])},
        wire.LimitsSet: {"attempt": attempt, "rank": 0, "change": wire.LimitsChange(sections={"step": 3.0})},
        wire.WorkloadControl: {"attempt": attempt, "rank": 0, "action": "exclude", "description": "hot"},
        wire.CaseReported: {"attempt": attempt, "rank": 0, "report": CASE},
        wire.MetricsReported: {"attempt": attempt, "rank": 0, "kind": "training", "series": SERIES},
        wire.StragglersReported: {"attempt": attempt, "rank": 0, "report": wire.StragglerReport(1, 10, 4)},
        wire.HealthSeen: {"readings": [wire.HealthReading("GPU-1", "xid", "63")], "boot_id": "boot"},
        wire.SignalReceived: {"signal": 15},
        wire.RequestDone: {"request_id": "r", "done": True},
        wire.Note: {"level": "info", "text": "hello"},
        wire.NodeLost: {"node": "b", "reason": "SLURM says so"},
        wire.AgentGone: {"reason": "dead"},
    }[kind]
    return kind(at_us=1, **values)  # type: ignore[return-value]


def test_the_table_has_a_row_for_every_fact_and_a_cell_for_every_phase() -> None:
    assert set(FACTS) == set(FACT_KINDS)
    assert all(set(row) == set(Phase) for row in FACTS.values())
    assert set(EVENTS) == set(typing.get_args(Event))


@pytest.mark.parametrize(("phase", "kind"), list(itertools.product(Phase, FACT_KINDS)))
def test_every_fact_in_every_phase_is_applied_once(phase: Phase, kind: type[wire.Fact]) -> None:
    driver = in_phase(phase)
    fact = some_fact(kind, driver.state.attempt)
    acked = driver.state.agents["a"].acked_fact
    driver.say("a", fact)
    after = driver.state
    assert after.agents["a"].acked_fact == acked + 1
    numbers = [event.number for event in driver.events()]
    assert numbers == list(range(1, len(numbers) + 1)) and after.num_events == len(numbers)
    assert driver.feed(FactArrived("a", acked + 1, fact)) == [] and driver.state == after, "a repeat changes nothing"
    assert driver.feed(FactArrived("a", acked + 3, fact)) == [] and driver.state == after, "nor does one after a gap"


@pytest.mark.parametrize(("phase", "kind"), list(itertools.product(Phase, FACT_KINDS)))
def test_a_fact_of_an_old_attempt_decides_nothing(phase: Phase, kind: type[wire.Fact]) -> None:
    driver = in_phase(phase)
    if "attempt" not in kind.__struct_fields__:
        return
    before = driver.state
    driver.say("a", some_fact(kind, before.attempt + 7 if kind is not wire.RanksGone else before.attempt - 1))
    assert driver.state.phase is before.phase
    assert [a.outbox for a in driver.state.agents.values()] == [a.outbox for a in before.agents.values()]
    assert driver.state.checkpoint == before.checkpoint
    if kind in SILENT_WHEN_LATE:
        assert driver.state.num_events == before.num_events
    elif kind is not wire.RanksGone:
        assert driver.events()[-1].level == "warning" and "decides nothing" in driver.events()[-1].text


OTHER_EVENTS: list[Event] = [
    AgentJoined(hello("a", spec(min_nodes=2, max_nodes=2))),
    AgentJoined(hello("new", spec(min_nodes=2, max_nodes=2))),
    AgentHeard("a", 1, 0),
    AgentHeard("nobody", 1, 0),
    AgentSilent("a", 20.0),
    AgentLeft("a"),
    AgentLeft("nobody"),
    StartedAgain("SLURM"),
    Tick(),
    Recovered("x"),
    OperatorAsked("stop", "alice", "", "r1"),
    OperatorAsked("checkpoint", "alice", "", "r2"),
    OperatorAsked("fence", "alice", "", "r3"),
    OperatorAsked("stragglers-on", "alice", "", "r4"),
    OperatorAsked("dance", "alice", "", "r4"),
]


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, OTHER_EVENTS)))
def test_every_event_in_every_phase_leaves_a_sound_state(phase: Phase, event: Event) -> None:
    driver = in_phase(phase)
    driver.feed(event)
    numbers = [logged.number for logged in driver.events()]
    assert numbers == list(range(1, len(numbers) + 1)) == list(range(1, driver.state.num_events + 1))
    assert all(logged.text and logged.kind for logged in driver.events())
    for agent in driver.state.agents.values():
        assert all(command.reason for command in agent.outbox)
        first = agent.last_command - len(agent.outbox) + 1
        assert [command.sequence for command in agent.outbox] == list(range(first, agent.last_command + 1))


ENDINGS = [
    # phase, event, phase after, exit code after
    (Phase.FORMING, OperatorAsked("stop", "alice", "", "r"), Phase.ENDED, 143),
    (Phase.STARTING, OperatorAsked("stop", "alice", "", "r"), Phase.ENDED, 143),
    (Phase.RUNNING, OperatorAsked("stop", "alice", "", "r"), Phase.STOPPING, None),
    (Phase.COLLECTING, OperatorAsked("stop", "alice", "", "r"), Phase.STOPPING, None),
    (Phase.STOPPING, OperatorAsked("stop", "alice", "", "r"), Phase.STOPPING, None),
    (Phase.WAITING, OperatorAsked("stop", "alice", "", "r"), Phase.ENDED, 143),
    (Phase.RUNNING, AgentSilent("a", 20.0), Phase.RUNNING, None),
    (Phase.STARTING, AgentSilent("a", 20.0), Phase.STARTING, None),  # goes on with the spare
    (Phase.STARTING, AgentLeft("a"), Phase.STARTING, None),
    (Phase.RUNNING, AgentLeft("a"), Phase.STOPPING, None),
    (Phase.FORMING, StartedAgain("SLURM"), Phase.ENDED, 143),
    (Phase.RUNNING, StartedAgain("SLURM"), Phase.ENDED, 143),
    (Phase.STOPPING, StartedAgain("SLURM"), Phase.ENDED, 143),
    (Phase.COLLECTING, AgentLeft("a"), Phase.STOPPING, None),
    (Phase.RUNNING, AgentLeft("c"), Phase.RUNNING, None),
]


@pytest.mark.parametrize(("phase", "event", "after", "exit_code"), ENDINGS)
def test_where_an_event_leads(phase: Phase, event: Event, after: Phase, exit_code: int | None) -> None:
    driver = in_phase(phase)
    driver.feed(event)
    assert driver.state.phase is after
    assert (driver.state.result.exit_code if driver.state.result else None) == exit_code


# ------------------------------------------------------------------------------------------------------ ways through a job


def test_one_node_runs_and_succeeds() -> None:
    driver = Driver(spec())
    assert any(isinstance(action, SendWelcome) for action in driver.join("a"))
    assert driver.commands("a") == ["HostStore"] and driver.state.epoch == 1
    driver.start()
    start = driver.last_command("a")
    assert isinstance(start, wire.StartAttempt)
    assert (start.world_size, start.first_rank, start.num_ranks, start.master_addr, start.epoch) == (2, 0, 2, "host", 1)
    driver.exit("a", 0, 0)
    assert driver.state.phase is Phase.RUNNING, "a rank that is done while others run is normal"
    driver.exit("a", 1, 0)
    end = driver.last_command("a")
    assert isinstance(end, wire.EndJob) and (end.result.exit_code, end.report) == (0, "")
    assert driver.incidents() == []


def test_a_failure_anywhere_stops_all_and_the_next_attempt_waits_for_every_rank() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=ONE_RESTART, stop_grace_s=7.0)).run_nodes("a", "b")
    actions = driver.exit("b", 3, 137, signal=9, iteration=25, section="step")
    assert [a.agent_id for a in actions if isinstance(a, SendOrder)] == ["a", "b"]
    stop = driver.last_command("a")
    assert isinstance(stop, wire.StopAttempt) and stop.grace_s == 7.0
    driver.gone("b")
    assert driver.state.phase is Phase.STOPPING, "a's ranks may be alive"
    driver.exit("a", 0, 143, signal=15, by_us="the attempt has failed")
    driver.exit("a", 1, 143, signal=15, by_us="the attempt has failed")
    driver.gone("a")
    assert (driver.state.phase, driver.state.attempt, driver.state.epoch) == (Phase.STARTING, 2, 2)
    (incident,) = driver.incidents()
    assert (incident.kind, incident.rank, incident.signal_name, incident.iteration) == ("signal", 3, "SIGKILL", 25)
    driver.start()
    again = driver.exit("b", 3, 3, error="ValueError: x")
    del again
    driver.exit("a", 0, 0, by_us="the attempt has failed")
    driver.exit("a", 1, 143, signal=15, by_us="the attempt has failed")
    driver.gone("a")
    driver.gone("b")
    assert driver.state.result and driver.state.result.exit_code == 3
    assert "all 1 restarts of --max-restarts are used" in driver.state.reason
    end = driver.last_command("a")
    assert isinstance(end, wire.EndJob) and "ValueError: x" in end.report
    assert "\n  1 rank was ended by us after that\n  1 rank left by itself (exit 0) after we asked it to end\n" in end.report


def test_the_first_mover_is_named_although_a_victim_was_heard_first() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")
    driver.exit("a", 0, 1, error="RuntimeError: Connection closed by peer [10.0.0.2]:4711")
    driver.exit("b", 2, 5, error="ValueError: bad batch")
    driver.gone("a")
    driver.gone("b")
    (incident,) = driver.incidents()
    assert (incident.rank, incident.exit_code, incident.victims) == (2, 5, [0])
    assert driver.state.result and (driver.state.result.exit_code, driver.state.result.rank) == (5, 2)


PEER_ERROR = "RuntimeError: Connection closed by peer [10.0.0.2]:4711"


@pytest.mark.parametrize("how", ["keeper", "fenced"])
def test_a_node_that_died_is_blamed_although_its_victims_were_heard_first(how: str) -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=ONE_RESTART)).run_nodes("a", "b")
    driver.exit("a", 0, 1, error=PEER_ERROR)
    driver.exit("a", 1, 1, error=PEER_ERROR)
    driver.gone("a")
    assert driver.state.phase is Phase.STOPPING
    if how == "keeper":
        driver.say("b", wire.AgentGone(0, "its launcher was killed"))
    else:
        driver.feed(AgentSilent("b", 16.0))
        driver.feed(OperatorAsked("fence", "root", "", "r", "node-b"))
    (incident,) = driver.incidents()
    assert (incident.kind, incident.rank, incident.node, incident.exit_code) == ("agent-lost", None, "node-b", None)
    assert "node-b is out" in incident.text and incident.victims == [0, 1]
    failure = driver.state.failure
    assert failure and (failure.kind, failure.exit_code, failure.node) == ("agent-lost", 1, "node-b")
    assert [e.node for e in driver.events() if e.kind == "FirstMover"] == ["node-b"]
    assert driver.state.current and driver.state.current.outcome == "lost"


@pytest.mark.parametrize("case", ["another error", "ranks seen to end"])
def test_a_node_that_went_later_is_not_blamed(case: str) -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")
    driver.exit("a", 0, 5, error="ValueError: bad batch" if case == "another error" else PEER_ERROR)
    driver.gone("a")
    if case == "ranks seen to end":
        driver.gone("b")
    driver.say("b", wire.AgentGone(0, "dead"))
    assert [(incident.kind, incident.rank) for incident in driver.incidents()] == [("exit", 0)]


def test_launchers_that_left_while_a_decision_was_due_make_the_job_88() -> None:
    driver = Driver(spec(policy=COUNT_3)).run_nodes("a")
    driver.exit("a", 0, 7)
    driver.feed(AgentLeft("a"))
    assert driver.state.result and driver.state.result.exit_code == wire.EXIT_REQUEUE


def test_requests_say_whom_they_ask_and_what_became_of_them() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")
    driver.feed(OperatorAsked("checkpoint", "alice", "", "r1"))
    driver.say("a", wire.RequestDone(0, "r1", False, "the script takes no requests"))
    driver.feed(OperatorAsked("stop", "alice", "", "r2"))
    data = {event.kind: event.data for event in driver.events()}
    assert data["SaveCheckpoint"] == {"request_id": "r1", "nodes": ["node-a", "node-b"]}
    assert data["RequestDone"] == {"request_id": "r1", "done": False, "message": "the script takes no requests"}
    assert data["StopRequested"] == {"request_id": "r2", "nodes": ["node-a", "node-b"]}


def test_a_hang_takes_stacks_before_it_kills_and_names_the_stopped_rank() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=ONE_RESTART)).run_nodes("a", "b")
    driver.say("a", wire.RankOverdue(0, 1, 0, "step", 3.1, 3.0, iteration=7))
    assert (driver.state.phase, driver.commands("b")[-1]) == (Phase.COLLECTING, "TakeStacks")
    driver.say("b", wire.RankOverdue(0, 1, 3, "step", 3.1, 3.0, iteration=7))
    in_collective = [wire.RankStack(rank, 1, "py-spy", "all_reduce (torch)", "S", 7) for rank in (0, 1, 2)]
    driver.say("a", wire.StacksTaken(0, 1, in_collective[:2]))
    driver.say("b", wire.StacksTaken(0, 1, [in_collective[2], wire.RankStack(3, 1, "none", "stopped", "T", 7)]))
    stop = driver.last_command("b")
    assert isinstance(stop, wire.StopAttempt) and stop.grace_s == 0.0
    (incident,) = driver.incidents()
    assert (incident.kind, incident.rank, incident.victims, incident.section) == ("hang", 3, [0], "step")
    assert [group["ranks"] for group in incident.stacks] == [[3], [0, 1, 2]]


def test_stacks_are_not_waited_for_for_ever() -> None:
    driver = Driver(spec(policy=ONE_RESTART)).run_nodes("a")
    driver.say("a", wire.RankOverdue(0, 1, 1, "step", 3.1, 3.0))
    driver.wait(10.0)
    assert driver.state.phase is Phase.COLLECTING
    driver.wait(1.5)
    assert driver.state.phase is Phase.STOPPING


@pytest.mark.parametrize(
    ("on_hang", "calculated", "enforce", "kills"),
    [
        ("auto", False, False, True),
        ("auto", True, False, False),
        ("auto", True, True, True),
        ("report", False, False, False),
        ("report", True, True, False),
        ("restart", True, False, True),
    ],
)
def test_when_an_expired_limit_kills(on_hang: str, calculated: bool, enforce: bool, kills: bool) -> None:
    limits = wire.Limits(enforce_calculated=enforce)
    driver = Driver(spec(policy=wire.RestartPolicy(on_hang=on_hang), limits=limits)).run_nodes("a")
    for rank in (0, 1):
        driver.say("a", wire.RankOverdue(0, 1, rank, "step", 3.1, 3.0, calculated=calculated))
    assert (driver.state.phase is Phase.COLLECTING) == kills
    assert [incident.kind for incident in driver.incidents()] == ([] if kills else ["suspected-hang"])
    if not kills:
        assert "StopAttempt" not in driver.commands("a")


@pytest.mark.parametrize(("main_beat_age_s", "still_s"), [(0.0, 4.0), (9.0, 4.0), (1.5, 1.5)])
def test_a_hang_began_when_the_rank_last_got_on(main_beat_age_s: float, still_s: float) -> None:
    """An outer section's limit may expire although the rank got on inside it; 0: an older agent does not tell."""
    driver = Driver(spec(policy=wire.RestartPolicy(on_hang="report"))).run_nodes("a")
    found_us = driver.now().us
    driver.say("a", wire.RankOverdue(found_us, 1, 0, "step", 4.0, 3.0, main_beat_age_s=main_beat_age_s))
    (incident,) = driver.incidents()
    assert incident.detected_us == found_us and incident.at_us == found_us - int(still_s * 1e6)


def test_a_lost_agent_is_not_a_dead_one() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3)).run_nodes("a", "b")
    driver.feed(AgentSilent("b", 16.0))
    assert (driver.state.phase, driver.state.agents["b"].role) == (Phase.RUNNING, Role.LOST)
    driver.exit("a", 0, 1)
    driver.gone("a")
    assert driver.state.phase is Phase.STOPPING, "b's ranks may be alive"
    assert driver.kinds().count("AttemptBlocked") == 1
    driver.wait(599.0)
    assert driver.state.phase is Phase.STOPPING
    driver.feed(AgentHeard("b", 1, 0))
    driver.gone("b")
    assert driver.state.attempt == 2


def test_a_restart_waits_for_a_lost_node_no_longer_than_for_a_new_one() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3, join_timeout_s=100.0)).run_nodes("a", "b")
    driver.feed(AgentSilent("b", 16.0))
    driver.exit("a", 0, 1)
    driver.gone("a")
    driver.wait(101.0)
    assert driver.state.result and driver.state.result.exit_code == 88
    assert "may be alive on node-b" in driver.state.result.reason and "code 1" in driver.state.result.reason
    assert driver.commands("b")[-1] == "EndJob", "should it come back, it ends its ranks"


def test_an_end_does_not_wait_for_a_lost_agent() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")
    driver.feed(AgentSilent("b", 16.0))
    driver.exit("a", 0, 9)
    driver.gone("a")
    assert driver.state.result and driver.state.result.exit_code == 9
    assert driver.commands("b")[-2:] == ["StopAttempt", "EndJob"]


@pytest.mark.parametrize("how", ["keeper", "fence timeout", "operator", "rebooted"])
def test_a_dead_agent_fails_the_attempt_and_a_spare_takes_its_place(how: str) -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3, fence_timeout_s=20.0))
    driver.join("a", agent=info("a", node_rank=0))
    driver.join("b", agent=info("b", node_rank=1))
    driver.join("c")
    driver.start()
    assert driver.commands("c") == ["Park"]
    if how == "keeper":
        driver.say("b", wire.AgentGone(0, "dead"))
    else:
        driver.feed(AgentSilent("b", 49.0))
        assert driver.state.phase is Phase.RUNNING
        if how == "fence timeout":
            driver.feed(AgentSilent("b", 51.0))
        elif how == "operator":
            (answer,) = (
                a for a in driver.feed(OperatorAsked("fence", "root", "", "r", "node-b")) if isinstance(a, AnswerOperator)
            )
            assert answer.done
        else:
            driver.feed(AgentJoined(hello("b2", driver.spec, agent=info("b2", boot_id="other"), job_id="")))
            driver.feed(AgentJoined(hello("b3", driver.spec, agent=wire.AgentInfo("b3", "node-b", "h", 1, "other", 1, 2))))
    assert driver.state.phase is Phase.STOPPING
    driver.gone("a")
    assert driver.incidents()[0].kind == "agent-lost"
    members = {agent_id: agent.group_rank for agent_id, agent in driver.state.active}
    assert driver.state.phase is Phase.STARTING and members == ({"a": 0, "b3": 1} if how == "rebooted" else {"a": 0, "c": 1})


def test_a_fenced_agent_that_comes_back_must_end_its_ranks_first() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2, policy=COUNT_3, last_call_s=0.0))
    driver.join("a")
    driver = Driver(spec(min_nodes=1, max_nodes=2, policy=COUNT_3)).run_nodes("a", "b")
    driver.feed(AgentSilent("b", 16.0))
    driver.feed(OperatorAsked("fence", "root", "", "r", "node-b"))
    driver.gone("a")
    driver.feed(AgentJoined(hello("b", driver.spec, epoch=1, attempt=1)))
    assert driver.commands("b")[-1] == "StopAttempt" and driver.state.agents["b"].live_attempt == 1
    driver.wait(10.0)
    assert driver.state.attempt == 1, "no attempt while those ranks may live"
    assert not {"StartAttempt", "HostStore"} & set(driver.commands("b")), "and nothing that it missed starts now"
    driver.say("b", wire.RanksGone(0, 1))
    assert driver.state.attempt == 2 and len(driver.state.active) == 2


def test_a_late_hello_of_a_dead_agent_does_not_bring_it_back() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3)).run_nodes("a", "b")
    driver.say("b", wire.AgentGone(0, "dead"))
    (refusal,) = (a for a in driver.join("b") if isinstance(a, SendRefusal))
    assert refusal.exit_code == 1 and driver.state.agents["b"].role is Role.GONE


def test_a_stop_ends_zero_only_after_a_durable_save() -> None:
    for saved, codes, expected in [(True, (0, 0), 0), (False, (0, 0), 143), (True, (0, 143), 143)]:
        driver = Driver(spec()).run_nodes("a")
        driver.feed(OperatorAsked("stop", "alice", "lunch", "r1"))
        command = driver.last_command("a")
        assert isinstance(command, wire.StopTraining) and "alice (lunch)" in command.reason
        if saved:
            driver.say("a", wire.CheckpointCommitted(0, 1, 9, "/c"))
        for rank, code in enumerate(codes):
            driver.exit("a", rank, code, by_us="asked to leave")
        driver.gone("a")
        assert driver.state.result and driver.state.result.exit_code == expected
        assert driver.incidents() == []


def test_a_signal_to_one_launcher_stops_the_others() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")
    driver.say("a", wire.SignalReceived(0, 15))
    assert driver.commands("b")[-1] == "StopTraining" and driver.commands("a")[-1] == "StartAttempt"
    for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
        for rank in ranks:
            driver.exit(name, rank, 143, signal=15, by_us="SIGTERM")
    assert driver.state.result and driver.state.result.exit_code == 143


def test_ranks_that_do_not_leave_are_stopped_and_then_the_node_is_called_stuck() -> None:
    driver = Driver(spec(stop_grace_s=5.0)).run_nodes("a")
    driver.feed(OperatorAsked("stop", "alice", "", "r1"))
    driver.wait(16.0)
    assert driver.commands("a")[-1] == "StopAttempt"
    driver.wait(66.0)
    assert driver.state.phase is Phase.ENDED and "RanksStuck" in driver.kinds()


def test_recovery_is_measured_when_every_rank_has_stepped() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3)).run_nodes("a", "b")
    driver.beat("a", 14)
    driver.say("a", wire.CheckpointCommitted(0, 1, 10, "/c"))
    driver.exit("b", 3, 137, signal=9)
    driver.gone("a")
    driver.gone("b")
    driver.now_s += 2.0
    driver.start()
    driver.beat("a", 11)
    assert driver.incidents()[0].recovered_us is None
    driver.now_s += 1.0
    driver.beat("b", 10)
    assert driver.incidents()[0].recovered_us is None, "iteration 10 is where it resumed"
    driver.beat("b", 11)
    (incident,) = driver.incidents()
    assert incident.recovered_us is not None and incident.detected_us is not None
    assert incident.recovered_us - incident.detected_us == 3_000_000 and incident.lost_iterations == 4
    attempts = [a.record for a in driver.actions if hasattr(a, "record") and isinstance(a.record, AttemptSaved)]
    assert attempts[-1].first_step_us == driver.now().us
    (recovered,) = [event.text for event in driver.events() if event.kind == "Recovered"]
    assert recovered.startswith("every rank has done iteration 11, the first after the resume, 3.00 s after")
    assert recovered.endswith("4 iterations are done again")


def test_a_script_without_iterations_has_recovered_when_its_ranks_run() -> None:
    driver = Driver(spec(policy=COUNT_3)).run_nodes("a")
    driver.exit("a", 0, 1)
    driver.gone("a")
    driver.start()
    (incident,) = driver.incidents()
    assert incident.recovered_us is not None and incident.lost_iterations is None


def test_an_attempt_that_the_store_does_not_know_is_adopted() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3))
    driver.join("a", epoch=5, attempt=3)
    driver.join("b", epoch=5, attempt=3)
    assert (driver.state.phase, driver.state.attempt, driver.state.epoch) == (Phase.RUNNING, 3, 5)
    assert driver.commands("a") == [] and "AttemptAdopted" in driver.kinds()
    driver.exit("a", 1, 1)
    driver.feed(AgentHeard("a", 5, 17))
    assert [c.sequence for c in driver.state.agents["a"].outbox] == [18], "numbers go on where the other supervisor was"
    driver.gone("a")
    driver.gone("b")
    assert (driver.state.phase, driver.state.attempt, driver.state.epoch) == (Phase.STARTING, 4, 6)


def restored(*members: str) -> Driver:
    """Attempt 1 of two nodes, as an old backup has it; the agents are at attempt 3, of epoch 5, two ranks each."""
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3)).run_nodes("a", "b")
    for name in members:
        rejoin(driver, name)
    return driver


def rejoin(driver: Driver, name: str, attempt: int = 3, first_rank: int | None = None) -> None:
    rank = {"a": 0, "b": 2}[name] if first_rank is None else first_rank
    running = wire.RunningAttempt(rank, rank // 2, 4, 2) if attempt else None
    driver.join(name, epoch=5, attempt=attempt, running=running)


def test_all_agents_of_a_restored_job_are_adopted_before_its_end_is_believed() -> None:
    driver = restored("a")
    assert (driver.state.phase, driver.state.attempt, driver.state.world_size) == (Phase.RUNNING, 3, 4)
    assert not driver.commands("b"), "what was to be done was in another attempt"
    driver.exit("a", 0, 0)
    driver.exit("a", 1, 0)
    driver.gone("a")
    driver.wait(driver.spec.join_timeout_s - 1)
    assert driver.state.phase is Phase.RUNNING, "the other node may run its ranks"
    rejoin(driver, "b")
    driver.wait(3600)
    assert driver.state.phase is Phase.RUNNING and driver.state.deadline_s is None, "it does"
    agent = driver.state.agents["b"]
    assert (agent.group_rank, agent.first_rank, agent.live_attempt) == (1, 2, 3)
    ranks = {row.rank: row.node for row in driver.records(RankSaved) if row.attempt == 3}
    assert ranks == {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
    before = {row.attempt: row for row in driver.records(AttemptSaved)}[1]
    assert (before.outcome, before.stopped_us is not None) == ("lost", True) and "attempt 3 was found running" in before.reason
    rejoin(driver, "b")  # the same again, late
    driver.exit("b", 3, 1)
    assert driver.incidents()[-1].rank == 3 and driver.commands("b") == ["StopAttempt"]
    driver.gone("b")
    assert (driver.state.phase, driver.state.attempt, driver.state.epoch) == (Phase.STARTING, 4, 6)
    driver = restored("b", "a")
    assert [name for name, _ in driver.state.active] == ["a", "b"]
    for name, rank in (("a", 0), ("a", 1), ("b", 2), ("b", 3)):
        assert driver.state.phase is Phase.RUNNING
        driver.exit(name, rank, 0)
    assert driver.state.result is not None and driver.state.result.exit_code == 0


def test_an_adopted_attempt_is_ended_on_nodes_that_are_heard_late() -> None:
    driver = restored("a")
    driver.exit("a", 0, 1)
    driver.gone("a")
    assert driver.state.phase is Phase.STOPPING, "ranks may live on b"
    rejoin(driver, "b")
    assert driver.commands("b") == ["StopAttempt"]
    driver.feed(AgentHeard("b", 5, 17))
    assert [c.sequence for c in driver.state.agents["b"].outbox] == [18]
    driver.gone("b")
    assert driver.state.phase is Phase.STARTING and driver.state.attempt == 4
    driver = restored("a")
    driver.exit("a", 0, 1)
    driver.gone("a")
    rejoin(driver, "b", attempt=0)
    assert driver.state.phase is Phase.STARTING and driver.state.attempt == 4, "it runs nothing"


def test_ranks_that_a_store_never_heard_of_are_waited_for_as_long_as_nodes_may_take() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2, policy=COUNT_3, join_timeout_s=60.0))
    rejoin(driver, "a")
    driver.exit("a", 0, 0)
    driver.exit("a", 1, 0)
    driver.gone("a")
    assert driver.state.phase is Phase.RUNNING and "nothing has been heard of 2 ranks" in driver.events()[-1].text
    driver.wait(30)
    rejoin(driver, "b")
    driver.wait(40)
    assert driver.state.phase is Phase.RUNNING
    driver.exit("b", 2, 0)
    driver.exit("b", 3, 0)
    assert driver.state.result is not None and driver.state.result.exit_code == 0
    driver = Driver(spec(min_nodes=1, max_nodes=2, policy=COUNT_3, join_timeout_s=60.0))
    rejoin(driver, "a")
    driver.exit("a", 0, 0)
    driver.exit("a", 1, 0)
    driver.gone("a")
    driver.wait(61)
    assert driver.state.result is not None and driver.state.result.exit_code == 88, "they may be alive: no other attempt"
    assert "nothing has been heard of 2 ranks of attempt 3, for 60 s" in driver.state.reason


def test_a_node_that_only_the_backup_knows_is_not_waited_for_for_ever() -> None:
    """The nodes are a and b; before b, the backup's b, there was another, which was replaced after the backup was made."""
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3, join_timeout_s=60.0)).run_nodes("a", "x")
    rejoin(driver, "a")
    rejoin(driver, "b")
    for name, rank in (("a", 0), ("a", 1), ("b", 2), ("b", 3)):
        driver.exit(name, rank, 0)
    driver.gone("a")
    driver.gone("b")
    driver.wait(59)
    assert driver.state.phase is Phase.RUNNING, "it may have ranks"
    driver.wait(2)
    assert driver.state.result is not None and driver.state.result.exit_code == 88
    assert "node-x has not said whether ranks of attempt 3 are there, for 60 s now (--join-timeout)" in driver.state.reason
    assert not [action for action in driver.actions if isinstance(action, FoundEvidence)], "nothing speaks against it"
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3, join_timeout_s=60.0)).run_nodes("a", "x")
    rejoin(driver, "a")
    driver.exit("a", 0, 0)
    driver.exit("a", 1, 0)
    driver.gone("a")
    driver.wait(61)
    assert "nothing has been heard of 2 ranks of attempt 3, for 60 s" in driver.state.reason


def test_a_damaged_agent_gone_number_does_not_hide_the_death() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=COUNT_3)).run_nodes("a", "b")
    driver.feed(FactArrived("b", 1, wire.AgentGone(0, "dead")))
    assert driver.state.agents["b"].dead and driver.state.phase is Phase.STOPPING


def test_start_failure_ends_with_the_agents_code() -> None:
    driver = Driver(spec())
    driver.join("a")
    driver.say("a", wire.StartFailed(0, 1, "train.py: no such file", 2))
    assert driver.state.result and driver.state.result.exit_code == 2
    assert driver.incidents()[0].kind == "start-failed" and "no such file" in driver.state.reason


def test_a_declared_exit_code_ends_the_job_and_an_undeclared_one_becomes_1() -> None:
    for declared, expected in [(17, 17), (0, 1)]:
        driver = Driver(spec(policy=wire.RestartPolicy(max_restarts=0 if not declared else 5))).run_nodes("a")
        driver.exit("a", 0, 17, declared=declared, declared_reason="loss is NaN twice")
        driver.gone("a")
        assert driver.state.result and driver.state.result.exit_code == expected


def test_a_launcher_that_leaves_before_anything_ran_ends_the_job() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2))
    driver.join("a")
    driver.feed(AgentLeft("a"))
    assert driver.state.phase is Phase.ENDED


def test_a_job_whose_launchers_leave_before_anything_ran_is_given_up_and_no_node_is_lost() -> None:
    driver = Driver(spec())
    driver.join("a")
    assert driver.state.phase is Phase.STARTING
    driver.feed(AgentLeft("a"))
    assert driver.state.phase is Phase.ENDED and driver.state.reason.startswith(GIVEN_UP)
    assert driver.state.current is not None and driver.state.current.outcome == "stopped"
    assert "AgentLost" not in [event.kind for event in driver.events()]
    assert driver.state.agents["a"].role is Role.GONE


def test_ranks_ended_by_their_own_launcher_are_a_lost_node_not_a_crash() -> None:
    driver = Driver(spec(policy=COUNT_3)).run_nodes("a")
    driver.exit("a", 0, 137, signal=9, by_us="the supervisor was not heard for 30 s (fence timeout)")
    (incident,) = driver.incidents()
    assert incident.kind == "agent-lost" and "fence timeout" in incident.text


def restarted(policy: wire.RestartPolicy) -> Driver:
    """Rank 1 died at iteration 42 with iteration 30 durable; attempt 2 has started."""
    driver = Driver(spec(policy=policy)).run_nodes("a")
    driver.say("a", wire.CheckpointCommitted(driver.now().us, 1, 30, "/c/30"))
    driver.beat("a", 42)
    driver.exit("a", 1, 137, signal=9, iteration=42)
    driver.gone("a")
    driver.wait(0.1)
    driver.start()
    return driver


def test_what_is_done_again_is_known_from_where_training_resumed() -> None:
    driver = restarted(wire.RestartPolicy(max_restarts=3))
    assert driver.incidents()[0].lost_iterations == 12
    driver.say("a", wire.ResumedFrom(driver.now().us, 2, 40, "/c/40"))  # durable, but nobody lived to report it
    assert driver.incidents()[0].lost_iterations == 2
    assert driver.state.current is not None and driver.state.current.start_iteration == 40
    driver.say("a", wire.ResumedFrom(driver.now().us, 1, 10, "/c/10"))  # of the attempt before: decides nothing
    assert driver.state.current.start_iteration == 40


def test_a_local_checkpoint_shortens_what_is_done_again_and_counts_for_nothing_else() -> None:
    """P34: restart budgets and the last durable iteration do not see it."""
    driver = restarted(wire.RestartPolicy(max_restarts=3))
    driver.say("a", wire.ResumedFrom(driver.now().us, 2, 40, "/dev/shm/c", durable=False))
    assert driver.incidents()[0].lost_iterations == 2
    assert driver.state.checkpoint == 30
    assert driver.state.current is not None and driver.state.current.start_iteration == 40


def unwatched(limits: dict[str, float | None], seen: dict[str, wire.SectionSeen]) -> tuple[list[str], list[str]]:
    """What the story and the terminal say of a job that stepped at once and then observed `seen` for two minutes."""
    driver = Driver(spec(limits=wire.Limits(sections=limits))).run_nodes("a")
    driver.beat("a", 1)
    driver.beat("a", 2)
    for waited_s in range(0, 130, 10):
        driver.say("a", wire.SectionsObserved(driver.now().us, 1, seen))
        assert waited_s >= 60 or "Note" not in driver.kinds(), "it may still come"
        driver.wait(10.0)
    story = [event.text for event in driver.events() if event.kind == "Note"]
    return story, [action.text for action in driver.actions if isinstance(action, SendNotice)]


def test_limits_of_sections_that_nobody_opens_are_told_once() -> None:
    given = {"setup": 600.0, "step": 60.0, "checkpointing": 600.0}
    [story], [notice] = unwatched(given, {})
    assert story == "no rank has opened a section yet, so the limits of setup, step watch nothing"
    assert notice.startswith(story) and "--enable-ft-package" in notice
    assert unwatched(given, {"step": wire.SectionSeen(0.1, 5)}) == ([], [])
    assert unwatched({"checkpointing": 60.0, "step": None}, {}) == ([], []), "it comes late"
    assert unwatched({}, {}) == ([], [])


def test_limits_that_came_with_the_checkpoint_go_to_the_agents_and_never_replace_configured_ones() -> None:
    driver = Driver(spec(limits=wire.Limits(sections={"step": 3.0}))).run_nodes("a")
    loaded = wire.Limits(sections={"step": 50.0, "setup": 20.0}, calculated=["setup", "step"])
    driver.say("a", wire.LimitsLoaded(driver.now().us, 1, loaded))
    assert driver.state.limits.sections == {"step": 3.0, "setup": 20.0}
    assert driver.state.limits.calculated == ["setup"]
    command = driver.last_command("a")
    assert isinstance(command, wire.SetLimits) and command.limits == driver.state.limits
    num_commands = len(driver.state.agents["a"].outbox)
    driver.say("a", wire.LimitsLoaded(driver.now().us, 1, loaded))
    assert len(driver.state.agents["a"].outbox) == num_commands, "nothing new: nothing is pushed"
