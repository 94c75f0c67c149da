"""When to save and when to leave, in the seed's order. Pure: what the ranks have agreed on comes in, one decision goes out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExitPlan:
    """The intervals, in iterations; None or empty where unused. `can_save`: there is a directory to save to."""

    last_iteration: int
    can_save: bool
    save_interval: int | None = None
    exit_interval: int | None = None
    phase_transitions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What holds for any rank, agreed by all: `signal` is the exit signal's name, `duration_over` the time budget's end."""

    signal: str = ""
    save: bool = False
    leave: bool = False
    duration_over: bool = False


@dataclass(frozen=True)
class Decision:
    """`save` now; `leave` after it, for `reason` (also the reason of an unscheduled save)."""

    save: bool
    leave: bool
    reason: str


def decide(plan: ExitPlan, asked: Asked, iteration: int) -> Decision:
    """What to do after `iteration`. Every way out saves, once, if there is where to; the first reason counts."""
    if asked.signal:
        return Decision(plan.can_save, True, f"signal {asked.signal}")
    if asked.leave:
        return Decision(plan.can_save, True, "asked to stop")
    if asked.duration_over:
        return Decision(plan.can_save, True, "the time budget is used up")
    if plan.exit_interval and iteration % plan.exit_interval == 0:
        return Decision(plan.can_save, True, f"iteration {iteration} is a multiple of the exit interval")
    if iteration in plan.phase_transitions:
        return Decision(plan.can_save, True, f"iteration {iteration} ends a phase")
    if iteration >= plan.last_iteration:
        return Decision(plan.can_save, True, "")
    if asked.save:
        return Decision(plan.can_save, False, "asked for")
    scheduled = plan.save_interval is not None and iteration % plan.save_interval == 0
    return Decision(plan.can_save and scheduled, False, "")


def may_save_at(plan: ExitPlan, iteration: int) -> bool:
    """Whether an undisturbed run saves after `iteration`."""
    return decide(plan, Asked(), iteration).save
