"""Injected faults: what is accepted, that each does what it says, and that it strikes once per job."""

import os
import signal
from pathlib import Path

import pytest

from rsup.supervisor.wire import UsageError
from rsup.worker.exit_policy import ExitPlan, may_save_at
from rsup.worker.faults import Fault, FaultPlan, InjectedFault, check_fault, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rank=1,iteration=25,kind=sigkill", Fault(1, "sigkill", 25)),
        ("kind=gil-hang,iteration=3,rank=0,repeat", Fault(0, "gil-hang", 3, repeat=True)),
        ("rank=0,iteration=2,exit=7", Fault(0, "exit", 2, 7)),
        ("rank=0,iteration=2,kind=exit=7", Fault(0, "exit", 2, 7)),
        ("rank=2,kind=hang-at-start", Fault(2, "hang-at-start")),
    ],
)
def test_what_is_a_fault(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == parse_fault(text.removesuffix(",repeat"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rank=1,iteration=5,kind=explode", "unknown kind"),
        ("rank=1,iteration=5", "unknown kind"),
        ("rank=1,iteration=5,kind=exit", "exit= must be a number"),
        ("rank=1,iteration=5,kind=hang,exit=3", "unknown kind"),
        ("rank=1,iteration=5,kind=hang,when=now", "unknown key 'when'"),
        ("rank=1,rank=2,iteration=5,kind=hang", "'rank' is given twice"),
        ("rank=1,kind=hang", "iteration= must be a number"),
        ("iteration=1,kind=hang", "rank= must be a number"),
        ("rank=-1,iteration=1,kind=hang", "rank= must be a number"),
        ("rank=x,iteration=1,kind=hang", "rank= must be a number"),
        ("rank=1,iteration=1,exit=300", "at most 255"),
        ("rank=1,iteration=1,kind=hang-at-start", "leave iteration out"),
        ("rank=1,iteration=1,kind=hang,repeat=yes", "takes none"),
        ("", "unknown key"),
    ],
)
def test_what_is_none(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_fault(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rank=2,iteration=5,kind=hang", "there is no rank 2 among 2"),
        ("rank=1,iteration=21,kind=hang", "there is no iteration 21 among 1 to 20"),
        ("rank=1,iteration=0,kind=hang", "there is no iteration 0"),
        ("rank=1,iteration=5,kind=hang-in-checkpoint", "nothing is saved after iteration 5"),
    ],
)
def test_what_cannot_happen_is_refused(text: str, complaint: str) -> None:
    plan = ExitPlan(last_iteration=20, can_save=True, save_interval=8)
    with pytest.raises(UsageError, match=complaint):
        check_fault(parse_fault(text), 2, 20, lambda iteration: may_save_at(plan, iteration))
    for possible in (8, 16, 20):
        fault = Fault(1, "hang-in-checkpoint", possible)
        check_fault(fault, 2, 20, lambda iteration: may_save_at(plan, iteration))


def strikes(plan: FaultPlan, iteration: int) -> bool:
    try:
        plan.at_step(iteration)
    except InjectedFault:
        return True
    return False


def test_once_per_job_also_across_attempts_unless_repeated(tmp_path: Path) -> None:
    once, often = Fault(0, "exception", 5), Fault(0, "exception", 6, repeat=True)
    markers = tmp_path / "markers"
    first = FaultPlan([once, often], 0, markers, "job.1")
    assert not strikes(first, 4) and strikes(first, 5) and not strikes(first, 5)
    next_attempt = FaultPlan([once, often], 0, markers, "job.1")
    assert not strikes(next_attempt, 5)
    assert strikes(next_attempt, 6) and strikes(next_attempt, 6)
    assert strikes(FaultPlan([once], 0, markers, "job.2"), 5)
    assert not strikes(FaultPlan([once], 1, markers, "job.3"), 5)


def in_child(act) -> int:
    """Status of a forked child that does `act` and, if that returns, exits with 99."""
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(99)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return status


@pytest.mark.parametrize("kind", ["sigkill", "sigstop", "exit"])
def test_kinds_that_end_or_stop_the_process(tmp_path: Path, kind: str) -> None:
    fault = Fault(0, kind, 3, exit_code=7 if kind == "exit" else 0)
    plan = FaultPlan([fault], 0, tmp_path / "deep" / "markers", "job")
    status = in_child(lambda: plan.at_step(3))
    if kind == "sigkill":
        assert os.WTERMSIG(status) == signal.SIGKILL
    elif kind == "sigstop":
        assert os.WSTOPSIG(status) == signal.SIGSTOP
    else:
        assert os.WEXITSTATUS(status) == 7
    assert len(list((tmp_path / "deep" / "markers").iterdir())) == 1
