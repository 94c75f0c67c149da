"""A launcher that is told to stop: what becomes of its job."""

import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import Action, SendNotice
from rsup.supervisor.events import AgentLeft, OperatorAsked
from rsup.supervisor.states import Phase, Role
from tests.core.job_driver import Driver, spec


def told(driver: Driver, name: str, signum: int = 15) -> list[Action]:
    return driver.say(name, wire.SignalReceived(driver.now().us, signum))


def end_code(driver: Driver, name: str) -> int | None:
    codes = [c.result.exit_code for c in driver.state.agents[name].outbox if isinstance(c, wire.EndJob)]
    return codes[-1] if codes else None


def stop_ranks(driver: Driver, *names: str, exit_code: int = 143) -> None:
    for name in names:
        first = driver.state.agents[name].first_rank
        for rank in range(first, first + driver.state.agents[name].info.num_ranks):
            signum = exit_code - 128 if exit_code else 0
            driver.exit(name, rank, exit_code, signal=signum, by_us="told to")
        driver.gone(name)


def test_an_elastic_job_forms_anew_without_the_node_and_spends_no_restart() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2)).run_nodes("a", "b")
    told(driver, "b")
    assert (driver.state.phase, driver.commands("a")[-1]) == (Phase.STOPPING, "StopTraining")
    stop_ranks(driver, "b", "a")
    assert end_code(driver, "b") == 143 and driver.state.agents["b"].role is Role.GONE
    driver.wait(5.0)
    assert (driver.state.phase, driver.state.attempt, driver.state.budget.restarts) == (Phase.STARTING, 2, 0)
    driver.start()
    assert [agent_id for agent_id, _ in driver.state.active] == ["a"]
    driver.feed(AgentLeft("b"))
    assert driver.state.phase is Phase.RUNNING


def test_who_leaves_after_a_durable_save_leaves_with_0() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2)).run_nodes("a", "b")
    told(driver, "b")
    for name, rank in (("b", 2), ("b", 3), ("a", 0), ("a", 1)):
        driver.exit(name, rank, 0, saved=True)
    driver.gone("b")
    assert driver.state.phase is Phase.STOPPING, "the new attempt waits for every old rank"
    driver.gone("a")
    driver.wait(5.0)
    assert end_code(driver, "b") == 0 and driver.state.attempt == 2


def test_an_error_for_want_of_the_leaving_peer_is_not_held_against_the_job() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2)).run_nodes("a", "b")
    driver.exit("a", 0, 1, error="RuntimeError: Connection closed by peer [10.0.0.2]:4")
    told(driver, "b")
    stop_ranks(driver, "b", "a")
    driver.wait(5.0)
    assert driver.state.attempt == 2 and end_code(driver, "b") == 143


def test_a_failure_of_its_own_is_judged_as_ever() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2)).run_nodes("a", "b")
    driver.exit("a", 0, 7, error="ValueError: no")
    told(driver, "b")
    stop_ranks(driver, "b", "a")
    assert driver.state.result and driver.state.result.exit_code == 7


@pytest.mark.parametrize("signalled", [("a", "b"), ("b", "a")])
def test_a_job_all_of_whose_launchers_are_told_to_stop_ends(signalled: tuple[str, str]) -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2)).run_nodes("a", "b")
    for name in signalled:
        told(driver, name)
    stop_ranks(driver, "a", "b")
    assert driver.state.result and driver.state.result.exit_code == 143 and driver.state.attempt == 1


def test_a_job_that_needs_the_node_ends() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")
    told(driver, "b", 2)
    stop_ranks(driver, "a", "b", exit_code=130)
    assert driver.state.result and driver.state.result.exit_code == 130


def test_an_operator_who_stops_the_job_stops_all_of_it() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2)).run_nodes("a", "b")
    told(driver, "b")
    driver.feed(OperatorAsked("stop", "root", "", "r1", ""))
    stop_ranks(driver, "a", "b")
    assert driver.state.result is not None and driver.state.result.reason.endswith(": no durable save was reported")


def test_why_a_stop_after_a_save_is_no_success_is_said() -> None:
    """One way or the other, not both."""
    driver = Driver(spec(min_nodes=1, max_nodes=1)).run_nodes("a")
    driver.feed(OperatorAsked("stop", "root", "", "r1", ""))
    driver.exit("a", 0, 0, saved=True)
    driver.exit("a", 1, 143, signal=15, by_us="too slow")
    driver.gone("a")
    assert driver.state.result is not None and driver.state.result.exit_code == 143
    assert driver.state.result.reason == "stopped by root: a durable save was reported, but only 1 of 2 ranks left with 0"


def test_a_spare_leaves_alone_and_the_first_node_says_so() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")
    driver.join("c")
    actions = told(driver, "c")
    assert end_code(driver, "c") == 143 and driver.state.phase is Phase.RUNNING
    (notice,) = [action for action in actions if isinstance(action, SendNotice)]
    assert notice.agent_id == "a" and "node-c leaves" in notice.text
    driver.feed(AgentLeft("c"))
    assert driver.state.phase is Phase.RUNNING and driver.state.failure is None


def test_while_nodes_gather_one_may_leave_and_come_back() -> None:
    driver = Driver(spec(min_nodes=3, max_nodes=3))
    driver.join("a")
    driver.join("b")
    told(driver, "b", 2)
    assert end_code(driver, "b") == 130 and driver.state.phase is Phase.FORMING
    driver.join("c")
    assert driver.state.phase is Phase.FORMING, "b does not count any more"
    driver.join("d")
    assert driver.state.phase is Phase.STARTING


def test_the_only_node_that_waits_ends_the_job() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2))
    driver.join("a")
    told(driver, "a", 2)
    assert driver.state.result and driver.state.result.exit_code == 130


def test_a_member_told_to_stop_before_its_ranks_are_started() -> None:
    driver = Driver(spec(min_nodes=1, max_nodes=2))
    driver.join("a")
    driver.join("b")
    assert driver.state.phase is Phase.STARTING
    told(driver, "a")
    assert end_code(driver, "a") == 143
    driver.wait(5.0)
    driver.start()
    assert [agent_id for agent_id, _ in driver.state.active] == ["b"]
