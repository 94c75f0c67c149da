"""The part of the process machine about an attempt's ranks: their store, their start, their deaths, and that all are gone."""

import signal

from msgspec.structs import replace

from rsup.launcher import process_requests
from rsup.launcher.process_deadlines import HURRIED_LEAVE_S, LEAVE_S, say_waiting_later
from rsup.launcher.process_ending import finish, reap, signal_ranks
from rsup.launcher.process_events import (
    AllReaped,
    PrintReport,
    RankDied,
    RanksSpawned,
    SpawnFailure,
    SpawnRanks,
    StoreFailure,
    StoreReady,
)
from rsup.launcher.process_state import AgentState, Phase, Rank
from rsup.launcher.process_turn import Turn
from rsup.supervisor import wire


def spawn(turn: Turn, command: wire.StartAttempt) -> None:
    settings = turn.state.settings
    speaks = settings.speaks_for_all or command.group_rank == 0
    if speaks and (command.attempt > 1 or settings.max_nodes > 1):
        turn.do(PrintReport(_start_line(turn.state, command)))
    turn.set(
        phase=Phase.RUNNING,
        start=command,
        ranks=tuple(Rank(command.first_rank + i) for i in range(command.num_ranks)),
        exits=(),
        why_stopped="",
        limits=command.limits,
        switches=command.switches,
        stop=None,
        held_stop=None,
        stacks_asked=False,
        stood_in=(),
        reap_at=None,
        said_stuck=False,
        requests=(),
        asked_to_leave=False,
        next_start=None,
        failed_at=None,
        say_waiting_at=None,
    )
    turn.do(SpawnRanks(command, command.reason))


def _start_line(state: AgentState, command: wire.StartAttempt) -> str:
    """What starts; and why there is another attempt, as the decider said when it ended the one before; else as we saw it.
    A newcomer knows no reason."""
    why = state.why_stopped.removeprefix(f"attempt {state.attempt} has failed: ")
    failed = next((fact for fact in state.exits if fact.exit_code and not fact.by_us), None)
    if not why and failed:
        how = f"was killed by {signal.Signals(failed.signal).name}" if failed.signal else f"exited with code {failed.exit_code}"
        why = f"rank {failed.rank} {how}"
    told = _restart(state, command) if command.attempt > 1 else ""
    restart = f" ({told})" if told else ""
    size = f" with {_size(command)}" if state.settings.max_nodes > 1 else ""
    return f"rsup: attempt {command.attempt} starts{size}{why and ': '}{why}{restart}"


def _restart(state: AgentState, command: wire.StartAttempt) -> str:
    """Which restart it is, or that it is none that counts; nothing of a launch that goes on with what another one began."""
    spent = command.restarts_spent
    if state.start is not None and spent >= 0 and spent == state.start.restarts_spent:
        return "costs no restart"
    if spent == 0:
        return ""
    limit = f" of {command.max_restarts}" if command.max_restarts else ""
    return f"restart {spent if spent >= 0 else command.attempt - 1}{limit}"


def _size(command: wire.StartAttempt) -> str:
    ranks, nodes = command.world_size, command.group_world_size
    return f"{ranks} rank{'s'[: ranks > 1]} on {nodes} node{'s'[: nodes > 1]}"


def spawned(turn: Turn, event: RanksSpawned) -> None:
    if event.attempt != turn.state.attempt:
        return
    pids = event.pids
    turn.set(ranks=tuple(replace(rank, pid=pids[i]) for i, rank in enumerate(turn.state.ranks)))
    turn.fact(wire.AttemptStarted(turn.now.wall_us, event.attempt, list(pids), list(event.devices), list(event.cpus)))
    stop = turn.state.stop
    if stop and stop.killed_at is not None:
        signal_ranks(turn, turn.state.alive, signal.SIGKILL, stop.why, whole_session=True)
    elif stop:
        signal_ranks(turn, turn.state.alive, stop.signum, stop.why)


def spawn_failed(turn: Turn, event: SpawnFailure) -> None:
    if event.attempt != turn.state.attempt:
        return
    turn.fact(wire.StartFailed(turn.now.wall_us, event.attempt, event.message, event.exit_code))
    turn.set(ranks=())
    reap(turn, "the ranks could not be started")


def store_ready(turn: Turn, event: StoreReady) -> None:
    turn.fact(wire.StoreBound(turn.now.wall_us, event.attempt, event.host, event.port))


def store_failed(turn: Turn, event: StoreFailure) -> None:
    turn.fact(wire.StartFailed(turn.now.wall_us, event.attempt, event.message, event.exit_code))
    if turn.state.phase is Phase.HOSTING:
        turn.set(phase=Phase.GONE)


def rank_died(turn: Turn, event: RankDied) -> None:
    state = turn.state
    if event.attempt != state.attempt or not state.ranks or not state.ranks[event.local_rank].alive:
        return
    rank = state.ranks[event.local_rank]
    by_us = "" if event.was_dying else rank.signalled
    was_shot = event.signal == signal.SIGKILL and not by_us  # by somebody else: what its log says is older than that
    fact = wire.RankExited(
        at_us=turn.now.wall_us,
        attempt=event.attempt,
        rank=rank.rank,
        exit_code=event.exit_code,
        signal=event.signal,
        by_us=by_us,
        iteration=event.iteration,
        section=event.section,
        error="" if was_shot and not event.traceback else event.error,
        traceback=event.traceback,
        log_tail=event.log_tail,
        declared=rank.declared,
        declared_reason=rank.declared_reason,
        saved=rank.saved,
        rejected=list(event.rejected),
        killer=(rank.doomed or event.killer) if not by_us else "",
    )
    turn.fact(fact)
    turn.set(exits=(*turn.state.exits, fact))
    turn.set_rank(event.local_rank, exit_code=event.exit_code)
    process_requests.rank_left(turn, event.local_rank)
    if event.exit_code and state.failed_at is None and (not by_us or state.phase is Phase.RUNNING):
        turn.set(failed_at=turn.now.mono_s)
    if not turn.state.alive and not _may_be_replaced(turn.state, fact):
        reap(turn, "all ranks of the attempt have exited")


def _may_be_replaced(state: AgentState, fact: wire.RankExited) -> bool:
    """Whether ranks of other nodes may go on, in their processes, with a new one here: the supervisor says."""
    others = state.start is not None and state.start.world_size > len(state.ranks)
    entered = any(rank.entered for rank in state.ranks)
    return others and entered and state.phase is Phase.RUNNING and bool(fact.exit_code) and not fact.declared


def reaped(turn: Turn, event: AllReaped) -> None:
    state = turn.state
    if event.attempt != state.attempt or state.alive:
        return
    process_requests.attempt_over(turn)
    turn.fact(wire.RanksGone(turn.now.wall_us, event.attempt))
    turn.set(phase=Phase.GONE, stop=None, reap_at=None)
    if state.ending:
        finish(turn, state.ending)
    elif state.next_start:
        spawn(turn, state.next_start)
    elif not state.signum:
        say_waiting_later(turn)
    else:
        turn.set(leave_at=turn.now.mono_s + (HURRIED_LEAVE_S if state.stop and state.stop.killed_at else LEAVE_S))
