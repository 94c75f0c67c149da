"""Ranks that end with 0 in the middle of an in-process restart, and what counts as a fault of its own during one."""

import pytest

from rsup.supervisor import wire
from rsup.supervisor.failure import NOBODY_KNOWN
from rsup.supervisor.states import Phase
from tests.core.in_process_driver import InProcessDriver, one_node, two_nodes

LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:5"
SOFT = f"no progress for 3 s ({wire.SOFT_LIMIT}, --inprocess-soft-timeout)"


def failure_text(driver: InProcessDriver) -> str:
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    return driver.state.failure.text


# ---------------------------------------------------------------------------------------------------------------- exit 0


def test_a_rank_that_makes_an_exit_of_the_interruption_is_replaced() -> None:
    driver = two_nodes()
    driver.fault(1, 1)
    driver.exit("a", 0, 0)
    assert driver.is_in(Phase.RUNNING) and driver.restarts("a")[-1].replace == [0]
    assert driver.last("InProcessRestart").text.startswith(
        "rank 0 on node-a exited with code 0 in entry 1, before all had finished; rank 0 gets a new process"
    )
    driver.enter_all(2, 1, 2, 3)
    assert driver.waiting and (driver.state.num_ok, driver.state.num_ended) == (0, 0)
    driver.enter(0, 2, joined=True)
    assert not driver.waiting
    incident = driver.incidents()[-1]
    assert (incident.rank, incident.victims) == (1, [0]), "the exception is what came first"
    for rank in range(4):
        driver.exit(driver.owner(rank), rank, 0)
    assert driver.state.result is not None and driver.state.result.exit_code == 0


def test_a_replacement_that_does_not_come_does_not_meet_the_deadline() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=10.0))
    driver.fault(1, 1)
    driver.exit("a", 0, 0)
    driver.enter_all(2, 1, 2, 3)
    driver.wait(19.0)  # 8 of them for the start of a process
    text = failure_text(driver)
    assert "rank 1 on node-a left entry 1" in text and "still without rank 0 (--inprocess-restart-within 10)" in text


def test_a_replacement_that_ends_with_0_each_time_is_bounded() -> None:
    driver = two_nodes()
    driver.fault(1, 1)
    for _ in range(4):
        driver.exit("a", 0, 0)
    assert "3 equal faults" in failure_text(driver)


@pytest.mark.parametrize("order", ["exit first", "victim first"])
def test_a_rank_that_leaves_with_0_in_mid_training_is_named_and_nobody_waits(order: str) -> None:
    """Its end looks like that of a rank that has done its work, until others fall."""
    driver = two_nodes()
    if order == "exit first":
        driver.exit("a", 0, 0)
        assert driver.is_in(Phase.RUNNING)
        driver.fault(2, 1, LOST, victim=True)
        text = failure_text(driver)
        assert "rank 0 on node-a exited with code 0" in text and "rank 0 ended with 0, so it cannot come into entry 2" in text
        assert (driver.state.failure.rank if driver.state.failure else None, driver.state.num_ok) == (0, 1)
        assert driver.state.failure is not None and driver.state.failure.exit_code == 1
        assert driver.incidents()[-1].victims == [2]
    else:
        driver.fault(2, 1, LOST, victim=True)
        driver.exit("a", 0, 0)
        assert driver.is_in(Phase.RUNNING) and driver.restarts("a")[-1].replace == [0]
    assert (driver.incidents()[-1].rank, len(driver.incidents())) == (0, 1)


def test_the_last_rank_of_a_node_is_not_waited_for_where_its_launcher_is_done() -> None:
    driver = two_nodes(1)
    driver.fault(1, 1)
    driver.exit("a", 0, 0)
    text = failure_text(driver)
    assert "ValueError: a bug" in text and "rank 0 ended with 0" in text
    driver.gone("a")
    driver.exit("b", 1, 143, signal=15, by_us="the attempt has failed")
    driver.gone("b")
    assert driver.state.attempt == 2 and driver.incidents()[-1].rank == 1


def test_with_reserves_one_takes_the_place_of_a_rank_that_left_with_0() -> None:
    driver = one_node(3, reserves=1)
    driver.fault(1, 1)
    driver.exit("a", 0, 0)
    assert driver.is_in(Phase.RUNNING) and driver.restarts("a")[-1].gone == [0]
    driver.enter_all(2, 1, 2, reserves=1)
    assert not driver.waiting and driver.state.num_ok == 1
    driver.exit("a", 1, 0)
    driver.exit("a", 2, 0)
    assert driver.state.result is not None and driver.state.result.exit_code == 0


def test_ranks_that_finish_while_others_entry_is_not_known_yet_have_finished() -> None:
    """Facts of two agents: what one of them has to tell comes late."""
    driver = two_nodes()
    driver.fault(0, 1)
    driver.enter_all(2, 0, 1)
    driver.exit("a", 0, 0)
    driver.exit("a", 1, 0)
    assert driver.is_in(Phase.RUNNING) and driver.waiting and len(driver.restarts("a")) == 1
    driver.fault(2, 1, LOST, victim=True)
    driver.enter_all(2, 2, 3)
    assert not driver.waiting
    driver.exit("b", 2, 0)
    driver.exit("b", 3, 0)
    assert driver.state.result is not None and driver.state.result.exit_code == 0


# --------------------------------------------------------------------------------------------- waiting for a new process


def test_ranks_that_wait_for_a_process_that_starts_slowly_are_no_faults() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=60.0))
    for rank in (0, 3):
        driver.fault(rank, 1, SOFT, kind="soft-timeout", signature="soft-timeout", iteration=9, victim=True)
    driver.die(2, exit_code=143, signal=15, killer=f"{wire.HUNG}: it hung")
    for entry in range(2, 6):
        driver.enter_all(entry, 0, 1, 3)
        driver.now_s += 3.0
        driver.fault(1, entry, SOFT, kind="soft-timeout", signature="soft-timeout", victim=entry % 2 == 0)
        driver.fault(0, entry, LOST, signature="lost", victim=True)
        assert driver.restarts("a")[-1].entry == entry, "they leave the entry all the same"
    driver.fault(2, 5, SOFT, kind="soft-timeout", signature="soft-timeout")  # the new process, which has not come in yet
    assert driver.is_in(Phase.RUNNING)
    assert (driver.state.in_process.num_restarts, len(driver.state.in_process.faults)) == (1, 1)
    assert driver.incidents()[-1].rank == 2
    driver.enter_all(6, 0, 1, 3)
    driver.enter(2, 6, joined=True)
    assert not driver.waiting


def test_waiting_ranks_are_bounded_by_the_restart_s_own_deadline() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=10.0))  # and 8 s that the first start took
    driver.die(2)
    since_s = driver.now_s
    for entry in range(2, 9):
        driver.enter_all(entry, 0, 1, 3)
        driver.fault(1, entry, SOFT, kind="soft-timeout", signature="soft-timeout", victim=True)
        driver.wait(3.0)
        if not driver.is_in(Phase.RUNNING):
            break
    assert "--inprocess-restart-within 10" in failure_text(driver) and driver.now_s - since_s <= 18.0


def test_a_fault_of_its_own_counts_even_where_a_victim_of_it_was_heard_first() -> None:
    driver = two_nodes()
    driver.die(2)
    for entry in (2, 3, 4):
        driver.enter_all(entry, 0, 1, 3)
        driver.fault(0, entry, LOST, victim=True)
        driver.fault(1, entry, "ValueError: each time")
    assert "3 equal faults" in failure_text(driver)


# --------------------------------------------------------------------------------------------------- who it was, and why


def test_where_only_victims_are_heard_of_it_is_said_that_nobody_knows_the_first_mover() -> None:
    driver = two_nodes()
    driver.fault(0, 1, LOST, victim=True)
    driver.fault(2, 1, LOST, victim=True)
    driver.enter_all(2)
    assert NOBODY_KNOWN in driver.incidents()[-1].text
    driver.fault(1, 2)
    driver.enter_all(3)
    assert NOBODY_KNOWN not in driver.incidents()[-1].text


def test_a_given_up_restart_is_not_blamed_on_a_victim_that_dies_of_it() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=10.0))
    driver.fault(1, 1)
    driver.wait(10.0)
    driver.exit("b", 3, 1, error=LOST)
    driver.gone("a")
    driver.gone("b")
    assert driver.incidents()[-1].rank == 1 and driver.incidents()[-1].text.startswith("rank 1 on node-a left entry 1")


@pytest.mark.parametrize("reason", ["--foo is wrong", ""])
def test_the_reason_of_a_declared_end_is_told_with_it_or_that_of_another_rank(reason: str) -> None:
    driver = two_nodes()
    driver.exit("a", 1, 2, declared=2, declared_reason=reason)
    driver.exit("a", 0, 2, declared=2, declared_reason="--bar is wrong")
    driver.gone("a")
    driver.gone("b")
    told = f"exited with code 2: {reason}" if reason else "exited with code 2 (rank 0: --bar is wrong)"
    assert driver.incidents()[-1].text == f"rank 1 on node-a {told}"
