"""What the hardware's history says against a node's devices, as far as a job has to know it: for its next attempt. Pure.

Ranks that run are left alone, whatever becomes known of their devices meanwhile.
"""

from rsup.supervisor.events import DevicesKnown
from rsup.supervisor.states import AgentState
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import AvoidedDevice

MAX_NAMED = 8


def devices_known(turn: Turn, event: DevicesKnown) -> None:
    """Keep it until the next attempt starts, and say it in the job's story when it has changed."""
    agent = turn.state.agents.get(event.agent_id)
    if agent is None or (agent.known == event.avoid and agent.node_known == event.node):
        return
    turn.change_agent(event.agent_id, known=event.avoid, node_known=event.node)
    node = agent.info.node
    told = [f"{one.device} is {one.reason}" for one in event.avoid[:MAX_NAMED]]
    if len(event.avoid) > MAX_NAMED:
        told.append(f"and {len(event.avoid) - MAX_NAMED} more")
    if event.node is not None:
        told.insert(0, f"the node is {event.node.reason}")
    text = f"known of {node}: {'; '.join(told)}" if told else f"nothing is known against {node} and its devices any more"
    data: dict[str, object] = {"devices": [[one.device, one.quarantined] for one in event.avoid]}
    turn.log("DevicesKnown", text, "warning" if told else "info", node=node, data=data)


def avoided_for(agent: AgentState, of_job: list[AvoidedDevice]) -> list[AvoidedDevice]:
    """The job's own list and what is known of the agent's devices; of one device the harder word."""
    own = {one.device for one in of_job if one.rank is None and one.quarantined}
    known = [one for one in agent.known if one.device not in own]
    out = {one.device for one in known if one.quarantined}
    kept = [one for one in of_job if not (one.rank is None and one.device in out)]
    listed = {one.device for one in kept if one.rank is None}
    return kept + [one for one in known if one.quarantined or one.device not in listed]


def badness(agent: AgentState) -> int:
    """2: the node is to stay out where others suffice, since it or too many of its devices are quarantined; 1: it comes last,
    since it is suspect or some of its ranks would have to use a suspect device; 0: nothing speaks against it."""
    of_node = 0 if agent.node_known is None else 2 if agent.node_known.quarantined else 1
    suspect = {one.device for one in agent.known}
    out = {one.device for one in agent.known if one.quarantined}
    num_ranks = min(agent.info.num_ranks, len(agent.devices))
    if sum(device not in out for device in agent.devices) < num_ranks:
        return 2
    return max(of_node, int(sum(device not in suspect for device in agent.devices) < num_ranks))


def say_which_nodes_must_do(turn: Turn, member_ids: list[str]) -> None:
    """Of nodes that take part though something is known against them: one line each."""
    for agent_id in member_ids:
        agent = turn.state.agents[agent_id]
        if agent.node_known is not None:
            text = f"node {agent.info.node} takes part, no other node is free: it is {agent.node_known.reason}"
            turn.log("SuspectNodeUsed", text, "warning", node=agent.info.node)
            turn.tell(text)
