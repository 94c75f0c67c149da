"""In-process restart as the supervisor decides it: who is replaced, what ends an attempt all the same, what is written down."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from rsup.launcher.launch_options import job_spec
from rsup.launcher.launch_parser import parse_launch
from rsup.supervisor import wire
from rsup.supervisor.actions import Record
from rsup.supervisor.events import AgentSilent, FactArrived, OperatorAsked, Recovered
from rsup.supervisor.in_process import NO_FURTHER_RESTART
from rsup.supervisor.records import RankSaved
from rsup.supervisor.states import Phase, decode, encode, rebased
from tests.core.in_process_driver import POLICY, InProcessDriver, one_node, two_nodes
from tests.core.job_driver import spec

# ------------------------------------------------------------------------------------------------------------ replacing


def test_a_killed_rank_gets_a_new_process_and_everybody_else_is_left_alone() -> None:
    """A rank killed, rank 0 too: its agent replaces it, all others are told at once, nothing of the budget is spent."""
    driver = two_nodes()
    driver.beat_all(7)
    driver.die(0)
    assert driver.is_in(Phase.RUNNING) and driver.state.failure is None
    (to_a,), (to_b,) = driver.restarts("a"), driver.restarts("b")
    assert (to_a.failed, to_a.gone, to_a.deaths, to_a.replace, to_a.entry) == ([0], [0], [1], [0], 0)
    assert (to_b.failed, to_b.gone, to_b.deaths, to_b.replace) == ([0], [0], [1], [])
    assert "rank 0 on node-a was killed by SIGKILL" in to_b.reason and "entry 2" in to_b.reason
    driver.now_s += 1.5
    driver.enter_all(2, 1, 2, 3)
    assert driver.waiting
    driver.enter(0, 2, joined=True, took_s=1.4)
    assert not driver.waiting
    done = driver.last("InProcessRestarted")
    assert done.data == {"entry": 2, "failed": [0], "gone": [0], "seconds": 1.5, "number": 1}
    assert "RankReplaced" in driver.kinds() and "StopAttempt" not in driver.kinds()
    assert (driver.state.budget.restarts, driver.state.num_ended, driver.state.attempt) == (0, 0, 1)


def test_recovery_counts_until_every_rank_has_done_an_iteration_again() -> None:
    driver = two_nodes()
    driver.beat_all(7)
    driver.say("a", wire.CheckpointCommitted(0, 1, 5, "/c/5"))
    driver.die(2)
    incident = driver.incidents()[-1]
    assert (incident.kind, incident.rank, incident.signal, incident.lost_iterations) == ("in-process", 2, 9, 2)
    driver.now_s += 1.0
    driver.enter_all(2)
    driver.say("a", wire.ResumedFrom(0, 1, 5, "/c/5"))
    driver.beat_all(7)  # what the board still shows of before the fault
    driver.beat_all(5)
    assert driver.incidents()[-1].recovered_us is None
    driver.now_s += 1.0
    driver.beat("a", 6)
    assert driver.incidents()[-1].recovered_us is None, "ranks of the other node have done nothing yet"
    driver.beat("b", 6)
    assert driver.state.in_process.open is None
    recovered = driver.incidents()[-1]
    assert recovered.recovered_us is not None and recovered.recovered_us - (recovered.detected_us or 0) == 2_000_000
    assert driver.last("Recovered").data == {"in_process": True, "entry": 2, "seconds": 2.0}
    assert driver.state.current is not None and driver.state.current.start_iteration == 0, "the attempt began before"


def test_the_ranks_rows_tell_the_end_of_the_old_process_and_then_the_new_one() -> None:
    driver = two_nodes()
    driver.say("a", wire.DeviceUsed(0, 1, 1, "GPU-1"))
    driver.die(1)
    driver.enter(1, 2, joined=True)
    driver.beat("a", 3)  # its pid is known from beats, where nobody tells it before
    rows = [
        a.record for a in driver.actions if isinstance(a, Record) and isinstance(a.record, RankSaved) and a.record.rank == 1
    ]
    assert [(row.exit_code, row.signal) for row in rows[-3:]] == [(137, 9), (None, 0), (None, 0)]
    assert (rows[-1].pid, rows[-1].device) == (1, "GPU-1")


def test_a_replaced_rank_ends_as_any_other_and_the_job_succeeds() -> None:
    driver = two_nodes()
    driver.die(1)
    driver.enter_all(2)
    for rank in range(4):
        assert driver.is_in(Phase.RUNNING)
        driver.exit(driver.owner(rank), rank, 0)
    assert driver.is_in(Phase.ENDED) and driver.state.result is not None
    assert (driver.state.result.exit_code, driver.state.num_ok) == (0, 4)
    assert driver.incidents()[-1].recovered_us is not None


def test_a_later_end_of_the_attempt_is_not_blamed_on_a_rank_that_was_replaced() -> None:
    driver = two_nodes()
    driver.die(0, signal=11, exit_code=139)
    driver.enter_all(2)
    driver.exit("b", 3, 17, declared=17, declared_reason="results differ")
    assert driver.is_in(Phase.STOPPING)
    driver.exit("a", 0, 143, signal=15, by_us="attempt 1 has failed")
    driver.gone("a")
    driver.gone("b")
    assert driver.state.result is not None
    assert (driver.state.result.rank, driver.state.result.exit_code) == (3, 17)
    report = driver.last_command("a")
    assert isinstance(report, wire.EndJob) and "rank 0 on node-a was killed" not in report.report


def test_a_declared_exit_during_a_restart_is_what_ends_the_attempt() -> None:
    driver = two_nodes()
    driver.die(0)
    driver.exit("b", 3, 16, declared=16, declared_reason="another device")
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    driver.gone("a")
    driver.gone("b")
    assert driver.state.result is not None and (driver.state.result.rank, driver.state.result.exit_code) == (3, 16)


# ------------------------------------------------------------------------------------------------- processes that live on


def test_an_exception_is_told_to_all_at_once_and_victims_add_nothing() -> None:
    driver = two_nodes()
    driver.beat_all(4)
    driver.fault(2, 1, iteration=4)
    assert [(c.failed, c.gone, c.replace, c.entry) for c in driver.restarts("a")] == [([2], [], [], 1)]
    driver.fault(0, 1, "RuntimeError: Connection closed by peer", kind="exception", victim=True)
    driver.fault(1, 1, "interrupted", kind="exception", victim=True)
    assert len(driver.restarts("a")) == len(driver.restarts("b")) == 1
    driver.now_s += 0.1
    driver.enter_all(2)
    assert driver.last("InProcessRestarted").data["failed"] == [0, 1, 2]
    incident = driver.incidents()[-1]
    assert (incident.rank, incident.victims, incident.found_by) == (2, [0, 1], "report of the rank")
    assert driver.state.in_process.num_restarts == 1 and driver.state.in_process.faults == ["ValueError: a bug"]


def test_a_victim_that_is_heard_of_first_does_not_keep_the_blame() -> None:
    driver = two_nodes()
    driver.fault(3, 1, "RuntimeError: Connection reset by peer", victim=True)
    driver.die(0, error="Segmentation fault", signal=11, exit_code=139)
    (first, second) = driver.restarts("b")
    assert (first.entry, first.gone, second.gone) == (1, [], [0])
    incident = driver.incidents()[-1]
    assert (incident.incident, incident.rank, incident.victims) == (1, 0, [3])
    assert driver.state.in_process.num_restarts == 1 and "139" in driver.state.in_process.faults[0]
    assert driver.last("FirstMover").rank == 0


def test_a_fault_that_nothing_follows_becomes_a_restart_of_all_processes() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=20.0))
    driver.fault(1, 1)
    driver.enter(0, 2)
    driver.wait(19.0)
    assert driver.is_in(Phase.RUNNING)
    driver.wait(1.0)
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    text = driver.state.failure.text
    assert "ValueError: a bug" in text and "ranks 1, 2, 3" in text and "--inprocess-restart-within 20" in text
    stop = driver.last_command("b")
    assert isinstance(stop, wire.StopAttempt) and stop.stacks_within_s > 0
    assert len(driver.incidents()) == 1 and driver.incidents()[0].kind == "exit"
    driver.gone("a")
    driver.gone("b")
    assert (driver.state.attempt, driver.state.budget.restarts) == (2, 1)
    assert driver.state.in_process.restartable is False and driver.state.budget.signature.startswith("exit|1||ValueError")


# --------------------------------------------------------------------------------------------------- what is not replaced

ENDS = {
    "declared 16": {"exit_code": 16, "signal": 0, "declared": 16},
    "declared 88": {"exit_code": 88, "signal": 0, "declared": 88},
    "an operating error": {"exit_code": 1, "signal": 0, "declared": 1},
    "an operating error that Python ends with": {"exit_code": 1, "signal": 0, "declared": 2},
    "ended by its launcher": {"by_us": "cut off for too long"},
}


@pytest.mark.parametrize("how", ENDS.values(), ids=ENDS)
def test_ends_that_a_new_process_does_not_make_good_end_the_attempt(how: dict[str, object]) -> None:
    driver = two_nodes()
    driver.die(1, **how)
    assert driver.is_in(Phase.STOPPING) and not driver.restarts("a")


def test_undeclared_codes_are_failures_like_any_other() -> None:
    driver = two_nodes()
    driver.die(1, exit_code=17, signal=0)
    assert driver.is_in(Phase.RUNNING) and driver.restarts("a")[0].replace == [1]


def test_before_every_rank_has_entered_a_death_ends_the_attempt() -> None:
    driver = InProcessDriver(spec(policy=POLICY, min_nodes=2, max_nodes=2))
    driver.run_nodes("a", "b")
    driver.enter_all(1, 0, 1, 2)
    driver.die(0)
    assert driver.is_in(Phase.STOPPING) and not driver.restarts("b")


def test_a_job_of_one_rank_and_a_policy_of_zero_end_the_attempt() -> None:
    for driver in (one_node(1), one_node(3, in_process=wire.InProcessPolicy(max_restarts=0))):
        driver.die(0)
        assert driver.is_in(Phase.STOPPING)


def test_nobody_enters_again_where_a_rank_has_finished_or_the_ranks_leave() -> None:
    driver = two_nodes()
    driver.exit("a", 0, 0)
    driver.die(1)
    assert driver.is_in(Phase.STOPPING)
    driver = two_nodes()
    driver.say("a", wire.RankLeaves(0, 1, 8, "duration", "time is up", True))
    driver.die(1)
    assert driver.is_in(Phase.STOPPING)


def test_all_ranks_dead_end_the_attempt_and_the_first_one_is_named() -> None:
    driver = one_node(2)
    driver.die(1, signal=11, exit_code=139)
    driver.die(0, signal=6, exit_code=134, error="RuntimeError: Connection closed by peer")
    assert driver.is_in(Phase.STOPPING) and len(driver.incidents()) == 1
    assert not [c for c in driver.restarts("a") if c.replace == [0]]
    driver.exit("a", 1, 143, signal=15, by_us="the attempt has failed")
    driver.gone("a")
    assert driver.state.attempt == 2
    incident = driver.incidents()[0]
    assert (incident.kind, incident.rank, incident.signal, incident.victims) == ("signal", 1, 11, [0])
    assert "no process of the attempt is left" in incident.text


def test_a_node_that_is_lost_in_the_middle_ends_the_attempt() -> None:
    driver = two_nodes()
    driver.die(0)
    driver.say("b", wire.AgentGone(0, "the launcher ended without a word"))
    assert driver.is_in(Phase.STOPPING)
    assert driver.state.failure is not None and driver.state.failure.kind == "agent-lost"


def test_with_reserves_nobody_is_replaced_and_the_job_ends_well_without_the_dead_rank() -> None:
    driver = one_node(3, reserves=1)
    driver.die(0)
    (command,) = driver.restarts("a")
    assert (command.gone, command.replace, command.deaths) == ([0], [], [1])
    driver.enter(1, 2, reserves=1)
    assert driver.waiting
    driver.enter(2, 2, reserves=1)
    assert not driver.waiting
    driver.exit("a", 1, 0)
    assert driver.is_in(Phase.RUNNING)
    driver.exit("a", 2, 0)
    driver.gone("a")
    assert driver.state.result is not None and driver.state.result.exit_code == 0


def test_when_no_reserve_is_left_the_attempt_ends_and_does_not_count_as_done() -> None:
    driver = one_node(3, reserves=1)
    driver.die(0)
    driver.enter_all(2, 1, 2, reserves=1)
    driver.die(2)
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    assert "no rank in reserve is left" in driver.state.failure.text
    driver.exit("a", 1, 0)
    driver.gone("a")
    assert driver.state.result is None and driver.state.attempt == 2


def test_ranks_that_restart_no_more_by_themselves_are_not_replaced() -> None:
    """P27: `--inprocess-max-iterations` is an end."""
    said = "rsup.worker.inprocess.wrapping.RestartsOver: no further restart inside the processes: 3 iterations"
    driver = two_nodes()
    driver.fault(0, 1)
    driver.die(1, exit_code=1, signal=0, error=said)
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    assert "restart no more" in driver.state.failure.text and not [c for c in driver.restarts("a") if c.replace]


# ---------------------------------------------------------------------------------------------------- several at a time


def test_two_ranks_that_die_at_once_are_replaced_in_one_restart() -> None:
    """Two faults at once, on two nodes."""
    driver = two_nodes()
    driver.die(1)
    driver.die(2)
    assert [c.replace for c in driver.restarts("a")] == [[1], []] and [c.replace for c in driver.restarts("b")] == [[], [2]]
    assert driver.state.in_process.num_restarts == 1 and len(driver.incidents()) == 1
    driver.enter_all(2, 0, 3)
    driver.enter(1, 2, joined=True)
    assert driver.waiting
    driver.enter(2, 2, joined=True)
    assert not driver.waiting


def test_a_replacement_that_dies_before_it_joins_is_replaced_again_within_the_bounds() -> None:
    """A fault during the restart: the second process of a rank has number 2 among the dead."""
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=20.0))
    driver.die(0)
    driver.now_s += 10.0
    driver.die(0, exit_code=1, signal=0, error="ImportError: no module")
    assert driver.restarts("a")[-1].deaths == [2]
    driver.die(0, exit_code=1, signal=0, error="ImportError: no module")
    assert driver.is_in(Phase.RUNNING)
    driver.die(0, exit_code=1, signal=0, error="ImportError: no module")
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    assert "3 equal faults" in driver.state.failure.text


def test_deaths_move_the_deadline_and_never_beyond_twice_the_bound() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=20.0))  # and 8 s that the first start took
    driver.die(0)
    driver.wait(27.0)
    assert driver.is_in(Phase.RUNNING)
    driver.die(2)
    driver.wait(27.0)
    assert driver.is_in(Phase.RUNNING)
    driver.die(0)
    driver.wait(2.0)
    assert driver.is_in(Phase.STOPPING), "56 s after the first fault"


def test_a_survivor_that_dies_while_the_others_wait_joins_the_restart() -> None:
    driver = two_nodes()
    driver.die(0)
    driver.enter_all(2, 1, 2)
    driver.die(3)
    assert driver.restarts("b")[-1].replace == [3]
    driver.enter(0, 2, joined=True)
    assert driver.waiting
    driver.enter(3, 2, joined=True)
    assert not driver.waiting


def test_a_fault_in_the_next_entry_before_all_are_in_it_asks_for_one_more() -> None:
    driver = two_nodes()
    driver.fault(0, 1)
    driver.enter_all(2, 0, 1, 2)
    driver.fault(1, 2, "OSError: no file")
    assert driver.restarts("b")[-1].entry == 2 and driver.state.in_process.num_restarts == 2
    driver.enter(3, 2)
    assert driver.waiting
    driver.enter_all(3)
    assert not driver.waiting and driver.last("InProcessRestarted").data["entry"] == 3


# --------------------------------------------------------------------------------------------------------------- ordering


def test_entries_that_are_known_before_the_death_that_they_follow() -> None:
    """The new process reports from the other node before the old one's end is known: what matters is that all are in."""
    driver = two_nodes()
    driver.enter_all(2, 2, 3)
    assert driver.waiting and driver.last_command("a").__class__ is not wire.RestartInProcess, "nobody is told twice"
    driver.die(1)
    assert driver.restarts("a")[-1].replace == [1] and len(driver.incidents()) == 1
    assert driver.incidents()[0].rank == 1, "whose end it was is known now"
    driver.enter(0, 2)
    assert driver.waiting
    driver.enter(1, 2, joined=True)
    assert not driver.waiting and driver.state.in_process.num_restarts == 1


def test_an_entry_that_is_known_before_its_fault_needs_no_further_one() -> None:
    driver = two_nodes()
    driver.enter_all(2, 2, 3)
    driver.fault(0, 1)
    driver.enter_all(2, 0, 1)
    assert not driver.waiting and not driver.restarts("a"), "the ranks have restarted already"
    assert driver.incidents()[-1].rank == 0 and driver.state.in_process.num_restarts == 1


def test_faults_and_entries_that_are_late_or_doubled_decide_nothing() -> None:
    driver = two_nodes()
    driver.fault(0, 1)
    driver.enter_all(2)
    before = driver.state
    driver.fault(1, 1, "interrupted", kind="exception", victim=True)
    driver.enter(1, 2)
    driver.enter(1, 1)
    assert driver.state.in_process == before.in_process and len(driver.restarts("b")) == len(before.agents["b"].outbox) - 1
    repeat = wire.RankFaulted(0, 1, 0, 2, "exception", "again")
    assert driver.feed(FactArrived("a", 1, repeat)) == []
    driver.die(1)
    driver.die(1, exit_code=1, signal=0)  # of its new process
    driver.fault(1, 2, "left by the process before it died")
    assert driver.waiting and driver.state.in_process.open is not None and driver.state.in_process.open.replacing == [1]


def test_ranks_gone_of_a_node_whose_only_rank_is_replaced_ends_nothing() -> None:
    driver = two_nodes(1)
    driver.die(1)
    driver.gone("b")
    assert driver.is_in(Phase.RUNNING) and driver.state.agents["b"].live_attempt == 1
    driver.enter_all(2)
    assert not driver.waiting


# --------------------------------------------------------------------------------------------------------------- bounds


def test_equal_faults_without_getting_further_end_the_attempt() -> None:
    driver = two_nodes()
    for entry in (1, 2):
        driver.fault(0, entry, iteration=6)
        driver.recover(entry + 1, 5)  # iterations that had been done before are no progress
    driver.fault(0, 3, iteration=6)
    assert driver.is_in(Phase.STOPPING) and driver.state.failure is not None
    assert "3 equal faults" in driver.state.failure.text and "--inprocess-identical-limit" in driver.state.failure.text
    assert driver.last("InProcessGivenUp").data["number"] == 3 and len(driver.incidents()) == 3


def test_progress_forgets_equal_faults_and_any_number_of_restarts_is_free() -> None:
    driver = two_nodes()
    for entry in range(1, 31):
        driver.fault(0, entry, iteration=10 * entry)
        driver.recover(entry + 1, 10 * entry + 2)
    assert driver.is_in(Phase.RUNNING)
    assert (driver.state.in_process.num_restarts, driver.state.budget.restarts, driver.state.attempt) == (30, 0, 1)


def test_faults_of_any_kind_without_progress_and_the_number_of_restarts_are_bounded() -> None:
    """P27: a limit that is set has effect."""
    cases = (
        (wire.InProcessPolicy(no_progress_limit=4), "4 faults without getting further"),
        (wire.InProcessPolicy(max_restarts=3), "all 3 in-process restarts"),
    )
    for policy, words in cases:
        driver = two_nodes(in_process=policy)
        for entry in range(1, 4):
            driver.fault(entry % 4, entry, f"Error {'abc'[entry - 1]}")
            assert driver.is_in(Phase.RUNNING)
            driver.enter_all(entry + 1)
        driver.fault(0, 4, "OSError")
        assert driver.is_in(Phase.STOPPING)
        assert driver.state.failure is not None and words in driver.state.failure.text


def test_kills_from_outside_are_not_equal_faults() -> None:
    driver = two_nodes()
    for entry in range(1, 6):
        driver.die(1)
        driver.enter_all(entry + 1)
    assert driver.is_in(Phase.RUNNING)


def test_nothing_is_given_up_while_a_node_is_not_heard_of() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=20.0))
    driver.die(0)
    driver.feed(AgentSilent("b", 16.0))
    driver.wait(200.0)
    assert driver.is_in(Phase.RUNNING) and driver.waiting
    driver.enter_all(2)  # it is back
    assert not driver.waiting


# ---------------------------------------------------------------------------------------------- stops, and a new supervisor


def test_a_stop_in_the_middle_of_a_restart_replaces_nothing_any_more() -> None:
    driver = two_nodes()
    driver.die(0)
    driver.feed(OperatorAsked("stop", "alice", "", "r1"))
    assert driver.is_in(Phase.STOPPING) and isinstance(driver.last_command("b"), wire.StopAttempt)
    driver.wait(3.0)
    assert driver.is_in(Phase.STOPPING)
    driver.die(3)
    assert len(driver.restarts("b")) == 1, "nothing is replaced any more"
    driver.gone("a")
    driver.gone("b")
    assert driver.state.result is not None and driver.state.result.exit_code == 143


def test_ranks_that_leave_well_after_a_fault_have_recovered_from_it() -> None:
    driver = two_nodes()
    driver.beat_all(7)
    driver.die(0)
    driver.enter_all(2, 1, 2, 3)
    driver.enter(0, 2, joined=True)
    driver.feed(OperatorAsked("stop", "alice", "", "r1"))
    for rank in range(4):
        assert driver.incidents()[-1].recovered_us is None
        driver.die(rank, exit_code=0, signal=0)
    assert driver.incidents()[-1].recovered_us is not None


def test_a_supervisor_that_comes_back_goes_on_with_the_restart_and_its_time() -> None:
    driver = two_nodes(in_process=wire.InProcessPolicy(restart_within_s=20.0))
    driver.die(0)
    driver.wait(10.0)
    kept = encode(replace(driver.state, clock_s=driver.now_s))
    driver.now_s += 5000.0  # a clock of its own, and time in which nobody watched
    driver.state = rebased(decode(kept), driver.now_s)
    driver.feed(Recovered("new"))
    driver.wait(10.0)
    assert driver.is_in(Phase.RUNNING) and driver.waiting
    driver.enter_all(2)
    assert not driver.waiting
    driver.fault(1, 2)
    driver.wait(20.0)
    assert driver.is_in(Phase.STOPPING)


def test_a_state_of_a_release_without_in_process_restart_is_read() -> None:
    driver = two_nodes()
    old = msgspec.msgpack.decode(encode(driver.state))
    del old["in_process"], old["spec"]["in_process"]
    read = decode(msgspec.msgpack.encode(old))
    assert not read.in_process.restartable and read.spec.in_process.restart_within_s == 60.0


# --------------------------------------------------------------------------------------------------------------- options


def test_the_launcher_s_options_reach_the_supervisor(tmp_path: Path) -> None:
    """P27: each of them has an effect."""
    words = ["within=7.5", "identical-limit=0", "no-progress-limit=4", "max-restarts=2"]
    names = ["--inprocess-restart-" + words[0], *(f"--inprocess-{word}" for word in words[1:])]
    environ = {"RSUP_STATE_DIR": str(tmp_path)}
    read = job_spec(parse_launch([*names, "train.py"], environ), "alice").in_process
    assert read == wire.InProcessPolicy(7.5, 2, 0, 4)
    assert job_spec(parse_launch(["train.py"], environ), "alice").in_process == wire.InProcessPolicy()
    for wrong in ("--inprocess-max-restarts=some", "--inprocess-restart-within=0", "--inprocess-identical-limit=-1"):
        with pytest.raises(wire.UsageError, match=wrong.split("=")[0]):
            parse_launch([wrong, "train.py"], environ)


def test_the_worker_s_word_for_no_more_is_the_one_that_is_looked_for() -> None:
    source = Path(__file__).parents[2] / "worker/inprocess/wrapping.py"
    assert NO_FURTHER_RESTART in source.read_text()
