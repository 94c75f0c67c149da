"""The rerun machine's transitions, without torch.distributed: severities, verdicts of moves, and what follows a verdict."""

import itertools
import math
from dataclasses import replace

import pytest

from rsup.worker.rerun.contract import Checked, Exit, Judgement, RerunConfig, RerunState
from rsup.worker.rerun.machine import (
    Moved,
    Severity,
    Step,
    after_confirmation,
    after_first_pass,
    after_judgement,
    after_replay,
    bad_data,
    closing,
    doubt_skips,
    first_severity,
    judge_moved,
    replay_severity,
)
from rsup.worker.rerun.passes import Judged

NAN = math.nan


def judged(check: str, value: float, rejected: bool = False, fatal: bool = True) -> Judged:
    return Judged(Checked(check, value, rejected, fatal))


MINOR = judged("spiky", 9.0, True, False)
FATAL = judged("loss", NAN, True)


@pytest.mark.parametrize(
    ("first", "severity"),
    [
        ([], Severity.CLEAN),
        ([judged("loss", 1.0)], Severity.CLEAN),
        ([MINOR], Severity.MINOR),
        ([MINOR, FATAL], Severity.FATAL),
        ([FATAL, MINOR], Severity.FATAL),
    ],
)
def test_every_finding_of_a_pass_counts(first: list[Judged], severity: Severity) -> None:
    """P4, S11: a finding that is not fatal hides no fatal one of the same rank, whichever comes first."""
    assert first_severity(first) is severity


@pytest.mark.parametrize(
    ("first", "again", "severity"),
    [
        ([FATAL], [judged("loss", 1.0)], Severity.TRANSIENT),
        ([FATAL], [judged("loss", NAN, True)], Severity.REPRODUCED),
        ([FATAL], [judged("loss", math.inf, True)], Severity.REPRODUCED),  # another value, rejected as well
        ([FATAL], [], Severity.UNREACHED),
        ([FATAL], [judged("loss", 1.0), judged("grad", NAN, True)], Severity.UNREACHED),
        ([MINOR], [judged("spiky", 1.0)], Severity.MINOR),
        ([MINOR], [judged("spiky", 9.0, True, False)], Severity.MINOR),
        ([MINOR, FATAL], [judged("spiky", 9.0, True, False), judged("loss", 1.0)], Severity.TRANSIENT),
        ([], [judged("loss", 1.0)], Severity.CLEAN),
        ([], [judged("loss", NAN, True)], Severity.UNREACHED),
    ],
)
def test_what_a_replay_in_place_shows(first: list[Judged], again: list[Judged], severity: Severity) -> None:
    assert replay_severity(first, again) is severity


def test_no_finding_is_cancelled_by_a_lesser_one() -> None:
    """P3, S10: whatever other ranks found, a fatal outcome decides what all do."""
    for severities in itertools.product(Severity, repeat=3):
        agreed = max(severities)
        if Severity.REPRODUCED in severities:
            assert after_replay(agreed, "").step is Step.ROTATE
            assert after_replay(agreed, "alone").step is Step.SEND_ELSEWHERE
        elif Severity.TRANSIENT in severities or Severity.UNREACHED in severities:
            assert after_replay(agreed, "").step in (Step.CLOSE,) if agreed is not Severity.FATAL else True


def test_a_clean_pass_goes_on_and_any_other_is_replayed() -> None:
    assert after_first_pass(Severity.CLEAN).step is Step.GO_ON
    for severity in (Severity.MINOR, Severity.FATAL):
        assert after_first_pass(severity).state is RerunState.RERUNNING_IN_PLACE


def test_data_dependent_faults_must_come_out_a_second_time_in_place() -> None:
    found = Judgement("persistent", "...", (1,), data_dependent=True)
    assert after_judgement(found).step is Step.CONFIRM
    assert after_confirmation(Severity.REPRODUCED, found).judgement == found
    doubted = after_confirmation(Severity.TRANSIENT, found).judgement
    assert doubted is not None and doubted.verdict == "undecided"


def moved(rank: int, *, flagged: bool = True, device: str = "", before: str = "?", **found: bool) -> Moved:
    """A rank that ran on `old-RANK` and now runs on `new-RANK`."""
    device, before = device or f"new-{rank}", f"old-{rank}" if before == "?" else before
    return Moved(rank, flagged=flagged, device=device, before=before, **found)


CALM = moved(0, flagged=False)
SWAPPED = [moved(0, device="old-1", same=True, healthy=False), moved(1, device="old-0", same=True, healthy=False)]


@pytest.mark.parametrize(
    ("all_moved", "verdict", "accused"),
    [
        ([CALM, moved(1, same=True, healthy=False)], "application", ()),
        ([CALM, moved(1)], "persistent", (1,)),
        ([CALM, moved(1, healthy=False)], "undecided", ()),
        ([CALM, moved(1, reached=False)], "undecided", ()),
        ([CALM, moved(1, flagged=False)], "undecided", ()),
        ([CALM, moved(1, alike=False)], "undecided", ()),
        ([CALM, moved(1, before="")], "undecided", ()),  # another rank's state: it says nothing of this one's device
        ([CALM, moved(1, stable=False)], "undecided", ()),  # the process made the difference, as far as one can see
        ([CALM, moved(1, same=True, healthy=False, alike=False)], "application", ()),
        ([moved(0, same=True, healthy=False), moved(1)], "persistent", (1,)),
        (
            [moved(0, device="old-1", same=True, healthy=False), moved(1, device="old-0", same=True, healthy=False)],
            "undecided",
            (),
        ),
    ],
)
def test_verdict_of_a_replay_on_another_device(all_moved: list[Moved], verdict: str, accused: tuple[int, ...]) -> None:
    judgement = judge_moved(all_moved)
    assert (judgement.verdict, judgement.accused) == (verdict, accused)


@pytest.mark.parametrize(
    ("verdict", "config", "clean", "in_use", "action", "exit_"),
    [
        ("transient", RerunConfig(), True, False, "continue", Exit(False, False, 0)),
        ("transient", RerunConfig(), False, False, "restart", Exit(False, True, 17)),
        ("transient", RerunConfig(on_transient="restart"), True, False, "restart", Exit(False, True, 17)),
        ("persistent", RerunConfig(), False, True, "elsewhere", Exit(True, True, 16)),
        ("persistent", RerunConfig(), True, True, "elsewhere", Exit(True, True, 16)),
        ("persistent", RerunConfig(), True, False, "continue", Exit(False, False, 0)),
        ("application", RerunConfig(), False, False, "leave", Exit(False, True, 17)),
        ("application", RerunConfig(on_application="skip"), False, False, "skip", Exit(False, False, 0)),
        ("corrupted state", RerunConfig(), False, False, "restart", Exit(False, True, 17)),
        ("undecided", RerunConfig(), False, False, "leave", Exit(False, True, 17)),
    ],
)
def test_what_follows_a_verdict(verdict: str, config: RerunConfig, clean: bool, in_use: bool, action: str, exit_: Exit) -> None:
    """P20/H1: a transient or corrupted state leaves no checkpoint; DESIGN.md 6, after the verdict."""
    found = closing(Judgement(verdict, "..."), config, clean=clean, accused_in_use=in_use)
    assert (found.action, found.exit) == (action, exit_)


def test_skipping_for_bad_data_has_an_end() -> None:
    """Iteration after iteration left out for its data is no longer the data's fault: the job must not end as a success."""
    skips, found = RerunConfig(on_application="skip"), Judgement("application", "...")
    assert doubt_skips(found, skips, 0) == doubt_skips(found, skips, 1) == found
    assert doubt_skips(found, skips, 2).verdict == "undecided"
    assert doubt_skips(found, RerunConfig(), 5) == found
    assert doubt_skips(Judgement("persistent", "..."), skips, 5).verdict == "persistent"


def test_a_doubtful_audit_lets_training_go_on() -> None:
    """Devices differ, no check has failed, and nobody can say which is wrong: in doubt, keep training."""
    found = closing(Judgement("undecided", "..."), RerunConfig(), clean=True, accused_in_use=False, is_audit=True)
    assert found.action == "continue" and not found.exit.should_exit


def test_data_proven_bad_clears_the_boards_that_it_failed_on() -> None:
    """Bad data on all three ranks, one spare: two moves tell it from three bad boards."""
    fails = {"same": True, "healthy": False}
    first = [moved(0, device="old-1", **fails), moved(1, device="old-0", **fails), moved(2, device="spare", **fails)]
    assert bad_data(first) == {2} and judge_moved(first).verdict == "undecided"
    tried = (("old-0", "old-1"), ("old-1", "old-0"), ("old-2", "spare"))
    second = [moved(0, device="old-2", **fails), moved(1, device="spare", **fails), moved(2, device="old-0", **fails)]
    second = [replace(one, tried=tried[one.rank]) for one in second]
    proven = bad_data(second, {2})
    assert proven == {0, 1, 2} and judge_moved(second, proven).verdict == "application"
