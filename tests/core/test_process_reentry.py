"""The agent's process machine under in-process restart: peers are told, a dead rank alone gets a new process."""

import signal
import typing

import msgspec
import pytest

from rsup.launcher import process_events as ev
from rsup.launcher.process_machine import decide, new_state
from rsup.launcher.process_state import Phase, Settings
from rsup.supervisor import wire


class Agent:
    """The machine of a node with ranks 0 and 1, of `world_size`; all ranks have entered their training function."""

    def __init__(self, world_size: int = 2, **settings: typing.Any) -> None:
        self.now = 100.0
        self.state = new_state(Settings(**settings), self.moment)
        self.sequence = 0
        info = wire.SupervisorInfo("i", 1, "h", True)
        self.feed(ev.Welcomed(wire.Welcome((1, 3), "0", info, "job", 1, 0, 0)))
        self.order(wire.StartAttempt(0, "go", 1, 1, 0, 2, world_size, 0, 1, "127.0.0.1", 1234, "job", 1, max_restarts=3))
        self.feed(ev.RanksSpawned(1, (11, 12)))
        for local_rank in (0, 1):
            self.say(local_rank, wire.RankEntered(1))

    @property
    def moment(self) -> ev.Moment:
        return ev.Moment(self.now, int(self.now * 1e6))

    def feed(self, event: ev.Event) -> list[ev.Action]:
        self.state, actions = decide(self.state, event, self.moment)
        return actions

    def order(self, command: wire.AnyCommand) -> list[ev.Action]:
        self.sequence += 1
        numbered = msgspec.structs.replace(command, sequence=self.sequence)
        return self.feed(ev.OrderArrived(wire.Order("a", max(1, self.state.epoch), 0, [numbered])))

    def say(self, local_rank: int, message: wire.RankToAgent) -> list[ev.Action]:
        return self.feed(ev.RankMessage(1, local_rank, message))

    def die(self, local_rank: int, exit_code: int = 137, signum: int = 9) -> list[ev.Action]:
        return self.feed(ev.RankDied(1, local_rank, exit_code, signum))

    def replace(self, local_rank: int, death: int = 1) -> list[ev.Action]:
        return self.order(wire.RestartInProcess(0, "rank died", 1, [local_rank], [local_rank], [local_rank], [death]))

    def tick(self, until: float) -> list[ev.Action]:
        actions = []
        while self.now < until:
            self.now += 0.5
            actions += self.feed(ev.Tick())
        return actions


def facts(actions: list[ev.Action], kind: type) -> list[typing.Any]:
    return [action.fact for action in actions if isinstance(action, ev.AddFact) and isinstance(action.fact, kind)]


def of(actions: list[ev.Action], kind: type) -> list[typing.Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_fault_of_a_peer_is_passed_on_and_nothing_is_signalled() -> None:
    agent = Agent()
    (told,) = agent.order(wire.RestartInProcess(0, "rank 5 raised", 1, [5], entry=3))
    assert told == ev.TellPeers(wire.PeersFailed([5], [], "rank 5 raised", [], 3))
    assert agent.order(wire.RestartInProcess(0, "of another attempt", 2, [5])) == []


def test_a_dead_rank_gets_a_new_process_and_its_siblings_keep_theirs() -> None:
    """P28: rank 0's death is no more than that of any other rank."""
    agent = Agent()
    agent.die(0)
    told, replaces = agent.replace(0)
    assert isinstance(told, ev.TellPeers) and told.message == wire.PeersFailed([0], [0], "rank died", [1])
    assert replaces == ev.ReplaceRank(1, 0, 1, "rank died")
    assert agent.state.exits == () and agent.state.failed_at is None
    assert agent.feed(ev.RankReplaced(1, 0, 13)) == []
    assert [(rank.pid, rank.alive) for rank in agent.state.ranks] == [(13, True), (12, True)]
    (again,) = facts(agent.die(0), wire.RankExited)
    assert (again.rank, again.by_us) == (0, "")
    assert agent.replace(0, 2)[1] == ev.ReplaceRank(1, 0, 2, "rank died")


def test_a_rank_that_nvrx_is_about_to_kill_is_told_with_its_end() -> None:
    agent = Agent()
    why = f"{wire.HUNG}: no sign of progress for 90 s ({wire.HARD_LIMIT})"
    assert agent.say(1, wire.RankFault(0, "hard-timeout", why)) == []
    (hung,) = facts(agent.feed(ev.RankDied(1, 1, 143, 15, killer=wire.NOT_OURS)), wire.RankExited)
    assert (hung.killer, hung.by_us) == (why, "")
    agent.replace(1)
    agent.feed(ev.RankReplaced(1, 1, 13))
    (again,) = facts(agent.feed(ev.RankDied(1, 1, 143, 15, killer=wire.NOT_OURS)), wire.RankExited)
    assert again.killer == wire.NOT_OURS, "that was said of the process before"


def test_what_the_dead_process_declared_is_not_the_new_ones_word() -> None:
    agent = Agent()
    agent.say(0, wire.RankHello(0, 1, 11, takes_requests=True))
    agent.say(0, wire.RankDeclares(17, "validation failed"))
    agent.die(0)
    agent.replace(0)
    agent.feed(ev.RankReplaced(1, 0, 13))
    assert not agent.state.ranks[0].takes_requests
    assert facts(agent.die(0, 17, 0), wire.RankExited)[0].declared == 0


def test_a_stop_reaches_the_new_process_as_soon_as_it_is_there() -> None:
    for grace_s, signum, whole in ((5.0, signal.SIGTERM, False), (0.0, signal.SIGKILL, True)):
        agent = Agent()
        agent.die(0)
        agent.replace(0)
        (others,) = of(agent.order(wire.StopAttempt(0, "no use", 1, grace_s)), ev.SignalRanks)
        assert others.local_ranks == (1,)
        (late,) = of(agent.feed(ev.RankReplaced(1, 0, 13)), ev.SignalRanks)
        assert (late.local_ranks, late.signum, late.whole_session) == ((0,), signum, whole)
        agent.die(1)
        assert of(agent.die(0), ev.ReapAll)


def test_an_attempt_that_is_ended_replaces_nobody() -> None:
    agent = Agent()
    agent.die(0)
    agent.order(wire.StopAttempt(0, "rank 0 was killed", 1, 5.0))
    assert agent.replace(0) == []
    assert agent.order(wire.EndRanks(0, "stuck", 1, [1])) == []


def test_a_process_that_cannot_be_started_is_told_as_one_that_ended() -> None:
    agent = Agent()
    agent.die(0)
    agent.replace(0)
    (fact,) = facts(agent.feed(ev.ReplaceFailure(1, 0, "cannot start python: no memory", 126)), wire.RankExited)
    assert (fact.rank, fact.exit_code, fact.error, fact.by_us) == (0, 126, "cannot start python: no memory", "")
    assert agent.state.phase is Phase.RUNNING
    assert agent.feed(ev.ReplaceFailure(1, 0, "told again")) == agent.feed(ev.ReplaceFailure(2, 0, "of another attempt")) == []


def test_stuck_ranks_alone_are_killed_and_their_death_is_reported() -> None:
    agent = Agent()
    (kill,) = agent.order(wire.EndRanks(0, "rank 1 hangs", 1, [1, 7]))
    assert kill == ev.SignalRanks((1,), signal.SIGKILL, "rank 1 hangs")
    (fact,) = facts(agent.die(1), wire.RankExited)
    assert (fact.rank, fact.by_us) == (1, "rank 1 hangs")
    assert agent.order(wire.EndRanks(0, "rank 1 hangs", 1, [1])) == [], "it is dead already"
    assert agent.order(wire.EndRanks(0, "of another attempt", 2, [0])) == []
    assert agent.state.failed_at is not None, "what follows is the supervisor's to say"
    assert of(agent.replace(1), ev.ReplaceRank) and agent.state.ranks[1].signalled == ""


def test_a_rank_to_be_killed_before_it_has_a_process_is_killed_then() -> None:
    agent = Agent()
    agent.die(1)
    agent.replace(1)
    assert agent.order(wire.EndRanks(0, "rank 1 hangs", 1, [1])) == []
    (kill,) = of(agent.feed(ev.RankReplaced(1, 1, 13)), ev.SignalRanks)
    assert (kill.local_ranks, kill.signum) == ((1,), signal.SIGKILL)
    agent = Agent()
    agent.die(1)
    agent.replace(1)
    agent.order(wire.EndRanks(0, "rank 1 hangs", 1, [1]))
    assert facts(agent.feed(ev.ReplaceFailure(1, 1, "no memory")), wire.RankExited)[0].by_us == ""


def test_the_last_rank_of_a_node_waits_for_its_process_while_other_nodes_train() -> None:
    agent = Agent(world_size=4)
    agent.die(0)
    assert not of(agent.die(1), ev.ReapAll)
    assert agent.state.phase is Phase.RUNNING
    assert [one.local_rank for rank in (0, 1) for one in of(agent.replace(rank), ev.ReplaceRank)] == [0, 1]
    for local_rank in (0, 1):  # neither entered: they may be replaced again
        agent.feed(ev.RankReplaced(1, local_rank, 13 + local_rank))
        assert not of(agent.die(local_rank), ev.ReapAll)
    assert of(Agent().die(0), ev.ReapAll) == []
    alone = Agent()
    alone.die(0)
    assert of(alone.die(1), ev.ReapAll), "no rank of the job is left"


@pytest.mark.parametrize(
    "stop",
    [
        lambda agent: agent.order(wire.StopAttempt(0, "no use", 1, 5.0)),
        lambda agent: agent.order(wire.StopTraining(0, "rsup stop", "q", 5.0)),
        lambda agent: agent.order(wire.EndJob(0, "over", wire.JobResult(1, "failed"))),
        lambda agent: agent.feed(ev.SignalArrived(signal.SIGTERM)),
        lambda agent: agent.tick(161.0),
    ],
    ids=["stop", "leave", "end", "signal", "silence"],
)
def test_whatever_ends_the_attempt_while_a_nodes_last_rank_waits_reaps_the_rest(
    stop: typing.Callable[[Agent], list[ev.Action]],
) -> None:
    agent = Agent(world_size=4, supervisor_grace_s=60.0)
    agent.die(0)
    agent.die(1)
    assert len(of(stop(agent), ev.ReapAll)) == 1
    assert not of(agent.replace(0), ev.ReplaceRank), "too late"
    assert facts(agent.feed(ev.AllReaped(1)), wire.RanksGone)


def test_a_death_that_was_not_decided_about_is_still_waited_for() -> None:
    agent = Agent(world_size=4, supervisor_grace_s=60.0)
    agent.die(0)
    agent.die(1)
    agent.replace(0)
    assert agent.state.failed_at is not None
    agent.replace(1)
    assert agent.state.failed_at is None
    agent.feed(ev.RankReplaced(1, 0, 13))
    agent.feed(ev.RankReplaced(1, 1, 14))
    assert not of(agent.tick(400.0), ev.SignalRanks)


def test_a_rank_whose_work_a_reserve_has_taken_spoils_no_success() -> None:
    agent = Agent()
    agent.die(1)
    assert not of(agent.order(wire.RestartInProcess(0, "rank 1 was killed", 1, [1], [1], [], [1])), ev.ReplaceRank)
    assert agent.state.exits == () and agent.state.failed_at is None
    assert [reap.grace_s for reap in of(agent.die(0, 0, 0), ev.ReapAll)] == [10.0]
    agent.feed(ev.AllReaped(1))
    assert of(agent.tick(120.0), ev.Exit)[0].code == 0


def test_an_open_request_is_put_to_the_new_process_and_not_to_one_that_is_not_replaced() -> None:
    agent = Agent()
    for local_rank in (0, 1):
        agent.say(local_rank, wire.RankHello(local_rank, 1, 11 + local_rank, takes_requests=True))
    agent.order(wire.SaveCheckpoint(0, "rsup checkpoint", "q"))
    agent.die(0)
    agent.replace(0)
    agent.feed(ev.RankReplaced(1, 0, 13))
    assert not of(agent.say(0, wire.RankHello(0, 1, 13)), ev.AskRanks)
    (asked,) = of(agent.say(0, wire.RankHello(0, 1, 13, takes_requests=True)), ev.AskRanks)
    assert (asked.local_ranks, asked.request_id, asked.leave) == ((0,), "q", False)
    assert not of(agent.say(0, wire.RankHello(0, 1, 13, "GPU-1", takes_requests=True)), ev.AskRanks)
    assert not facts(agent.say(1, wire.RankRequestDone("q", 5)), wire.RequestDone)
    agent.die(0)
    done = agent.order(wire.RestartInProcess(0, "rank 0 was killed", 1, [0], [0], [], [2]))
    assert facts(done, wire.RequestDone)[0].done
