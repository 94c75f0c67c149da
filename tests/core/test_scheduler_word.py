"""What SLURM and the gate say of a job's nodes, in the two machines: a node that was given up, and one that may not be used."""

from msgspec.structs import replace

from rsup.launcher import process_events as ev
from rsup.supervisor import wire
from rsup.supervisor.events import AgentSilent
from rsup.supervisor.states import Phase, Role
from tests.core.job_driver import Driver, info, spec
from tests.core.test_process_machine import Agent, facts, of, start_command

AUTO = wire.RestartPolicy(mode="auto")


def test_a_silent_node_that_slurm_has_given_up_is_dead_and_a_spare_takes_its_place() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=AUTO)).run_nodes("a", "b")
    driver.join("c")
    word = wire.NodeLost(0, "node-b", "SLURM says that it is DOWN")
    driver.say("a", word)
    assert driver.state.agents["b"].role is Role.ACTIVE, "it answers: whatever SLURM says, it is not dead"
    driver.feed(AgentSilent("b", 16.0))
    driver.say("a", wire.NodeLost(0, "node-c", "SLURM says that it is DOWN"))
    assert driver.state.agents["c"].role is not Role.GONE
    driver.say("a", word)
    (incident,) = driver.incidents()
    assert (incident.kind, incident.node) == ("agent-lost", "node-b")
    assert incident.text == "node node-b is out: it does not answer, and SLURM says that it is DOWN"
    driver.gone("a")
    driver.wait(1.0)
    assert driver.state.attempt == 2 and driver.state.agents["c"].group_rank >= 0


def test_a_start_that_the_gate_refuses_ends_the_job_with_88_whatever_the_policy() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=AUTO))
    driver.join("a")
    driver.join("b")
    driver.say("a", wire.StoreBound(0, 1, "host-a", 4711))
    driver.say("b", wire.StartFailed(0, 1, f"{wire.GATE_REFUSES} node-b: nothing was started here", wire.EXIT_REQUEUE))
    driver.gone("b")
    driver.gone("a")
    result = driver.state.result
    assert driver.state.phase is Phase.ENDED and result is not None
    assert (result.exit_code, result.node) == (wire.EXIT_REQUEUE, "node-b")
    assert wire.GATE_REFUSES in result.reason and "run again on other nodes" in result.reason


def test_nobody_is_told_to_start_where_the_gate_refuses_one_of_the_nodes() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=AUTO))
    driver.join("a")
    driver.join("b", agent=replace(info("b"), gate_refusal=f"{wire.GATE_REFUSES} node-b: nothing was started here"))
    driver.wait(1.0)
    result = driver.state.result
    assert driver.state.phase is Phase.ENDED and result is not None
    assert (result.exit_code, result.node) == (wire.EXIT_REQUEUE, "node-b")
    assert wire.GATE_REFUSES in result.reason and "run again on other nodes" in result.reason
    assert not {"HostStore", "StartAttempt"} & set(driver.kinds())
    assert driver.commands("a") == driver.commands("b") == ["EndJob"]


def test_a_spare_behind_the_gate_holds_up_nobody() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, policy=AUTO)).run_nodes("a", "b")
    driver.join("c", agent=replace(info("c"), gate_refusal=f"{wire.GATE_REFUSES} node-c: nothing was started here"))
    assert driver.state.phase is Phase.RUNNING and driver.state.agents["c"].role is Role.SPARE


def test_an_agent_behind_the_gate_joins_and_starts_nothing() -> None:
    agent = Agent(gate_refusal="the gate refuses n1: nothing was started here").join()
    actions = agent.order(start_command())
    assert of(actions, ev.SpawnRanks) == []
    (failed,) = facts(actions, wire.StartFailed)
    assert (failed.exit_code, failed.message) == (wire.EXIT_REQUEUE, "the gate refuses n1: nothing was started here")
    assert [fact.attempt for fact in facts(actions, wire.RanksGone)] == [1]


def test_one_node_of_a_step_says_what_all_would_say() -> None:
    for group, num_reports in (("none", 2), (f"{wire.SLURM_GROUP}c-1.0.0", 1)):
        driver = Driver(spec(min_nodes=2, max_nodes=2, rdzv_id=group)).run_nodes("a", "b")
        driver.exit("b", 2, 3)
        for name in "ab":
            driver.gone(name)
        reports = [c.report for a in driver.state.agents.values() for c in a.outbox if isinstance(c, wire.EndJob)]
        assert len(reports) == 2 and sum(map(bool, reports)) == num_reports
    quiet, first = Agent(speaks_for_all=False, max_nodes=2).join(), Agent(speaks_for_all=True, max_nodes=2).join()
    second = replace(start_command(), group_rank=1, first_rank=2)
    assert of(quiet.order(second), ev.PrintReport) == []
    assert len(of(first.order(second), ev.PrintReport)) == 1
    moved = Agent(speaks_for_all=False, max_nodes=2).join().order(start_command())
    assert len(of(moved, ev.PrintReport)) == 1, "it has taken the first one's place"


def test_a_node_that_was_given_up_is_a_fact() -> None:
    (fact,) = facts(Agent().run().feed(ev.NodeGivenUp("n2", "SLURM says that it is DOWN")), wire.NodeLost)
    assert (fact.node, fact.reason) == ("n2", "SLURM says that it is DOWN")
