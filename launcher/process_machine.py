"""The agent's core: `decide(state, event, now) -> (state, actions)`. No clock, no I/O, no randomness.

Theory of operation. The supervisor decides, the agent performs: commands come in orders, numbered, and each is performed once
and in sequence; orders of an older epoch are dropped and counted. What the agent decides alone is little:

* No two attempts live side by side. A `StartAttempt` that finds ranks kills and reaps them first.
* A stop is SIGTERM, then SIGKILL to whole sessions when the grace is over (at once for 0). `RanksGone` is said only when
  nothing that the attempt spawned is left.
* A rank's failure alone never stops its siblings; the decider has `supervisor_grace_s` to say something, then the ranks are
  stopped and the agent asks to be requeued (88). With a fence timeout, an agent cut off that long kills its ranks.
* A second signal from the user shortens the wait to a kill.
* A tick that comes more than a second late means that this process did not run. The lost time is added to every deadline and
  handed to `board_watch` as a `Gap`, so that agent and ranks suspended together and continued are never taken for hung.

`process_events` has the data. The shell is `agent`; the simulation of the supervisor drives this same function.
"""

import signal
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rsup.launcher import process_requests
from rsup.launcher.failure_report import failure_report
from rsup.launcher.process_deadlines import HURRIED_LEAVE_S, LEAVE_S, tick
from rsup.launcher.process_ending import (
    HAS_PROCESSES,
    end_after_ranks,
    finish,
    kill_ranks,
    reap,
    signal_ending,
    signal_ranks,
    stop_ranks,
)
from rsup.launcher.process_events import (
    Action,
    AgentState,
    AllReaped,
    BindStore,
    CollectStacks,
    Ending,
    Event,
    Moment,
    Noticed,
    OrderArrived,
    Overdue,
    Phase,
    PrintReport,
    PushLimits,
    Rank,
    RankDied,
    RankMessage,
    RanksSpawned,
    Refused,
    SectionsRead,
    Settings,
    SignalArrived,
    SignalRanks,
    SpawnFailure,
    SpawnRanks,
    StacksReady,
    StoreFailure,
    StoreReady,
    Tick,
    Welcomed,
)
from rsup.launcher.process_turn import Turn
from rsup.supervisor import wire


def new_state(settings: Settings, now: Moment) -> AgentState:
    """The state of an agent that has just begun to call its supervisor."""
    return AgentState(settings=settings, phase=Phase.IDLE, contact_at=now.mono_s, tick_at=now.mono_s)


def decide(state: AgentState, event: Event, now: Moment) -> tuple[AgentState, list[Action]]:
    """What follows from `event`: the next state, and the actions to perform in order. Never raises for any pair."""
    if (state.phase, type(event)) in UNEXPECTED:
        return replace(state, num_unexpected=state.num_unexpected + 1), []
    turn = Turn(state, now)
    _HANDLERS[type(event)](turn, event)
    return turn.state, turn.actions


# ------------------------------------------------------------------------------------------------- the decider's voice


def _welcomed(turn: Turn, event: Welcomed) -> None:
    welcome, store = event.welcome, event.welcome.supervisor.store
    if turn.state.store and store != turn.state.store:
        turn.set(last_command=0)  # a supervisor with another store counts from 1
    turn.set(
        store=store or turn.state.store,
        joined=True,
        job_id=welcome.job_id,
        run=welcome.run,
        epoch=max(turn.state.epoch, welcome.epoch),
        contact_at=turn.now.mono_s,
    )


def _refused(turn: Turn, event: Refused) -> None:
    refusal = event.refusal
    if turn.state.phase in HAS_PROCESSES:
        # Not our decider: it does not know us. Training goes on; if nobody else answers, the grace decides.
        turn.note("warning", f"a supervisor refused this agent while its ranks run: {refusal.message}")
        return
    finish(turn, Ending(wire.JobResult(refusal.exit_code, refusal.message, attempts=turn.state.attempt), refusal.message))


def _order(turn: Turn, event: OrderArrived) -> None:
    order = event.order
    if order.epoch < turn.state.epoch:
        turn.set(num_dropped=turn.state.num_dropped + 1)
        return
    turn.set(epoch=order.epoch, contact_at=turn.now.mono_s)
    for command in sorted(order.commands, key=lambda command: command.sequence):
        if command.sequence <= turn.state.last_command:
            continue
        if command.sequence != turn.state.last_command + 1 or turn.state.phase is Phase.ENDED:
            break  # a hole: the missing ones are sent again, and these with them
        turn.set(last_command=command.sequence)
        _COMMANDS[type(command)](turn, command)


def _host_store(turn: Turn, command: wire.HostStore) -> None:
    if turn.state.phase not in HAS_PROCESSES:
        turn.set(phase=Phase.HOSTING)
    turn.do(BindStore(command.attempt, command.port, command.reason))


def _start_attempt(turn: Turn, command: wire.StartAttempt) -> None:
    turn.set(epoch=max(turn.state.epoch, command.epoch))
    if turn.state.signum:  # the order crossed our news of the signal: nothing new is started for a user who said stop
        name = signal.Signals(turn.state.signum).name
        turn.fact(wire.StartFailed(turn.now.wall_us, command.attempt, f"the launcher received {name}", 128 + turn.state.signum))
        turn.fact(wire.RanksGone(turn.now.wall_us, command.attempt))
    elif turn.state.phase in HAS_PROCESSES:
        turn.set(next_start=command)
        kill_ranks(turn, f"attempt {command.attempt} starts in place of attempt {turn.state.attempt}")
    else:
        _spawn(turn, command)


def _stop_attempt(turn: Turn, command: wire.StopAttempt) -> None:
    state = turn.state
    if command.attempt == state.attempt:
        turn.set(why_stopped=command.reason)
    if state.phase in HAS_PROCESSES and command.attempt == state.attempt:
        stop_ranks(turn, command.reason, command.grace_s)
        return
    if state.next_start and command.attempt == state.next_start.attempt:
        turn.set(next_start=None)
    elif state.phase is Phase.HOSTING:
        turn.set(phase=Phase.GONE)
    turn.fact(wire.RanksGone(turn.now.wall_us, command.attempt))


def _take_stacks(turn: Turn, command: wire.TakeStacks) -> None:
    if turn.state.phase in HAS_PROCESSES and command.attempt == turn.state.attempt and turn.state.alive:
        turn.do(CollectStacks(command.attempt, command.within_s, command.reason))
    else:
        turn.fact(wire.StacksTaken(turn.now.wall_us, command.attempt, []))


def _save_checkpoint(turn: Turn, command: wire.SaveCheckpoint) -> None:
    process_requests.ask_to_save(turn, command)


def _stop_training(turn: Turn, command: wire.StopTraining) -> None:
    state = turn.state
    if state.phase is not Phase.RUNNING:
        turn.set(next_start=None)
        if state.phase is Phase.STOPPING:
            stop_ranks(turn, command.reason, command.grace_s)
        turn.fact(wire.RequestDone(turn.now.wall_us, command.request_id, True, "no ranks to ask: they are stopping or gone"))
        return
    asked = process_requests.ask_to_leave(turn, command)
    stop_ranks(turn, command.reason, command.grace_s, spare=asked)


def _set_limits(turn: Turn, command: wire.SetLimits) -> None:
    turn.set(limits=command.limits)
    turn.do(PushLimits(command.limits, command.reason))


def _park(turn: Turn, command: wire.Park) -> None:
    if turn.state.phase not in HAS_PROCESSES:
        turn.set(phase=Phase.PARKED)


def _end_job(turn: Turn, command: wire.EndJob) -> None:
    result, report, state = command.result, command.report, turn.state
    if result.exit_code and any(fact.exit_code and not fact.by_us for fact in state.exits):
        report = failure_report(state.job_id, state.exits, reason=result.reason)  # it was here: we have the last log lines
    end_after_ranks(turn, Ending(result, report), grace_s=0.0, why=command.reason)


# ------------------------------------------------------------------------------------------- starting and ending ranks


def _spawn(turn: Turn, command: wire.StartAttempt) -> None:
    if command.attempt > 1:
        turn.do(PrintReport(_restart_line(turn.state, command)))
    turn.set(
        phase=Phase.RUNNING,
        start=command,
        ranks=tuple(Rank(command.first_rank + i) for i in range(command.num_ranks)),
        exits=(),
        why_stopped="",
        limits=command.limits,
        stop=None,
        reaping=False,
        requests=(),
        next_start=None,
        failed_at=None,
    )
    turn.do(SpawnRanks(command, command.reason))


def _restart_line(state: AgentState, command: wire.StartAttempt) -> str:
    """Why there is another attempt, as the decider said when it ended the one before; else as we saw it."""
    why = state.why_stopped.removeprefix(f"attempt {state.attempt} has failed: ")
    failed = next((fact for fact in state.exits if fact.exit_code and not fact.by_us), None)
    if not why and failed:
        how = f"was killed by {signal.Signals(failed.signal).name}" if failed.signal else f"exited with code {failed.exit_code}"
        why = f"rank {failed.rank} {how}"
    limit = f" of {command.max_restarts}" if command.max_restarts else ""
    return f"rsup: attempt {command.attempt} starts: {why or command.reason} (restart {command.attempt - 1}{limit})"


def _spawned(turn: Turn, event: RanksSpawned) -> None:
    if event.attempt != turn.state.attempt:
        return
    pids = event.pids
    turn.set(ranks=tuple(replace(rank, pid=pids[i]) for i, rank in enumerate(turn.state.ranks)))
    turn.fact(wire.AttemptStarted(turn.now.wall_us, event.attempt, list(pids)))
    stop = turn.state.stop
    if stop and stop.killed_at is not None:
        signal_ranks(turn, turn.state.alive, signal.SIGKILL, stop.why, whole_session=True)
    elif stop:
        signal_ranks(turn, turn.state.alive, stop.signum, stop.why)


def _spawn_failed(turn: Turn, event: SpawnFailure) -> None:
    if event.attempt != turn.state.attempt:
        return
    turn.fact(wire.StartFailed(turn.now.wall_us, event.attempt, event.message, event.exit_code))
    turn.set(ranks=())
    reap(turn, "the ranks could not be started")


def _store_ready(turn: Turn, event: StoreReady) -> None:
    turn.fact(wire.StoreBound(turn.now.wall_us, event.attempt, event.host, event.port))


def _store_failed(turn: Turn, event: StoreFailure) -> None:
    turn.fact(wire.StartFailed(turn.now.wall_us, event.attempt, event.message, event.exit_code))
    if turn.state.phase is Phase.HOSTING:
        turn.set(phase=Phase.GONE)


def _rank_died(turn: Turn, event: RankDied) -> None:
    state = turn.state
    if event.attempt != state.attempt or not state.ranks or not state.ranks[event.local_rank].alive:
        return
    rank = state.ranks[event.local_rank]
    fact = wire.RankExited(
        at_us=turn.now.wall_us,
        attempt=event.attempt,
        rank=rank.rank,
        exit_code=event.exit_code,
        signal=event.signal,
        by_us=rank.signalled,
        iteration=event.iteration,
        section=event.section,
        error=event.error,
        traceback=event.traceback,
        log_tail=event.log_tail,
        declared=rank.declared,
        declared_reason=rank.declared_reason,
        saved=rank.saved,
    )
    turn.fact(fact)
    turn.set(exits=(*turn.state.exits, fact))
    turn.set_rank(event.local_rank, exit_code=event.exit_code)
    process_requests.rank_left(turn, event.local_rank)
    if event.exit_code and not rank.signalled and state.failed_at is None:
        turn.set(failed_at=turn.now.mono_s)
    if not turn.state.alive:
        reap(turn, "all ranks of the attempt have exited")


def _reaped(turn: Turn, event: AllReaped) -> None:
    state = turn.state
    if event.attempt != state.attempt or state.alive:
        return
    process_requests.attempt_over(turn)
    turn.fact(wire.RanksGone(turn.now.wall_us, event.attempt))
    turn.set(phase=Phase.GONE, stop=None, reaping=False)
    if state.ending:
        finish(turn, state.ending)
    elif state.next_start:
        _spawn(turn, state.next_start)
    elif state.signum:
        turn.set(leave_at=turn.now.mono_s + (HURRIED_LEAVE_S if state.stop and state.stop.killed_at else LEAVE_S))


# ---------------------------------------------------------------------------------------------- what the shell noticed


def _overdue(turn: Turn, event: Overdue) -> None:
    for fact in event.facts:
        if fact.attempt == turn.state.attempt:
            turn.fact(fact)


def _sections_read(turn: Turn, event: SectionsRead) -> None:
    if event.fact.attempt == turn.state.attempt:
        turn.fact(event.fact)


def _stacks_ready(turn: Turn, event: StacksReady) -> None:
    turn.fact(wire.StacksTaken(turn.now.wall_us, event.attempt, list(event.stacks)))


def _noticed(turn: Turn, event: Noticed) -> None:
    turn.note(event.level, event.text, event.rank)


def _rank_message(turn: Turn, event: RankMessage) -> None:
    if event.attempt == turn.state.attempt and event.local_rank < len(turn.state.ranks):
        process_requests.hear(turn, event)


def _signal_arrived(turn: Turn, event: SignalArrived) -> None:
    state, name = turn.state, signal.Signals(event.signum).name
    if not event.stops:
        if ready := tuple(i for i in state.alive if state.ranks[i].pid):
            turn.do(SignalRanks(ready, event.signum, f"the launcher received {name}", if_caught=True))
        return
    if not state.joined:
        finish(turn, signal_ending(turn, event.signum))
        return
    if state.signum:
        turn.set(leave_at=turn.now.mono_s + HURRIED_LEAVE_S)
        if state.phase in HAS_PROCESSES:
            kill_ranks(turn, f"the launcher received {name} a second time")
        return
    turn.set(signum=event.signum, next_start=None)
    turn.fact(wire.SignalReceived(turn.now.wall_us, event.signum))
    if state.phase in HAS_PROCESSES:
        stop_ranks(turn, f"the launcher received {name}", state.settings.stop_grace_s, event.signum)
    else:
        turn.set(leave_at=turn.now.mono_s + LEAVE_S)


# --------------------------------------------------------------------------------------------------------------- tables

_Handler = Callable[[Turn, Any], None]

_COMMANDS: dict[type, _Handler] = {
    wire.HostStore: _host_store,
    wire.StartAttempt: _start_attempt,
    wire.StopAttempt: _stop_attempt,
    wire.TakeStacks: _take_stacks,
    wire.SaveCheckpoint: _save_checkpoint,
    wire.StopTraining: _stop_training,
    wire.SetLimits: _set_limits,
    wire.Park: _park,
    wire.EndJob: _end_job,
}

_HANDLERS: dict[type, _Handler] = {
    OrderArrived: _order,
    Welcomed: _welcomed,
    Refused: _refused,
    StoreReady: _store_ready,
    StoreFailure: _store_failed,
    RanksSpawned: _spawned,
    SpawnFailure: _spawn_failed,
    RankDied: _rank_died,
    AllReaped: _reaped,
    Overdue: _overdue,
    SectionsRead: _sections_read,
    StacksReady: _stacks_ready,
    SignalArrived: _signal_arrived,
    RankMessage: _rank_message,
    Noticed: _noticed,
    Tick: tick,
}

_OF_LIVE_RANKS = (RanksSpawned, SpawnFailure, RankDied, AllReaped, Overdue, RankMessage)
UNEXPECTED: frozenset[tuple[Phase, type]] = frozenset(
    [(phase, event) for phase in Phase if phase not in HAS_PROCESSES for event in _OF_LIVE_RANKS]
    + [(phase, SectionsRead) for phase in (Phase.IDLE, Phase.PARKED, Phase.HOSTING)]
    + [(phase, StacksReady) for phase in (Phase.IDLE, Phase.PARKED)]
    + [(Phase.RUNNING, AllReaped), (Phase.STOPPING, Overdue)]
    + [(Phase.ENDED, event) for event in _HANDLERS]
)
"""Pairs that cannot happen, or come too late to matter: counted, otherwise without effect."""
