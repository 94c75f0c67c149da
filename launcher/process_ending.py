"""How the process machine ends things: signals to ranks, the reaping of what they leave behind, the agent's own exit."""

import signal

from msgspec.structs import replace

from rsup.launcher.failure_report import signal_name
from rsup.launcher.process_events import (
    Exit,
    ObserveSections,
    PrintReport,
    ReapAll,
    SignalRanks,
    WriteResult,
)
from rsup.launcher.process_state import Ending, Phase, Stop
from rsup.launcher.process_turn import Turn
from rsup.launcher.scheduler_deadline import fitted_grace
from rsup.supervisor import wire

HAS_PROCESSES = (Phase.RUNNING, Phase.STOPPING)
REAP_GRACE_S = 0.5
"""What is left behind by ranks that ended by themselves or failed gets this long after SIGTERM."""
SUCCEEDED_REAP_GRACE_S = 10.0
"""The same after success, where no restart waits: an uploader may still be at work."""
HURRIED_GRACE_S = 10.0
"""A person who says SIGINT twice waits no longer than this."""


def stop_ranks(turn: Turn, why: str, grace_s: float, signum: int = signal.SIGTERM, spare: tuple[int, ...] = ()) -> None:
    """End the ranks: `signum` now, but not to those in `spare`; SIGKILL after `grace_s`. Repeated, it can only get shorter."""
    if grace_s <= 0:
        kill_ranks(turn, why)
        return
    now_s, before = turn.now.mono_s, turn.state.stop
    if before and before.killed_at is not None:
        return
    kill_at = now_s + _fitted(turn, grace_s)
    if before and before.kill_at is not None:
        kill_at = min(kill_at, before.kill_at)
    since = before.since if before else now_s
    turn.set(phase=Phase.STOPPING, stop=Stop(before.why if before else why, signum, kill_at, since=since))
    to_signal = tuple(i for i in turn.state.alive if i not in spare and not turn.state.ranks[i].signalled)
    _mark(turn, spare, why)
    signal_ranks(turn, to_signal, signum, why)
    _reap_if_nobody_lives(turn, why)


def _fitted(turn: Turn, grace_s: float) -> float:
    """What of the grace fits into the time that the scheduler leaves; said where it is less."""
    settings = turn.state.settings
    fitted = fitted_grace(grace_s, settings.end_s, turn.now.wall_us / 1e6, settings.deadline_margin_s)
    if fitted.why and not turn.state.stop:
        turn.note("warning", fitted.why)
        turn.do(PrintReport(f"rsup: {fitted.why}"))
    return fitted.grace_s


def kill_ranks(turn: Turn, why: str) -> None:
    """SIGKILL to every session now."""
    before = turn.state.stop
    if before and before.killed_at is not None:
        return
    turn.set(phase=Phase.STOPPING, stop=Stop(before.why if before else why, signal.SIGKILL, None, killed_at=turn.now.mono_s))
    signal_ranks(turn, turn.state.alive, signal.SIGKILL, why, whole_session=True)
    if turn.state.reap_at is not None:
        turn.set(reap_at=turn.now.mono_s)
        turn.do(ReapAll(turn.state.attempt, 0.0, why))
    _reap_if_nobody_lives(turn, why)


def _reap_if_nobody_lives(turn: Turn, why: str) -> None:
    """The last rank here had died, and waited for a new process: there will be none."""
    state = turn.state
    if state.ranks and not state.alive and state.reap_at is None:
        reap(turn, why)


def hurry_ranks(turn: Turn, signum: int, why: str) -> None:
    """Told to stop again: pass the signal on again, and say when the ranks are killed. SIGINT makes that sooner."""
    state, now_s = turn.state, turn.now.mono_s
    turn.set(said_again=True)
    stop = state.stop
    if stop is None or stop.kill_at is None:
        return
    if signum == signal.SIGINT and stop.kill_at > now_s + HURRIED_GRACE_S:
        stop = replace(stop, kill_at=now_s + HURRIED_GRACE_S)
        turn.set(stop=stop)
    kill_at = stop.kill_at or now_s
    if state.reap_at is not None:
        _reap_until(turn, min(kill_at, state.reap_at), why)
        kill_at = min(kill_at, state.reap_at)
    signal_ranks(turn, state.alive, signum, why)
    left_s = max(0.0, kill_at - now_s)
    turn.do(PrintReport(f"rsup: told to stop again; ranks are killed in {left_s:.0f} s, a third signal kills them now"))


def shorten_reaping(turn: Turn, why: str) -> None:
    """The attempt has failed elsewhere, so a restart waits for what our ranks left behind."""
    reap_at = turn.state.reap_at
    if reap_at is not None and not turn.state.told_to_leave:
        _reap_until(turn, min(reap_at, turn.now.mono_s + REAP_GRACE_S), why)


def _reap_until(turn: Turn, reap_at: float, why: str) -> None:
    if turn.state.reap_at is not None and reap_at < turn.state.reap_at:
        turn.set(reap_at=reap_at)
        turn.do(ReapAll(turn.state.attempt, max(0.0, reap_at - turn.now.mono_s), why))


def signal_ranks(turn: Turn, local_ranks: tuple[int, ...], signum: int, why: str, whole_session: bool = False) -> None:
    _mark(turn, local_ranks, why)
    ready = tuple(i for i in local_ranks if turn.state.ranks[i].pid)  # the others get it when they are spawned
    if ready:
        turn.do(SignalRanks(ready, signum, why, whole_session))


def _mark(turn: Turn, local_ranks: tuple[int, ...], why: str) -> None:
    for i in local_ranks:
        rank = turn.state.ranks[i]
        turn.set_rank(i, signalled=rank.signalled or why)


def reap(turn: Turn, why: str) -> None:
    """No rank is left: end what they left behind. A user's stop leaves it what remains of the grace, a success some time."""
    state, stop = turn.state, turn.state.stop
    grace_s = REAP_GRACE_S
    if stop and stop.killed_at is not None:
        grace_s = 0.0
    elif stop and stop.kill_at is not None and turn.state.told_to_leave:
        grace_s = max(0.0, stop.kill_at - turn.now.mono_s)
    elif state.ranks and not state.why_stopped and all(rank.ended_well for rank in state.ranks):
        grace_s = SUCCEEDED_REAP_GRACE_S
    turn.set(phase=Phase.STOPPING, reap_at=turn.now.mono_s + grace_s)
    turn.do(ObserveSections(turn.state.attempt))
    turn.do(ReapAll(turn.state.attempt, grace_s, why))


def end_after_ranks(turn: Turn, ending: Ending, grace_s: float, why: str) -> None:
    """Go with `ending`, after the ranks if there are some."""
    if turn.state.phase in HAS_PROCESSES:
        turn.set(ending=ending, next_start=None)
        stop_ranks(turn, why, grace_s)
    else:
        finish(turn, ending)


def finish(turn: Turn, ending: Ending) -> None:
    turn.set(phase=Phase.ENDED)
    turn.do(WriteResult(ending.result))
    if ending.report:
        turn.do(PrintReport(ending.report))
    turn.do(Exit(ending.result.exit_code, ending.result.reason))


def signal_ending(turn: Turn, signum: int) -> Ending:
    reason = f"told to stop by {signal_name(signum)}"
    return Ending(wire.JobResult(128 + signum, reason, attempts=turn.state.attempt, node=turn.state.settings.node))
