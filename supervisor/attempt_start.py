"""From "these agents" to "every rank runs": the attempt's store first, then one `StartAttempt` to all.

Each start has a new attempt number, a new epoch and a new store. The store is bound on the first node before any rank is
started anywhere (a probed port can be lost between probe and bind).
"""

from msgspec.structs import replace

from rsup.supervisor import records
from rsup.supervisor.attempt_end import fail_attempt
from rsup.supervisor.case_followup import begin_cases, placed, seated, settle_cases
from rsup.supervisor.devices_known import say_which_nodes_must_do
from rsup.supervisor.other_devices import avoided_by
from rsup.supervisor.phases import named, start_of
from rsup.supervisor.records import AttemptSaved, RankSaved
from rsup.supervisor.render import plural
from rsup.supervisor.states import AgentState, InProcess, Observed, Phase, Role
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import (
    EXIT_REQUEUE,
    AttemptStarted,
    DeviceUsed,
    HostStore,
    Park,
    StartAttempt,
    StartFailed,
    StoreBound,
)


def begin_attempt(turn: Turn, member_ids: list[str]) -> None:
    """Start the next attempt with these agents, in this order of group ranks unless a rank has to avoid its devices."""
    settle_cases(turn)
    member_ids = seated(turn.state, member_ids)
    first_rank = 0
    for agent_id, agent in list(turn.state.agents.items()):
        if agent_id not in member_ids:
            _leave_out(turn, agent_id, agent)
    for group_rank, agent_id in enumerate(member_ids):
        agent = turn.state.agents[agent_id]
        turn.put_agent(agent_id, _fresh(agent, Role.ACTIVE, group_rank, first_rank))
        first_rank += agent.info.num_ranks
        turn.see_node(agent_id)
    _number(turn, first_rank, [turn.state.agents[agent_id].info.node for agent_id in member_ids])
    begin_cases(turn)
    nodes = ", ".join(turn.state.current.nodes if turn.state.current else [])
    say_which_nodes_must_do(turn, member_ids)
    if refused := next((agent_id for agent_id in member_ids if turn.state.agents[agent_id].info.gate_refusal), ""):
        info = turn.state.agents[refused].info
        start_failed(turn, refused, StartFailed(turn.now.us, turn.state.attempt, info.gate_refusal, EXIT_REQUEUE))
        return
    reason = f"attempt {turn.state.attempt} is to start on {nodes} with {plural(first_rank, 'rank')}"
    turn.command(member_ids[0], HostStore(0, reason, turn.state.attempt, turn.state.spec.master_port))
    turn.log("HostStore", reason, node=turn.state.agents[member_ids[0]].info.node)


def _leave_out(turn: Turn, agent_id: str, agent: AgentState) -> None:
    if agent.role is Role.GONE:
        if agent.group_rank >= 0:
            turn.put_agent(agent_id, _fresh(agent, Role.GONE, -1, 0))
        return
    was_member = agent.group_rank >= 0 or not agent.parked
    turn.put_agent(agent_id, _fresh(agent, Role.LOST if agent.role is Role.LOST else Role.SPARE, -1, 0))
    if was_member:
        turn.change_agent(agent_id, parked=True)
        reason = f"node {agent.info.node} is a spare: attempt {turn.state.attempt + 1} has all the nodes that it needs"
        turn.command(agent_id, Park(0, reason))
        turn.log("Park", reason, node=agent.info.node)
        turn.see_node(agent_id)


def _fresh(agent: AgentState, role: Role, group_rank: int, first_rank: int) -> AgentState:
    return replace(
        agent,
        role=role,
        parked=agent.parked and group_rank < 0,
        previous_rank=agent.group_rank,
        group_rank=group_rank,
        first_rank=first_rank,
        started=False,
        pids=[],
        exits={},
        devices_used={},
        stacks=None,
        stepped=False,
        first_iteration=0,
        took_ranks="",
        excluded="",
    )


def _number(turn: Turn, world_size: int, nodes: list[str]) -> None:
    state = turn.state
    current = AttemptSaved(
        job=state.key,
        attempt=state.attempt + 1,
        epoch=state.epoch + 1,
        started_us=turn.now.us,
        world_size=world_size,
        nodes=nodes,
        start_iteration=max(0, state.checkpoint),
    )
    turn.enter(Phase.STARTING)
    reset(turn, current)
    turn.record(current)


def reset(turn: Turn, current: AttemptSaved) -> None:
    """Begin that attempt: what was so of the one before is over."""
    turn.change(
        attempt=current.attempt,
        epoch=current.epoch,
        adopted=False,
        current=current,
        world_size=current.world_size,
        num_ended=0,
        num_ok=0,
        num_overdue_logged=0,
        store_bound=False,
        started_s=turn.now.s,
        running_us=None,
        stepped=False,
        attempt_iteration=0,
        failure=None,
        left=None,
        shut_down="",
        overdue={},
        suspected=[],
        in_process=InProcess(),
        observed=Observed(),
    )


def store_bound(turn: Turn, agent_id: str, fact: StoreBound) -> None:
    """The store is there: start the ranks of all nodes."""
    state = turn.state
    if state.store_bound:
        return
    turn.change(store_bound=True)
    active = state.active
    size = f"{plural(state.world_size, 'rank')} on {plural(len(active), 'node')}"
    phase = start_of(state)
    turn.change(phase_number=phase.number if phase is not None else 0)
    in_phase = f", {named(state.spec.phases, phase.number)}" if phase is not None else ""
    reason = f"attempt {state.attempt} starts: {size}{in_phase}, store {fact.host}:{fact.port}"
    role_sizes: dict[str, int] = {}
    for _, member in active:
        role_sizes[member.info.role] = role_sizes.get(member.info.role, 0) + member.info.num_ranks
    role_ranks = dict.fromkeys(role_sizes, 0)
    for member_id, member in active:
        role = member.info.role
        turn.change_agent(member_id, live_attempt=state.attempt)
        turn.command(
            member_id,
            StartAttempt(
                0,
                reason,
                attempt=state.attempt,
                epoch=state.epoch,
                first_rank=member.first_rank,
                num_ranks=member.info.num_ranks,
                world_size=state.world_size,
                group_rank=member.group_rank,
                group_world_size=len(active),
                master_addr=fact.host,
                master_port=fact.port,
                job_id=state.key.job_id,
                run=state.key.run,
                max_restarts=state.spec.policy.max_restarts,
                limits=state.limits,
                avoid=avoided_by(state, member),
                first_role_rank=role_ranks[role],
                role_world_size=role_sizes[role],
                restarts_spent=state.budget.restarts,
                phase=phase,
                save_s=state.save_s,
                switches=state.switches,
            ),
        )
        role_ranks[role] += member.info.num_ranks
    turn.log("StartAttempt", reason, data={"store": f"{fact.host}:{fact.port}", "nodes": [a.info.node for _, a in active]})


def start_failed(turn: Turn, agent_id: str, fact: StartFailed) -> None:
    """The store or the ranks could not be started on a node."""
    node = turn.state.agents[agent_id].info.node
    text = f"attempt {fact.attempt} could not be started on {node}: {fact.message}"
    fail_attempt(turn, "start-failed", text, exit_code=fact.exit_code or 1, node=node)


def attempt_started(turn: Turn, agent_id: str, fact: AttemptStarted) -> None:
    """All ranks of a node have been spawned."""
    agent = turn.change_agent(agent_id, started=True, pids=fact.pids)
    for local_rank, pid in enumerate(fact.pids):
        rank = agent.first_rank + local_rank
        if rank not in agent.exits:
            device = agent.devices_used.get(rank, "")
            turn.record(RankSaved(turn.state.key, turn.state.attempt, rank, agent.info.node, pid, device))
    count = len(fact.pids)
    data: dict[str, object] = {"pids": fact.pids, "devices": fact.devices, "cpus": fact.cpus}
    text = f"{plural(count, 'rank')} run{'s' if count == 1 else ''} on {agent.info.node}"
    turn.log("AttemptStarted", text, at_us=fact.at_us, node=agent.info.node, data=data)


def all_started(turn: Turn) -> None:
    """Enter `running` once every node has started its ranks."""
    state = turn.state
    members = [agent for agent in state.agents.values() if agent.group_rank >= 0]
    if state.store_bound and members and all(agent.started or agent.role is Role.GONE for agent in members):
        turn.enter(Phase.RUNNING)
        turn.change(running_us=turn.now.us)
        size = f"{plural(state.world_size, 'rank')} on {plural(len(members), 'node')}"
        turn.log("AttemptRunning", f"attempt {state.attempt} runs: {size}")


def device_used(turn: Turn, agent_id: str, fact: DeviceUsed) -> None:
    """A rank has found out which device it really uses."""
    agent = turn.state.agents[agent_id]
    turn.change_agent(agent_id, devices_used={**agent.devices_used, fact.rank: fact.uuid})
    local_rank = fact.rank - agent.first_rank
    pid = agent.pids[local_rank] if 0 <= local_rank < len(agent.pids) else 0
    if fact.rank not in agent.exits:
        turn.record(RankSaved(turn.state.key, turn.state.attempt, fact.rank, agent.info.node, pid, fact.uuid))
    placed(turn, fact.rank, fact.uuid)
    turn.record(
        records.DeviceSeen(
            fact.uuid, fact.at_us, agent.info.node, job=turn.state.key, attempt=turn.state.attempt, rank=fact.rank
        )
    )
