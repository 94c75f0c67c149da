"""How long ranks have: by reason, and before the scheduler ends everything. And what is looked at before they are ended."""

import pytest
from msgspec.structs import replace

from rsup.launcher import process_events as ev
from rsup.launcher.launch_parser import parse_launch
from rsup.launcher.process_machine import decide, new_state
from rsup.launcher.process_state import AgentState, Phase, Settings
from rsup.launcher.scheduler_deadline import fitted_grace, is_over, read_end_time
from rsup.launcher.signal_forwarding import told_text
from rsup.launcher.stacks import innermost_frame
from rsup.supervisor import wire

FAILED = "attempt 1 has failed: rank 0 exited with code 1"
STACK = """Process 7: python s.py

Thread 7 (idle): "MainThread"
    waits (s.py:2)
    <module> (s.py:3)
Thread 9 (idle)
    beat (b.py:1)
"""


@pytest.mark.parametrize(
    "grace_s, end_s, wall_s, fits_s",
    [
        (30, None, 1000, 30),
        (30, 1100, 1000, 30),
        (30, 1020, 1000, 15),  # 5 s are for us
        (30, 1004, 1000, 2),  # however little there is, ranks have half of it
        (60, 1000, 1000, 25),  # SLURM's SIGTERM at the end: 30 s until its SIGKILL
        (60, 1000, 1020, 5),
        (60, 1000, 1030, 60),  # long over, and we live: it has been moved
    ],
)
def test_a_grace_fits_into_what_the_scheduler_leaves(grace_s: float, end_s: float | None, wall_s: float, fits_s: float) -> None:
    fitted = fitted_grace(grace_s, end_s, wall_s, margin_s=5)
    assert fitted.grace_s == fits_s
    assert bool(fitted.why) == (fits_s < grace_s)


def test_when_nothing_may_be_waited_for_any_more() -> None:
    assert not is_over(None, 1000, 5) and not is_over(1000, 994, 5)
    assert is_over(1000, 995, 5)
    assert not is_over(1000, 1010, 5) and is_over(1000, 1026, 5) and not is_over(1000, 1031, 5)


@pytest.mark.parametrize(
    "text, end_s",
    [("1767225600", 1767225600.0), ("", None), ("NONE", None), ("0", None), ("9" * 30, None)],
)
def test_slurms_end_time(text: str, end_s: float | None) -> None:
    assert read_end_time({"SLURM_JOB_END_TIME": text}) == end_s


def test_the_options() -> None:
    options = parse_launch(["--signal-grace", "TERM=110", "--signal-grace=SIGINT=0.5", "--deadline", "1767225600", "s.py"], {})
    assert {signum.name: grace_s for signum, grace_s in options.signal_graces.items()} == {"SIGTERM": 110, "SIGINT": 0.5}
    assert options.deadline == 1767225600
    assert parse_launch(["--deadline", "none", "s.py"]).deadline is None
    assert options.notes == ("--deadline 1767225600 is in the past: it is ignored, and no grace is shortened",)
    (note,) = parse_launch(["s.py"], {"SLURM_JOB_END_TIME": "1767225600"}).notes
    assert note.startswith("SLURM_JOB_END_TIME=1767225600 is in the past")
    assert parse_launch(["--deadline", "99999999999", "s.py"], {}).notes == ()
    for wrong in ("TERM", "NOSUCH=3", "TERM=soon", "TERM=-1"):
        with pytest.raises(wire.UsageError, match="--signal-grace"):
            parse_launch(["--signal-grace", wrong, "s.py"])


def at(mono_s: float, wall_s: float = 1_000_000.0) -> ev.Moment:
    return ev.Moment(mono_s, int((wall_s + mono_s) * 1e6))


def step(state: AgentState, event: ev.Event, mono_s: float) -> tuple[AgentState, list[ev.Action]]:
    """The event alone; that the ticks before it came in time is taken for granted."""
    return decide(replace(state, tick_at=max(state.tick_at, mono_s - 0.1)), event, at(mono_s))


def running(settings: Settings | None = None) -> AgentState:
    """Two ranks run; it is 1 s."""
    start = wire.StartAttempt(1, "go", 1, 1, 0, 2, 2, 0, 1, "127.0.0.1", 29500, "j", 1, 0)
    welcome = wire.Welcome((1, 3), "0", wire.SupervisorInfo("i", 1, "h", True), "j", 1, 1, 0)
    state, _ = step(new_state(settings or Settings(), at(0.0)), ev.Welcomed(welcome), 0.5)
    state, _ = step(state, ev.OrderArrived(wire.Order("a", 1, 0, [start])), 1.0)
    state, _ = step(state, ev.RanksSpawned(1, (7, 8)), 1.0)
    assert state.phase is Phase.RUNNING
    return state


def stop(state: AgentState, mono_s: float, grace_s: float = 30.0, stacks_s: float = 0.0) -> tuple[AgentState, list[ev.Action]]:
    order = wire.Order("a", 1, 0, [wire.StopAttempt(2, FAILED, 1, grace_s, stacks_s)])
    return step(state, ev.OrderArrived(order), mono_s)


def kinds(actions: list[ev.Action]) -> set[str]:
    return {type(action).__name__ for action in actions}


def test_each_signal_has_its_grace_and_tells_it() -> None:
    settings = Settings(stop_grace_s=30.0, signal_graces_s={15: 110.0})
    for signum, grace_s in ((15, 110.0), (2, 30.0)):
        state = running(settings)
        state, actions = step(state, ev.SignalArrived(signum), 2.0)
        assert state.stop is not None and state.stop.kill_at == 2.0 + grace_s
        facts = [action.fact for action in actions if isinstance(action, ev.AddFact)]
        assert [fact.grace_s for fact in facts if isinstance(fact, wire.SignalReceived)] == [grace_s]


def test_the_schedulers_end_comes_before_any_grace_and_is_said_once() -> None:
    state = running(Settings(end_s=1_000_022.0))
    state, actions = stop(state, 2.0)
    assert state.stop is not None and state.stop.kill_at == 2.0 + 15.0
    (said,) = [action.text for action in actions if isinstance(action, ev.PrintReport)]
    assert said == "rsup: the scheduler ends the job in 20 s: ranks have 15 s instead of 30 s"
    _, actions = stop(state, 2.5)
    assert "PrintReport" not in kinds(actions)


def test_after_a_timeout_stacks_come_before_sigterm() -> None:
    state, actions = stop(running(), 2.0, stacks_s=2.0)
    assert kinds(actions) == {"CollectStacks"} and state.stop is None
    stacks = (wire.RankStack(0, 7, "py-spy", STACK),)
    state, actions = step(state, ev.StacksReady(1, stacks), 2.4)
    assert [action.signum for action in actions if isinstance(action, ev.SignalRanks)] == [15]
    assert state.stop is not None and state.stop.kill_at == 32.4
    assert state.stood_in == ((0, "waits (s.py:2)"),)


def test_stacks_that_do_not_come_hold_nothing_up() -> None:
    state, _ = stop(running(), 2.0, stacks_s=2.0)
    for tick in range(20, 46):
        state, actions = step(state, ev.Tick(), tick / 10)
        if "SignalRanks" in kinds(actions):
            assert tick == 45
            break
    else:
        pytest.fail("never told to end")


def test_who_asks_for_no_stacks_gets_none_at_once_but_of_a_rank_that_does_not_go() -> None:
    state, actions = stop(running(), 2.0)
    assert kinds(actions) == {"SignalRanks"}
    state, _ = step(state, ev.RankDied(1, 1, 143, 15), 2.1)
    seen = []
    for tick in range(22, 80):
        state, actions = step(state, ev.Tick(), tick / 10)
        seen += [(tick, action.within_s) for action in actions if isinstance(action, ev.CollectStacks)]
    assert seen == [(30, 5.0)]


def test_a_person_who_ends_the_job_gets_no_stacks_of_ranks_that_save() -> None:
    state = running()
    state, _ = step(state, ev.SignalArrived(15), 2.0)
    for tick in range(21, 80):
        state, actions = step(state, ev.Tick(), tick / 10)
        assert "CollectStacks" not in kinds(actions)


@pytest.mark.parametrize(
    "text, pid, frame",
    [
        (STACK, 7, "waits (s.py:2)"),
        (STACK.replace(': "MainThread"', ""), 7, "waits (s.py:2)"),
        ("Process 7: python\n\nThread 7 (idle)\nThread 9 (idle)\n    beat (b.py:1)\n", 7, ""),
        ("the process has ended", 7, ""),
    ],
)
def test_where_a_rank_stood(text: str, pid: int, frame: str) -> None:
    assert innermost_frame(text, pid) == frame


def test_what_is_said_of_a_signal_that_was_passed_on() -> None:
    assert told_text("SIGUSR1", [0, 1], 2) == "SIGUSR1 passed on to all 2 ranks; training goes on"
    assert told_text("SIGUSR1", [3], 1) == "SIGUSR1 passed on to the rank; training goes on"
    assert told_text("SIGUSR1", [3], 2) == "SIGUSR1 passed on to rank 3; the others have no handler for it; training goes on"
    assert "no rank has a handler" in told_text("SIGUSR1", [], 2)
