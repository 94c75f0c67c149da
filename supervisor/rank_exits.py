"""The end of a rank's process: written down, and then a reason to go on, to replace the process, or to end the attempt."""

from msgspec.structs import replace

from rsup.supervisor.attempt_end import STACKS_WITHIN_S, fail_attempt
from rsup.supervisor.early_ends import took_early_end
from rsup.supervisor.end_report import MAX_REPORTED
from rsup.supervisor.failure import exit_kind, exit_text, waited_in_vain
from rsup.supervisor.first_mover import exit_incident
from rsup.supervisor.in_process import took_death
from rsup.supervisor.re_entry import finished
from rsup.supervisor.records import RankSaved
from rsup.supervisor.restart_policy import passed_on
from rsup.supervisor.states import AgentState, Phase, RankExit
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import RankExited, clip

MAX_TAIL_CHARS = 4000
MAX_ERROR_CHARS = 500


def rank_exited(turn: Turn, agent_id: str, fact: RankExited) -> None:
    """A rank's process ended. A failure ends the attempt, unless a new process can take its place; a clean exit while others
    run is normal."""
    agent = turn.state.agents[agent_id]
    if fact.rank in agent.exits:
        return
    _note_exit(turn, agent_id, agent, fact)
    state = turn.state
    text = exit_text(fact.rank, agent.info.node, state.agents[agent_id].exits[fact.rank])
    blame = f"{text} (signalled by us: {fact.by_us})" if fact.by_us else text
    failed = bool(fact.exit_code) and not fact.by_us
    data: dict[str, object] = {
        "exit_code": fact.exit_code,
        "signal": fact.signal,
        "iteration": fact.iteration,
        "by_us": fact.by_us,
        "killer": fact.killer,
    }
    if failed:
        data |= {"error": fact.error, "traceback": fact.traceback, "log_tail": clip(fact.log_tail)}
    turn.log(
        "RankExited",
        blame,
        "error" if failed and state.stop is None else "info",
        at_us=fact.at_us,
        rank=fact.rank,
        node=agent.info.node,
        data=data,
    )
    if fact.exit_code and state.phase in (Phase.STARTING, Phase.RUNNING):
        fail_by_exit(turn, agent_id, fact.rank)
    elif fact.saved and state.stop is not None:
        turn.change(stop=replace(state.stop, saved=True))
    if not fact.exit_code and not took_early_end(turn, agent_id, fact.rank):
        finished(turn, fact.rank)


def _note_exit(turn: Turn, agent_id: str, agent: AgentState, fact: RankExited) -> None:
    state = turn.state
    keep_tail = fact.exit_code and not fact.by_us and state.num_ended - state.num_ok < MAX_REPORTED
    exit_ = RankExit(
        order=state.num_ended + sum(state.in_process.deaths.values()) + 1,
        exit_code=fact.exit_code,
        at_us=fact.at_us,
        signal=fact.signal,
        by_us=fact.by_us,
        iteration=fact.iteration,
        section=fact.section,
        error=fact.error[:MAX_ERROR_CHARS],
        log_tail=clip(fact.traceback or fact.log_tail, MAX_TAIL_CHARS) if keep_tail else "",
        declared=fact.declared,
        declared_reason=fact.declared_reason[:MAX_ERROR_CHARS],
        rejected=fact.rejected[-1:],
        killer=fact.killer[:MAX_ERROR_CHARS],
    )
    turn.change_agent(agent_id, exits={**agent.exits, fact.rank: exit_})
    turn.change(
        num_ended=state.num_ended + 1,
        num_ok=state.num_ok + (fact.exit_code == 0),
        iteration=max(state.iteration, fact.iteration),
        attempt_iteration=max(state.attempt_iteration, fact.iteration),
        counts_iterations=state.counts_iterations or fact.iteration > 0,
    )
    local_rank = fact.rank - agent.first_rank
    turn.record(
        RankSaved(
            job=state.key,
            attempt=state.attempt,
            rank=fact.rank,
            node=agent.info.node,
            pid=agent.pids[local_rank] if 0 <= local_rank < len(agent.pids) else 0,
            device=agent.devices_used.get(fact.rank, ""),
            exit_code=fact.exit_code,
            signal=fact.signal,
            reason=fact.by_us or exit_.error or fact.declared_reason,
        )
    )


def fail_by_exit(turn: Turn, agent_id: str, rank: int) -> None:
    """A rank that has ended badly is replaced, or ends the attempt."""
    if took_death(turn, agent_id, rank):
        return
    agent = turn.state.agents[agent_id]
    exit_ = agent.exits[rank]
    if exit_.by_us:  # its launcher ended it, and we did not ask for that: cut off for too long, or leaving
        text = f"the launcher on {agent.info.node} ended its ranks: {exit_.by_us}"
        fail_attempt(turn, "agent-lost", text, node=agent.info.node)
        return
    kind = exit_kind(exit_)
    text = exit_text(rank, agent.info.node, exit_)
    fail_attempt(
        turn,
        kind,
        text,
        exit_code=passed_on(exit_.exit_code, exit_.declared),
        section=exit_.section,
        rank=rank,
        node=agent.info.node,
        incident=exit_incident(turn.state, agent, rank, exit_, kind, text),
        stacks_within_s=STACKS_WITHIN_S if waited_in_vain(exit_.error) else 0.0,
    )
