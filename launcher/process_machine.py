"""The agent's core: `decide(state, event, now) -> (state, actions)`. No clock, no I/O, no randomness.

Theory of operation. The supervisor decides, the agent performs: commands come in orders, numbered, and each is performed once
and in sequence; orders of an older epoch are dropped and counted. What the agent decides alone is little:

* No two attempts live side by side. A `StartAttempt` that finds ranks kills and reaps them first.
* A stop is SIGTERM, then SIGKILL to whole sessions when the grace is over (at once for 0). `RanksGone` is said only when
  nothing that the attempt spawned is left.
  A process that outlives its SIGKILL is named; if nobody ends the job for it, the agent asks to be requeued (88).
* A rank's failure alone never stops its siblings; the decider has `supervisor_grace_s` to say something, then the ranks are
  stopped and the agent asks to be requeued (88). With a fence timeout, an agent cut off that long kills its ranks.
* What concerns a newer attempt under a newer epoch than that of the ranks here: they are killed first.
* A second signal from the user is passed on again (batch systems repeat SIGTERM); from a person at a keyboard, SIGINT, it
  shortens the wait. A third one kills.
* A tick that comes more than a second late means that this process did not run. The lost time is added to every deadline and
  handed to `board_watch` as a `Gap`, so that agent and ranks suspended together and continued are never taken for hung. Only
  the fence counts it: the supervisor's clock went on.

`process_events` and `process_state` have the data. The shell is `agent`; the simulation of the supervisor drives this same
function.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rsup.launcher import process_requests
from rsup.launcher.failure_report import failure_report, signal_name
from rsup.launcher.process_attempt import (
    rank_died,
    reaped,
    spawn,
    spawn_failed,
    spawned,
    store_failed,
    store_ready,
)
from rsup.launcher.process_deadlines import (
    HURRIED_LEAVE_S,
    LEAVE_S,
    STUCK_AFTER_S,
    fence_when_due,
    say_waiting_later,
    tick,
)
from rsup.launcher.process_ending import (
    HAS_PROCESSES,
    end_after_ranks,
    finish,
    hurry_ranks,
    kill_ranks,
    shorten_reaping,
    signal_ending,
    stop_ranks,
)
from rsup.launcher.process_events import (
    Action,
    AllReaped,
    BindStore,
    Event,
    HealthRead,
    Moment,
    NodeGivenUp,
    Noticed,
    OrderArrived,
    Overdue,
    PrintReport,
    PushLimits,
    RankDied,
    RankMessage,
    RankReplaced,
    RanksSpawned,
    Refused,
    ReplaceFailure,
    SectionsRead,
    SignalArrived,
    SignalRanks,
    SpawnFailure,
    StacksReady,
    StoreFailure,
    StoreReady,
    SurvivorsNamed,
    Tick,
    Welcomed,
)
from rsup.launcher.process_reentry import end_ranks, replace_failed, replaced, restart_in_process
from rsup.launcher.process_stacks import stacks_ready, stop_after_stacks, take_stacks
from rsup.launcher.process_state import AgentState, Ending, Phase, Settings
from rsup.launcher.process_turn import Turn
from rsup.supervisor import wire


def new_state(settings: Settings, now: Moment) -> AgentState:
    """The state of an agent that has just begun to call its supervisor."""
    at_s = now.mono_s
    return AgentState(settings=settings, phase=Phase.IDLE, contact_at=at_s, tick_at=at_s, heard_at=at_s)


def decide(state: AgentState, event: Event, now: Moment) -> tuple[AgentState, list[Action]]:
    """What follows from `event`: the next state, and the actions to perform in order. Never raises for any pair."""
    if (state.phase, type(event)) in UNEXPECTED:
        return replace(state, num_unexpected=state.num_unexpected + 1), []
    turn = Turn(state, now)
    _HANDLERS[type(event)](turn, event)
    return turn.state, turn.actions


# ------------------------------------------------------------------------------------------------- the decider's voice


def _heard(turn: Turn, epoch: int) -> None:
    """The decider has spoken; a message that waited while we were suspended does not undo a fence that is due."""
    fence_when_due(turn)
    turn.set(epoch=epoch, contact_at=turn.now.mono_s, heard_at=turn.now.mono_s, said_silent=False)


def _welcomed(turn: Turn, event: Welcomed) -> None:
    _heard(turn, max(turn.state.epoch, event.welcome.epoch))
    welcome, store = event.welcome, event.welcome.supervisor.store
    if _is_another_store(turn.state, welcome.supervisor):
        turn.set(last_command=0)  # a supervisor with another store counts from 1
    if not turn.state.joined:
        say_waiting_later(turn)
    turn.set(
        store=store or turn.state.store,
        store_id=welcome.supervisor.store_id or turn.state.store_id,
        joined=True,
        takes_metrics=welcome.takes_metrics,
        job_id=welcome.job_id,
        run=welcome.run,
    )


def _is_another_store(state: AgentState, supervisor: wire.SupervisorInfo) -> bool:
    """By its id where both supervisors named one: two on one database may spell its address in different ways."""
    if state.store_id and supervisor.store_id:
        return state.store_id != supervisor.store_id
    return bool(state.store) and state.store != supervisor.store


def _refused(turn: Turn, event: Refused) -> None:
    refusal = event.refusal
    if turn.state.phase in HAS_PROCESSES:
        # Not our decider: it does not know us. Training goes on; if nobody else answers, the grace decides.
        turn.note("warning", f"a supervisor refused this agent while its ranks run: {refusal.message}")
        return
    turn.set(told=True)
    finish(turn, Ending(wire.JobResult(refusal.exit_code, refusal.message, attempts=turn.state.attempt), refusal.message))


def _order(turn: Turn, event: OrderArrived) -> None:
    order = event.order
    if order.epoch < turn.state.epoch:
        turn.set(num_dropped=turn.state.num_dropped + 1)
        return
    _heard(turn, order.epoch)
    _give_way(turn, order)
    for command in sorted(order.commands, key=lambda command: command.sequence):
        if command.sequence <= turn.state.last_command:
            continue
        if command.sequence != turn.state.last_command + 1 or turn.state.phase is Phase.ENDED:
            break  # a hole: the missing ones are sent again, and these with them
        turn.set(last_command=command.sequence)
        _COMMANDS[type(command)](turn, command)


def _give_way(turn: Turn, order: wire.Order) -> None:
    """An order about a newer attempt finds ranks of ours: the decider took them for dead, so they must be."""
    state = turn.state
    if state.phase not in HAS_PROCESSES or state.start is None or order.epoch <= state.start.epoch:
        return
    fresh = [command for command in order.commands if command.sequence > state.last_command]
    newest = max((getattr(command, "attempt", 0) for command in fresh), default=0)
    if newest > state.attempt:
        kill_ranks(turn, f"attempt {newest} is under way (epoch {order.epoch}), this is attempt {state.attempt}")


def _host_store(turn: Turn, command: wire.HostStore) -> None:
    if turn.state.phase not in HAS_PROCESSES:
        turn.set(phase=Phase.HOSTING)
    turn.do(BindStore(command.attempt, command.port, command.reason))


def _start_attempt(turn: Turn, command: wire.StartAttempt) -> None:
    turn.set(epoch=max(turn.state.epoch, command.epoch))
    if turn.state.signum:  # the order crossed our news of the signal: nothing new is started for a user who said stop
        name = signal_name(turn.state.signum)
        turn.fact(wire.StartFailed(turn.now.wall_us, command.attempt, f"the launcher received {name}", 128 + turn.state.signum))
        turn.fact(wire.RanksGone(turn.now.wall_us, command.attempt))
    elif turn.state.start is None and (
        why := turn.state.settings.gate_refusal
    ):  # the first start of this launch: all have joined
        turn.fact(wire.StartFailed(turn.now.wall_us, command.attempt, why, wire.EXIT_REQUEUE))
        turn.fact(wire.RanksGone(turn.now.wall_us, command.attempt))
    elif turn.state.phase in HAS_PROCESSES:
        turn.set(next_start=command)
        kill_ranks(turn, f"attempt {command.attempt} starts in place of attempt {turn.state.attempt}")
    else:
        spawn(turn, command)


def _stop_attempt(turn: Turn, command: wire.StopAttempt) -> None:
    state = turn.state
    if command.attempt == state.attempt:
        turn.set(why_stopped=command.reason)
        if state.phase is Phase.GONE:
            say_waiting_later(turn)
    if state.phase in HAS_PROCESSES and command.attempt == state.attempt:
        shorten_reaping(turn, command.reason)
        if not stop_after_stacks(turn, command):
            stop_ranks(turn, command.reason, command.grace_s)
        return
    if state.next_start and command.attempt == state.next_start.attempt:
        turn.set(next_start=None)
    elif state.phase is Phase.HOSTING:
        turn.set(phase=Phase.GONE)
    turn.fact(wire.RanksGone(turn.now.wall_us, command.attempt))


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
    turn.set(asked_to_leave=True)
    asked = process_requests.ask_to_leave(turn, command)
    stop_ranks(turn, command.reason, command.grace_s, spare=asked)


def _set_limits(turn: Turn, command: wire.SetLimits) -> None:
    turn.set(limits=command.limits, switches=command.switches)
    turn.do(PushLimits(command.limits, command.reason, command.switches))


def _park(turn: Turn, command: wire.Park) -> None:
    if turn.state.phase not in HAS_PROCESSES:
        if turn.state.phase is not Phase.PARKED:
            turn.do(PrintReport(f"rsup: {command.reason}"))
        turn.set(phase=Phase.PARKED)


def _end_job(turn: Turn, command: wire.EndJob) -> None:
    result, report, state = command.result, command.report, turn.state
    turn.set(told=True)
    if result.exit_code and any(fact.exit_code and not fact.by_us for fact in state.exits):
        # It was here: we have the last log lines. Without a report of the decider's another agent of this terminal has it.
        says_where = bool(report)
        report = failure_report(
            state.job_id,
            state.exits,
            reason=result.reason,
            rank=result.rank,
            stood_in=state.stood_in,
            says_where=says_where,
        )
    if report and result.exit_code == wire.EXIT_NO_REQUEUE and "identical failures" in result.reason:
        report += "\nrsup: exit 93, do not requeue as it is: equal failures end a job, --identical-failures N says how many"
    if (result.exit_code == 0 or state.told_to_leave) and state.phase is Phase.STOPPING and not state.alive:
        turn.set(ending=Ending(result, report), next_start=None)  # after what its ranks left behind: that has some time
    else:
        end_after_ranks(turn, Ending(result, report), grace_s=0.0, why=command.reason)


# ---------------------------------------------------------------------------------------------- what the shell noticed


def _overdue(turn: Turn, event: Overdue) -> None:
    for fact in event.facts:
        if fact.attempt == turn.state.attempt:
            turn.fact(fact)


def _sections_read(turn: Turn, event: SectionsRead) -> None:
    if event.fact.attempt == turn.state.attempt:
        turn.fact(event.fact)


def _noticed(turn: Turn, event: Noticed) -> None:
    if event.num_standbys is None:
        turn.note(event.level, event.text, event.rank)
        return
    told = (event.num_standbys, event.standby_bytes)
    turn.fact(wire.Note(turn.now.wall_us, event.level, event.text, event.rank, *told))


def _health_read(turn: Turn, event: HealthRead) -> None:
    turn.fact(wire.HealthSeen(turn.now.wall_us, list(event.readings), event.boot_id))


def _survivors_named(turn: Turn, event: SurvivorsNamed) -> None:
    if event.attempt == turn.state.attempt and event.survivors:
        who, node = ", ".join(event.survivors), turn.state.settings.node
        text = f"{who} cannot be ended, {STUCK_AFTER_S:.0f} s after SIGKILL: node {node} needs attention, perhaps a reboot"
        turn.note("error", text)
        turn.do(PrintReport(f"rsup: {text}"))


def _node_given_up(turn: Turn, event: NodeGivenUp) -> None:
    turn.fact(wire.NodeLost(turn.now.wall_us, event.node, event.why))


def _rank_message(turn: Turn, event: RankMessage) -> None:
    if event.attempt == turn.state.attempt and event.local_rank < len(turn.state.ranks):
        process_requests.hear(turn, event)


def _signal_arrived(turn: Turn, event: SignalArrived) -> None:
    state, name = turn.state, signal_name(event.signum)
    if not event.stops:
        if ready := tuple(i for i in state.alive if state.ranks[i].pid):
            turn.do(SignalRanks(ready, event.signum, f"the launcher received {name}", if_caught=True))
        return
    if not state.joined:
        finish(turn, signal_ending(turn, event.signum))
        return
    if state.signum:
        turn.set(leave_at=turn.now.mono_s + HURRIED_LEAVE_S)
        if state.phase in HAS_PROCESSES and not state.said_again:
            hurry_ranks(turn, event.signum, f"the launcher received {name} again")
        elif state.phase in HAS_PROCESSES:
            kill_ranks(turn, f"the launcher received {name} a third time")
        return
    turn.set(signum=event.signum, next_start=None)
    grace_s = state.settings.grace_of(event.signum)
    turn.fact(wire.SignalReceived(turn.now.wall_us, event.signum, grace_s))
    if state.phase in HAS_PROCESSES:
        stop_ranks(turn, f"the launcher received {name}", grace_s, event.signum)
    else:
        turn.set(leave_at=turn.now.mono_s + LEAVE_S)


# --------------------------------------------------------------------------------------------------------------- tables

_Handler = Callable[[Turn, Any], None]

_COMMANDS: dict[type, _Handler] = {
    wire.HostStore: _host_store,
    wire.StartAttempt: _start_attempt,
    wire.StopAttempt: _stop_attempt,
    wire.RestartInProcess: restart_in_process,
    wire.EndRanks: end_ranks,
    wire.TakeStacks: take_stacks,
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
    StoreReady: store_ready,
    StoreFailure: store_failed,
    RanksSpawned: spawned,
    SpawnFailure: spawn_failed,
    RankReplaced: replaced,
    ReplaceFailure: replace_failed,
    RankDied: rank_died,
    AllReaped: reaped,
    Overdue: _overdue,
    SectionsRead: _sections_read,
    StacksReady: stacks_ready,
    SignalArrived: _signal_arrived,
    RankMessage: _rank_message,
    Noticed: _noticed,
    HealthRead: _health_read,
    SurvivorsNamed: _survivors_named,
    NodeGivenUp: _node_given_up,
    Tick: tick,
}

_OF_SPAWNING = (RanksSpawned, SpawnFailure, RankReplaced, ReplaceFailure)
_OF_LIVE_RANKS = (*_OF_SPAWNING, RankDied, AllReaped, Overdue, RankMessage, SurvivorsNamed)
UNEXPECTED: frozenset[tuple[Phase, type]] = frozenset(
    [(phase, event) for phase in Phase if phase not in HAS_PROCESSES for event in _OF_LIVE_RANKS]
    + [(phase, SectionsRead) for phase in (Phase.IDLE, Phase.PARKED, Phase.HOSTING)]
    + [(phase, StacksReady) for phase in (Phase.IDLE, Phase.PARKED)]
    + [(Phase.RUNNING, AllReaped), (Phase.RUNNING, SurvivorsNamed), (Phase.STOPPING, Overdue)]
    + [(Phase.ENDED, event) for event in _HANDLERS]
)
"""Pairs that cannot happen, or come too late to matter: counted, otherwise without effect."""
