"""The process machine's deadlines, all looked at in one place: the tick."""

from msgspec.structs import replace

from rsup.launcher.process_ending import HAS_PROCESSES, end_after_ranks, finish, kill_ranks, signal_ending
from rsup.launcher.process_events import NameSurvivors, PrintReport, Tick
from rsup.launcher.process_stacks import look_at_stacks
from rsup.launcher.process_state import AgentState, Ending, Gap, Phase, Settings
from rsup.launcher.process_turn import Turn
from rsup.launcher.scheduler_deadline import is_over
from rsup.supervisor import wire

SUSPENDED_AFTER_S = 1.0
"""A tick later than this was not just a busy machine: this process did not run."""
LEAVE_S = 10.0
"""After a signal and with the ranks gone, the decider has this long to end the job in its own words."""
HURRIED_LEAVE_S = 1.0
SUCCEEDED_LEAVE_S = 15.0
"""All ranks of the job were here and exited 0: nothing is left to decide, so a silent decider is not waited for."""
STUCK_AFTER_S = 30.0
"""A process that outlives its SIGKILL this long cannot be ended from here: it is named."""
GIVE_UP_AFTER_S = 90.0
"""The decider ends such a job after the grace and 60 s; an agent that hears nothing of that goes by itself."""
SAY_WAITING_AFTER_S = 5.0
"""A person in front of a terminal on which nothing happens for so long is told what is waited for."""
MAX_GAPS = 64


def tick(turn: Turn, event: Tick) -> None:
    """Do what time alone asks for."""
    _account_for_suspension(turn)
    look_at_stacks(turn)
    _kill_when_due(turn)
    _give_up_when_stuck(turn)
    fence_when_due(turn)
    _say_what_is_waited_for(turn)
    _leave_when_due(turn)


def _account_for_suspension(turn: Turn) -> None:
    state, now_s = turn.state, turn.now.mono_s
    late_s = now_s - state.tick_at
    turn.set(tick_at=now_s)
    if late_s <= SUSPENDED_AFTER_S:
        return
    gaps = (*state.gaps, Gap(int(state.tick_at * 1e9), int(now_s * 1e9)))
    if len(gaps) > MAX_GAPS:  # two old ones become one that covers both: too much forgiven, never too little
        gaps = (Gap(gaps[0].start_ns, gaps[1].end_ns), *gaps[2:])
    stop = state.stop
    if stop:
        stop = replace(stop, kill_at=_later(stop.kill_at, late_s), killed_at=_later(stop.killed_at, late_s))
    turn.set(
        gaps=gaps,
        stop=stop,
        contact_at=state.contact_at + late_s,
        reap_at=_later(state.reap_at, late_s),
        failed_at=_later(state.failed_at, late_s),
        leave_at=_later(state.leave_at, late_s),
        say_waiting_at=_later(state.say_waiting_at, late_s),
    )
    if state.phase in HAS_PROCESSES:
        turn.note("warning", f"the launcher did not run for {late_s:.1f} s (suspended?): limits and graces were moved by that")


def _later(at: float | None, by_s: float) -> float | None:
    return None if at is None else at + by_s


def _kill_when_due(turn: Turn) -> None:
    state, now_s = turn.state, turn.now.mono_s
    stop = state.stop
    if stop is None or state.phase is not Phase.STOPPING:
        return
    if stop.killed_at is None and stop.kill_at is not None and now_s >= stop.kill_at:
        kill_ranks(turn, f"{stop.why}; the grace is over")


def _give_up_when_stuck(turn: Turn) -> None:
    """Something outlives its SIGKILL. `RanksGone` would be a lie and another attempt a second one: the job cannot go on."""
    state = turn.state
    killed_at = state.stop.killed_at if state.stop and state.stop.killed_at is not None else state.reap_at
    if state.phase is not Phase.STOPPING or killed_at is None:
        return
    stuck_s = turn.now.mono_s - killed_at
    if stuck_s < STUCK_AFTER_S:
        return
    if not state.said_stuck:
        turn.set(said_stuck=True)
        turn.do(NameSurvivors(state.attempt, f"something lives {STUCK_AFTER_S:.0f} s after SIGKILL"))
    elif state.ending:
        finish(turn, state.ending)
    elif stuck_s >= GIVE_UP_AFTER_S:
        reason = f"processes of attempt {state.attempt} on {state.settings.node} cannot be ended: the node needs attention"
        result = wire.JobResult(wire.EXIT_REQUEUE, reason, attempts=max(1, state.attempt), node=state.settings.node)
        finish(turn, Ending(result, f"rsup: {reason}; exit 88: please requeue"))


def fence_when_due(turn: Turn) -> None:
    """Kill the ranks of an agent that has been cut off for the fence timeout, by the clock that the supervisor goes by too."""
    state = turn.state
    fence_s = state.settings.fence_timeout_s
    if fence_s is None or state.phase not in HAS_PROCESSES or turn.now.mono_s - state.heard_at < fence_s:
        return
    if state.stop is None or state.stop.killed_at is None:
        turn.note("error", f"cut off from the supervisor for {fence_s:g} s: the ranks are killed (fence timeout)")
        kill_ranks(turn, f"the supervisor was not heard for {fence_s:g} s (fence timeout)")


def _say_what_is_waited_for(turn: Turn) -> None:
    state, settings, now_s = turn.state, turn.state.settings, turn.now.mono_s
    waited_s = _waited_s(state, now_s)
    due = state.joined and state.ending is None and _decision_is_due(state) and not _succeeded_here(state)
    if due and waited_s >= SAY_WAITING_AFTER_S and not state.said_silent:
        turn.set(said_silent=True)
        what = "a rank has failed, and" if state.failed_at is not None else "a decision is due, and"
        end = f"without its word this launch ends with 88 after {settings.supervisor_grace_s:g} s"
        turn.do(PrintReport(f"rsup: {what} nothing has been heard of the supervisor for {waited_s:.0f} s; {end}"))
    elif state.say_waiting_at is not None and now_s >= state.say_waiting_at:
        turn.set(say_waiting_at=None)
        ended = state.phase is Phase.GONE and state.why_stopped
        if (state.phase is Phase.IDLE or ended) and not state.signum:
            turn.do(PrintReport(f"rsup: {_ended_text(state) if ended else ''}{_forming_text(state)}"))


def say_waiting_later(turn: Turn) -> None:
    """Say what is waited for if nothing has started some seconds from now."""
    if turn.state.settings.max_nodes > 1:
        turn.set(say_waiting_at=turn.now.mono_s + SAY_WAITING_AFTER_S)


def _ended_text(state: AgentState) -> str:
    beginning = f"attempt {state.attempt} has "
    why = state.why_stopped.removeprefix(f"{beginning}failed: ")
    return f"{beginning}ended: {why}; "


def _forming_text(state: AgentState) -> str:
    settings = state.settings
    within = f"it waits up to {_duration(settings.join_timeout_s)} for that (--join-timeout)"
    if settings.min_nodes == settings.max_nodes:
        return f"waiting for other nodes: the job starts when all {settings.max_nodes} are here; {within}"
    few = f"{_duration(settings.last_call_s)} after there are at least {settings.min_nodes}"
    return f"waiting for other nodes: the job starts with {settings.max_nodes}, or {few}; {within}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 120 and not seconds % 30 else f"{seconds:g} s"


def _leave_when_due(turn: Turn) -> None:
    state, now_s = turn.state, turn.now.mono_s
    silent_s = now_s - state.contact_at
    settings = state.settings
    if state.phase is Phase.ENDED or state.ending:
        return
    if state.leave_at is not None and state.phase not in HAS_PROCESSES:
        if now_s >= state.leave_at:
            finish(turn, signal_ending(turn, state.signum))
    elif not state.joined:
        if silent_s >= settings.join_timeout_s:
            message = f"rsup: {_unanswered(settings)}"
            finish(turn, Ending(wire.JobResult(1, message[6:], node=settings.node), message))
    elif _succeeded_here(state) and silent_s >= min(SUCCEEDED_LEAVE_S, settings.supervisor_grace_s):
        reason = "all ranks exited 0; the supervisor could not be told"
        finish(turn, Ending(wire.JobResult(0, reason, attempts=state.attempt, node=settings.node), f"rsup: {reason}"))
    elif _decision_is_due(state) and (_waited_s(state, now_s) >= settings.supervisor_grace_s or _scheduler_ends_us(turn)):
        reason = f"a decision was due and the supervisor was not heard for {_waited_s(state, now_s):.0f} s"
        result = wire.JobResult(wire.EXIT_REQUEUE, reason, attempts=max(1, state.attempt), node=settings.node)
        end_after_ranks(turn, Ending(result, f"rsup: {reason}; exit 88: please requeue"), settings.stop_grace_s, reason)


def _scheduler_ends_us(turn: Turn) -> bool:
    """Whether nothing has been heard for a while and the scheduler's end is too near to wait on."""
    settings, silent_s = turn.state.settings, turn.now.mono_s - turn.state.contact_at
    return silent_s >= SAY_WAITING_AFTER_S and is_over(settings.end_s, turn.now.wall_us / 1e6, settings.deadline_margin_s)


def _unanswered(settings: Settings) -> str:
    if not settings.meeting:
        return f"the supervisor of this launch did not answer within {settings.join_timeout_s:g} s; see rsup doctor"
    return (
        f"no supervisor answered at {settings.meeting} within {settings.join_timeout_s:g} s (--join-timeout); "
        "is the first node up, and is that its address?"
    )


def _succeeded_here(state: AgentState) -> bool:
    whole_job = state.start is not None and state.start.world_size == len(state.ranks)
    return state.phase is Phase.GONE and whole_job and all(rank.ended_well for rank in state.ranks)


def _decision_is_due(state: AgentState) -> bool:
    if state.phase is Phase.RUNNING:
        return state.failed_at is not None
    return state.phase is not Phase.STOPPING


def _waited_s(state: AgentState, now_s: float) -> float:
    since = state.contact_at
    if state.phase is Phase.RUNNING and state.failed_at is not None:
        since = max(since, state.failed_at)
    return now_s - since
