"""A launcher that is told to stop by a signal, and the job that may go on without it.

A node without ranks (a spare, or while the nodes gather) leaves alone as long as the job can do without it. The ranks of all
nodes are asked to save and leave when a node with ranks is told to stop: a job that still has `min_nodes` after that forms
anew without it, at no cost of its restarts, as torchrun's elastic jobs do; any other ends. A batch system that stops a job
tells all of its launchers: nobody is left then.
"""

from rsup.supervisor.failure import is_of_a_peer, signal_name
from rsup.supervisor.render import plural
from rsup.supervisor.states import AgentState, JobState, Phase, Role, StopRequest
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import EndJob, JobResult


def leaves_alone(state: JobState, agent_id: str) -> bool:
    """Whether this agent, told to stop, is simply let go."""
    if state.agents[agent_id].live_attempt or state.stop is not None:
        return False
    return len(_staying(state)) >= (state.spec.min_nodes if state.attempt else 1)


def goes_on(state: JobState) -> bool:
    """Whether the job forms anew once its ranks are gone, without the launchers that were told to stop."""
    return state.stop is not None and state.stop.of_a_launcher and len(_staying(state)) >= state.spec.min_nodes


def how_ranks_left(state: JobState, stop: StopRequest) -> tuple[bool, str]:
    """Whether the ranks of a job that was told to stop left with nothing lost, and what they did."""
    saved = stop.saved or (state.left is not None and state.left.durable)
    if state.failure is not None:
        return False, state.failure.text
    if not saved:
        return False, "no durable save was reported"
    if state.num_ok < state.world_size:
        return False, f"a durable save was reported, but only {state.num_ok} of {plural(state.world_size, 'rank')} left with 0"
    return True, "all ranks saved and left"


def let_go(turn: Turn, agent_id: str) -> None:
    """End the launcher of a node that was told to stop. It takes no part from now on."""
    state, agent = turn.state, turn.state.agents[agent_id]
    why = f"the launcher on {agent.info.node} received {signal_name(agent.leaving)}"
    saved = state.stop is not None and state.stop.saved and _left_cleanly(agent)
    result = JobResult(0 if saved else 128 + agent.leaving, why, attempts=max(1, state.attempt), node=agent.info.node)
    text = f"this node leaves job {state.key.job_id}, which goes on without it: {why}"
    turn.command(agent_id, EndJob(0, why, result, f"rsup: {text}"))
    turn.change_agent(agent_id, role=Role.GONE, live_attempt=0)
    turn.log("AgentLeft", f"node {agent.info.node} leaves, the job goes on without it: {why}", "warning", node=agent.info.node)
    turn.see_node(agent_id)
    if state.phase is not Phase.FORMING or state.attempt:
        turn.tell(f"node {agent.info.node} leaves, the job goes on without it: {why}")


def let_all_go(turn: Turn) -> str:
    """The same for every launcher that was told to stop; return a sentence about what follows."""
    leaving = [agent_id for agent_id, agent in turn.state.agents.items() if agent.leaving and agent.role is not Role.GONE]
    for agent_id in leaving:
        let_go(turn, agent_id)
    turn.change(stop=None)
    left = ", ".join(turn.state.agents[agent_id].info.node for agent_id in leaving)
    return f"the job forms anew without {left}, which costs no restart"


def is_by_leaving(state: JobState) -> bool:
    """Whether the attempt was ended by the launchers that leave alone: no rank failed, or only for want of a peer."""
    if state.failure is None:
        return True
    exits = (exit_ for agent in state.agents.values() for rank, exit_ in agent.exits.items() if rank == state.failure.rank)
    return any(is_of_a_peer(exit_.error) for exit_ in exits)


def _staying(state: JobState) -> list[str]:
    return [agent_id for agent_id, agent in state.agents.items() if agent.reachable and not agent.leaving]


def _left_cleanly(agent: AgentState) -> bool:
    return len(agent.exits) >= agent.info.num_ranks and not any(exit_.exit_code for exit_ in agent.exits.values())
