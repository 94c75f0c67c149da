"""Hangs under in-process restart: the one rank that causes them is ended alone. And what faults say of hardware, which is the
same whether the attempt goes on or not."""

from rsup.supervisor import wire
from rsup.supervisor.actions import FoundEvidence
from rsup.supervisor.states import Phase
from tests.core.in_process_driver import InProcessDriver, two_nodes

IN_TORCH = 'Thread 0x1 (most recent call first):\n  File "torch/distributed/distributed_c10d.py", line 1 in all_reduce'
IN_USER = 'Thread 0x1 (most recent call first):\n  File "train.py", line 7 in spin'


def hang(driver: InProcessDriver, stacks: dict[int, str], states: dict[int, str] | None = None) -> None:
    """The step limit expires on all ranks, and stacks arrive."""
    driver.beat_all(9)
    for rank in range(driver.state.world_size):
        fact = wire.RankOverdue(driver.now().us, driver.state.attempt, rank, "step", 3.1, 3.0, 9, 3.1, beat_age_s=0.1)
        driver.say(driver.owner(rank), fact)
    assert driver.is_in(Phase.COLLECTING)
    send_stacks(driver, stacks, states or {})


def send_stacks(driver: InProcessDriver, stacks: dict[int, str], states: dict[int, str]) -> None:
    for agent_id, agent in driver.state.active:
        ranks = range(agent.first_rank, agent.first_rank + agent.info.num_ranks)
        taken = [wire.RankStack(r, 1, "py-spy", stacks[r], states.get(r, "S"), 9) for r in ranks if r in stacks]
        driver.say(agent_id, wire.StacksTaken(driver.now().us, driver.state.attempt, taken))


ONE_SPINS = {0: IN_TORCH, 1: IN_TORCH, 2: IN_USER, 3: IN_TORCH}


def test_the_one_rank_that_hangs_is_ended_and_replaced() -> None:
    driver = two_nodes()
    hang(driver, ONE_SPINS)
    assert driver.is_in(Phase.RUNNING) and driver.state.failure is None
    command = driver.last_command("b")
    assert isinstance(command, wire.EndRanks) and command.ranks == [2] and "rank 2 on node-b hangs" in command.reason
    assert "EndRanks" not in driver.commands("a")
    incident = driver.incidents()[-1]
    assert (incident.kind, incident.rank, incident.section) == ("in-process", 2, "step") and incident.stacks
    assert any(isinstance(a, FoundEvidence) and a.evidence.source == "hang" for a in driver.actions)
    driver.die(2, by_us=command.reason)
    assert driver.restarts("b")[-1].replace == [2] and driver.restarts("a")[-1].gone == [2]
    driver.enter_all(2)
    assert not driver.waiting and driver.state.in_process.num_restarts == 1
    assert driver.incidents()[-1].text.startswith("rank 2 on node-b hangs")


def test_a_hang_without_a_culprit_ends_the_attempt() -> None:
    driver = two_nodes()
    hang(driver, dict.fromkeys(range(4), IN_TORCH))
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    assert driver.state.failure.kind == "hang" and "EndRanks" not in driver.commands("a") + driver.commands("b")


def test_a_rank_that_was_heard_from_in_the_meantime_is_not_ended() -> None:
    for heard in ("entry", "fault", "beat"):
        driver = two_nodes()
        driver.beat_all(9)
        for rank in range(4):
            driver.say(driver.owner(rank), wire.RankOverdue(0, 1, rank, "step", 3.1, 3.0, 9, 3.1, beat_age_s=0.1))
        if heard == "entry":
            driver.enter_all(2)
        elif heard == "fault":
            for rank in range(4):
                driver.fault(rank, 1, "interrupted", kind="soft-timeout")
        else:
            driver.beat_all(10)
        send_stacks(driver, ONE_SPINS, {})
        assert driver.is_in(Phase.RUNNING), heard
        assert "EndRanks" not in driver.commands("b") and driver.last("HangOver")


def test_the_last_one_that_was_not_heard_from_is_the_culprit() -> None:
    driver = two_nodes()
    driver.beat_all(9)
    for rank in range(4):
        driver.say(driver.owner(rank), wire.RankOverdue(0, 1, rank, "step", 3.1, 3.0, 9, 3.1, beat_age_s=0.1))
    for rank in (0, 2, 3):
        driver.fault(rank, 1, "RuntimeError: timed out waiting for peer", victim=True)
    send_stacks(driver, dict.fromkeys(range(4), IN_TORCH), {})
    command = driver.last_command("a")
    assert isinstance(command, wire.EndRanks) and command.ranks == [1]
    driver.die(1, by_us="it hangs")
    driver.enter_all(2)
    assert not driver.waiting and driver.incidents()[-1].rank == 1


def test_a_rank_that_dies_while_stacks_are_taken_is_replaced_and_nothing_else_is_ended() -> None:
    driver = two_nodes()
    driver.beat_all(9)
    driver.say("b", wire.RankOverdue(0, 1, 2, "step", 3.1, 3.0, 9, 3.1, beat_age_s=0.1))
    driver.die(2)
    assert driver.is_in(Phase.COLLECTING)
    send_stacks(driver, {0: IN_TORCH, 1: IN_TORCH, 3: IN_TORCH}, {})
    assert driver.is_in(Phase.RUNNING) and driver.restarts("b")[-1].replace == [2]
    assert "EndRanks" not in driver.commands("a") + driver.commands("b")


def test_a_culprit_that_does_not_die_becomes_a_restart_of_all_processes() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=20.0))
    hang(driver, ONE_SPINS)
    driver.wait(20.0)
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    assert driver.state.failure.kind == "hang" and driver.incidents()[-1].kind == "hang" and len(driver.incidents()) == 1


def test_limits_that_expire_while_ranks_wait_for_each_other_end_nothing() -> None:
    driver = two_nodes()
    driver.die(0)
    for rank in (1, 2, 3):
        driver.say(driver.owner(rank), wire.RankOverdue(0, 1, rank, "out-of-section", 30.0, 20.0, 9, 30.0))
    assert driver.is_in(Phase.RUNNING) and not driver.state.overdue
    driver.enter_all(2)
    driver.say("b", wire.RankOverdue(0, 1, 2, "step", 3.1, 3.0, 9, 3.1))
    assert driver.is_in(Phase.COLLECTING), "the limits hold again"


# ---------------------------------------------------------------------------------------------------------------- evidence


def evidence(driver: InProcessDriver) -> list[tuple[str, str, str]]:
    return [(a.evidence.kind, a.evidence.subject, a.evidence.code) for a in driver.actions if isinstance(a, FoundEvidence)]


def test_a_rank_lost_to_its_hardware_is_the_same_evidence_whether_it_was_replaced_or_not() -> None:
    """Told once, when the restart is done; or when the attempt has ended after all."""
    found = []
    for replaced in (True, False):
        driver = two_nodes()
        driver.say("a", wire.DeviceUsed(0, 1, 1, "GPU-1"))
        driver.die(1, signal=7, exit_code=135)
        assert evidence(driver) == []
        if replaced:
            driver.enter_all(2)
        else:
            driver.wait(100.0)
            driver.gone("a")
            driver.gone("b")
        found.append(evidence(driver))
    assert found == [[("device", "GPU-1", "SIGBUS")]] * 2


def test_an_exception_with_a_driver_s_word_of_a_broken_board_is_evidence() -> None:
    driver = two_nodes()
    driver.say("b", wire.DeviceUsed(0, 1, 2, "GPU-2"))
    driver.fault(2, 1, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    driver.enter_all(2)
    assert evidence(driver) == [("device", "GPU-2", "gpu-error")]
    driver.fault(1, 2, "ValueError")
    driver.enter_all(3)
    assert len(evidence(driver)) == 1
