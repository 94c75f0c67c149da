"""A fault in a job whose ranks can enter their training function again: what follows, and when that is not enough.

The ranks restart by themselves (`worker.inprocess`); here is decided what no rank can: whether a dead process is replaced by
a new one, whether a restart has come to its end in time, and when all processes have to be restarted instead. That ends the
attempt by the same path as any failure, and the restart policy speaks then; in-process restarts cost nothing of its budget.

What a restart under way remembers, and when it is given up, is in `open_restart`; what it takes to be all in again, and to get
on, in `re_entry`.
"""

from msgspec.structs import replace

from rsup.supervisor.attempt_end import cut_short
from rsup.supervisor.failure import OF_A_PEER, exit_kind, exit_text, is_of_a_peer, weight
from rsup.supervisor.first_mover import exit_incident
from rsup.supervisor.open_restart import IN_PROCESS, UNTOLD, Fault, change_open, give_up, has_reserves, join, opened
from rsup.supervisor.re_entry import announce, check_entered, heard_from, joined, noted, under_way
from rsup.supervisor.records import IncidentSaved
from rsup.supervisor.restart_policy import passed_on, signature
from rsup.supervisor.states import AgentState, JobState, Phase, RankExit
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import (
    SOFT_LIMIT,
    EndRanks,
    EntryBegun,
    RankFaulted,
    RestartInProcess,
    clip,
)

NO_FURTHER_RESTART = "no further restart inside the processes"
"""What a rank says that ends because its own limit is reached (`--inprocess-max-iterations`), or too few are left."""
MAX_LOGGED = 8
"""Of the faults of one restart, those that only follow from another one."""
_WAITED = 2
"""`failure.weight` of a rank that waited for others until the soft limit: as of one that did so until the hard one."""


# ---------------------------------------------------------------------------------------------------------- what arrives


def took_death(turn: Turn, agent_id: str, rank: int) -> bool:
    """Replace the process of a rank that has failed, in place of ending the attempt, if the job is such that this helps.
    False: the attempt ends for it, as it would without in-process restart."""
    agent = turn.state.agents[agent_id]
    exit_ = agent.exits[rank]
    if _ends_attempt(turn.state, rank, exit_):
        return False
    entries = turn.state.in_process.entries
    fault = fault_of_exit(turn.state, agent, rank, exit_, entries.get(rank, max(entries.values(), default=0)))
    turn.change(in_process=replace(turn.state.in_process, entries={r: e for r, e in entries.items() if r != rank}))
    _, why = join(turn, fault)
    if NO_FURTHER_RESTART in exit_.error:
        why = "the ranks themselves restart no more"
    elif not turn.state.in_process.entries:
        why = "no process of the attempt is left that could take a new one in"
    elif has_reserves(turn.state) and not _reserves_left(turn.state):
        why = "no rank in reserve is left for it"
    if why:
        give_up(turn, why)
        return True
    _take_off(turn, agent_id, rank, exit_)
    restart = turn.state.in_process.open
    assert restart is not None
    replaced = rank in restart.replacing
    how = f"rank {rank} gets a new process" if replaced else "a reserve takes its place"
    _push(turn, f"{fault.text}; {how}", [rank], fault.weight, gone=rank, owner=agent_id if replaced else "")
    check_entered(turn)
    return True


def fault_of_exit(state: JobState, agent: AgentState, rank: int, exit_: RankExit, entry: int) -> Fault:
    """The end of a rank's process in that entry. One that ended with 0 may well follow from another rank's fault."""
    kind, left = exit_kind(exit_), not exit_.exit_code
    text = exit_text(rank, agent.info.node, exit_) + (f" in entry {entry}, before all had finished" if left else "")
    return Fault(
        rank=rank,
        entry=entry + 1,
        text=text,
        kind=kind,
        signature=signature(kind, exit_.exit_code, exit_.section, exit_.error, rank),
        weight=UNTOLD if exit_.by_us else OF_A_PEER if left else weight(exit_),
        incident=exit_incident(state, agent, rank, exit_, kind, text),
        exit_code=1 if left else passed_on(exit_.exit_code, exit_.declared),
        error=exit_.error,
        is_death=True,
    )


def rank_faulted(turn: Turn, agent_id: str, fact: RankFaulted) -> None:
    """A rank has left its training function for a fault, and its process lives: all ranks are to enter again."""
    state = turn.state
    agent, ip = state.agents[agent_id], state.in_process
    restart = under_way(ip)
    where = f" at iteration {fact.iteration}" if fact.iteration else ""
    is_hang = fact.kind == "soft-timeout"
    what = "was interrupted in" if is_hang else "left"
    text = f"rank {fact.rank} on {agent.info.node} {what} entry {fact.entry}{where} ({fact.kind}): {fact.text}"[:1000]
    is_late = state.phase not in (Phase.STARTING, Phase.RUNNING, Phase.COLLECTING)
    is_late = is_late or fact.entry < ip.entered or fact.rank in agent.exits or fact.entry < ip.entries.get(fact.rank, 0)
    is_victim = fact.victim or is_of_a_peer(fact.text)
    if restart is None or restart.num_logged < MAX_LOGGED or not is_victim:
        _log_fault(turn, agent, fact, f"{text}; it decides nothing any more" if is_late else text, is_victim)
    if is_late:
        if state.stop is not None and state.failure is None and fact.entry >= ip.entered:
            cut_short(turn, text)
        return
    heard_from(turn, fact.rank)
    further = max(state.attempt_iteration, fact.iteration)
    counts = state.counts_iterations or fact.iteration > 0
    turn.change(attempt_iteration=further, iteration=max(state.iteration, further), counts_iterations=counts)
    fault = Fault(
        rank=fact.rank,
        entry=fact.entry + 1,
        text=text,
        kind="hang" if is_hang else "exit",
        signature=fact.signature or signature(fact.kind, 1, "", fact.text, fact.rank),
        weight=(_WAITED if is_hang else OF_A_PEER) if is_victim else 0,
        incident=_fault_incident(state, agent, fact, text),
        error=fact.text,
    )
    begins, why = join(turn, fault)
    if why:
        give_up(turn, why)
    elif begins:
        _push(turn, text, [fact.rank], fault.weight, of_entry=fact.entry)
    announce(turn)
    check_entered(turn)


def entry_begun(turn: Turn, agent_id: str, fact: EntryBegun) -> None:
    """A rank has entered its training function."""
    if not noted(turn, agent_id, fact):
        return
    ip = turn.state.in_process
    if ip.restartable and fact.entry > max(ip.entered, ip.open.entry if ip.open is not None else 0):
        _entered_untold(turn, agent_id, fact.rank, fact.entry)
    joined(turn, agent_id, fact)
    check_entered(turn)


def _entered_untold(turn: Turn, agent_id: str, rank: int, entry: int) -> None:
    """A rank enters again, and no fault is known: what another node has to tell is still under way."""
    if under_way(turn.state.in_process) is not None and rank in opened(turn).replacing:
        return  # the entry that a new process joins is told by it
    agent = turn.state.agents[agent_id]
    text = f"rank {rank} on {agent.info.node} has begun entry {entry}, and no rank has told why"
    incident = IncidentSaved(
        turn.state.key, 0, turn.state.attempt, turn.now.us, IN_PROCESS, rank, agent.info.node, found_by="entry", text=text
    )
    fault = Fault(rank=rank, entry=entry, text=text, kind="exit", signature="", weight=UNTOLD, incident=incident)
    _, why = join(turn, fault)
    if why:
        give_up(turn, why)


def end_culprit(turn: Turn, agent_id: str, rank: int, text: str, incident: IncidentSaved, section: str, exit_code: int) -> None:
    """Kill the one rank that holds the others up; its death leads on."""
    entries = turn.state.in_process.entries
    fault = Fault(
        rank=rank,
        entry=entries[rank] + 1,
        text=text,
        kind="hang",
        signature=signature("hang", exit_code, section, "", rank),
        weight=0,
        incident=incident,
        exit_code=exit_code,
    )
    _, why = join(turn, fault)
    if why:
        give_up(turn, why)
        return
    change_open(turn, ending=sorted({*opened(turn).ending, rank}))
    reason = f"{text}: it alone is ended, the others take a new process in"
    turn.command(agent_id, EndRanks(0, reason, turn.state.attempt, [rank]))
    turn.log("EndRanks", reason, "warning", rank=rank, node=turn.state.agents[agent_id].info.node, data={"ranks": [rank]})


def _ends_attempt(state: JobState, rank: int, exit_: RankExit) -> bool:
    """Whether this end of a rank is none that a new process could make good."""
    ip, restart = state.in_process, state.in_process.open
    if not ip.restartable or state.adopted or state.phase is not Phase.RUNNING or state.spec.in_process.max_restarts == 0:
        return True
    if exit_.declared and exit_.exit_code in (exit_.declared, 1):
        return True  # on purpose; 1 is what Python makes of an error that a script lets pass
    ending, replacing = (restart.ending, restart.replacing) if restart is not None else ([], [])
    if exit_.by_us and rank not in ending:
        return True
    if state.num_ok - (not exit_.exit_code) > ip.num_retired or state.left is not None:
        return True  # ranks have finished, or leave: nobody enters again with those that are left
    has_entered = rank in ip.entries or rank in replacing or has_reserves(state)
    alone = not [r for r in ip.entries if r != rank] and under_way(ip) is None
    return not has_entered or alone


def _reserves_left(state: JobState) -> int:
    return state.world_size - state.in_process.active - state.in_process.num_retired


def _take_off(turn: Turn, agent_id: str, rank: int, exit_: RankExit) -> None:
    """The process that ended is not the rank's end: a new one follows, or a reserve has its work."""
    state, restart = turn.state, opened(turn)
    agent, ip = state.agents[agent_id], state.in_process
    others = {r: e for r, e in agent.exits.items() if r != rank}
    retires = has_reserves(state)
    if retires:
        taken_over = RankExit(exit_.order, 0, exit_.at_us, by_us="a reserve has taken its place", iteration=exit_.iteration)
        turn.change_agent(agent_id, exits={**others, rank: taken_over})
        turn.change(num_ok=state.num_ok + bool(exit_.exit_code))
    else:
        local_rank = rank - agent.first_rank
        pids = [0 if i == local_rank else pid for i, pid in enumerate(agent.pids)]
        turn.change_agent(agent_id, exits=others, pids=pids)
        turn.change(num_ended=state.num_ended - 1, num_ok=state.num_ok - (not exit_.exit_code))
    turn.change(
        in_process=replace(
            ip,
            deaths={**ip.deaths, rank: ip.deaths.get(rank, 0) + 1},
            num_retired=ip.num_retired + retires,
            open=replace(
                restart,
                exits={**restart.exits, rank: exit_},
                ending=[r for r in restart.ending if r != rank],
                replacing=restart.replacing if retires else sorted({*restart.replacing, rank}),
            ),
        )
    )


def _push(
    turn: Turn, reason: str, failed: list[int], weight: int, *, gone: int | None = None, owner: str = "", of_entry: int = 0
) -> None:
    """Tell every node at once, so that no rank waits until it finds out by itself; and people, whom a victim's fault tells
    nothing new."""
    state, restart = turn.state, opened(turn)
    ip, gone_ranks = state.in_process, [] if gone is None else [gone]
    deaths = [ip.deaths[rank] for rank in gone_ranks]
    reason = f"{reason}; the ranks enter their training function again, in their processes (entry {restart.entry})"
    for agent_id, agent in list(state.agents.items()):
        if agent.live_attempt and agent.live_attempt == state.attempt:
            replaced = gone_ranks if agent_id == owner else []
            command = RestartInProcess(0, reason, state.attempt, failed, gone_ranks, replaced, deaths, of_entry)
            turn.command(agent_id, command)
    data: dict[str, object] = {
        "entry": restart.entry,
        "failed": restart.failed,
        "gone": gone_ranks,
        "replaced": gone_ranks if owner else [],
        "deaths": deaths,
        "signature": ip.faults[-1] if ip.faults else "",
        "number": ip.num_restarts,
        "reserves": _reserves_left(state),
    }
    turn.log("InProcessRestart", reason, "warning", rank=failed[0], node=restart.incident.node, data=data)
    if not restart.told:
        announce(turn)
    elif not weight:
        turn.tell(reason)


# --------------------------------------------------------------------------------------------------------------- records


def _fault_incident(state: JobState, agent: AgentState, fact: RankFaulted, text: str) -> IncidentSaved:
    return IncidentSaved(
        job=state.key,
        incident=0,
        attempt=state.attempt,
        at_us=fact.at_us,
        kind=IN_PROCESS,
        rank=fact.rank,
        node=agent.info.node,
        device=agent.devices_used.get(fact.rank, ""),
        iteration=fact.iteration,
        found_by=SOFT_LIMIT if fact.kind == "soft-timeout" else "report of the rank",
        text=text,
    )


def _log_fault(turn: Turn, agent: AgentState, fact: RankFaulted, text: str, is_victim: bool) -> None:
    restart = under_way(turn.state.in_process)
    if restart is not None:
        change_open(turn, num_logged=restart.num_logged + 1)
    data: dict[str, object] = {
        "entry": fact.entry,
        "kind": fact.kind,
        "signature": fact.signature,
        "iteration": fact.iteration,
        "victim": is_victim,
        "traceback": clip(fact.traceback),
    }
    level = "info" if is_victim else "error"
    turn.log("RankFaulted", text, level, at_us=fact.at_us, rank=fact.rank, node=agent.info.node, data=data)
