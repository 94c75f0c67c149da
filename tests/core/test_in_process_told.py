"""What people hear of an in-process restart: the fault behind the others, and at once that ranks cannot save during one."""

import pytest

from rsup.supervisor import wire
from rsup.supervisor.actions import SendNotice
from rsup.supervisor.events import OperatorAsked
from rsup.supervisor.states import Phase
from tests.core.in_process_driver import InProcessDriver, one_node, two_nodes

LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:5"
SOFT = f"no progress for 3 s ({wire.SOFT_LIMIT}, --inprocess-soft-timeout)"
HARD = f"no sign of progress for 6 s ({wire.HARD_LIMIT}, --inprocess-hard-timeout)"


def told(driver: InProcessDriver) -> list[str]:
    return [action.text for action in driver.actions if isinstance(action, SendNotice)]


def stop(driver: InProcessDriver) -> None:
    driver.feed(OperatorAsked("stop", "ada", "", "r1"))


# ------------------------------------------------------------------------------------------------------ culprit and victims


def test_the_culprit_is_told_and_not_the_victim_that_was_heard_of_first() -> None:
    driver = two_nodes()
    driver.fault(0, 1, LOST, victim=True)
    assert driver.restarts("b"), "the ranks are told at once"
    assert not told(driver)
    driver.die(2)
    (line,) = told(driver)
    assert line.startswith(
        "rank 2 on node-b was killed by SIGKILL; rank 0 fell with it; rank 2 gets a new process; the ranks enter"
    )
    driver.fault(1, 1, LOST, victim=True)
    driver.fault(3, 1, LOST, victim=True)
    driver.enter_all(2)
    assert told(driver) == [line], "victims are no news"
    assert driver.incidents()[-1].victims == [0, 1, 3]


def test_a_victim_alone_is_told_after_a_moment() -> None:
    driver = two_nodes()
    driver.fault(0, 1, LOST, victim=True)
    driver.wait(0.5)
    assert not told(driver)
    driver.wait(0.6)
    (line,) = told(driver)
    assert "rank 0 on node-a left entry 1" in line
    driver.die(2)
    assert told(driver)[1].startswith("rank 2 on node-b was killed by SIGKILL")


def test_victims_whose_culprit_never_becomes_known_are_told_when_all_are_in_again() -> None:
    driver = two_nodes()
    driver.fault(0, 1, LOST, victim=True)
    driver.enter_all(2)
    (line,) = told(driver)
    assert "Connection closed by peer" in line


# ---------------------------------------------------------------------------------------------------------------- hangs


def test_the_rank_that_does_not_wait_for_others_is_the_one_that_hangs() -> None:
    driver = two_nodes()
    for rank in (0, 3):
        driver.fault(rank, 1, f"{SOFT}; it waits for other ranks", kind="soft-timeout", iteration=9, victim=True)
    driver.fault(2, 1, f"{SOFT}; it stands in spin (train.py:7)", kind="soft-timeout", iteration=9)
    driver.fault(1, 1, f"{SOFT}; it waits for other ranks", kind="soft-timeout", iteration=9, victim=True)
    (line,) = told(driver)
    assert "rank 2 on node-b was interrupted" in line and SOFT in line
    incident = driver.incidents()[-1]
    assert (incident.rank, incident.victims, incident.found_by) == (2, [0, 1, 3], wire.SOFT_LIMIT)
    driver.wait(100.0)
    assert driver.state.failure is not None and (driver.state.failure.kind, driver.state.failure.rank) == ("hang", 2)


def test_of_ranks_that_all_wait_the_one_that_has_come_less_far_is_named() -> None:
    driver = two_nodes()
    for rank, iteration in enumerate((9, 9, 8, 9)):
        driver.fault(rank, 1, SOFT, kind="soft-timeout", iteration=iteration, victim=True)
    assert driver.incidents()[-1].rank == 2


def test_a_rank_that_is_killed_after_the_hard_limit_has_hung() -> None:
    driver = two_nodes()
    for rank in (0, 1, 3):
        driver.fault(rank, 1, f"{SOFT}; it waits for other ranks", kind="soft-timeout", iteration=9, victim=True)
    driver.die(2, exit_code=143, signal=15, killer=f"{wire.HUNG}: {HARD}")
    assert told(driver)[-1].startswith(f"rank 2 on node-b was killed by SIGTERM, {wire.HUNG}: {HARD}")
    incident = driver.incidents()[-1]
    assert (incident.rank, incident.victims, incident.found_by) == (2, [0, 1, 3], wire.HARD_LIMIT)


def test_a_victim_of_a_hang_that_is_killed_first_is_not_taken_for_its_culprit() -> None:
    driver = one_node(2)
    driver.die(0, exit_code=143, signal=15, killer=f"{wire.WAITED_IN_VAIN}: {HARD}")
    driver.die(1, exit_code=143, signal=15, killer=f"{wire.HUNG}: {HARD}")
    assert driver.is_in(Phase.STOPPING)
    driver.exit("a", 0, 143, signal=15, by_us="told to")  # the process that was to replace it
    driver.gone("a")
    incident = driver.incidents()[-1]
    assert (incident.kind, incident.rank, incident.victims) == ("hang", 1, [0])


# ---------------------------------------------------------------------------------------------------------------- a stop


@pytest.mark.parametrize("how", ["operator", "launcher"])
def test_a_stop_during_a_restart_ends_ranks_that_cannot_save_at_once(how: str) -> None:
    driver = two_nodes(stop_grace_s=30.0)
    driver.say("a", wire.CheckpointCommitted(0, 1, 5, "/c/5"))
    driver.die(2)
    if how == "operator":
        stop(driver)
    else:
        driver.say("a", wire.SignalReceived(0, 15, 30.0))
    for name in ("a", "b"):
        command = driver.last_command(name)
        assert isinstance(command, wire.StopAttempt) and command.grace_s <= 2.0
        assert "StopTraining" not in driver.commands(name)
    assert "the ranks cannot save, and are ended; the checkpoint of iteration 5 is the newest" in told(driver)[-1]


def test_a_stop_that_a_fault_follows_ends_the_ranks_too_and_says_so_once() -> None:
    driver = two_nodes(stop_grace_s=30.0)
    stop(driver)
    assert driver.commands("a")[-1] == driver.commands("b")[-1] == "StopTraining"
    driver.fault(0, 1)
    driver.fault(1, 1, LOST, victim=True)
    assert [kind for kind in driver.commands("a") if kind == "StopAttempt"] == ["StopAttempt"]
    assert len([line for line in told(driver) if "cannot save" in line]) == 1


def test_a_stop_after_every_rank_is_in_again_gives_them_time_to_save() -> None:
    driver = two_nodes(stop_grace_s=30.0)
    driver.die(2)
    driver.enter_all(2)
    stop(driver)
    assert driver.commands("a")[-1] == driver.commands("b")[-1] == "StopTraining"
