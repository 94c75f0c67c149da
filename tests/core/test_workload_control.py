"""What ranks ask for through NVRx's clients: that counts once their attempt has failed, and not before. And their limits."""

from rsup.supervisor import wire
from rsup.supervisor.states import Phase, Role
from tests.core.job_driver import Driver, spec

ONCE = wire.RestartPolicy(max_restarts=1)


def ask(driver: Driver, name: str, rank: int, action: str) -> None:
    driver.say(name, wire.WorkloadControl(driver.now().us, driver.state.attempt, rank, action, "hot"))


def fail(driver: Driver, name: str, rank: int, *others: str, exit_code: int = 9) -> None:
    driver.exit(name, rank, exit_code)
    for agent in (name, *others):
        driver.gone(agent)


def two_nodes(**fields: object) -> Driver:
    return Driver(spec(min_nodes=1, max_nodes=2, **fields)).run_nodes("a", "b")


def test_a_request_changes_nothing_while_the_attempt_runs() -> None:
    driver = two_nodes()
    for action in ("continue", "exclude", "shutdown"):
        ask(driver, "b", 2, action)
    assert driver.state.phase is Phase.RUNNING
    for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
        for rank in ranks:
            driver.exit(name, rank, 0)
    assert driver.state.result == wire.JobResult(0, "every rank exited 0")


def test_an_excluded_node_leaves_and_the_others_go_on_without_paying_for_it() -> None:
    driver = two_nodes()  # no restarts at all are allowed
    ask(driver, "b", 2, "exclude")
    fail(driver, "b", 2, "a")
    assert driver.state.agents["b"].role is Role.GONE
    end = driver.last_command("b")
    assert isinstance(end, wire.EndJob) and end.result.exit_code == 1 and "hot" in end.result.reason
    driver.wait(6)  # the last call
    driver.start()
    assert (driver.state.attempt, driver.state.world_size) == (2, 2)
    assert driver.state.budget.restarts == 0
    assert driver.kinds().count("AgentExcluded") == 1


def test_an_excluded_agent_that_calls_again_is_told_of_its_end_and_takes_no_part() -> None:
    driver = two_nodes(policy=ONCE)
    ask(driver, "b", 2, "exclude")
    fail(driver, "b", 2, "a")
    driver.join("b", job_id="t1", run=1, epoch=1)
    assert driver.state.agents["b"].role is Role.GONE and driver.commands("b")[-1] == "EndJob"
    driver.wait(6)
    driver.start()
    assert [name for name, _ in driver.state.active] == ["a"]


def test_a_new_launch_on_the_excluded_node_may_join() -> None:
    driver = two_nodes()
    ask(driver, "b", 2, "exclude")
    fail(driver, "b", 2, "a")
    driver.join("b2")
    driver.start()
    assert driver.state.world_size == 4


def test_too_few_nodes_wait_for_another_one() -> None:
    driver = Driver(spec(min_nodes=2, max_nodes=2, join_timeout_s=60.0)).run_nodes("a", "b")
    ask(driver, "b", 2, "exclude")
    fail(driver, "b", 2, "a")
    assert driver.state.phase is Phase.FORMING
    driver.wait(61)
    assert driver.state.result is not None and driver.state.result.exit_code == 1


def test_without_another_node_the_job_ends() -> None:
    driver = Driver(spec(policy=ONCE)).run_nodes("a")
    ask(driver, "a", 1, "exclude")
    fail(driver, "a", 1)
    assert driver.state.result is not None
    assert driver.state.result.exit_code == 1 and "hot" in driver.state.result.reason


def test_shutdown_ends_the_job_with_the_ranks_code() -> None:
    driver = two_nodes(policy=wire.RestartPolicy(max_restarts=9))
    ask(driver, "a", 1, "shutdown")
    fail(driver, "a", 1, "b", exit_code=123)
    assert driver.state.result is not None
    assert driver.state.result.exit_code == 123 and "asked that the job is not restarted: hot" in driver.state.result.reason


def test_a_request_is_forgotten_with_its_attempt() -> None:
    driver = two_nodes(policy=wire.RestartPolicy(max_restarts=9))
    ask(driver, "a", 1, "exclude")
    fail(driver, "b", 3, "a")  # another rank failed: the request counts all the same
    assert driver.state.agents["a"].role is Role.GONE
    driver.wait(6)
    driver.start()
    fail(driver, "b", 0)
    assert driver.state.phase is Phase.STARTING and driver.state.attempt == 3, "an ordinary restart"
    assert driver.state.budget.restarts == 1


def test_limits_of_a_client_are_the_jobs_from_then_on() -> None:
    driver = two_nodes(policy=ONCE, limits=wire.Limits(sections={"step": 60.0, "setup": 90.0}, heartbeat_s=5.0))
    change = wire.LimitsChange({"step": 2.0, "setup": None}, out_of_section_s=4.0)
    driver.say("a", wire.LimitsSet(driver.now().us, 1, 0, change))
    limits = wire.Limits(
        sections={"step": 2.0, "setup": None},
        out_of_section_s=4.0,
        heartbeat_s=5.0,
        from_client=["out-of-section", "setup", "step"],
    )
    assert driver.state.limits == driver.state.spec.limits == limits
    for name in ("a", "b"):
        command = driver.last_command(name)
        assert isinstance(command, wire.SetLimits) and command.limits == limits
    num_events = len(driver.events())
    driver.say("b", wire.LimitsSet(driver.now().us, 1, 2, change))
    assert len(driver.events()) == num_events, "all ranks set the same: it is told once"
    fail(driver, "b", 2, "a")
    driver.start()
    start = driver.last_command("b")
    assert isinstance(start, wire.StartAttempt) and start.limits == limits


def test_limits_of_a_client_are_not_replaced_by_observed_ones() -> None:
    driver = Driver(spec()).run_nodes("a")
    driver.say("a", wire.LimitsSet(driver.now().us, 1, 0, wire.LimitsChange({"step": 2.0})))
    seen = wire.SectionsObserved(driver.now().us, 1, {"step": wire.SectionSeen(9.0, 50)}, num_train_steps=50, num_checkpoints=1)
    driver.say("a", seen)
    assert driver.state.limits.sections["step"] == 2.0 and not driver.state.limits.calculated
