"""What follows a pass: the rerun machine's transitions, without torch, clock or communication. Pure.

The facade (`state_machine`) runs the passes, lets all ranks agree on the worst `Severity`, and asks `after_pass` what to do;
every rank hands in the same and gets the same. Sources: the seed's states, reliability.md section 1.2 with its faults P3 to P8,
DESIGN.md section 6.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from rsup.worker.rerun import values
from rsup.worker.rerun.contract import EXIT_ELSEWHERE, EXIT_FAILED, Checked, Exit, Judgement, RerunConfig, RerunState
from rsup.worker.rerun.passes import Judged

MAX_SKIPS_IN_ROW = 2
"""Iterations that may be left out for their data without a healthy one between them."""
STABLE_WITHIN = 1e-3
GO_ON = Exit(False, False, 0)
"""Neither a checkpoint nor an exit."""
Same = Callable[[Checked, Checked], bool]
"""Whether a check's value in a replay is that of the first pass."""


def same(before: Checked, after: Checked) -> bool:
    """By the check's own tolerance, and the comparison function of the replay (a checkpoint cannot hold one)."""
    return values.is_same(before.value, after.value, before.tolerance, after.compare)


class Severity(IntEnum):
    """What a rank found in a pass. The greatest of all ranks counts: no rank's lesser finding cancels another's."""

    CLEAN = 0
    MINOR = 1
    """A check that is not fatal rejects (or rejected, in a replay)."""
    TRANSIENT = 2
    """A fatal finding is gone in the replay, which is clean."""
    FATAL = 3
    """First pass: a fatal check rejects."""
    UNREACHED = 4
    """A replay ended without making a check that had failed: the iteration does not repeat itself."""
    REPRODUCED = 5
    """A fatal finding came out again: the same, or at least rejected again."""


class Step(StrEnum):
    """What the facade does next."""

    REPLAY = "replay"
    """Roll back and run once more in place."""
    ROTATE = "rotate"
    """Compare the replicated state; then every rank computes the data of another."""
    CONFIRM = "confirm"
    GO_ON = "go on"
    """The pass just run is the iteration's: its gradients count."""
    CLOSE = "close"
    """The case has a verdict: report it, then do as `Closing` says."""
    SEND_ELSEWHERE = "send elsewhere"
    """Report the case as open, checkpoint, leave: another placement has to decide."""


@dataclass(frozen=True)
class Next:
    """A step, the state that goes with it, and for `CLOSE` and `SEND_ELSEWHERE` the judgement."""

    step: Step
    state: RerunState
    judgement: Judgement | None = None


def first_severity(judged: Sequence[Judged]) -> Severity:
    """Of a rank's first pass."""
    rejected = [one.checked for one in judged if one.checked.rejected]
    if any(one.fatal for one in rejected):
        return Severity.FATAL
    return Severity.MINOR if rejected else Severity.CLEAN


def flagged_again(first: Sequence[Judged], again: Sequence[Judged], is_same: Same = same) -> dict[str, bool]:
    """The fatal findings of the first pass by check, and whether each came out again (the same, or rejected again)."""
    now = {one.checked.check: one.checked for one in again}
    found = {}
    for one in first:
        before = one.checked
        if before.rejected and before.fatal and before.check in now:
            after = now[before.check]
            found[before.check] = after.rejected or is_same(before, after)
    return found


def replay_severity(first: Sequence[Judged], again: Sequence[Judged], is_same: Same = same) -> Severity:
    """Of a rank's replay in place."""
    failed = [one.checked for one in first if one.checked.rejected]
    made = {one.checked.check for one in again}
    if any(one.check not in made for one in failed):
        return Severity.UNREACHED
    if any(flagged_again(first, again, is_same).values()):
        return Severity.REPRODUCED
    if any(one.checked.rejected and one.checked.fatal for one in again):
        return Severity.UNREACHED  # something else fails now: neither clean nor the same
    if any(one.fatal for one in failed):
        return Severity.TRANSIENT
    return Severity.MINOR if failed else Severity.CLEAN


def after_first_pass(agreed: Severity) -> Next:
    """All ranks replay if any found something."""
    if agreed is Severity.CLEAN:
        return Next(Step.GO_ON, RerunState.NOT_RUNNING_YET)
    return Next(Step.REPLAY, RerunState.RERUNNING_IN_PLACE)


def after_replay(agreed: Severity, why_no_rotation: str) -> Next:
    """After the replay in place. `why_no_rotation`: empty where the iteration can be rotated."""
    if agreed <= Severity.MINOR:
        return Next(Step.GO_ON, RerunState.NOT_RUNNING_YET)
    if agreed is Severity.TRANSIENT:
        text = "the same data and random numbers gave a healthy result on the same device"
        return Next(Step.CLOSE, RerunState.NOT_RUNNING_YET, Judgement("transient", text))
    if agreed is Severity.UNREACHED:
        text = "the replay in place made other checks, or failed another way: the iteration does not repeat itself"
        return Next(Step.CLOSE, RerunState.NOT_RUNNING_YET, Judgement("undecided", text))
    if why_no_rotation:
        open_ = Judgement("undecided", why_no_rotation, another_placement_may_decide=True)
        return Next(Step.SEND_ELSEWHERE, RerunState.WILL_RERUN_FROM_CHECKPOINT, open_)
    return Next(Step.ROTATE, RerunState.RERUNNING_ROTATED)


def after_judgement(judgement: Judgement) -> Next:
    """After a rotated replay, or where it could not be run after all."""
    if judgement.verdict == "persistent" and judgement.data_dependent:
        return Next(Step.CONFIRM, RerunState.RERUNNING_TO_CONFIRM, judgement)
    if judgement.verdict == "undecided" and judgement.another_placement_may_decide:
        return Next(Step.SEND_ELSEWHERE, RerunState.WILL_RERUN_FROM_CHECKPOINT, judgement)
    return Next(Step.CLOSE, RerunState.NOT_RUNNING_YET, judgement)


def after_confirmation(agreed: Severity, judgement: Judgement) -> Next:
    """After one more replay in place: a device is accused of a data-dependent fault only if it failed again."""
    if agreed is Severity.REPRODUCED:
        return Next(Step.CLOSE, RerunState.NOT_RUNNING_YET, judgement)
    text = f"it did not come out again in a second replay in place, after: {judgement.reason}"
    return Next(Step.CLOSE, RerunState.NOT_RUNNING_YET, Judgement("undecided", text, judgement.accused))


@dataclass(frozen=True)
class Moved:
    """What a rank found when it repeated an iteration from a checkpoint on another device. Gathered over all ranks."""

    rank: int
    flagged: bool = False
    """It had a fatal finding in the attempt before."""
    device: str = ""
    """Where it runs now."""
    before: str = ""
    """Where it ran when the finding was made."""
    tried: tuple[str, ...] = ()
    """All devices on which its data has failed, `before` the first."""
    reached: bool = True
    same: bool = False
    healthy: bool = True
    """No fatal check rejects in this pass."""
    stable: bool = True
    """Values that no check had rejected came out as before (within `STABLE_WITHIN`)."""
    alike: bool = True
    """Its device now is of the model, VBIOS and driver of that before: another value is not expected of it."""


def bad_data(moved: Sequence[Moved], known: Collection[int] = ()) -> frozenset[int]:
    """The ranks whose data is proven to be at fault: it gave the same on a device against which nothing speaks. A device on
    which only such data failed is cleared by that. `known`: those proven by earlier moves."""
    proven = set(known)
    while True:
        open_ = [one for one in moved if one.flagged and one.rank not in proven]
        for one in open_:
            doubtful = {device for other in open_ if other is not one for device in (other.before, *other.tried)}
            if one.same and one.reached and one.device not in doubtful:
                proven.add(one.rank)
                break
        else:
            return frozenset(proven)


def judge_moved(moved: Sequence[Moved], proven: Collection[int] | None = None) -> Judgement:
    """The verdict of a replay from a checkpoint; doubts are `undecided`. `proven`: of `bad_data`."""
    proven = bad_data(moved) if proven is None else proven
    flagged = [one for one in moved if one.flagged]
    if not flagged:
        return Judgement("undecided", "the checkpoint names no rank with a rejected result")
    if any(not one.reached for one in flagged):
        return Judgement("undecided", "the replay from the checkpoint did not make the check that had failed")
    if any(not one.same and not one.healthy for one in flagged):
        text = "on another device another value came out, and it was rejected too"
        return Judgement("undecided", text, another_placement_may_decide=True)
    different = [one for one in flagged if not one.same]
    if any(one.same and one.rank not in proven for one in flagged):
        text = f"the same came out, but on a device that had failed as well ({_places(flagged)})"
        return Judgement("undecided", text, another_placement_may_decide=True)
    if any(not one.before or not one.stable for one in different):
        text = "values that had been healthy came out otherwise, too: the process, not the device, may have made the difference"
        return Judgement("undecided", f"{text} ({_places(different)})")
    if not different:
        return Judgement("application", f"the same came out on another device ({_places(flagged)})")
    if any(not one.alike for one in different):
        text = f"no like device: another value came out on one of another model, VBIOS or driver ({_places(different)})"
        return Judgement("undecided", text, another_placement_may_decide=True)
    text = f"another, healthy value came out on another device ({_places(different)})"
    return Judgement("persistent", text, tuple(one.rank for one in different))


def _places(moved: Sequence[Moved]) -> str:
    return ", ".join(f"rank {one.rank}: {one.device} after {one.before}" for one in moved)


def doubt_skips(judgement: Judgement, config: RerunConfig, skips_in_row: int) -> Judgement:
    """`undecided` instead of one more iteration that would be left out for its data."""
    if judgement.verdict != "application" or config.on_application != "skip" or skips_in_row < MAX_SKIPS_IN_ROW:
        return judgement
    text = (
        f"{judgement.reason}; but {skips_in_row} iterations before it were left out, too: the data alone does not explain that"
    )
    return Judgement("undecided", text)


@dataclass(frozen=True)
class Closing:
    """What the ranks do once a case is closed. `action` is one of `wire.CASE_ACTIONS`."""

    action: str
    exit: Exit = GO_ON
    skip_step: bool = False


def closing(judgement: Judgement, config: RerunConfig, *, clean: bool, accused_in_use: bool, is_audit: bool = False) -> Closing:
    """What a verdict leads to. `clean`: the pass just run has healthy gradients on every rank; `accused_in_use`: a rank still
    runs on an accused device; `is_audit`: no check has failed, devices differ, and in doubt training goes on."""
    verdict = judgement.verdict
    if is_audit and verdict == "undecided":
        return Closing("continue")
    if verdict == "transient":
        if config.on_transient == "continue" and clean:
            return Closing("continue")
        return Closing("restart", Exit(False, True, EXIT_FAILED))
    if verdict == "persistent":
        if clean and not accused_in_use:
            return Closing("continue")
        return Closing("elsewhere", Exit(True, True, EXIT_ELSEWHERE))
    if verdict == "application" and config.on_application == "skip":
        return Closing("skip", skip_step=True)
    if verdict == "corrupted state":
        return Closing("restart", Exit(False, True, EXIT_FAILED))
    return Closing("leave", Exit(False, True, EXIT_FAILED))
