"""What people and programs ask of a job: stop, checkpoint, fence, switches; and the signals that a launcher passed on."""

from collections.abc import Callable

from rsup.supervisor.actions import AnswerOperator
from rsup.supervisor.attempt_end import end_job, stop_training
from rsup.supervisor.events import OperatorAsked
from rsup.supervisor.failure import signal_name
from rsup.supervisor.leaving import goes_on, leaves_alone, let_go
from rsup.supervisor.progress import push_limits
from rsup.supervisor.render import plural
from rsup.supervisor.rendezvous import abandon_start, known_dead
from rsup.supervisor.states import Phase, Role, StopRequest
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import RequestDone, SaveCheckpoint, SignalReceived

STOPPED_EXIT_CODE = 128 + 15
KEPT_REQUESTS = 64


def operator_asked(turn: Turn, event: OperatorAsked) -> None:
    """Take the request up, or say why not. The same request id is taken up once."""
    state = turn.state
    if event.request_id in state.requests:
        turn.act(AnswerOperator(event.request_id, True, "this request has been taken up already"))
        return
    refused = _refusal(turn, event)
    if refused is not None:
        turn.act(AnswerOperator(event.request_id, False, refused))
        return
    if event.dry_run:
        turn.act(AnswerOperator(event.request_id, True, _would(turn, event)))
        return
    turn.change(requests=[*state.requests, event.request_id][-KEPT_REQUESTS:])
    turn.act(AnswerOperator(event.request_id, True, _TAKEN_UP[event.kind](turn, event)))


def _refusal(turn: Turn, event: OperatorAsked) -> str | None:
    state, job = turn.state, turn.state.key.job_id
    if event.kind not in _TAKEN_UP:
        return f"unknown request {event.kind!r}: use one of {', '.join(_TAKEN_UP)}"
    if state.phase is Phase.ENDED:
        return f"job {job} has ended already: {state.reason}"
    if event.kind == "stop" and state.stop is not None and not goes_on(state):
        return f"job {job} is being stopped already: {state.stop.reason}"
    if event.kind == "checkpoint" and state.phase is not Phase.RUNNING:
        return f"job {job} is {state.phase.value}: no ranks to ask for a checkpoint"
    if event.kind == "fence" and not _lost(turn, event.node):
        return f"no node {event.node or 'of the job'} is lost: only a node that does not answer can be fenced"
    return None


def _would(turn: Turn, event: OperatorAsked) -> str:
    state = turn.state
    if event.kind == "fence":
        return f"would declare dead in job {state.key}: {_names(turn, _lost(turn, event.node))}; only do so if you are sure"
    if event.kind in _SWITCHES:
        return f"would switch the detection of stragglers {'on' if _SWITCHES[event.kind] else 'off'} in job {state.key}"
    what = "stop" if event.kind == "stop" else "ask for a checkpoint of"
    size = f"{plural(state.world_size, 'rank')} on {plural(len(state.active), 'node')}"
    return f"would {what} job {state.key}: {state.phase.value}, attempt {state.attempt}, {size}"


def _names(turn: Turn, agent_ids: list[str]) -> str:
    return ", ".join(turn.state.agents[agent_id].info.node for agent_id in agent_ids)


def _by(event: OperatorAsked) -> str:
    return f"{event.principal} ({event.reason})" if event.reason else event.principal


def _stop(turn: Turn, event: OperatorAsked) -> str:
    reason = f"stopped by {_by(event)}"
    stop_job(
        turn, StopRequest(exit_code=STOPPED_EXIT_CODE, reason=reason, principal=event.principal, request_id=event.request_id)
    )
    return f"job {turn.state.key.job_id} is being stopped"


def stop_job(turn: Turn, stop: StopRequest, except_agent: str = "") -> None:
    """End the job: at once where no rank can be alive, else by asking the ranks."""
    if any(agent.live_attempt for agent in turn.state.agents.values()):
        stop_training(turn, stop, except_agent)
        return
    turn.change(stop=stop)
    turn.log("StopRequested", stop.reason, "warning", principal=stop.principal)
    if turn.state.phase is not Phase.STOPPING:
        end_job(turn, stop.exit_code, f"{stop.reason}: no rank was running")


def _checkpoint(turn: Turn, event: OperatorAsked) -> str:
    state = turn.state
    reason = f"checkpoint asked for by {_by(event)}"
    nodes = []
    for agent_id, agent in list(state.agents.items()):
        if agent.live_attempt and agent.live_attempt == state.attempt:
            turn.command(agent_id, SaveCheckpoint(0, reason, event.request_id))
            nodes.append(agent.info.node)
    turn.log("SaveCheckpoint", reason, principal=event.principal, data={"request_id": event.request_id, "nodes": nodes})
    return "the ranks are asked for a checkpoint at their next common iteration"


def _lost(turn: Turn, node: str) -> list[str]:
    return [
        agent_id
        for agent_id, agent in turn.state.agents.items()
        if agent.role is Role.LOST and (not node or node in (agent_id, agent.info.node))
    ]


def _fence(turn: Turn, event: OperatorAsked) -> str:
    fenced = _lost(turn, event.node)
    nodes = _names(turn, fenced)
    text = f"{_by(event)} is sure that no process of this job lives on {nodes}"
    turn.log("Fence", text, "warning", principal=event.principal)
    for agent_id in fenced:
        known_dead(turn, agent_id, f"declared dead by {_by(event)}", for_good=False, with_node=True)
    return f"fenced: {nodes}"


def _switch(turn: Turn, event: OperatorAsked) -> str:
    """It holds from the ranks' next report on, and in later attempts."""
    is_on = _SWITCHES[event.kind]
    word, job = "on" if is_on else "off", turn.state.key.job_id
    if turn.state.switches.get("stragglers") is is_on:
        return f"the detection of stragglers has been switched {word} in job {job} already"
    turn.change(switches={**turn.state.switches, "stragglers": is_on})
    reason = f"detection of stragglers switched {word} by {_by(event)}"
    turn.log("Switched", reason, principal=event.principal, data={"stragglers": is_on})
    push_limits(turn, reason)
    said = f"the detection of stragglers is switched {word} in job {job}"
    if not any(agent.live_attempt and agent.live_attempt == turn.state.attempt for agent in turn.state.agents.values()):
        return f"{said}: no rank runs now, it holds from the next attempt on"
    return f"{said}: the ranks follow at their next report, if their rsup is not of an older release"


_SWITCHES = {"stragglers-on": True, "stragglers-off": False}
_TAKEN_UP: dict[str, Callable[[Turn, OperatorAsked], str]] = {
    "stop": _stop,
    "checkpoint": _checkpoint,
    "fence": _fence,
    **dict.fromkeys(_SWITCHES, _switch),
}


def signal_received(turn: Turn, agent_id: str, fact: SignalReceived) -> None:
    """A launcher was told to stop: the whole job ends, unless it can do without this node."""
    node = turn.state.agents[agent_id].info.node
    reason = f"the launcher on {node} received {signal_name(fact.signal)}"
    turn.log("SignalReceived", reason, "warning", at_us=fact.at_us, node=node)
    turn.change_agent(agent_id, leaving=fact.signal)
    if leaves_alone(turn.state, agent_id):
        let_go(turn, agent_id)
        if turn.state.phase is Phase.STARTING and turn.state.agents[agent_id].group_rank >= 0:
            abandon_start(turn, reason)
    elif turn.state.stop is None:
        stop = StopRequest(
            exit_code=128 + fact.signal,
            reason=reason,
            request_id=f"signal-{turn.state.num_events}",
            of_a_launcher=True,
            grace_s=fact.grace_s,
        )
        stop_job(turn, stop, except_agent=agent_id)


def request_done(turn: Turn, agent_id: str, fact: RequestDone) -> None:
    """A node's ranks have taken a request up, or could not."""
    node = turn.state.agents[agent_id].info.node
    text = f"{node}: request {fact.request_id} {'taken up' if fact.done else 'not taken up'}"
    more = f": {fact.message}" if fact.message else ""
    data: dict[str, object] = {"request_id": fact.request_id, "done": fact.done, "message": fact.message}
    turn.log("RequestDone", text + more, "info" if fact.done else "warning", at_us=fact.at_us, node=node, data=data)
