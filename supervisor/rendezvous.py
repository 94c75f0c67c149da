"""Who takes part in a job's next attempt, in which order, and who is turned away.

An agent that joins waits as a spare until an attempt starts. The attempt starts with all `max_nodes`, with as many as the one
before had, or with at least `min_nodes` after the last call; never while a rank of an earlier attempt may be alive anywhere.
Ranks are stable: who was in the last attempt keeps its group rank, `--node-rank` decides for newcomers, then the order of
joining.
Agents that are not needed park as spares; surplus never ends a job (NVRx issue 348), nor does a newcomer disturb a running one.
"""

from msgspec.structs import replace

from rsup.supervisor import records
from rsup.supervisor.actions import SendOrder, SendRefusal, SendWelcome
from rsup.supervisor.adoption import adopt, is_ahead, runs_nothing
from rsup.supervisor.attempt_end import allow_time_to_end, blocked_for_s, end_job, fail_attempt, give_up_blocked
from rsup.supervisor.attempt_start import begin_attempt
from rsup.supervisor.devices_known import badness, devices_known
from rsup.supervisor.events import AgentJoined, Now
from rsup.supervisor.fault_evidence import lost_node_evidence
from rsup.supervisor.node_versions import difference
from rsup.supervisor.records import GIVEN_UP, JobKey
from rsup.supervisor.refusal import nnodes, refusal
from rsup.supervisor.render import plural
from rsup.supervisor.states import LIVE_PHASES, AgentState, Budget, JobState, Observed, Phase, Role
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import (
    EXIT_NO_SUPERVISOR,
    EXIT_REQUEUE,
    EXIT_USAGE,
    AgentInfo,
    AnyCommand,
    EndJob,
    EndRanks,
    Hello,
    HostStore,
    JobSpec,
    Park,
    RestartInProcess,
    SaveCheckpoint,
    StartAttempt,
    StopAttempt,
    TakeStacks,
)


def new_job(key: JobKey, spec: JobSpec, now: Now, before: JobState | None = None) -> JobState:
    """A job before its first agent. `before`: the run before, so that epochs never fall for one job id."""
    return JobState(
        key=key,
        spec=spec,
        created_us=now.us,
        clock_s=now.s,
        epoch=before.epoch if before is not None else 0,
        run_before=before.result if before is not None else None,
        deadline_s=now.s + spec.join_timeout_s,
        limits=spec.limits,
    )


def resumed_job(old: JobState, spec: JobSpec, now: Now) -> JobState:
    """An ended run that goes on: attempts and epochs are numbered on, the restart budget is new.

    Agents of the launch before stay only to be told of its end.
    """
    agents = {
        agent_id: replace(agent, role=Role.GONE, live_attempt=0, group_rank=-1)
        for agent_id, agent in old.agents.items()
        if agent.outbox
    }
    return replace(
        old,
        spec=spec,
        phase=Phase.FORMING,
        epoch=old.epoch + 1,
        clock_s=now.s,
        deadline_s=now.s + spec.join_timeout_s,
        agents=agents,
        failure=None,
        stop=None,
        incident=None,
        result=None,
        ended_us=None,
        reason="",
        budget=Budget(checkpoint=old.checkpoint, iteration=old.iteration),
        reruns=0,
        cases=[replace(case, num_reruns=0) for case in old.cases],
        case_restarts=0,
        limits=replace(spec.limits, sections={**old.limits.sections, **spec.limits.sections}, calculated=old.limits.calculated),
        observed=Observed(),
        current=None,
        adopted=False,
    )


def agent_joined(turn: Turn, event: AgentJoined) -> None:
    """Welcome a newcomer, or an agent that was cut off; turn away who cannot take part."""
    hello = event.hello
    agent_id = hello.agent.agent_id
    agent = turn.state.agents.get(agent_id)
    if hello.agent.gone:
        _keeper_speaks(turn, agent_id, agent)
    elif turn.state.phase is Phase.ENDED or (agent is not None and any(isinstance(c, EndJob) for c in agent.outbox)):
        _greet_after_end(turn, agent_id)
    elif agent is not None and agent.dead:
        turn.act(SendRefusal(agent_id, 1, f"this agent ({agent_id}) has been reported dead by its companion; start it again"))
    elif hello.attempt and is_ahead(turn.state, hello):
        adopt(turn, hello)
        turn.act(SendWelcome(agent_id))
    elif agent is None:
        _newcomer(turn, hello)
    else:
        _returned(turn, hello, agent)
    if event.known is not None and not hello.agent.gone:
        devices_known(turn, event.known)
        for doubt in event.doubts:
            turn.log("DeviceContested", doubt, "warning", node=hello.agent.node)


def _keeper_speaks(turn: Turn, agent_id: str, agent: AgentState | None) -> None:
    """A dead agent's keeper delivers what was left; it joins nothing."""
    if agent is None:
        turn.act(SendRefusal(agent_id, 1, f"agent {agent_id} is not of job {turn.state.key.job_id}"))
    else:
        turn.act(SendWelcome(agent_id))


def _greet_after_end(turn: Turn, agent_id: str) -> None:
    if agent_id in turn.state.agents:
        turn.act(SendWelcome(agent_id))
        turn.act(SendOrder(agent_id))
    else:
        turn.act(SendRefusal(agent_id, 1, f"job {turn.state.key.job_id} has just ended; start it again"))


def _newcomer(turn: Turn, hello: Hello) -> None:
    state, info = turn.state, hello.agent
    _drop_rebooted(turn, info)
    taken = any(agent.role is not Role.GONE for agent in turn.state.agents.values())
    why_not = refusal(turn.state, hello.spec, info, bool(hello.spec.job_id)) if taken else None
    if why_not is not None:
        turn.act(SendRefusal(info.agent_id, EXIT_USAGE, why_not))
        return
    if not state.num_events:
        turn.log("JobCreated", f"job {state.key.job_id} (run {state.key.run}): {' '.join(state.spec.command)}")
    number = turn.state.num_joined + 1
    devices = [device.uuid for device in info.devices]
    agent = AgentState(info=replace(info, devices=[]), role=Role.SPARE, joined=number, devices=devices)
    turn.change(num_joined=number)
    turn.put_agent(info.agent_id, agent)
    present = sum(a.reachable for a in turn.state.agents.values())
    text = f"node {info.node} joined ({present} of {nnodes(turn.state.spec)}) with {plural(info.num_ranks, 'rank')}"
    turn.log("AgentJoined", text, node=info.node, data={"agent_id": info.agent_id, "pid": info.pid})
    see_devices(turn, hello)
    turn.see_node(info.agent_id)
    turn.act(SendWelcome(info.agent_id))
    if differs := difference(turn.state.agents.values(), info):
        turn.log("VersionsDiffer", differs, "warning", node=info.node)
        turn.tell(differs, info.agent_id)
    if hello.attempt:
        _end_strays(turn, hello)
    if turn.state.phase is not Phase.FORMING:
        park(turn, info.agent_id)


def see_devices(turn: Turn, hello: Hello) -> None:
    """Record the devices of a node."""
    for device in hello.agent.devices:
        turn.record(
            records.DeviceSeen(
                uuid=device.uuid,
                at_us=turn.now.us,
                node=hello.agent.node,
                model=device.model,
                serial=device.serial,
                board=device.board,
                pci_bus_id=device.pci_bus_id,
                vbios=device.vbios,
                driver=device.driver,
                job=turn.state.key,
            )
        )


def _drop_rebooted(turn: Turn, info: AgentInfo) -> None:
    """An agent of the same node under another boot id is dead: the node has been started anew since."""
    for agent_id, agent in list(turn.state.agents.items()):
        rebooted = info.boot_id and agent.info.boot_id and info.boot_id != agent.info.boot_id
        if agent.role is not Role.GONE and agent.info.node == info.node and rebooted:
            known_dead(turn, agent_id, f"its node {info.node} has been rebooted", for_good=True, with_node=True)


def _end_strays(turn: Turn, hello: Hello) -> None:
    """A newcomer, or one that was fenced, still runs ranks of an older attempt: they must go before it can take part."""
    agent_id = hello.agent.agent_id
    reason = f"attempt {hello.attempt} on {hello.agent.node} is no longer that of the job"
    turn.change_agent(agent_id, live_attempt=hello.attempt)
    turn.command(agent_id, StopAttempt(0, reason, hello.attempt, 0.0))
    turn.log("StopAttempt", reason, "warning", attempt=hello.attempt, node=hello.agent.node)


def _returned(turn: Turn, hello: Hello, agent: AgentState) -> None:
    agent_id = hello.agent.agent_id
    if agent.role is Role.GONE:
        turn.change_agent(agent_id, role=Role.SPARE, group_rank=-1, previous_rank=-1, parked=False)
        turn.log("AgentReturned", f"node {agent.info.node} is back after it was taken for dead; it waits as a spare", "warning")
        if hello.attempt:
            _end_strays(turn, hello)
        if turn.state.phase is not Phase.FORMING:
            park(turn, agent_id)
        turn.see_node(agent_id)
    elif agent.role is Role.LOST:
        found(turn, agent_id)
    runs_nothing(turn, hello)
    turn.act(SendWelcome(agent_id))
    if turn.state.agents[agent_id].outbox:
        turn.act(SendOrder(agent_id))


def park(turn: Turn, agent_id: str) -> None:
    """Let a node wait as a spare."""
    agent = turn.state.agents[agent_id]
    if not agent.parked:
        reason = f"node {agent.info.node} is a spare: it takes part when a node is lost or the next attempt has a place"
        turn.change_agent(agent_id, parked=True)
        turn.command(agent_id, Park(0, reason))
        turn.log("Park", reason, node=agent.info.node)


def lost(turn: Turn, agent_id: str, silent_s: float) -> None:
    """An agent has not been heard of for too long. It may be alive: nothing is killed."""
    agent = turn.change_agent(agent_id, role=Role.LOST, heard_us=turn.now.us - int(silent_s * 1e6))
    what = (
        "its ranks may be alive, so nothing is restarted yet"
        if agent.live_attempt
        else "no attempt counts on it until it answers"
    )
    text = f"nothing heard of node {agent.info.node} for {silent_s:.0f} s; {what}"
    turn.log("AgentLost", text, "warning", node=agent.info.node)
    has_others = len(turn.state.agents) > 1
    turn.tell(text, *((agent_id,) if has_others and not turn.first_answering() else ()))  # the last one reads it afterwards
    turn.see_node(agent_id)
    if turn.state.phase is Phase.STARTING and not turn.state.store_bound and agent.group_rank >= 0:
        abandon_start(turn, f"node {agent.info.node} was lost before any rank was started")


def found(turn: Turn, agent_id: str) -> None:
    """A lost agent has been heard again."""
    agent = turn.state.agents[agent_id]
    member = agent.group_rank >= 0 and turn.state.phase is not Phase.FORMING
    turn.change_agent(agent_id, role=Role.ACTIVE if member else Role.SPARE, heard_us=0)
    if len(turn.state.agents) > 1:
        turn.tell(f"node {agent.info.node} answers again")  # its own terminal will do where no other node answers
    turn.log("AgentFound", f"node {agent.info.node} answers again", node=agent.info.node)
    if turn.state.phase is Phase.STOPPING and agent.live_attempt:
        allow_time_to_end(turn)
    turn.see_node(agent_id)


def known_dead(turn: Turn, agent_id: str, reason: str, *, for_good: bool, with_node: bool = False) -> None:
    """No rank of this agent is alive any more; an attempt it took part in has failed. `for_good`: it cannot come back.
    `with_node`: its node was lost, not the launcher alone."""
    agent = turn.state.agents[agent_id]
    if agent.role is Role.GONE:
        if for_good and not agent.dead:
            turn.change_agent(agent_id, dead=True, outbox=[], live_attempt=0)
        return
    unfinished = sum(e.exit_code == 0 for e in agent.exits.values()) < agent.info.num_ranks
    outbox = [] if for_good else [_harmless(command) for command in agent.outbox]
    text = f"node {agent.info.node} is out: {reason}"
    if with_node:
        lost_node_evidence(turn, agent, text)
    unseen = agent.group_rank >= 0 and agent.live_attempt == turn.state.attempt and len(agent.exits) < agent.info.num_ranks
    took_ranks = text if unseen else ""
    turn.change_agent(agent_id, role=Role.GONE, live_attempt=0, dead=for_good, outbox=outbox, took_ranks=took_ranks)
    turn.log("AgentGone", text, "warning", node=agent.info.node)
    turn.see_node(agent_id)
    phase = turn.state.phase
    if phase is Phase.STARTING and not turn.state.store_bound and agent.group_rank >= 0:
        abandon_start(turn, text, "stopped" if agent.left else "lost")
    elif phase in LIVE_PHASES and phase is not Phase.STOPPING and agent.group_rank >= 0 and unfinished:
        fail_attempt(turn, "agent-lost", text, node=agent.info.node)


def _harmless(command: AnyCommand) -> AnyCommand:
    """What a fenced agent still has to acknowledge must not start anything when it comes back; numbers stay without gaps."""
    if isinstance(command, (HostStore, StartAttempt, RestartInProcess, EndRanks, TakeStacks, SaveCheckpoint)):
        return Park(command.sequence, "this node was taken for dead: it waits as a spare")
    return command


def abandon_start(turn: Turn, reason: str, outcome: str = "lost") -> None:
    """Give up a start of which no rank was spawned; it costs no restart."""
    if turn.state.current is not None:
        turn.change(current=replace(turn.state.current, outcome=outcome, reason=reason, stopped_us=turn.now.us))
        turn.record(turn.state.current)
    turn.log("StartAbandoned", f"attempt {turn.state.attempt} was not started: {reason}", "warning")
    turn.enter(Phase.FORMING, turn.now.s + turn.state.spec.join_timeout_s)


def form(turn: Turn) -> None:
    """Start the next attempt if it can start; end the job if it cannot come together in time."""
    state, spec = turn.state, turn.state.spec
    agents = state.agents.values()
    ready = [agent_id for agent_id, agent in state.agents.items() if agent.reachable]
    if state.num_joined and agents and all(agent.role is Role.GONE for agent in agents):
        _end_deserted(turn)
        return
    blockers = [agent.info.node for agent in agents if agent.live_attempt]
    before = len(state.current.nodes) if state.current else 0
    enough = max(spec.min_nodes, min(before, spec.max_nodes)) if before else spec.max_nodes
    if len(ready) >= spec.min_nodes and blockers:
        _wait_for_old_ranks(turn, blockers)
    elif len(ready) >= enough and (before or len(_meant_to_run(state, ready)) >= enough):
        begin_attempt(turn, members(state, ready))
    elif len(ready) >= spec.min_nodes:
        _last_call(turn, ready)
    elif state.deadline_s is not None and turn.now.s >= state.deadline_s:
        waited = f"{len(ready)} of at least {plural(spec.min_nodes, 'node')} came together in {spec.join_timeout_s:g} s"
        end_job(turn, 1, f"{waited}: check the other nodes, or allow more time with --rdzv-conf join_timeout=SECONDS")
    elif state.last_call_s is not None:
        turn.change(last_call_s=None)


def _end_deserted(turn: Turn) -> None:
    """No agent is left to form an attempt with. Launchers that left on their own word have exited with 88: so has the job."""
    state = turn.state
    has_run = state.attempt > 1 or state.store_bound
    if not has_run and state.failure is None and all(agent.left for agent in state.agents.values()):
        left = plural(len(state.agents), "launcher")
        end_job(turn, EXIT_NO_SUPERVISOR, f"{GIVEN_UP}: {left} of it left, as one does that has waited in vain for an answer")
        return
    if has_run and any(agent.left and agent.group_rank >= 0 for agent in state.agents.values()):
        code = EXIT_REQUEUE
    else:
        code = 1 if state.failure is None else state.failure.exit_code
    end_job(turn, code, f"no node of the job is left{'' if state.failure is None else f'; {state.failure.text}'}")


def _meant_to_run(state: JobState, ready: list[str]) -> list[str]:
    """Those whose `--node-rank` does not say that they are spares: it lies beyond the number of nodes."""
    return [agent_id for agent_id in ready if state.agents[agent_id].info.node_rank < state.spec.max_nodes]


def _last_call(turn: Turn, ready: list[str]) -> None:
    state = turn.state
    if state.last_call_s is None:
        turn.change(last_call_s=turn.now.s + state.spec.last_call_s)
        state = turn.state
        if state.spec.last_call_s > 0:
            more = plural(state.spec.max_nodes - len(_meant_to_run(state, ready)), "more node")
            text = f"{len(ready)} of {nnodes(state.spec)} nodes are here: {more} may join within {state.spec.last_call_s:g} s"
            turn.log("LastCall", f"{text}, then the attempt starts with those that are here")
    if state.last_call_s is not None and turn.now.s >= state.last_call_s:
        begin_attempt(turn, members(state, ready))


def _wait_for_old_ranks(turn: Turn, blockers: list[str]) -> None:
    state = turn.state
    text = f"ranks of an earlier attempt may be alive on {', '.join(sorted(set(blockers)))}"
    if not state.blocked:
        turn.change(blocked=True, deadline_s=turn.now.s + blocked_for_s(state.spec))
        text += ": the next attempt waits for them"
        turn.log("AttemptBlocked", text, "warning")
        turn.tell(text)
    elif state.deadline_s is not None and turn.now.s >= state.deadline_s:
        give_up_blocked(turn, text)


def members(state: JobState, ready: list[str]) -> list[str]:
    """The agents of the next attempt by group rank: who stays keeps its rank, hints come next, then the order of joining.
    Nodes that something is known against come last."""

    def seniority(agent_id: str) -> tuple[int, bool, int, int]:
        agent = state.agents[agent_id]
        hint = agent.info.node_rank if agent.info.node_rank >= 0 else state.spec.max_nodes
        return badness(agent), agent.group_rank < 0, hint, agent.joined

    chosen = sorted(ready, key=seniority)[: state.spec.max_nodes]
    places: list[str | None] = [None] * len(chosen)
    for wish in ("group_rank", "node_rank"):
        for agent_id in [agent_id for agent_id in chosen if agent_id not in places]:
            agent = state.agents[agent_id]
            place = agent.group_rank if wish == "group_rank" else agent.info.node_rank
            if 0 <= place < len(places) and places[place] is None:
                places[place] = agent_id
    placed = set(places)
    rest = iter([agent_id for agent_id in chosen if agent_id not in placed])
    return [next(rest) if place is None else place for place in places]
