"""What a live job waits for, in a sentence: nodes that have yet to join, ranks that have yet to end, nodes that do not answer.

Read from the machine's state as it stands in the job's row, so it is told alike with and without a supervisor.
"""

from rsup.supervisor.render import duration
from rsup.supervisor.states import AgentState, JobState, Phase, Role


def waiting_for(state: JobState, saved_us: int, now_us: int) -> str:
    """The sentence, empty where a job only runs or has ended. `saved_us`: when that state was kept; deadlines count from it."""
    if state.phase is Phase.ENDED:
        return ""
    told = [_silent(agent, now_us) for agent in state.agents.values() if agent.role is Role.LOST]
    if state.phase is Phase.FORMING:
        told.insert(0, _nodes(state, saved_us, now_us))
    elif state.phase is Phase.STARTING:
        told.insert(0, _start(state))
    elif state.phase is Phase.COLLECTING:
        told.insert(0, f"stacks of attempt {state.attempt}, which looks hung")
    elif state.phase is Phase.STOPPING:
        told.insert(0, _ends(state))
    elif state.phase is Phase.WAITING:
        told.insert(0, f"the next attempt{_until(state.deadline_s, state, saved_us, now_us)}")
    return "; ".join(text for text in told if text)


def _silent(agent: AgentState, now_us: int) -> str:
    since = f" for {duration(max(0.0, (now_us - agent.heard_us) / 1e6))}" if agent.heard_us else ""
    return f"nothing heard of node {agent.info.node}{since}"


def _nodes(state: JobState, saved_us: int, now_us: int) -> str:
    spec = state.spec
    blockers = sorted({agent.info.node for agent in state.agents.values() if agent.live_attempt})
    if blockers:
        return f"ranks of an earlier attempt to end on {', '.join(blockers)}"
    ready = sum(agent.reachable for agent in state.agents.values())
    needed = str(spec.max_nodes) if spec.min_nodes == spec.max_nodes else f"{spec.min_nodes} to {spec.max_nodes}"
    deadline_s = state.last_call_s if state.last_call_s is not None else state.deadline_s
    return f"nodes: {ready} of {needed} have joined{_until(deadline_s, state, saved_us, now_us)}"


def _start(state: JobState) -> str:
    if not state.store_bound:
        return f"the store of attempt {state.attempt}"
    late = sorted(agent.info.node for _, agent in state.active if not agent.started)
    return f"ranks to be started on {', '.join(late)}" if late else ""


def _ends(state: JobState) -> str:
    nodes = sorted({agent.info.node for agent in state.agents.values() if agent.live_attempt})
    return f"the ranks of attempt {state.attempt} to end on {', '.join(nodes)}" if nodes else ""


def _until(deadline_s: float | None, state: JobState, saved_us: int, now_us: int) -> str:
    if deadline_s is None:
        return ""
    left_s = deadline_s - state.clock_s - (now_us - saved_us) / 1e6
    return f", at most {duration(left_s)} more" if left_s > 0 else ", which is due now"
