"""When to save and when to leave, in the seed's order. Pure: what the ranks have agreed on comes in, one decision goes out.

The order: an exit signal, a request from outside, the intervals of saves, the time budget, the deadline, the exit interval, the
end of a phase, the end of the training. Every way out makes a durable save, once: a local one is never enough to leave on.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ExitPlan:
    """The intervals, in iterations; None or empty where unused. `can_save`: there is a directory to save to.

    `last_iteration` None: the loop ends when it likes. `local_save_interval`: of saves that stay in memory or on this node.
    """

    last_iteration: int | None
    can_save: bool
    save_interval: int | None = None
    exit_interval: int | None = None
    phase_transitions: tuple[int, ...] = ()
    local_save_interval: int | None = None


@dataclass(frozen=True)
class Asked:
    """What holds for any rank, agreed by all: `signal` is the exit signal's name, `duration_over` the time budget's end.

    `deadline_near`: after one more iteration a save might not be durable in time. `saves_on_signal`: False for a signal that
    ends the training in order and without a save.
    """

    signal: str = ""
    save: bool = False
    leave: bool = False
    duration_over: bool = False
    deadline_near: bool = False
    saves_on_signal: bool = True
    measure_save: bool = False
    """The deadline is near unless saves are quick, and nobody knows yet how long one takes."""


@dataclass(frozen=True)
class Decision:
    """`save` durably now, or `save_local`; `leave` after it, for `reason` (also the reason of an unscheduled save).

    `kind`: of `wire.LEAVE_KINDS`, empty where training goes on.
    """

    save: bool
    leave: bool
    reason: str
    kind: str = ""
    save_local: bool = False


NOTHING = Decision(False, False, "")
"""Training goes on, and nothing is saved."""


def decide(plan: ExitPlan, asked: Asked, iteration: int) -> Decision:
    """What to do after `iteration`. Every way out saves, once, if there is where to; the first reason counts."""
    kind, reason = _way_out(plan, asked, iteration)
    if kind:
        return Decision(plan.can_save and (kind != "signal" or asked.saves_on_signal), True, reason, kind)
    if asked.save:
        return Decision(plan.can_save, False, "asked for")
    if plan.can_save and _is_due(plan.save_interval, iteration):
        return Decision(True, False, "")
    if plan.can_save and asked.measure_save:
        return Decision(True, False, "the deadline is not far, and how long a save takes is not known yet")
    return Decision(False, False, "", save_local=_is_due(plan.local_save_interval, iteration))


def _way_out(plan: ExitPlan, asked: Asked, iteration: int) -> tuple[str, str]:
    """Kind and reason of the first way out that is due; two empty texts for none."""
    if asked.signal:
        return "signal", f"signal {asked.signal}"
    if asked.leave:
        return "request", "asked to stop"
    if asked.duration_over:
        return "duration", "the time budget is used up"
    if asked.deadline_near:
        return "deadline", "the deadline leaves time for a save, and for no further iteration"
    if _is_due(plan.exit_interval, iteration):
        return "interval", f"iteration {iteration} is a multiple of the exit interval"
    if iteration in plan.phase_transitions:
        return "phase", f"iteration {iteration} ends a phase"
    if plan.last_iteration is not None and iteration >= plan.last_iteration:
        return "finished", ""
    return "", ""


def _is_due(interval: int | None, iteration: int) -> bool:
    return bool(interval) and iteration % (interval or 1) == 0


def may_save_at(plan: ExitPlan, iteration: int) -> bool:
    """Whether an undisturbed run makes a durable save after `iteration`."""
    return decide(plan, Asked(), iteration).save


def problem_of_phases(ends: Iterable[int], last: int) -> str:
    """What is wrong with these ends of phases, in one sentence; empty: nothing. `last`: the last iteration."""
    before = 0
    for end in ends:
        if end <= before:
            return f"{end} comes after {before}; each must be greater than the one before"
        if end >= last:
            return f"{end} is not before the last iteration, --train-iters {last}"
        before = end
    return ""
