"""The agent's process machine: tables of (state, event) -> (state, actions)."""

import signal
import typing

import pytest
from msgspec.structs import replace

from rsup.launcher import process_events as ev
from rsup.launcher.process_machine import UNEXPECTED, decide, new_state
from rsup.launcher.process_state import Phase, Settings
from rsup.supervisor import wire

RESULT = wire.JobResult(0, "all ranks exited 0")


def at(seconds: float) -> ev.Moment:
    return ev.Moment(seconds, int(seconds * 1e6))


def start_command(
    sequence: int = 1, attempt: int = 1, epoch: int | None = None, reason: str = "all nodes are here"
) -> wire.StartAttempt:
    return wire.StartAttempt(
        sequence, reason, attempt, epoch or attempt, 0, 2, 2, 0, 1, "127.0.0.1", 1234, "job", 1, max_restarts=3
    )


class Agent:
    """The machine with a clock, as the shell drives it."""

    def __init__(self, **settings: typing.Any) -> None:
        self.now = 100.0
        self.state = new_state(Settings(**settings), at(self.now))
        self.actions: list[ev.Action] = []
        self.sequence = 0

    def feed(self, event: ev.Event) -> list[ev.Action]:
        self.state, actions = decide(self.state, event, at(self.now))
        self.actions += actions
        return actions

    def order(self, *commands: wire.AnyCommand, epoch: int | None = None) -> list[ev.Action]:
        numbered = []
        for command in commands:
            self.sequence += 1
            numbered.append(replace_struct(command, sequence=self.sequence))
        epoch = self.state.epoch if epoch is None else epoch
        return self.feed(ev.OrderArrived(wire.Order("a", epoch, 0, numbered)))

    def tick(self, until: float, step: float = 0.5) -> list[ev.Action]:
        actions = []
        while self.now < until:
            self.now += step
            actions += self.feed(ev.Tick())
        return actions

    def join(self) -> "Agent":
        info = wire.SupervisorInfo("i", 1, "h", True)
        self.feed(ev.Welcomed(wire.Welcome((1, 3), "0", info, "job", 1, 0, 0)))
        return self

    def run(self, attempt: int = 1) -> "Agent":
        if not self.state.joined:
            self.join()
        self.order(start_command(attempt=attempt))
        self.feed(ev.RanksSpawned(attempt, (11, 12)))
        return self

    def die(self, local_rank: int, exit_code: int = 0, signum: int = 0) -> list[ev.Action]:
        return self.feed(ev.RankDied(self.state.attempt, local_rank, exit_code, signum))


def replace_struct(command: wire.AnyCommand, **changes: typing.Any) -> wire.AnyCommand:
    import msgspec

    return msgspec.structs.replace(command, **changes)


def facts(actions: list[ev.Action], kind: type) -> list[typing.Any]:
    return [action.fact for action in actions if isinstance(action, ev.AddFact) and isinstance(action.fact, kind)]


def of(actions: list[ev.Action], kind: type) -> list[typing.Any]:
    return [action for action in actions if isinstance(action, kind)]


# ------------------------------------------------------------------------------------------------- every pair has an answer

EXAMPLES: list[ev.Event] = [
    ev.OrderArrived(wire.Order("a", 1, 0, [])),
    ev.Welcomed(wire.Welcome((1, 3), "0", wire.SupervisorInfo("i", 1, "h", True), "job", 1, 1, 0)),
    ev.Refused(wire.Refusal(2, "no")),
    ev.StoreReady(1, "127.0.0.1", 1),
    ev.StoreFailure(1, "in use"),
    ev.RanksSpawned(1, (11, 12)),
    ev.SpawnFailure(1, "no such file"),
    ev.RankReplaced(1, 0, 13),
    ev.ReplaceFailure(1, 0, "no memory"),
    ev.RankDied(1, 0, 1),
    ev.AllReaped(1),
    ev.Overdue((wire.RankOverdue(0, 1, 0, "step", 4.0, 3.0),)),
    ev.SectionsRead(wire.SectionsObserved(0, 1, {})),
    ev.StacksReady(1, ()),
    ev.SignalArrived(signal.SIGTERM),
    ev.RankMessage(1, 0, wire.RankNote("info", "hello")),
    ev.RankMessage(1, 0, wire.RankSetsLimits(wire.LimitsChange(sections={"step": 3.0}))),
    ev.RankMessage(1, 0, wire.RankControls("shutdown", "enough")),
    ev.Noticed("info", "a line"),
    ev.HealthRead((wire.HealthReading("GPU-1", "xid", "79"),), "boot"),
    ev.SurvivorsNamed(1, ("11 (python, D)",)),
    ev.NodeGivenUp("n2", "SLURM says that it is DOWN"),
    ev.Tick(),
]


def in_phase(phase: Phase) -> Agent:
    agent = Agent().join()
    if phase is Phase.PARKED:
        agent.order(wire.Park(0, "spare"))
    elif phase is Phase.HOSTING:
        agent.order(wire.HostStore(0, "first", 1))
    elif phase in (Phase.RUNNING, Phase.STOPPING, Phase.GONE):
        agent.run()
    if phase in (Phase.STOPPING, Phase.GONE):
        agent.order(wire.StopAttempt(0, "rank 9 failed", 1, 5.0))
    if phase is Phase.GONE:
        agent.die(0)
        agent.die(1)
        agent.feed(ev.AllReaped(1))
    elif phase is Phase.ENDED:
        agent.order(wire.EndJob(0, "over", RESULT))
    assert agent.state.phase is phase
    return agent


def test_examples_cover_every_event_and_command() -> None:
    assert {type(example) for example in EXAMPLES} == set(typing.get_args(ev.Event))


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_every_pair_is_handled_or_rejected(phase: Phase, event: ev.Event) -> None:
    agent = in_phase(phase)
    before = agent.state
    actions = agent.feed(event)
    if (phase, type(event)) in UNEXPECTED:
        assert actions == []
        assert agent.state == replace(before, num_unexpected=before.num_unexpected + 1)
    else:
        assert agent.state.num_unexpected == before.num_unexpected
    for action in actions:
        reason = getattr(action, "reason", "said")
        assert reason, action


COMMANDS: list[wire.AnyCommand] = [
    wire.HostStore(0, "r", 2),
    start_command(attempt=2),
    wire.StopAttempt(0, "r", 1, 5.0),
    wire.RestartInProcess(0, "r", 1, [1], [1], [1], [1]),
    wire.EndRanks(0, "r", 1, [1]),
    wire.TakeStacks(0, "r", 1),
    wire.SaveCheckpoint(0, "r", "q"),
    wire.StopTraining(0, "r", "q", 5.0),
    wire.SetLimits(0, "r", wire.Limits()),
    wire.Park(0, "r"),
    wire.EndJob(0, "r", RESULT),
]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_every_command_is_performed_once_in_every_phase(phase: Phase, command: wire.AnyCommand) -> None:
    assert {type(command) for command in COMMANDS} == set(typing.get_args(wire.AnyCommand))
    agent = in_phase(phase)
    agent.order(command)
    assert agent.state.last_command == agent.sequence
    again = replace_struct(command, sequence=agent.sequence)
    assert agent.feed(ev.OrderArrived(wire.Order("a", 9, 0, [again]))) == []


# ------------------------------------------------------------------------------------------------------------- orders


def test_commands_are_performed_in_sequence_and_a_hole_waits() -> None:
    agent = Agent().join()
    third = wire.SetLimits(3, "r", wire.Limits())
    assert agent.feed(ev.OrderArrived(wire.Order("a", 0, 0, [third]))) == []
    first, second = wire.Park(1, "r"), wire.HostStore(2, "r", 1)
    actions = agent.feed(ev.OrderArrived(wire.Order("a", 0, 0, [third, first, second])))
    assert [type(action) for action in actions] == [ev.PrintReport, ev.BindStore, ev.PushLimits]
    assert agent.state.last_command == 3


def test_an_order_of_an_older_epoch_is_dropped_and_counted() -> None:
    agent = Agent().run(attempt=3)
    agent.now += 50
    contact = agent.state.contact_at
    assert agent.order(wire.StopAttempt(0, "old", 3, 0.0), epoch=2) == []
    assert agent.state.num_dropped == 1
    assert agent.state.phase is Phase.RUNNING
    assert agent.state.contact_at == contact


def test_a_start_kills_and_reaps_the_ranks_of_the_attempt_before() -> None:
    agent = Agent().run()
    actions = agent.order(start_command(attempt=2), epoch=2)
    (kill,) = of(actions, ev.SignalRanks)
    assert (kill.local_ranks, kill.signum, kill.whole_session) == ((0, 1), signal.SIGKILL, True)
    assert not of(actions, ev.SpawnRanks)
    agent.die(0, 137, 9)
    assert of(agent.die(1, 137, 9), ev.ReapAll) == [ev.ReapAll(1, 0.0, "all ranks of the attempt have exited")]
    actions = agent.feed(ev.AllReaped(1))
    assert facts(actions, wire.RanksGone)[0].attempt == 1
    assert of(actions, ev.SpawnRanks)[0].command.attempt == 2


@pytest.mark.parametrize(
    "command", [wire.HostStore(0, "r", 2), wire.StopAttempt(0, "r", 2, 5.0), wire.TakeStacks(0, "r", 2)], ids=str
)
def test_an_order_about_a_newer_attempt_kills_the_ranks_first(command: wire.AnyCommand) -> None:
    agent = Agent().run()
    actions = agent.order(command, epoch=2)
    assert isinstance(actions[0], ev.SignalRanks) and killed(actions)
    assert "attempt 2 is under way (epoch 2), this is attempt 1" in actions[0].reason


def test_a_newer_epoch_alone_kills_nothing() -> None:
    agent = Agent().run()
    for command in (wire.TakeStacks(0, "r", 1), wire.SetLimits(0, "r", wire.Limits())):
        assert not of(agent.order(command, epoch=agent.state.epoch + 1), ev.SignalRanks)
    assert agent.state.phase is Phase.RUNNING


# ------------------------------------------------------------------------------------------------ the life of an attempt


def test_success_ends_with_the_supervisors_word() -> None:
    agent = Agent().run()
    assert facts(agent.actions, wire.AttemptStarted)[0].pids == [11, 12]
    assert agent.die(0) and not of(agent.actions, ev.ReapAll)
    actions = agent.die(1)
    assert [type(action) for action in actions] == [ev.AddFact, ev.ObserveSections, ev.ReapAll]
    agent.feed(ev.AllReaped(1))
    actions = agent.order(wire.EndJob(0, "all ranks exited 0", RESULT))
    assert actions == [ev.WriteResult(RESULT), ev.Exit(0, RESULT.reason)]
    assert agent.state.phase is Phase.ENDED


def test_what_a_success_leaves_behind_has_time_though_the_job_is_over() -> None:
    agent = Agent().run()
    agent.die(0)
    assert [reap.grace_s for reap in of(agent.die(1), ev.ReapAll)] == [10.0]
    assert agent.order(wire.EndJob(0, "all ranks exited 0", RESULT)) == []
    assert of(agent.feed(ev.AllReaped(1)), ev.Exit) == [ev.Exit(0, RESULT.reason)]


def test_what_is_left_behind_does_not_hold_up_a_restart() -> None:
    agent = Agent().run()
    agent.die(0)
    assert [reap.grace_s for reap in of(agent.die(1, 3), ev.ReapAll)] == [0.5]
    agent = Agent(max_nodes=2).run()
    agent.die(0)
    agent.die(1)
    actions = agent.order(wire.StopAttempt(0, "rank 3 exited with code 1", 1, 30.0))
    assert [reap.grace_s for reap in of(actions, ev.ReapAll)] == [0.5]


def test_a_failed_rank_leaves_its_siblings_to_the_decider() -> None:
    agent = Agent().run()
    actions = agent.feed(ev.RankDied(1, 1, 137, 9, iteration=7, section="step", error="Killed"))
    (fact,) = facts(actions, wire.RankExited)
    assert (fact.rank, fact.exit_code, fact.signal, fact.by_us, fact.iteration) == (1, 137, 9, "", 7)
    assert len(actions) == 1
    actions = agent.order(wire.StopAttempt(0, "rank 1 was killed", 1, 5.0))
    assert of(actions, ev.SignalRanks) == [ev.SignalRanks((0,), signal.SIGTERM, "rank 1 was killed")]
    assert facts(agent.die(0, 143, 15), wire.RankExited)[0].by_us == "rank 1 was killed"


def test_a_rank_that_was_dying_when_it_was_signalled_did_not_die_of_that() -> None:
    agent = Agent().run()
    agent.die(0, 1)  # a victim that was faster to end than the rank whose GPU memory the kernel was still freeing
    agent.order(wire.StopAttempt(0, "rank 0 exited with code 1", 1, 5.0))
    (fact,) = facts(agent.feed(ev.RankDied(1, 1, 137, 9, killer=wire.NOT_OURS, was_dying=True)), wire.RankExited)
    assert (fact.by_us, fact.killer) == ("", wire.NOT_OURS)


def test_sigkill_follows_when_the_grace_is_over() -> None:
    agent = Agent().run()
    agent.order(wire.StopAttempt(0, "r", 1, 5.0))
    assert not of(agent.tick(104.5), ev.SignalRanks)
    (kill,) = of(agent.tick(105.5), ev.SignalRanks)
    assert (kill.signum, kill.whole_session) == (signal.SIGKILL, True)


def test_a_stop_without_grace_kills_at_once_and_a_longer_one_cannot_undo_a_shorter() -> None:
    agent = Agent().run()
    assert of(agent.order(wire.StopAttempt(0, "hung", 1, 0.0)), ev.SignalRanks)[0].signum == signal.SIGKILL
    agent = Agent().run()
    agent.order(wire.StopAttempt(0, "r", 1, 5.0))
    agent.order(wire.StopTraining(0, "r", "q", 60.0))
    assert of(agent.tick(105.5), ev.SignalRanks)[0].signum == signal.SIGKILL


def test_a_stop_that_comes_before_the_pids_is_done_when_they_are_there() -> None:
    agent = Agent().join()
    agent.order(start_command())
    assert not of(agent.order(wire.StopAttempt(0, "r", 1, 5.0)), ev.SignalRanks)
    assert of(agent.feed(ev.RanksSpawned(1, (11, 12))), ev.SignalRanks)[0].signum == signal.SIGTERM


def test_a_failed_spawn_is_reported_and_reaped() -> None:
    agent = Agent().join()
    agent.order(start_command())
    actions = agent.feed(ev.SpawnFailure(1, "no such file: x.py", 2))
    assert facts(actions, wire.StartFailed)[0].exit_code == 2
    assert of(actions, ev.ReapAll)
    assert facts(agent.feed(ev.AllReaped(1)), wire.RanksGone)


def test_stop_of_an_attempt_that_never_began_here_answers_that_it_is_gone() -> None:
    agent = Agent().join()
    agent.order(wire.HostStore(0, "r", 1))
    assert facts(agent.order(wire.StopAttempt(0, "r", 1, 5.0)), wire.RanksGone)


def test_a_restart_is_said_in_one_line_with_its_cause() -> None:
    agent = Agent().run()
    agent.die(1, 137, 9)
    agent.die(0, 1)
    agent.feed(ev.AllReaped(1))
    (said,) = of(agent.order(start_command(attempt=2), epoch=2), ev.PrintReport)
    assert said.text == "rsup: attempt 2 starts: rank 1 was killed by SIGKILL (restart 1 of 3)"
    agent.feed(ev.RanksSpawned(2, (13, 14)))
    agent.order(wire.StopAttempt(0, "rank 5 on other hung", 2, 0.0))
    agent.die(0, 137, 9)
    agent.die(1, 137, 9)
    agent.feed(ev.AllReaped(2))
    (said,) = of(agent.order(start_command(attempt=3), epoch=3), ev.PrintReport)
    assert said.text == "rsup: attempt 3 starts: rank 5 on other hung (restart 2 of 3)"


def test_a_free_restart_does_not_say_that_one_was_spent() -> None:
    agent = Agent().join()
    agent.order(replace(start_command(), restarts_spent=0))
    agent.feed(ev.RanksSpawned(1, (11, 12)))
    for attempt, spent, expected in ((2, 0, "costs no restart"), (3, 1, "restart 1 of 3"), (4, 1, "costs no restart")):
        agent.die(0, 16)
        agent.die(1, 16)
        agent.feed(ev.AllReaped(attempt - 1))
        command = replace(start_command(attempt=attempt), restarts_spent=spent)
        (said,) = of(agent.order(command, epoch=attempt), ev.PrintReport)
        assert said.text.endswith(f"({expected})")
        agent.feed(ev.RanksSpawned(attempt, (11 + 2 * attempt, 12 + 2 * attempt)))


def test_a_launch_that_goes_on_with_an_attempt_of_another_names_no_restart() -> None:
    """`--resume`: attempts are numbered on, and no restart of this launch is spent."""
    (said,) = of(Agent().join().order(replace(start_command(attempt=2), restarts_spent=0)), ev.PrintReport)
    assert said.text == "rsup: attempt 2 starts"


def test_several_nodes_are_told_what_starts_and_a_newcomer_no_cause_that_it_does_not_know() -> None:
    said = of(Agent(max_nodes=2).join().order(start_command(attempt=2)), ev.PrintReport)
    assert [report.text for report in said] == ["rsup: attempt 2 starts with 2 ranks on 1 node (restart 1 of 3)"]
    said = of(Agent(max_nodes=2).join().order(start_command()), ev.PrintReport)
    assert [report.text for report in said] == ["rsup: attempt 1 starts with 2 ranks on 1 node"]
    assert not of(Agent().join().order(start_command()), ev.PrintReport)


def test_who_waits_for_other_nodes_says_so_once() -> None:
    agent = Agent(min_nodes=2, max_nodes=2).join()
    agent.state = replace(agent.state, contact_at=1000.0)  # the supervisor goes on answering
    assert not of(agent.tick(104), ev.PrintReport)
    (said,) = of(agent.tick(200), ev.PrintReport)
    assert said.text == (
        "rsup: waiting for other nodes: the job starts when all 2 are here; it waits up to 10 min for that (--join-timeout)"
    )
    elastic = Agent(min_nodes=1, max_nodes=3, join_timeout_s=90.0).join()
    elastic.state = replace(elastic.state, contact_at=1000.0)
    (said,) = of(elastic.tick(200), ev.PrintReport)
    assert "starts with 3, or 30 s after there are at least 1; it waits up to 90 s" in said.text
    alone = Agent().join()
    alone.state = replace(alone.state, contact_at=1000.0)
    assert not of(alone.tick(200), ev.PrintReport)


def test_who_waits_for_other_nodes_after_an_attempt_says_why_it_ended() -> None:
    agent = Agent(min_nodes=2, max_nodes=2).run()
    agent.order(wire.StopAttempt(0, "attempt 1 has failed: the agent on n2 is gone", 1, 5.0))
    agent.die(0, 143, 15)
    agent.die(1, 143, 15)
    agent.feed(ev.AllReaped(1))
    agent.state = replace(agent.state, contact_at=1000.0)
    (said,) = of(agent.tick(200), ev.PrintReport)
    assert said.text == (
        "rsup: attempt 1 has ended: the agent on n2 is gone; "
        "waiting for other nodes: the job starts when all 2 are here; it waits up to 10 min for that (--join-timeout)"
    )
    agent = Agent(min_nodes=2, max_nodes=2).run()
    agent.die(0)
    agent.die(1)
    agent.feed(ev.AllReaped(1))
    agent.state = replace(agent.state, contact_at=1000.0)
    assert not of(agent.tick(200), ev.PrintReport), "the other node still trains"
    agent.order(wire.StopAttempt(0, "the agent on n2 is gone", 1, 5.0))
    agent.state = replace(agent.state, contact_at=1000.0)
    assert "the agent on n2 is gone; waiting" in of(agent.tick(210), ev.PrintReport)[0].text


def test_a_spare_says_once_that_it_is_one() -> None:
    agent = Agent(max_nodes=2).join()
    (said,) = of(agent.order(wire.Park(0, "node a is a spare")), ev.PrintReport)
    assert said.text == "rsup: node a is a spare"
    assert not of(agent.order(wire.Park(0, "node a is a spare")), ev.PrintReport)


def test_a_silent_decider_is_said_once_when_it_is_missed() -> None:
    agent = Agent().run()
    assert not of(agent.tick(130), ev.PrintReport), "nothing is to be decided"
    agent.die(0, 7)
    (said,) = of(agent.tick(150), ev.PrintReport)
    assert said.text == (
        "rsup: a rank has failed, and nothing has been heard of the supervisor for 5 s; "
        "without its word this launch ends with 88 after 300 s"
    )
    agent.order()
    assert len(of(agent.tick(170), ev.PrintReport)) == 1, "it had answered, and is silent again"


def test_the_end_after_identical_failures_names_the_option() -> None:
    agent = Agent().run()
    agent.die(0, 1)
    agent.die(1, 1)
    agent.feed(ev.AllReaped(1))
    result = wire.JobResult(93, "no restart: 3 identical failures without progress between them (limit 3)")
    (said,) = of(agent.order(wire.EndJob(0, "r", result)), ev.PrintReport)
    assert "--identical-failures" in said.text.splitlines()[-1]
    assert "more: rsup" not in said.text, "without a report of the decider's another agent of this terminal says it"


# ------------------------------------------------------------------------------------------------ signals and requests


@pytest.mark.parametrize(("signum", "left_s"), [(signal.SIGTERM, 25), (signal.SIGINT, 10)])
def test_a_second_signal_is_passed_on_too_and_only_sigint_shortens_the_wait(signum: signal.Signals, left_s: int) -> None:
    agent = Agent(stop_grace_s=30.0).run()
    agent.feed(ev.SignalArrived(signum))
    agent.tick(105)
    actions = agent.feed(ev.SignalArrived(signum))
    assert [(s.local_ranks, s.signum, s.whole_session) for s in of(actions, ev.SignalRanks)] == [((0, 1), signum, False)]
    (said,) = of(actions, ev.PrintReport)
    assert said.text == f"rsup: told to stop again; ranks are killed in {left_s} s, a third signal kills them now"
    assert not facts(actions, wire.SignalReceived)
    assert not killed(agent.tick(104.5 + left_s))
    assert killed(agent.tick(105.5 + left_s))


def test_a_second_signal_leaves_time_to_what_ranks_left_behind_and_a_third_does_not() -> None:
    agent = Agent(stop_grace_s=30.0).run()
    agent.feed(ev.SignalArrived(signal.SIGTERM))
    agent.die(0)
    assert [reap.grace_s for reap in of(agent.die(1), ev.ReapAll)] == [30.0]
    assert not of(agent.feed(ev.SignalArrived(signal.SIGTERM)), ev.ReapAll)
    assert [reap.grace_s for reap in of(agent.feed(ev.SignalArrived(signal.SIGTERM)), ev.ReapAll)] == [0.0]


def test_signal_is_passed_on_and_a_third_one_kills() -> None:
    agent = Agent(stop_grace_s=30.0).run()
    actions = agent.feed(ev.SignalArrived(signal.SIGINT))
    assert facts(actions, wire.SignalReceived)[0].signal == signal.SIGINT
    assert of(actions, ev.SignalRanks)[0].signum == signal.SIGINT
    agent.feed(ev.SignalArrived(signal.SIGINT))
    actions = agent.feed(ev.SignalArrived(signal.SIGINT))
    assert of(actions, ev.SignalRanks)[0].signum == signal.SIGKILL
    agent.die(0, 137, 9)
    agent.die(1, 137, 9)
    agent.feed(ev.AllReaped(1))
    assert of(agent.tick(103), ev.Exit)[0].code == 130


def test_the_deciders_result_wins_over_our_own_after_a_signal() -> None:
    agent = Agent().run()
    agent.feed(ev.SignalArrived(signal.SIGTERM))
    agent.die(0)
    agent.die(1)
    agent.feed(ev.AllReaped(1))
    assert of(agent.order(wire.EndJob(0, "saved and left", RESULT)), ev.Exit)[0].code == 0


def test_nothing_is_started_after_a_signal() -> None:
    agent = Agent().join()
    agent.feed(ev.SignalArrived(signal.SIGTERM))
    actions = agent.order(start_command())
    assert not of(actions, ev.SpawnRanks)
    assert facts(actions, wire.RanksGone)
    assert of(agent.tick(112), ev.Exit)[0].code == 143


def test_other_signals_are_passed_on_and_training_goes_on() -> None:
    agent = Agent().run()
    actions = agent.feed(ev.SignalArrived(signal.SIGUSR1, stops=False))
    assert of(actions, ev.SignalRanks)[0].if_caught
    assert agent.state.phase is Phase.RUNNING


def test_requests_go_to_ranks_that_take_them_and_the_others_get_sigterm() -> None:
    agent = Agent().run()
    assert not facts(agent.order(wire.SaveCheckpoint(0, "r", "q1")), wire.RequestDone)[0].done
    for local_rank in (0, 1):
        agent.feed(ev.RankMessage(1, local_rank, wire.RankHello(local_rank, 1, 11, "CPU-x", takes_requests=True)))
    actions = agent.order(wire.SaveCheckpoint(0, "r", "q2"))
    assert of(actions, ev.AskRanks)[0].local_ranks == (0, 1)
    assert not facts(agent.feed(ev.RankMessage(1, 0, wire.RankRequestDone("q2", 5))), wire.RequestDone)
    assert facts(agent.feed(ev.RankMessage(1, 1, wire.RankRequestDone("q2", 5))), wire.RequestDone)[0].done
    actions = agent.order(wire.StopTraining(0, "rsup stop", "q3", 20.0))
    assert of(actions, ev.AskRanks)[0].leave and not of(actions, ev.SignalRanks)
    agent.feed(ev.RankMessage(1, 0, wire.RankCheckpoint(6, "/ckpt")))
    assert facts(agent.die(0), wire.RankExited)[0].saved
    assert not facts(agent.die(1), wire.RankExited)[0].saved
    plain = Agent().run()
    actions = plain.order(wire.StopTraining(0, "rsup stop", "q", 20.0))
    assert of(actions, ev.SignalRanks)[0].local_ranks == (0, 1)
    assert facts(actions, wire.RequestDone)[0].done


def test_a_request_that_one_rank_could_not_do_is_not_done_and_its_reason_travels() -> None:
    """`rsup checkpoint` then ends with 1 and says why; the reason of the first rank that gave one counts."""
    agent = Agent().run()
    for local_rank in (0, 1):
        agent.feed(ev.RankMessage(1, local_rank, wire.RankHello(local_rank, 1, 11, "CPU-x", takes_requests=True)))
    agent.order(wire.SaveCheckpoint(0, "r", "q"))
    failed = wire.RankRequestDone("q", 5, done=False, message="the disk is full")
    assert not facts(agent.feed(ev.RankMessage(1, 1, failed)), wire.RequestDone)
    (answer,) = facts(agent.feed(ev.RankMessage(1, 0, wire.RankRequestDone("q", 5))), wire.RequestDone)
    assert (answer.request_id, answer.done, answer.message) == ("q", False, "the disk is full")
    agent.order(wire.SaveCheckpoint(0, "r", "q2"))
    for local_rank in (0, 1):
        actions = agent.feed(ev.RankMessage(1, local_rank, wire.RankRequestDone("q2", 6, done=False)))
    assert facts(actions, wire.RequestDone)[0].message == "the script could not"


def test_declared_exit_code_travels_with_the_exit() -> None:
    agent = Agent().run()
    agent.feed(ev.RankMessage(1, 0, wire.RankDeclares(17, "validation failed")))
    assert facts(agent.die(0, 17), wire.RankExited)[0].declared == 17


# ----------------------------------------------------------------------------------------------------- silence and time


def test_a_local_failure_and_a_silent_decider_end_in_88() -> None:
    agent = Agent(supervisor_grace_s=60.0, stop_grace_s=5.0).run()
    agent.tick(150)
    agent.die(0, 1)
    assert not of(agent.tick(209), ev.SignalRanks)
    assert of(agent.tick(211), ev.SignalRanks)[0].signum == signal.SIGTERM
    agent.die(1, 143, 15)
    actions = agent.feed(ev.AllReaped(1))
    assert of(actions, ev.Exit)[0].code == 88
    assert of(actions, ev.WriteResult)[0].result.exit_code == 88


def test_a_silent_decider_alone_never_touches_running_ranks() -> None:
    agent = Agent(supervisor_grace_s=10.0).run()
    assert not agent.tick(100 + 86_400, step=1.0)
    assert agent.state.phase is Phase.RUNNING


def test_success_does_not_wait_for_a_silent_decider() -> None:
    agent = Agent(supervisor_grace_s=300.0).run()
    agent.die(0)
    agent.die(1)
    agent.feed(ev.AllReaped(1))
    assert of(agent.tick(120), ev.Exit)[0].code == 0


def test_the_fence_timeout_kills_the_ranks_of_a_cut_off_agent() -> None:
    agent = Agent(fence_timeout_s=20.0).run()
    assert not of(agent.tick(119), ev.SignalRanks)
    (kill,) = of(agent.tick(121), ev.SignalRanks)
    assert kill.signum == signal.SIGKILL and kill.whole_session


def test_who_has_heard_the_end_need_not_be_spoken_for() -> None:
    agent = Agent().run()
    agent.die(0)
    agent.die(1)
    agent.feed(ev.AllReaped(1))
    agent.tick(120)
    assert agent.state.phase is Phase.ENDED and not agent.state.told
    assert not Agent().run().state.told
    agent = Agent().run()
    agent.order(wire.EndJob(0, "over", RESULT))
    assert agent.state.told


def test_nobody_answers_within_the_join_timeout() -> None:
    agent = Agent(join_timeout_s=30.0)
    assert of(agent.tick(131), ev.Exit)[0].code == 1


def test_suspension_moves_every_deadline() -> None:
    agent = Agent(supervisor_grace_s=30.0).run()
    agent.die(0, 1)
    agent.order(wire.StopAttempt(0, "r", 1, 5.0))
    agent.tick(101)
    agent.now += 1000.0
    assert not of(agent.feed(ev.Tick()), ev.SignalRanks)
    assert [(gap.start_ns, gap.end_ns) for gap in agent.state.gaps] == [(101 * 10**9, 1101 * 10**9)]
    assert not of(agent.tick(1104.5), ev.SignalRanks)
    assert of(agent.tick(1106), ev.SignalRanks)[0].signum == signal.SIGKILL


def test_a_decision_that_is_due_is_awaited_anew_after_a_suspension() -> None:
    agent = Agent(supervisor_grace_s=30.0).run()
    agent.die(0, 1)
    agent.now += 1000.0
    assert not of(agent.feed(ev.Tick()), ev.SignalRanks)
    assert not of(agent.tick(1129), ev.SignalRanks)
    assert of(agent.tick(1131), ev.SignalRanks)[0].signum == signal.SIGTERM


def suspended(for_s: float) -> Agent:
    agent = Agent(fence_timeout_s=20.0).run()
    agent.tick(101)
    agent.now += for_s
    return agent


def killed(actions: list[ev.Action]) -> bool:
    return any(signalled.signum == signal.SIGKILL and signalled.whole_session for signalled in of(actions, ev.SignalRanks))


def test_the_fence_counts_the_time_of_a_suspension() -> None:
    assert killed(suspended(30.0).feed(ev.Tick()))
    agent = suspended(10.0)
    assert not killed(agent.feed(ev.Tick()))
    assert not killed(agent.tick(119.5))
    assert killed(agent.tick(121))


@pytest.mark.parametrize(
    "message",
    [
        ev.OrderArrived(wire.Order("a", 1, 0, [])),
        ev.Welcomed(wire.Welcome((1, 3), "0", wire.SupervisorInfo("i", 1, "h", True), "job", 1, 1, 0)),
    ],
    ids=["order", "welcome"],
)
def test_a_message_that_waited_through_the_suspension_undoes_no_fence(message: ev.Event) -> None:
    assert killed(suspended(30.0).feed(message))
    assert not killed(suspended(10.0).feed(message))


def test_many_gaps_stay_bounded_and_forgive_no_less() -> None:
    agent = Agent().run()
    for _ in range(200):
        agent.now += 2.0
        agent.feed(ev.Tick())
    gaps = agent.state.gaps
    assert len(gaps) == 64
    assert sum(gap.end_ns - gap.start_ns for gap in gaps) >= 200 * 2 * 10**9


def test_what_cannot_be_ended_is_named_once_and_ends_in_88_without_ranks_gone() -> None:
    agent = Agent(node="n1").run()
    agent.order(wire.StopAttempt(0, "r", 1, 0.0))
    assert of(agent.tick(150), ev.NameSurvivors) == [ev.NameSurvivors(1, "something lives 30 s after SIGKILL")]
    (note,) = facts(agent.feed(ev.SurvivorsNamed(1, ("11 (python, D)", "99 (dd, D)"))), wire.Note)
    assert note.level == "error"
    assert note.text.startswith("11 (python, D), 99 (dd, D) cannot be ended, 30 s after SIGKILL: node n1 needs attention")
    assert not of(agent.tick(189), ev.Exit)
    actions = agent.tick(191)
    assert of(actions, ev.Exit)[0].code == 88
    assert not facts(agent.actions, wire.RanksGone)


def test_descendants_that_cannot_be_ended_are_named_too() -> None:
    agent = Agent().run()
    agent.die(0)
    agent.die(1)
    assert not of(agent.tick(139), ev.NameSurvivors)
    assert of(agent.tick(141), ev.NameSurvivors)
    assert of(agent.tick(201), ev.Exit)[0].code == 88
    assert not facts(agent.actions, wire.RanksGone)


@pytest.mark.parametrize("told_after_s", [1.0, 60.0])
def test_the_deciders_end_is_obeyed_beside_what_cannot_be_ended(told_after_s: float) -> None:
    agent = Agent().run()
    agent.order(wire.StopAttempt(0, "r", 1, 0.0))
    agent.tick(100 + told_after_s)
    agent.order(wire.EndJob(0, "ranks cannot be ended", wire.JobResult(88, "ranks cannot be ended")))
    actions = agent.tick(101 + max(30.0, told_after_s))
    assert of(actions, ev.Exit)[0].code == 88
    assert agent.state.told


def test_a_refusal_ends_a_newcomer_but_not_running_ranks() -> None:
    agent = Agent()
    actions = agent.feed(ev.Refused(wire.Refusal(2, "job t1 is already running")))
    assert of(actions, ev.Exit)[0].code == 2
    agent = Agent().run()
    assert not of(agent.feed(ev.Refused(wire.Refusal(2, "unknown"))), ev.Exit)
