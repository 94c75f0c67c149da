"""The part of the process machine about in-process restart: other ranks' faults are passed on, a dead rank gets a new process.

The ranks restart by themselves; whether that suffices is the supervisor's to judge. A dead rank that is to be replaced keeps
its place: nothing is reaped while others of the attempt live, here or on another node.
"""

import signal

from rsup.launcher import process_requests
from rsup.launcher.process_attempt import rank_died
from rsup.launcher.process_ending import signal_ranks
from rsup.launcher.process_events import RankDied, RankReplaced, ReplaceFailure, ReplaceRank, TellPeers
from rsup.launcher.process_state import Phase, Rank
from rsup.launcher.process_turn import Turn
from rsup.supervisor import wire


def restart_in_process(turn: Turn, command: wire.RestartInProcess) -> None:
    """Tell the ranks here, and start what is to be replaced. An attempt that is being ended has no use for either."""
    state = turn.state
    if state.phase is not Phase.RUNNING or command.attempt != state.attempt:
        return
    turn.do(TellPeers(wire.PeersFailed(command.failed, command.gone, command.reason, command.deaths, command.entry)))
    deaths = dict(zip(command.gone, command.deaths, strict=False))
    for rank in dict.fromkeys((*command.gone, *command.replace)):
        local_rank = _local(turn, rank)
        if local_rank is None or turn.state.ranks[local_rank].alive:
            continue
        _settle(turn, local_rank)
        if rank in command.replace:
            _replace(turn, local_rank, deaths.get(rank, 1), command.reason)
        else:
            process_requests.rank_retired(turn, local_rank)
    if not any(rank.exit_code and not rank.settled for rank in turn.state.ranks):
        turn.set(failed_at=None)  # nothing more is to be decided


def _settle(turn: Turn, local_rank: int) -> None:
    """Its end is not what the attempt ends of."""
    rank = turn.state.ranks[local_rank].rank
    turn.set(exits=tuple(fact for fact in turn.state.exits if fact.rank != rank))
    turn.set_rank(local_rank, settled=True)


def _replace(turn: Turn, local_rank: int, death: int, reason: str) -> None:
    state, before = turn.state, turn.state.ranks[local_rank]
    fresh = Rank(before.rank, entered=before.entered)
    turn.set(ranks=tuple(fresh if i == local_rank else rank for i, rank in enumerate(state.ranks)))
    turn.do(ReplaceRank(state.attempt, local_rank, death, reason))


def replaced(turn: Turn, event: RankReplaced) -> None:
    """The new process runs; what was ordered for it meanwhile is done."""
    if event.attempt != turn.state.attempt or event.local_rank >= len(turn.state.ranks):
        return
    turn.set_rank(event.local_rank, pid=event.pid)
    stop, rank = turn.state.stop, turn.state.ranks[event.local_rank]
    if stop is not None and stop.killed_at is None:
        signal_ranks(turn, (event.local_rank,), stop.signum, stop.why)
    elif stop is not None or rank.signalled:
        why = rank.signalled or (stop.why if stop is not None else "")
        signal_ranks(turn, (event.local_rank,), signal.SIGKILL, why, whole_session=stop is not None)


def replace_failed(turn: Turn, event: ReplaceFailure) -> None:
    """There is no new process: told as the end of one, so that the supervisor decides as for any other."""
    if event.attempt == turn.state.attempt and event.local_rank < len(turn.state.ranks):
        if turn.state.stop is None:
            turn.set_rank(event.local_rank, signalled="")  # told to end or not, it did not end of that
        rank_died(turn, RankDied(event.attempt, event.local_rank, event.exit_code, error=event.message))


def end_ranks(turn: Turn, command: wire.EndRanks) -> None:
    """Kill the stuck processes of those ranks, and nothing else. What they leave behind is ended before they are replaced, and
    is recognised by the processes that are still there."""
    state = turn.state
    if state.phase is not Phase.RUNNING or command.attempt != state.attempt:
        return
    found = [_local(turn, rank) for rank in command.ranks]
    stuck = tuple(i for i in found if i is not None and state.ranks[i].alive)
    if stuck:
        signal_ranks(turn, stuck, signal.SIGKILL, command.reason)


def _local(turn: Turn, rank: int) -> int | None:
    """The local rank of a global one; None if it is another node's."""
    return next((i for i, found in enumerate(turn.state.ranks) if found.rank == rank), None)
