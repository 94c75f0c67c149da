"""A failure that several saw: hosts whose clocks nobody compared, and stacks of those who lived."""

from rsup.supervisor import wire
from tests.core.job_driver import Driver, spec

TIMED_OUT = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
STACK = 'Process 9: python\n\nThread 9 (idle): "MainThread"\n    read_shard (data.py:7)\n'


def two_nodes() -> Driver:
    return Driver(spec(min_nodes=2, max_nodes=2)).run_nodes("a", "b")


def test_two_hosts_that_failed_at_nearly_the_same_time_are_both_named() -> None:
    driver = two_nodes()
    driver.exit("a", 0, 3, error="ValueError: x")
    driver.exit("b", 2, 4, error="ValueError: y")
    driver.gone("a")
    driver.gone("b")
    (incident,) = driver.incidents()
    assert incident.rank == 0
    assert "rank 2 on other nodes failed within 0.5 s: no clock tells which was first" in incident.text


def test_a_host_that_failed_later_or_was_a_victim_raises_no_doubt() -> None:
    for error, pause_s in (("ValueError: y", 2.0), ("RuntimeError: Connection closed by peer", 0.0)):
        driver = two_nodes()
        driver.exit("a", 0, 3, error="ValueError: x")
        driver.wait(pause_s)
        driver.exit("b", 2, 4, error=error)
        driver.gone("a")
        driver.gone("b")
        (incident,) = driver.incidents()
        assert incident.rank == 0 and "no clock" not in incident.text


def test_a_timeout_asks_for_stacks_of_those_who_live_and_keeps_them() -> None:
    driver = two_nodes()
    driver.exit("a", 0, 1, error=TIMED_OUT)
    stop = driver.last_command("b")
    assert isinstance(stop, wire.StopAttempt) and stop.stacks_within_s > 0
    driver.say("b", wire.StacksTaken(driver.now().us, 1, [wire.RankStack(2, 9, "py-spy", STACK)]))
    driver.say("a", wire.StacksTaken(driver.now().us, 1, [wire.RankStack(1, 8, "py-spy", STACK.replace("data", "other"))]))
    driver.exit("b", 2, 143, signal=15, by_us="attempt 1 has failed")
    driver.gone("a")
    driver.gone("b")
    (incident,) = driver.incidents()
    assert sorted(stack["ranks"] for stack in incident.stacks) == [[1], [2]]  # type: ignore[type-var]
    (event,) = [event for event in driver.events() if event.kind == "StacksTaken" and "b" in event.node]
    assert event.data["stood_in"] == {2: "read_shard (data.py:7)"}


def test_an_ordinary_failure_is_not_held_up() -> None:
    driver = two_nodes()
    driver.exit("a", 0, 1, error="ValueError: x")
    stop = driver.last_command("b")
    assert isinstance(stop, wire.StopAttempt) and stop.stacks_within_s == 0
