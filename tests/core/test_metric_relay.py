"""Metrics, straggler reports and switches through the agent: to a supervisor that takes them, and from one."""

from msgspec.structs import replace

from rsup.launcher import process_events as ev
from rsup.launcher.process_requests import MAX_NUMBERS, NUMBERS_WINDOW_S
from rsup.supervisor import wire
from tests.core.test_process_machine import Agent, facts, start_command

SERIES = {"lm loss": [wire.MetricBin.of(3, 1, 24, 2.5)]}
REPORT = wire.StragglerReport(1, 10, 2)
INFO = wire.SupervisorInfo("i", 1, "h", True)


def say(agent: Agent, *messages: wire.RankToAgent) -> list[ev.Action]:
    """What follows from these packets of local rank 1."""
    return [action for message in messages for action in agent.feed(ev.RankMessage(agent.state.attempt, 1, message))]


def welcomed(takes_metrics: bool) -> Agent:
    agent = Agent()
    agent.feed(ev.Welcomed(wire.Welcome((1, 4), "0", INFO, "job", 1, 0, 0, takes_metrics=takes_metrics)))
    return agent


def test_numbers_become_facts_of_the_rank() -> None:
    agent = welcomed(takes_metrics=True).run()
    actions = say(agent, wire.RankMetrics("training", SERIES, 3), wire.RankStragglers(REPORT))
    (metrics,) = facts(actions, wire.MetricsReported)
    assert (metrics.attempt, metrics.rank, metrics.kind, metrics.series, metrics.entry) == (1, 1, "training", SERIES, 3)
    (stragglers,) = facts(actions, wire.StragglersReported)
    assert (stragglers.attempt, stragglers.rank, stragglers.report) == (1, 1, REPORT)


def test_an_older_supervisor_hears_nothing_of_them() -> None:
    agent = welcomed(takes_metrics=False).run()
    assert not say(agent, wire.RankMetrics("training", SERIES), wire.RankStragglers(REPORT))
    agent.feed(ev.Welcomed(wire.Welcome((1, 4), "0", INFO, "job", 1, 1, 0, takes_metrics=True)))
    assert say(agent, wire.RankStragglers(REPORT)), "it was replaced by one of this release"


def test_a_flood_is_left_out_with_a_line_a_window() -> None:
    agent = welcomed(takes_metrics=True).run()
    flood = [wire.RankMetrics("training", SERIES)] * (MAX_NUMBERS + 50)
    for _ in range(2):
        actions = say(agent, *flood, wire.RankMetrics("memory", SERIES), wire.RankMetrics("of tomorrow", SERIES))
        assert [fact.kind for fact in facts(actions, wire.MetricsReported)] == ["training"] * MAX_NUMBERS + ["memory"]
        (note,) = facts(actions, wire.Note)
        assert note.rank == 1 and "training metrics" in note.text
        assert len(facts(say(agent, *[wire.RankStragglers(REPORT)] * 200), wire.StragglersReported)) == MAX_NUMBERS
        agent.now += NUMBERS_WINDOW_S


def test_switches_come_with_a_start_and_with_limits() -> None:
    agent = welcomed(takes_metrics=True)
    agent.order(replace(start_command(), switches={"stragglers": True}))
    assert agent.state.switches == {"stragglers": True}
    actions = agent.order(wire.SetLimits(0, "off", wire.Limits(), {"stragglers": False}))
    (push,) = [action for action in actions if isinstance(action, ev.PushLimits)]
    assert push.switches == {"stragglers": False} == agent.state.switches


def test_messages_of_this_release_mean_the_same_to_one_without_the_new_fields() -> None:
    """What an older side reads of them: it drops fields that it does not know."""
    command = wire.encode(wire.Order("a", 1, 0, [wire.SetLimits(1, "why", wire.Limits(heartbeat_s=3.0), {"stragglers": True})]))
    assert b"switches" in command
    older = wire.decode_to_agent(command.replace(b"switches", b"swatches"))
    assert isinstance(older, wire.Order) and older.commands == [wire.SetLimits(1, "why", wire.Limits(heartbeat_s=3.0))]
