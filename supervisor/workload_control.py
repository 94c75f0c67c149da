"""What a rank asks through NVRx's clients to follow once its attempt has failed.

A request changes nothing while the attempt runs: the rank that made it ends by itself, with a code other than 0, when it has
done what it still has to do (NVRx reads requests at the next rendezvous). `exclude`: the rank's node takes no part in the next
attempt and its launcher exits 1; the restart costs nothing of the budget, since it cannot be repeated more often than there
are nodes. `shutdown`: no attempt follows. An attempt that succeeds has no use for either.
"""

from rsup.supervisor.restart_policy import Verdict
from rsup.supervisor.states import Failure, JobState, Role
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import EndJob, JobResult, WorkloadControl, clip

MAX_DESCRIPTION_CHARS = 500


def workload_control(turn: Turn, agent_id: str, fact: WorkloadControl) -> None:
    """Remember what a rank asked for; it counts when the attempt has failed."""
    agent = turn.state.agents[agent_id]
    who = f"rank {fact.rank} on {agent.info.node}"
    why = f": {clip(fact.description, MAX_DESCRIPTION_CHARS)}" if fact.description else ""
    if fact.action == "exclude":
        turn.change_agent(agent_id, excluded=f"{who} asked to leave this node out{why}")
        text = f"{who} asks that its node takes no part in the next attempt{why}"
    elif fact.action == "shutdown":
        turn.change(shut_down=turn.state.shut_down or f"{who} asked that the job is not restarted{why}")
        text = f"{who} asks that the job is not restarted once this attempt has failed{why}"
    else:
        text = f"{who} asks for no more than the usual once this attempt has failed{why}"
    level = "info" if fact.action == "continue" else "warning"
    turn.log("WorkloadControl", text, level, at_us=fact.at_us, rank=fact.rank, node=agent.info.node)


def asked_for(state: JobState, failure: Failure) -> Verdict | None:
    """The verdict that ranks of the failed attempt asked for; None if they asked for nothing."""
    if state.shut_down:
        return Verdict(False, failure.exit_code or 1, f"no restart: {state.shut_down}")
    excluded = [agent for agent in state.agents.values() if agent.excluded and agent.role is not Role.GONE]
    if not excluded:
        return None
    why = "; ".join(agent.excluded for agent in excluded)
    if not any(agent.reachable and not agent.excluded for agent in state.agents.values()):
        return Verdict(False, 1, f"no restart: {why}, and there is no other")
    return Verdict(True, 0, f"restart without a node ({why}), which costs nothing of the budget")


def let_excluded_go(turn: Turn) -> None:
    """The launchers of excluded nodes end; the others go on."""
    for agent_id, agent in list(turn.state.agents.items()):
        if agent.excluded and agent.role is not Role.GONE:
            result = JobResult(1, agent.excluded, attempts=turn.state.attempt, node=agent.info.node)
            turn.command(agent_id, EndJob(0, agent.excluded, result, f"rsup: this node leaves the job: {agent.excluded}"))
            turn.change_agent(agent_id, role=Role.GONE)
            turn.log("AgentExcluded", f"node {agent.info.node} is out: {agent.excluded}", "warning", node=agent.info.node)
            turn.see_node(agent_id)
