"""The way back from a fault into training: every rank enters its training function again, and gets past an iteration.

Ranks report entries, numbered alike on all (`EntryBegun`); that they get on shows in their beats. Facts of one agent come in
order, those of several do not: an entry may become known before the fault that it follows.
"""

from msgspec.structs import replace

from rsup.supervisor.failure import NOBODY_KNOWN, OF_A_PEER
from rsup.supervisor.fault_evidence import lost_in_process_evidence
from rsup.supervisor.records import RankSaved
from rsup.supervisor.render import plural
from rsup.supervisor.states import AgentState, InProcess, JobState, OpenRestart, Phase
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import EntryBegun, RankBeat

TELL_WITHIN_S = 1.0
"""A victim's fault may be heard of first. It is not told alone unless nothing else becomes known so soon."""
_AT_WORK = (Phase.STARTING, Phase.RUNNING, Phase.COLLECTING)


def under_way(in_process: InProcess) -> OpenRestart | None:
    """The restart that waits for ranks to enter, None if none does."""
    restart = in_process.open
    return restart if restart is not None and not restart.entered_us else None


def known_text(restart: OpenRestart) -> str:
    """The fault behind the restart, and that it is a victim's where nobody has told of one of his own."""
    is_victim = restart.weight == OF_A_PEER and restart.incident.exit_code != 0
    return f"{NOBODY_KNOWN}: {restart.text}" if is_victim else restart.text


def announce(turn: Turn) -> None:
    """Say once, on the terminal, what has happened: the fault behind the others, then whom it took along, and what follows."""
    state, restart = turn.state, turn.state.in_process.open
    if restart is None or restart.told:
        return
    waited_s = (turn.now.us - restart.since_us) / 1e6
    if restart.weight and not restart.entered_us and waited_s < TELL_WITHIN_S:
        return
    first = restart.incident.rank
    others = [rank for rank in restart.failed if rank != first and rank not in restart.exits]
    with_it = f"; {ranks_text(others)} fell with it" if others and not restart.weight else ""
    gone = sorted(restart.exits)
    replaced = f"; {ranks_text(gone)} get{'s'[: len(gone) == 1]} a new process" if gone else ""
    if 0 < state.in_process.active < state.world_size and gone:
        replaced = "; a reserve takes its place" if len(gone) == 1 else "; reserves take their places"
    again = f"the ranks enter their training function again, in their processes (entry {restart.entry})"
    turn.tell(f"{known_text(restart)}{with_it}{replaced}; {again}")
    _change(turn, restart, told=True)


def ranks_text(ranks: list[int]) -> str:
    """`rank 4`, `ranks 0, 2`; the first few of many."""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks[:8]))}{', ...' if ranks[8:] else ''}"


def num_needed(state: JobState) -> int:
    """How many ranks have to enter before all are in that can be: those that compute, of those that are left."""
    ip = state.in_process
    num_finished = state.num_ok - ip.num_retired
    return max(0, min((ip.active or state.world_size) - num_finished, state.world_size - state.num_ended))


def left_before(state: JobState, restart: OpenRestart) -> list[int]:
    """Ranks whose process has ended with 0 before it was in the entry that all have to reach: nobody will come. Of reserves,
    which enter nothing, this cannot be said."""
    ip = state.in_process
    if state.num_ok == ip.num_retired or state.adopted:
        return []
    has_reserves = 0 < ip.active < state.world_size
    last = ip.entries | ip.left
    return sorted(
        rank
        for _, agent in state.active
        for rank, exit_ in agent.exits.items()
        if not exit_.exit_code and not exit_.by_us and (rank in last or not has_reserves)
        if last.get(rank, 0) < restart.entry
    )


def num_entered(state: JobState, restart: OpenRestart) -> int:
    """How many have."""
    return sum(entry >= restart.entry for entry in state.in_process.entries.values())


def noted(turn: Turn, agent_id: str, fact: EntryBegun) -> bool:
    """Remember a rank's entry; False if it tells nothing new."""
    state, ip = turn.state, turn.state.in_process
    agent = state.agents[agent_id]
    if state.phase not in _AT_WORK or fact.rank in agent.exits or fact.entry <= ip.entries.get(fact.rank, 0):
        return False
    heard_from(turn, fact.rank)
    ip = turn.state.in_process
    active = ip.active or max(1, state.world_size - fact.reserves)
    ip = replace(ip, entries={**ip.entries, fact.rank: fact.entry}, active=active)
    turn.change(in_process=ip)
    if not ip.restartable:
        _restartable_if_all_in(turn)
    return True


def _restartable_if_all_in(turn: Turn) -> None:
    state, ip = turn.state, turn.state.in_process
    if len(ip.entries) < ip.active or state.adopted:
        return
    took_s = max(0.0, turn.now.s - state.started_s)
    entered = ip.entered if ip.open is not None else max(ip.entries.values())
    turn.change(in_process=replace(ip, restartable=True, start_s=took_s, entered=entered))
    reserves = state.world_size - ip.active
    spares = f", {plural(reserves, 'rank')} in reserve" if reserves else ""
    text = f"{plural(ip.active, 'rank')} in the training function{spares}: they can enter it again after a fault"
    turn.log("InProcessReady", text, data={"took_s": round(took_s, 3), "active": ip.active, "reserves": reserves})


def joined(turn: Turn, agent_id: str, fact: EntryBegun) -> None:
    """If it is the new process of a dead rank: the others come into its entry."""
    restart, agent = under_way(turn.state.in_process), turn.state.agents[agent_id]
    if restart is None or fact.rank not in restart.replacing or turn.state.phase not in _AT_WORK:
        return
    replacing = [rank for rank in restart.replacing if rank != fact.rank]
    entry = max(restart.entry, fact.entry) if fact.joined else restart.entry
    _change(turn, restart, replacing=replacing, entry=entry)
    text = f"rank {fact.rank} on {agent.info.node} has a new process, which joined in entry {fact.entry}"
    data: dict[str, object] = {"entry": fact.entry, "joined": fact.joined, "took_s": fact.took_s}
    turn.log("RankReplaced", text, at_us=fact.at_us, rank=fact.rank, node=agent.info.node, data=data)
    _record_process(turn, agent, fact.rank)


def _record_process(turn: Turn, agent: AgentState, rank: int) -> None:
    local_rank = rank - agent.first_rank
    pid = agent.pids[local_rank] if 0 <= local_rank < len(agent.pids) else 0
    device = agent.devices_used.get(rank, "")
    turn.record(RankSaved(turn.state.key, turn.state.attempt, rank, agent.info.node, pid, device))


def _change(turn: Turn, restart: OpenRestart, **fields: object) -> OpenRestart:
    restart = replace(restart, **fields)
    turn.change(in_process=replace(turn.state.in_process, open=restart))
    return restart


def heard_from(turn: Turn, rank: int) -> None:
    """A rank has shown that it gets on: it is no culprit of a hang that is being looked into."""
    state, ip = turn.state, turn.state.in_process
    if rank in state.overdue:
        turn.change(overdue={r: fact for r, fact in state.overdue.items() if r != rank})
    if state.phase is Phase.COLLECTING and rank not in ip.heard:
        turn.change(in_process=replace(ip, heard=[*ip.heard, rank]))


def finished(turn: Turn, rank: int) -> None:
    """A rank has left well: nobody waits for it."""
    ip, restart = turn.state.in_process, turn.state.in_process.open
    if rank in ip.entries:
        entries = {r: entry for r, entry in ip.entries.items() if r != rank}
        turn.change(in_process=replace(ip, entries=entries, left={**ip.left, rank: ip.entries[rank]}))
    if restart is not None and rank in (*restart.ending, *restart.replacing):
        ending, replacing = [[r for r in ranks if r != rank] for ranks in (restart.ending, restart.replacing)]
        _change(turn, restart, ending=ending, replacing=replacing)
    check_entered(turn)
    _recover_if_all_stepped(turn)


def check_entered(turn: Turn) -> None:
    """The restart is done once every rank that computes is in: what it took is known."""
    state, restart = turn.state, under_way(turn.state.in_process)
    if restart is None or state.phase not in _AT_WORK or restart.replacing or restart.ending:
        return
    if num_entered(state, restart) < num_needed(state) or left_before(state, restart):
        return
    took_s = (turn.now.us - restart.since_us) / 1e6
    restart = _change(turn, restart, entered_us=turn.now.us, deadline_s=None)
    announce(turn)
    restart = turn.state.in_process.open or restart
    if known_text(restart) != restart.text:
        incident = replace(restart.incident, text=known_text(restart))
        restart = _change(turn, restart, incident=incident)
        turn.record(incident)
    turn.change(in_process=replace(turn.state.in_process, entered=restart.entry))
    data: dict[str, object] = {
        "entry": restart.entry,
        "failed": restart.failed,
        "gone": sorted(restart.exits),
        "seconds": round(took_s, 3),
        "number": state.in_process.num_restarts,
    }
    text = f"every rank is in entry {restart.entry}, {took_s:.2f} s after the fault was found"
    turn.log("InProcessRestarted", text, rank=restart.incident.rank, node=restart.incident.node, data=data)
    lost_in_process_evidence(turn)
    if not state.counts_iterations:
        _recovered(turn, "every rank is in its training function again (the script shows no iterations)")


# ------------------------------------------------------------------------------------------------- the first iteration


def see_beats(turn: Turn, agent_id: str, beats: list[RankBeat]) -> None:
    """Beats after every rank has entered: a rank has got past an iteration once its count has grown since. It may first fall
    back to that of a checkpoint, and what stood on the board before the fault means nothing."""
    restart = turn.state.in_process.open
    if restart is None:
        return
    _see_pids(turn, agent_id, beats)
    if not restart.entered_us:
        return
    seen, stepped = dict(restart.seen), set(restart.stepped)
    for beat in beats:
        first = seen.setdefault(beat.rank, beat.iteration)
        if beat.iteration > first or (beat.iteration < first and _is_after_resume(restart, beat.iteration)):
            stepped.add(beat.rank)
        seen[beat.rank] = min(first, beat.iteration)
    if seen != restart.seen or len(stepped) != len(restart.stepped):
        _change(turn, restart, seen=seen, stepped=sorted(stepped))
    _recover_if_all_stepped(turn)


def _is_after_resume(restart: OpenRestart, iteration: int) -> bool:
    return restart.resumed is not None and iteration > restart.resumed


def _see_pids(turn: Turn, agent_id: str, beats: list[RankBeat]) -> None:
    """Beats of a new process are the first to tell which it is, where its agent does not."""
    agent = turn.state.agents[agent_id]
    for beat in beats:
        local_rank = beat.rank - agent.first_rank
        known = agent.pids[local_rank] if 0 <= local_rank < len(agent.pids) else -1
        if known == 0 and beat.pid and beat.rank in turn.state.in_process.entries:
            pids = [beat.pid if i == local_rank else pid for i, pid in enumerate(agent.pids)]
            agent = turn.change_agent(agent_id, pids=pids)
            _record_process(turn, agent, beat.rank)


def resumed_in_process(turn: Turn, iteration: int) -> bool:
    """The ranks go on from a checkpoint: whether they do so in a later entry, which does not move the attempt's start."""
    ip, restart = turn.state.in_process, turn.state.in_process.open
    if max(ip.entries.values(), default=0) <= 1 and restart is None:
        return False
    if restart is not None:
        incident = restart.incident
        if incident.lost_iterations is not None:
            incident = replace(incident, lost_iterations=max(0, ip.iteration - iteration))
            turn.record(incident)
        _change(turn, restart, resumed=iteration, incident=incident)
    return True


def _recover_if_all_stepped(turn: Turn) -> None:
    state, restart = turn.state, turn.state.in_process.open
    if restart is not None and _all_left_well(state):
        _recovered(turn, f"every rank has left well after entry {restart.entry}")
        return
    if restart is None or not restart.entered_us or state.phase not in _AT_WORK:
        return
    living = [rank for rank in restart.stepped if rank in state.in_process.entries]
    if len(living) >= num_needed(state):
        _recovered(turn, f"every rank has done an iteration in entry {restart.entry}")


def _all_left_well(state: JobState) -> bool:
    """Whether the ranks were told to stop and have left with 0: none is left for an iteration, and the fault ended nothing."""
    is_asked = state.phase is Phase.STOPPING and state.stop is not None and state.failure is None
    return is_asked and state.num_ended == state.num_ok and num_needed(state) == 0


def _recovered(turn: Turn, how: str) -> None:
    ip, restart = turn.state.in_process, turn.state.in_process.open
    assert restart is not None
    incident = replace(restart.incident, recovered_us=turn.now.us)
    turn.record(incident)
    turn.change(in_process=replace(ip, open=None))
    took_s = (turn.now.us - restart.since_us) / 1e6
    again = f", {plural(incident.lost_iterations, 'iteration')} done again" if incident.lost_iterations else ""
    data: dict[str, object] = {"in_process": True, "entry": restart.entry, "seconds": round(took_s, 3)}
    text = f"{how}, {took_s:.2f} s after the fault was found{again}"
    turn.log("Recovered", text, rank=incident.rank, node=incident.node, data=data)


def is_being_replaced(state: JobState, agent: AgentState) -> bool:
    """Whether nothing of a node is left but new processes are on their way: its ranks have ended, some to be replaced."""
    restart = under_way(state.in_process)
    ranks = range(agent.first_rank, agent.first_rank + agent.info.num_ranks)
    replacing = [rank for rank in ranks if restart is not None and rank in restart.replacing]
    return state.phase in _AT_WORK and bool(replacing) and all(r in replacing or r in agent.exits for r in ranks)
