"""A limit has expired: report it, or take stacks of all ranks, name the culprit and end the attempt.

It kills only if the limit was configured or calculated limits are enforced (`--on-hang` overrides both ways); otherwise it is
a warning, once per limit and attempt. Before anything is killed stacks are collected everywhere, for a bounded time.
"""

from msgspec.structs import replace

from rsup.supervisor.attempt_end import fail_attempt, succeed
from rsup.supervisor.failure import Hung, culprit, group_stacks, hang_text, innermost_frame, limit_name, overdue_text
from rsup.supervisor.fault_evidence import hang_evidence, stands_out
from rsup.supervisor.in_process import end_culprit
from rsup.supervisor.rank_exits import fail_by_exit
from rsup.supervisor.re_entry import under_way
from rsup.supervisor.records import IncidentSaved
from rsup.supervisor.states import AgentState, JobState, Phase, Role
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import RankOverdue, RankStack, StacksTaken, TakeStacks

STACKS_WITHIN_S = 10.0
STACKS_MARGIN_S = 1.0
VICTIM_GRACE_S = 5.0
HANG_EXIT_CODE = 128 + 9
"""What a hung rank exits with: SIGKILL, since nothing else reaches it."""
SILENT_AFTER_S = 2.0
"""Age of the beat thread's last beat from which a rank does not merely wait: beats come four times a second."""
MAX_OVERDUE_LOGGED = 32


def overdue(turn: Turn, agent_id: str, fact: RankOverdue) -> None:
    """A limit has expired while ranks should be working."""
    _log(turn, agent_id, fact)
    if under_way(turn.state.in_process) is not None and turn.state.phase is not Phase.COLLECTING:
        return  # ranks that wait for each other to enter again: that has a bound of its own
    if fact.rank not in turn.state.overdue:
        turn.change(overdue={**turn.state.overdue, fact.rank: fact})
    if turn.state.phase is Phase.COLLECTING:
        return
    if kills(turn.state, fact):
        _collect(turn, fact)
    elif fact.limit not in turn.state.suspected:
        _suspect(turn, agent_id, fact)


def kills(state: JobState, fact: RankOverdue) -> bool:
    """Whether this limit ends the attempt."""
    if state.spec.policy.on_hang in ("restart", "report"):
        return state.spec.policy.on_hang == "restart"
    return not fact.calculated or state.spec.limits.enforce_calculated


def _log(turn: Turn, agent_id: str, fact: RankOverdue) -> None:
    number = turn.state.num_overdue_logged + 1
    turn.change(num_overdue_logged=number)
    if number > MAX_OVERDUE_LOGGED:
        return
    node = turn.state.agents[agent_id].info.node
    text = f"rank {fact.rank} on {node}: {overdue_text(fact)}"
    data: dict[str, object] = {
        "iteration": fact.iteration,
        "main_beat_age_s": fact.main_beat_age_s,
        "calculated": fact.calculated,
    }
    more = "; further ones are not listed" if number == MAX_OVERDUE_LOGGED else ""
    turn.log("RankOverdue", text + more, "warning", at_us=fact.at_us, rank=fact.rank, node=node, data=data)


def _suspect(turn: Turn, agent_id: str, fact: RankOverdue) -> None:
    state = turn.state
    agent = state.agents[agent_id]
    why = (
        "--on-hang report"
        if state.spec.policy.on_hang == "report"
        else "the limit is a calculated one; --calc-ft-timeouts enforces it"
    )
    hung = Hung(agent_id, fact.rank, agent.info.node, fact.iteration, fact.main_beat_age_s)
    text = f"{hang_text(hung, fact)}; nothing is killed ({why})"
    number = state.num_incidents + 1
    turn.change(suspected=[*state.suspected, fact.limit], num_incidents=number)
    turn.record(_incident(state, agent, hung, fact, "suspected-hang", text, number, turn.now.us))
    turn.log("SuspectedHang", text, "warning", at_us=fact.at_us, rank=fact.rank, node=agent.info.node)


def _incident(
    state: JobState, agent: AgentState | None, hung: Hung, fact: RankOverdue, kind: str, text: str, number: int, now_us: int
) -> IncidentSaved:
    return IncidentSaved(
        job=state.key,
        incident=number,
        attempt=state.attempt,
        at_us=fact.at_us - int(_still_s(fact) * 1e6),
        kind=kind,
        rank=hung.rank,
        node=hung.node,
        device=agent.devices_used.get(hung.rank, "") if agent is not None else "",
        iteration=hung.iteration,
        section=fact.limit,
        found_by=f"{limit_name(fact.limit)} ({fact.limit_s:g} s)",
        text=text,
        detected_us=now_us,
    )


def _still_s(fact: RankOverdue) -> float:
    """How long the rank had stood still when its limit expired; within the section it may have got on for a while."""
    return min(fact.age_s, fact.main_beat_age_s) if fact.main_beat_age_s > 0 else fact.age_s


def _collect(turn: Turn, fact: RankOverdue) -> None:
    state = turn.state
    reason = f"rank {fact.rank} may hang ({limit_name(fact.limit)}, {fact.limit_s:g} s): stacks first"
    for agent_id, agent in list(state.agents.items()):
        if agent.live_attempt and agent.live_attempt == state.attempt:
            turn.change_agent(agent_id, stacks=None)
            turn.command(agent_id, TakeStacks(0, reason, state.attempt, STACKS_WITHIN_S))
    turn.change(in_process=replace(state.in_process, heard=[]))
    turn.enter(Phase.COLLECTING, turn.now.s + STACKS_WITHIN_S + STACKS_MARGIN_S)
    turn.log("TakeStacks", reason, "warning", rank=fact.rank)


def stacks_of_the_stopped(turn: Turn, agent_id: str, fact: StacksTaken) -> None:
    """Stacks that were taken while an attempt ends: they belong to its incident, unless that has better ones."""
    stacks_taken(turn, agent_id, fact)
    incident = turn.state.incident
    if fact.stacks and incident is not None and incident.attempt == fact.attempt:
        incident = replace(incident, stacks=group_stacks(s for _, agent in turn.state.active for s in agent.stacks or []))
        turn.change(incident=incident)
        turn.record(incident)


def stacks_taken(turn: Turn, agent_id: str, fact: StacksTaken) -> None:
    """One node's stacks."""
    agent = turn.change_agent(agent_id, stacks=fact.stacks)
    sources = ", ".join(sorted({stack.source for stack in fact.stacks})) or "nothing"
    turn.log(
        "StacksTaken",
        f"stacks of {len(fact.stacks)} ranks on {agent.info.node} ({sources})",
        at_us=fact.at_us,
        node=agent.info.node,
        data={"stood_in": {stack.rank: frame for stack in fact.stacks if (frame := innermost_frame(stack.text))}},
    )


def settle_collecting(turn: Turn) -> None:
    """Judge the hang when all stacks are there, the time is up, or every rank has ended by itself."""
    state = turn.state
    if state.num_ended >= state.world_size and not state.adopted:
        if state.num_ok == state.world_size:
            succeed(turn)
        else:
            _conclude_hang(turn)
        return
    waiting = any(a.live_attempt and a.stacks is None and a.role is Role.ACTIVE for a in state.agents.values())
    if not waiting or (state.deadline_s is not None and turn.now.s >= state.deadline_s):
        _conclude_hang(turn)


def _conclude_hang(turn: Turn) -> None:
    state = turn.state
    stacks = [stack for _, agent in state.active for stack in agent.stacks or []]
    ranks = _ranks(state, {stack.rank: stack for stack in stacks})
    if state.in_process.restartable and not state.adopted and _went_on(turn, ranks, stacks):
        return
    earliest = min(state.overdue.values(), key=lambda f: (f.at_us, f.rank))
    first = culprit(ranks) or Hung("", earliest.rank, "", earliest.iteration, earliest.main_beat_age_s, overdue=earliest)
    fact = first.overdue or earliest
    text = hang_text(first, fact)
    agent = state.agents.get(first.agent_id)
    incident = replace(
        _incident(state, agent, first, fact, "hang", text, 0, turn.now.us),
        victims=sorted(r for r in state.overdue if r != first.rank),
        stacks=group_stacks(stacks),
    )
    stuck = {hung.agent_id for hung in ranks if hung.overdue is not None or hung.process_state == "T"}

    def grace_s(agent_id: str) -> float:
        return 0.0 if agent_id in stuck else min(VICTIM_GRACE_S, state.spec.stop_grace_s)

    fail_attempt(
        turn,
        "hang",
        text,
        exit_code=HANG_EXIT_CODE,
        section=fact.limit,
        rank=first.rank,
        node=first.node,
        incident=incident,
        grace_s=grace_s,
    )
    hang_evidence(turn, first, ranks, turn.state.incident or incident)


# ------------------------------------------------------------------------------------------- under in-process restart


def _went_on(turn: Turn, ranks: list[Hung], stacks: list[RankStack]) -> bool:
    """Whether the attempt goes on: the hang has ended by itself, by a death, or by that of the one rank that causes it."""
    state = turn.state
    dead = [
        (exit_.order, agent_id, rank)
        for agent_id, agent in state.active
        for rank, exit_ in agent.exits.items()
        if exit_.exit_code
    ]
    going = [hung for hung in ranks if hung.rank not in state.in_process.heard]
    if dead:
        _back_to_work(turn)
        for _, agent_id, rank in sorted(dead):
            if turn.state.phase is Phase.RUNNING:
                fail_by_exit(turn, agent_id, rank)
        return True
    if not any(hung.overdue is not None for hung in going):
        _back_to_work(turn)
        turn.log("HangOver", "every rank whose limit had expired has shown a sign of progress since: nothing is ended")
        return True
    first = culprit(going)
    if first is None or not _is_named(state, first, going, ranks):
        return False
    fact = first.overdue or min((h.overdue for h in going if h.overdue is not None), key=lambda f: (f.at_us, f.rank))
    text = hang_text(first, fact)
    incident = replace(
        _incident(state, state.agents.get(first.agent_id), first, fact, "hang", text, 0, turn.now.us),
        victims=sorted(r for r in state.overdue if r != first.rank),
        stacks=group_stacks(stacks),
    )
    _back_to_work(turn)
    end_culprit(turn, first.agent_id, first.rank, text, incident, fact.limit, HANG_EXIT_CODE)
    hang_evidence(turn, first, going, incident)
    return True


def _back_to_work(turn: Turn) -> None:
    turn.enter(Phase.RUNNING)
    turn.change(overdue={})


def _is_named(state: JobState, first: Hung, going: list[Hung], ranks: list[Hung]) -> bool:
    """Whether that one rank is so plainly the culprit that it alone is ended, and the others can take a new process in."""
    ip = state.in_process
    has_peers = first.rank in ip.entries and len(ip.entries) > 1 and state.num_ok <= ip.num_retired
    agent = state.agents.get(first.agent_id)
    if not has_peers or agent is None or not agent.reachable or state.spec.in_process.max_restarts == 0:
        return False
    is_last = len(going) == 1 and len(ranks) > 1 and first.overdue is not None
    return first.process_state in ("T", "t") or stands_out(first, going) or is_last


def _ranks(state: JobState, stacks: dict[int, RankStack]) -> list[Hung]:
    result = []
    for agent_id, agent in state.active:
        local = {stack.rank for stack in agent.stacks or []}
        mine = local | {rank for rank in state.overdue if agent.first_rank <= rank < agent.first_rank + agent.info.num_ranks}
        for rank in mine - agent.exits.keys():
            stack, fact = stacks.get(rank), state.overdue.get(rank)
            result.append(
                Hung(
                    agent_id=agent_id,
                    rank=rank,
                    node=agent.info.node,
                    iteration=stack.iteration
                    if stack is not None and stack.iteration
                    else fact.iteration
                    if fact is not None
                    else 0,
                    main_beat_age_s=fact.main_beat_age_s if fact is not None else 0.0,
                    process_state=stack.process_state if stack is not None else "",
                    stack=stack.text if stack is not None else "",
                    overdue=fact,
                    is_silent=fact is not None and fact.beat_age_s > SILENT_AFTER_S,
                )
            )
    return result
