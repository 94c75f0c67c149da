"""Attempts that are running although this store knows nothing of them, or only of older ones, as after a backup was restored.

They are taken over as they are: when in doubt, training goes on. The first of a job's agents to be heard tells which attempt
it is. The others that the store knows may run ranks of it too: until each has said whether it does, no end of the attempt is
believed, and no other one is started.
"""

from msgspec.structs import replace

from rsup.supervisor.attempt_end import allow_time_to_end, blocked_for_s, close_attempt, give_up_blocked
from rsup.supervisor.attempt_start import reset
from rsup.supervisor.records import AttemptSaved, RankSaved
from rsup.supervisor.render import plural
from rsup.supervisor.states import LIVE_PHASES, AgentState, JobState, Phase, Role
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import Hello, StopAttempt


def is_ahead(state: JobState, hello: Hello) -> bool:
    """Whether this agent runs something that we know nothing of: our memory is gone or older than the job."""
    if hello.epoch > state.epoch:
        return True
    same = hello.epoch == state.epoch and hello.attempt == state.attempt
    agent = state.agents.get(hello.agent.agent_id)
    return same and state.adopted and (agent is None or agent.group_rank < 0)


def adopt(turn: Turn, hello: Hello) -> None:
    """Take an attempt over with this agent's part of it."""
    info, running = hello.agent, hello.running
    if not (turn.state.adopted and turn.state.attempt == hello.attempt and turn.state.epoch == hello.epoch):
        _begin(turn, hello)
    before = turn.state.agents.get(info.agent_id)
    joined = before.joined if before is not None else turn.state.num_joined + 1
    group_rank = info.node_rank if info.node_rank >= 0 else joined - 1
    agent = AgentState(
        info=replace(info, devices=[]),
        role=Role.ACTIVE,
        joined=joined,
        acked_fact=before.acked_fact if before is not None else 0,
        last_command=before.last_command if before is not None else 0,
        outbox=before.outbox if before is not None else [],
        devices=[device.uuid for device in info.devices],
        number_commands=True,
        live_attempt=hello.attempt,
        group_rank=running.group_rank if running is not None else group_rank,
        first_rank=running.first_rank if running is not None else 0,
        started=True,
    )
    turn.put_agent(info.agent_id, agent)
    state = turn.state
    assert state.current is not None
    seen = sum(a.info.num_ranks for a in state.agents.values() if a.group_rank >= 0)
    world_size = running.world_size if running is not None else max(state.world_size, seen)
    current = replace(state.current, nodes=[*state.current.nodes, info.node], world_size=world_size)
    turn.change(current=current, world_size=world_size, num_joined=max(state.num_joined, joined))
    turn.record(current)
    turn.see_node(info.agent_id)
    for rank in range(agent.first_rank, agent.first_rank + info.num_ranks) if running is not None else ():
        turn.record(RankSaved(state.key, hello.attempt, rank, info.node))
    text = f"attempt {hello.attempt} was found running on {info.node}, unknown to this store: it goes on under this supervisor"
    turn.log("AttemptAdopted", text, "warning", node=info.node)
    _end_with_the_others(turn, info.agent_id, agent)


def _begin(turn: Turn, hello: Hello) -> None:
    """What was to be done, and who took part, was so in another attempt."""
    was_adopted = turn.state.adopted
    close_attempt(turn, "lost", f"its end is not in this store: attempt {hello.attempt} was found running")
    turn.enter(Phase.RUNNING)
    reset(turn, AttemptSaved(turn.state.key, hello.attempt, hello.epoch, turn.now.us, reason="adopted", world_size=0))
    turn.change(adopted=True, store_bound=True)
    for agent_id, agent in list(turn.state.agents.items()):
        if agent.dead:
            continue
        may_live = agent.live_attempt if was_adopted else hello.attempt
        turn.change_agent(
            agent_id,
            role=Role.SPARE if agent.role is Role.ACTIVE else agent.role,
            outbox=[],
            number_commands=True,
            group_rank=-1,
            exits={},
            live_attempt=0 if agent.role is Role.GONE else may_live,
        )


def _end_with_the_others(turn: Turn, agent_id: str, agent: AgentState) -> None:
    """It has come late: the attempt is being ended, or has been."""
    state = turn.state
    if state.phase in LIVE_PHASES and state.phase is not Phase.STOPPING:
        return
    if not any(isinstance(command, StopAttempt) for command in agent.outbox):
        reason = f"attempt {state.attempt} is over"
        turn.command(agent_id, StopAttempt(0, reason, state.attempt, state.spec.stop_grace_s))
        turn.log("StopAttempt", reason, "warning", node=agent.info.node)
    if state.phase is Phase.STOPPING:
        allow_time_to_end(turn)


def runs_nothing(turn: Turn, hello: Hello) -> None:
    """An agent that might have taken part in an adopted attempt says that it does not."""
    agent_id = hello.agent.agent_id
    agent = turn.state.agents[agent_id]
    if turn.state.adopted and agent.group_rank < 0 and agent.live_attempt and not hello.attempt:
        turn.change_agent(agent_id, live_attempt=0)


def is_all_heard(state: JobState) -> bool:
    """Whether no more of the attempt can be somewhere that we have not heard of: else its end is not believed."""
    if not state.adopted:
        return True
    awaited = any(agent.group_rank < 0 and agent.live_attempt for agent in state.agents.values())
    return not awaited and len(state.active) >= state.spec.min_nodes


def settle_adopted(turn: Turn) -> None:
    """All ranks that we know of have ended, and there should be, or may be, more: wait for those as long as nodes may take to
    come together, then end the job, since they may be alive."""
    state = turn.state
    if not state.adopted or state.phase is not Phase.RUNNING:
        return
    if any(agent.live_attempt and agent.group_rank >= 0 for agent in state.agents.values()):
        if state.deadline_s is not None:
            turn.change(deadline_s=None)  # one of those who were waited for has come
        return
    text = _awaited_text(state)
    if state.deadline_s is None:
        turn.change(deadline_s=turn.now.s + blocked_for_s(state.spec))
        turn.log("AttemptIncomplete", f"{text}, which this store did not know: waiting for it", "warning")
    elif turn.now.s >= state.deadline_s:
        give_up_blocked(turn, text)


def _awaited_text(state: JobState) -> str:
    missing = state.world_size - state.num_ended
    unheard = sorted(agent.info.node for agent in state.agents.values() if agent.live_attempt and agent.group_rank < 0)
    if missing > 0 or not unheard:
        return f"nothing has been heard of {plural(max(1, missing), 'rank')} of attempt {state.attempt}"
    verb = "has" if len(unheard) == 1 else "have"
    return f"{', '.join(unheard)} {verb} not said whether ranks of attempt {state.attempt} are there"
