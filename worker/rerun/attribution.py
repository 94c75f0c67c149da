"""From a rejected value to a verdict: replay in place, replay of the data on another rank's device, replay after a move.

Each `end_*` is called when a pass is over, on all ranks alike, and says whether to run once more. Collective, all of it.
"""

from rsup.worker.rerun.checksums import not_finite
from rsup.worker.rerun.contract import (
    EXIT_ELSEWHERE,
    Checked,
    Exit,
    Judgement,
    RankFinding,
    Rejection,
    RerunState,
)
from rsup.worker.rerun.echoes import earliest, is_echo
from rsup.worker.rerun.judging import judge_state
from rsup.worker.rerun.machine import (
    STABLE_WITHIN,
    Moved,
    Next,
    Severity,
    Step,
    after_confirmation,
    after_judgement,
    after_replay,
    bad_data,
    doubt_skips,
    flagged_again,
    judge_moved,
    replay_severity,
)
from rsup.worker.rerun.parts import Parts
from rsup.worker.rerun.passes import Judged
from rsup.worker.rerun.pending import Pending
from rsup.worker.rerun.report import findings_of
from rsup.worker.rerun.step_keeper import StepKeeper
from rsup.worker.rerun.values import difference


class Attribution:
    """Works on the case of the iteration in progress."""

    def __init__(self, parts: Parts, keeper: StepKeeper) -> None:
        self._parts = parts
        self._keeper = keeper

    # ------------------------------------------------------------------------------------------------------- in place

    def end_replay(self, again: list[Judged]) -> bool:
        """The replay in place is over."""
        parts, iteration = self._parts, self._parts.iteration
        iteration.again = again
        came_again = flagged_again(iteration.first, again, parts.same)
        first_bad = min(parts.agreement.gather(earliest(check for check, again_ in came_again.items() if again_)))
        own = [one for one in iteration.first if not is_echo(one.checked.check, first_bad)]
        iteration.confirmed = [one for one in own if came_again.get(one.checked.check)]
        mine = replay_severity(iteration.first, again, parts.same)
        agreed = Severity(parts.agreement.worst(int(mine)))
        parts.work.open(iteration.number, findings_of(own, again, parts.agreement.rank, parts.device))
        self._track_replay()
        why_not = next(filter(None, parts.agreement.gather(self._why_no_rotation())), "")
        next_ = after_replay(agreed, why_not)
        if next_.step is Step.GO_ON:
            return self._close_minor()
        if next_.step is Step.CLOSE:
            return self.follow(next_)
        if next_.step is Step.ROTATE:
            parts.work.tell(parts.data_position)
        corrupted = self._corrupted_state(is_replicated=next_.step is Step.ROTATE)
        if corrupted is not None:
            return self.follow(after_judgement(corrupted))
        return self._rotate() if next_.step is Step.ROTATE else self.follow(next_)

    def _corrupted_state(self, is_replicated: bool) -> Judgement | None:
        """Whether the numbers were spoiled before this iteration: replicas differ, or a parameter is no number any more."""
        parts, rotation = self._parts, self._parts.rotation
        if is_replicated and rotation is not None:
            found = judge_state(rotation.compare_state(), rotation.axis)
            if found is not None:
                return found
        bad = parts.agreement.gather(not_finite(parts.named_state()))
        ranks = [rank for rank, names in enumerate(bad) if names]
        if not ranks:
            return None
        return Judgement("corrupted state", f"{bad[ranks[0]][0]} holds NaN or Inf before the iteration (ranks {ranks})")

    def _why_no_rotation(self) -> str:
        parts = self._parts
        if parts.rotation is None:
            return "iterations are not rotated in this run"
        if any(parts.injector.is_injected(one.checked.check) for one in parts.iteration.first):
            return "an injected error cannot be seen in another device's values"
        if any(iterator.has_ended for iterator in parts.iteration.iterators):
            return "a rank's data ended in the middle of the iteration"
        return parts.rotation.why_impossible()

    def _close_minor(self) -> bool:
        """Only checks that are not fatal have failed: the replay's gradients are used, whatever came out."""
        parts, iteration = self._parts, self._parts.iteration
        now = _by_check(iteration.again)
        failed = [one.checked for one in iteration.first if one.checked.rejected]
        again = any(one.check in now and parts.same(one, now[one.check]) for one in failed)
        if parts.agreement.worst(int(again)):
            judgement = Judgement("application", "the same came out again, and the check is not fatal")
        else:
            judgement = Judgement("transient", "it did not come out again, and the check is not fatal")
        parts.work.close_minor(judgement, parts.data_position)
        return parts.finish()

    def _track_replay(self) -> None:
        parts = self._parts
        now = _by_check(parts.iteration.again)
        for one in parts.iteration.first:
            if one.checked.rejected:
                after = now.get(one.checked.check)
                if after is None:
                    parts.track(Rejection.NOT_REACHED, one.checked)
                elif parts.same(one.checked, after):
                    parts.track(Rejection.FIRST_RERUN_REPRODUCIBLE, after)
                else:
                    parts.track(Rejection.FIRST_RERUN_NOT_REPRODUCIBLE, after)

    # ------------------------------------------------------------------------------------------ on another rank's device

    def _rotate(self) -> bool:
        """Compute another rank's data."""
        parts, rotation = self._parts, self._parts.rotation
        assert rotation is not None
        payload, counts = parts.iteration.payload()
        flagged = tuple(sorted(one.checked.check for one in parts.iteration.confirmed))
        finding = RankFinding(parts.agreement.rank, parts.device, flagged, counts)
        begun = rotation.begin(finding, payload)
        if isinstance(begun, Judgement):
            return self.follow(after_judgement(begun))
        return parts.iteration.borrow(begun)

    def end_rotated(self, there: list[Judged]) -> bool:
        """The pass over another rank's data is over. Its gradients are not used."""
        parts, rotation = self._parts, self._parts.rotation
        assert rotation is not None
        own = [one.checked for one in parts.iteration.again]  # a transient error of this rank is not in them
        flagged = {one.checked.check for one in parts.iteration.confirmed}
        judgement = rotation.end([one.checked for one in there], own, flagged)
        parts.work.add_elsewhere(rotation.outcomes)
        next_ = after_judgement(judgement)
        if next_.step is Step.CONFIRM:
            parts.iteration.judgement = judgement
            return parts.iteration.replay(next_.state)
        return self.follow(next_)

    def end_confirmation(self, again: list[Judged]) -> bool:
        """The second replay in place is over."""
        parts, judgement = self._parts, self._parts.iteration.judgement
        assert judgement is not None
        mine = replay_severity(parts.iteration.first, again, parts.same)
        return self.follow(after_confirmation(Severity(parts.agreement.worst(int(mine))), judgement))

    # --------------------------------------------------------------------------------------------- from a checkpoint

    def begin_pending(self, pending: Pending) -> bool | None:
        """Repeat the iteration that the checkpoint asks for: whether to run it. None: it asks for none, or no longer."""
        parts, iteration = self._parts, self._parts.iteration
        case = pending.case
        if case.iteration != iteration.number:
            parts.work.say(f"case {case.case_id} is dropped: training does not go on with its iteration {case.iteration}")
            return None
        parts.work.take_over(case)
        iteration.loaded = pending.iterators
        if verdict := parts.work.closed_before():
            parts.work.say(f"case {case.case_id} has its verdict already: {verdict}")
            parts.work.case = None
            return None
        iteration.first = iteration.confirmed = pending.first
        iteration.others, iteration.found_on = pending.others, pending.likeness
        tried = case.tried.get(parts.agreement.rank, [])
        if parts.agreement.worst(int(bool(pending.flagged) and parts.device.uuid in tried)):
            return self._same_device_again(pending)
        iteration.begin_data()
        parts.replay_state.restore_rng_bytes(bytes.fromhex(pending.rng))
        if pending.state is not None:
            parts.replay_state.load_state_dict(pending.state)
        iteration.capture()
        iteration.state = RerunState.RERUNNING_FROM_CHECKPOINT
        return True

    def _same_device_again(self, pending: Pending) -> bool:
        """Nothing is computed, and the checkpoint stays as it is."""
        parts = self._parts
        for one in pending.flagged:
            parts.track(Rejection.SAME_DEVICE_AGAIN, one.checked)
        text = "a rank runs again on a device that was tried before"
        open_ = Judgement("undecided", text, another_placement_may_decide=True)
        parts.work.send_elsewhere(open_, parts.data_position, bool(pending.flagged))
        parts.iteration.state = RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT
        parts.iteration.exit = Exit(False, True, EXIT_ELSEWHERE)
        return False

    def end_from_checkpoint(self, again: list[Judged]) -> bool:
        """The replay of an earlier attempt's iteration, on other devices, is over."""
        parts, iteration, case = self._parts, self._parts.iteration, self._parts.work.case
        assert case is not None
        iteration.again = again
        now = _by_check(again)
        flagged = [one.checked for one in iteration.first if one.checked.fatal]
        for one in flagged:
            parts.track(self._status_after_move(one, now), now.get(one.check, one))
        moved = Moved(
            parts.agreement.rank,
            flagged=bool(flagged),
            device=parts.device.uuid,
            before=(case.tried.get(parts.agreement.rank) or [""])[0],
            tried=tuple(case.tried.get(parts.agreement.rank) or ()),
            reached=all(one.check in now for one in flagged),
            same=all(one.check in now and parts.same_elsewhere(one, now[one.check]) for one in flagged),
            healthy=not any(one.checked.rejected and one.checked.fatal for one in again),
            stable=all(
                one.checked.check in now
                and difference(one.checked.value, now[one.checked.check].value) <= max(one.checked.tolerance, STABLE_WITHIN)
                for one in iteration.others
            ),
            alike=iteration.found_on == parts.device.likeness,
        )
        all_moved = parts.agreement.gather(moved)
        parts.work.add_moved({one.check: now[one.check].value for one in flagged if one.check in now})
        case.proven = sorted(bad_data(all_moved, case.proven))
        return self.follow(after_judgement(judge_moved(all_moved, case.proven)), all(one.healthy for one in all_moved))

    def _status_after_move(self, before: Checked, now: dict[str, Checked]) -> Rejection:
        if before.check not in now:
            return Rejection.NOT_REACHED
        is_same = self._parts.same_elsewhere(before, now[before.check])
        return Rejection.SECOND_RERUN_REPRODUCIBLE if is_same else Rejection.SECOND_RERUN_NOT_REPRODUCIBLE

    # ----------------------------------------------------------------------------------------- verdicts and ways out

    def follow(self, next_: Next, clean: bool | None = None) -> bool:
        """Close the case, or send it to another device. `clean`: the gradients of the pass just run are the iteration's;
        None: as the verdict says. False."""
        parts, iteration, judgement = self._parts, self._parts.iteration, next_.judgement
        assert judgement is not None
        if next_.step is Step.SEND_ELSEWHERE and not parts.config.can_checkpoint:  # P46: no promise that cannot be kept
            text = f"{judgement.reason}; without a checkpoint no other device can repeat the iteration"
            next_ = Next(Step.CLOSE, RerunState.NOT_RUNNING_YET, Judgement("undecided", text, judgement.accused))
            judgement = next_.judgement
            assert judgement is not None
        if next_.step is Step.SEND_ELSEWHERE:
            self._keeper.keep(judgement, is_open=True)
            iteration.roll_back()
            parts.work.send_elsewhere(judgement, parts.data_position, bool(iteration.confirmed))
            iteration.state, iteration.exit = next_.state, Exit(True, True, EXIT_ELSEWHERE)
            return False
        if clean is None:
            clean = judgement.verdict == "transient"
        judgement = doubt_skips(judgement, parts.config, parts.skips_in_row)
        case_id = parts.work.case_id
        self._keeper.keep(judgement)
        closing = parts.work.close(judgement, clean, parts.data_position)
        parts.tracking.verdict(iteration.number, case_id, judgement.verdict)
        if closing.action != "continue":
            iteration.roll_back()
        parts.injector.clear()
        parts.skips_in_row = parts.skips_in_row + 1 if closing.skip_step else 0
        return iteration.end(closing.exit, closing.skip_step, keeps_batches=closing.exit.should_checkpoint)


def _by_check(judged: list[Judged]) -> dict[str, Checked]:
    return {one.checked.check: one.checked for one in judged}
