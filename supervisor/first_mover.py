"""The incident of a crash: as it was first heard of, and as it looks when every rank's end is known."""

from msgspec.structs import replace

from rsup.supervisor.end_report import all_exits
from rsup.supervisor.failure import (
    NOBODY_KNOWN,
    OF_A_PEER,
    exit_kind,
    exit_text,
    first_mover,
    is_of_a_peer,
    is_of_a_watchdog,
    reason_of_another,
    signal_name,
    weight,
)
from rsup.supervisor.records import IncidentSaved
from rsup.supervisor.restart_policy import passed_on
from rsup.supervisor.states import AgentState, JobState, OpenRestart, RankExit
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import HARD_LIMIT

OF_A_WATCHDOG = "watchdog of a collective"
CLOCKS_US = 500_000
"""Clocks of hosts are not measured; what lies closer together than this has no known order."""


def exit_incident(state: JobState, agent: AgentState, rank: int, exit_: RankExit, kind: str, text: str) -> IncidentSaved:
    """The incident of a rank that ended by itself; its number is still to be given."""
    return IncidentSaved(
        job=state.key,
        incident=0,
        attempt=state.attempt,
        at_us=exit_.at_us,
        kind=kind,
        rank=rank,
        node=agent.info.node,
        device=agent.devices_used.get(rank, ""),
        iteration=exit_.iteration,
        exit_code=exit_.exit_code,
        signal=exit_.signal,
        signal_name=signal_name(exit_.signal),
        section=exit_.section,
        found_by=HARD_LIMIT if HARD_LIMIT in exit_.killer else OF_A_WATCHDOG if kind == "hang" else "exit of the process",
        text=text,
    )


def name_first_mover(turn: Turn) -> None:
    """The first failure to arrive may have been a victim's: look again now that all are known."""
    state = turn.state
    assert state.failure is not None
    if (
        state.failure.kind not in ("exit", "signal", "hang")
        or state.incident is None
        or state.incident.attempt != state.attempt
    ):
        return
    exits = all_exits(state)
    first = first_mover((rank, exit_) for rank, exit_, _ in exits)
    by_limit = state.failure.kind == "hang" and state.incident.found_by not in (OF_A_WATCHDOG, HARD_LIMIT)
    if first is None or (by_limit and state.incident.stacks):
        return
    rank, exit_ = first
    if state.in_process.given_up and _says_more(state.in_process.open, exit_):
        return
    agent = next(a for r, _, a in exits if r == rank)
    lost = _node_that_died(state, exit_)
    if lost is not None:
        _blame_node(turn, lost, exit_text(rank, agent.info.node, exit_))
        return
    kind = exit_kind(exit_)
    given_up = f"; {state.in_process.given_up}" if state.in_process.given_up else ""
    said = exit_text(rank, agent.info.node, exit_) + reason_of_another(exit_, ((r, e) for r, e, _ in exits))
    unknown = f"{NOBODY_KNOWN}: " if weight(exit_) == OF_A_PEER else ""
    text = unknown + said + _as_early(exits, rank) + given_up
    victims = sorted({r for r, e, _ in exits if e.exit_code and not e.by_us and r != rank})
    incident = replace(
        exit_incident(state, agent, rank, exit_, kind, text),
        incident=state.incident.incident,
        iteration=exit_.iteration or state.incident.iteration,
        detected_us=state.incident.detected_us,
        lost_iterations=state.incident.lost_iterations,
        victims=victims,
        stacks=state.incident.stacks,
    )
    failure = replace(
        state.failure,
        kind=kind,
        text=text,
        exit_code=passed_on(exit_.exit_code, exit_.declared),
        section=exit_.section,
        rank=rank,
        node=agent.info.node,
    )
    if rank != state.failure.rank:
        turn.log("FirstMover", f"first mover: {said}; rank {state.failure.rank} was a victim", rank=rank, node=agent.info.node)
    turn.change(failure=failure, incident=incident)
    turn.record(incident)


def _says_more(restart: OpenRestart | None, exit_: RankExit) -> bool:
    """Whether what began an in-process restart that was given up is better known than this end of a victim."""
    if restart is None:
        return False
    left_with_0 = restart.incident.exit_code == 0 and restart.weight == weight(exit_)
    return restart.weight < weight(exit_) or left_with_0


def _as_early(exits: list[tuple[int, RankExit, AgentState]], first_rank: int) -> str:
    """Ranks of other hosts that failed at nearly the same time, by themselves too: which came first is not known."""
    _, first, of = next(item for item in exits if item[0] == first_rank)
    near = [
        rank
        for rank, exit_, agent in exits
        if agent.info.node != of.info.node and exit_.exit_code and not exit_.by_us and weight(exit_) == weight(first)
        if abs(exit_.at_us - first.at_us) < CLOCKS_US
    ]
    if not near:
        return ""
    others = f"rank{'s'[: len(near) > 1]} {', '.join(map(str, sorted(near)[:4]))}{', ...' if near[4:] else ''}"
    return f" ({others} on other nodes failed within {CLOCKS_US / 1e6:g} s: no clock tells which was first)"


def _node_that_died(state: JobState, first: RankExit) -> AgentState | None:
    """The node that took its ranks with it, where even the first rank to be heard only tells of a peer: nobody could report
    its ranks, and its death became known after what it did to theirs."""
    if not (is_of_a_peer(first.error) or is_of_a_watchdog(first.error)):
        return None
    return next((agent for agent in state.agents.values() if agent.took_ranks), None)


def _blame_node(turn: Turn, agent: AgentState, of_a_victim: str) -> None:
    state = turn.state
    assert state.failure is not None and state.incident is not None
    text, node = agent.took_ranks, agent.info.node
    incident = replace(
        state.incident,
        kind="agent-lost",
        rank=None,
        node=node,
        device="",
        exit_code=None,
        signal=0,
        signal_name="",
        section="",
        found_by="agent-lost",
        text=text,
        victims=sorted(rank for rank, exit_, _ in all_exits(state) if exit_.exit_code and not exit_.by_us),
    )
    failure = replace(state.failure, kind="agent-lost", text=text, exit_code=1, section="", rank=None, node=node)
    turn.log("FirstMover", f"first mover: {text}; a victim: {of_a_victim}", node=node)
    turn.change(failure=failure, incident=incident)
    turn.record(incident)
