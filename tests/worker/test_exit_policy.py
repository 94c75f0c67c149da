"""The seed's order of ways out: as a table, and for every combination of reasons."""

import itertools

import pytest

from rsup.supervisor.wire import LEAVE_KINDS
from rsup.worker.exit_policy import Asked, Decision, ExitPlan, decide, may_save_at, problem_of_phases

PLAN = ExitPlan(100, True, save_interval=10, exit_interval=40, phase_transitions=(25,), local_save_interval=4)
ALL = Asked(signal="SIGTERM", save=True, leave=True, duration_over=True, deadline_near=True)


@pytest.mark.parametrize(
    ("asked", "iteration", "decision"),
    [
        (Asked(), 7, Decision(False, False, "")),
        (Asked(), 10, Decision(True, False, "")),
        (Asked(save=True), 7, Decision(True, False, "asked for")),
        (ALL, 40, Decision(True, True, "signal SIGTERM", "signal")),
        (Asked(save=True, leave=True, duration_over=True), 40, Decision(True, True, "asked to stop", "request")),
        (Asked(duration_over=True), 40, Decision(True, True, "the time budget is used up", "duration")),
        (Asked(), 40, Decision(True, True, "iteration 40 is a multiple of the exit interval", "interval")),
        (Asked(), 25, Decision(True, True, "iteration 25 ends a phase", "phase")),
        (Asked(), 100, Decision(True, True, "", "finished")),
    ],
)
def test_order(asked: Asked, iteration: int, decision: Decision) -> None:
    assert decide(PLAN, asked, iteration) == decision


FLAGS = ("signal", "leave", "duration_over", "deadline_near", "save", "measure_save")
OF_FLAG = {"signal": "signal", "leave": "request", "duration_over": "duration", "deadline_near": "deadline"}


@pytest.mark.parametrize("iteration", [7, 4, 10, 20, 25, 40, 100])
def test_every_combination_takes_the_first_way_out_and_every_way_out_saves_durably(iteration: int) -> None:
    """P34: a local save never stands in for the durable one of a way out."""
    at = {40: "interval", 25: "phase", 100: "finished"}.get(iteration, "")
    for bits in itertools.product((False, True), repeat=len(FLAGS)):
        flags = dict(zip(FLAGS, bits, strict=True))
        asked = Asked(**{**flags, "signal": "SIGUSR1" if flags["signal"] else ""})  # type: ignore[arg-type]
        decision = decide(PLAN, asked, iteration)
        expected = next((OF_FLAG[name] for name in OF_FLAG if flags[name]), at)
        assert (decision.kind, decision.leave) == (expected, bool(expected)), (flags, iteration)
        assert decision.kind in ("", *LEAVE_KINDS)
        is_due = iteration % PLAN.save_interval == 0 if PLAN.save_interval else False
        wanted = bool(expected) or flags["save"] or flags["measure_save"] or is_due
        assert decision.save == wanted and decision.save_local == (not wanted and iteration % 4 == 0), (flags, iteration)


def test_a_signal_that_ends_training_in_order_asks_for_no_save() -> None:
    """P35: with both handlers the one that saves wins (`saves_on_signal` is then True)."""
    quiet = decide(PLAN, Asked(signal="SIGINT", saves_on_signal=False), 10)
    assert (quiet.leave, quiet.save, quiet.kind) == (True, False, "signal")
    assert decide(PLAN, Asked(signal="SIGINT"), 10).save


def test_without_a_directory_every_way_out_still_leaves() -> None:
    plan = ExitPlan(last_iteration=100, can_save=False, exit_interval=40, phase_transitions=(25,))
    for asked, iteration in ((ALL, 7), (Asked(duration_over=True), 7), (Asked(), 40), (Asked(), 25), (Asked(), 100)):
        decision = decide(plan, asked, iteration)
        assert decision.leave and not decision.save
    assert decide(plan, Asked(measure_save=True), 7) == Decision(False, False, "")


def test_where_an_undisturbed_run_saves() -> None:
    plan = ExitPlan(last_iteration=25, can_save=True, save_interval=10, local_save_interval=4)
    assert [iteration for iteration in range(1, 26) if may_save_at(plan, iteration)] == [10, 20, 25]
    assert [i for i in range(1, 26) if decide(plan, Asked(), i).save_local] == [4, 8, 12, 16, 24], "20 is a durable one"
    assert not may_save_at(ExitPlan(last_iteration=25, can_save=False), 25)
    assert decide(ExitPlan(None, True), Asked(), 10**9) == Decision(False, False, ""), "a loop that ends when it likes"


@pytest.mark.parametrize(
    ("ends", "complaint"),
    [
        ((), ""),
        ((10, 20), ""),
        ((10, 10), "10 comes after 10"),
        ((20, 10), "10 comes after 20"),
        ((10, 60), "60 is not before"),
    ],
)
def test_ends_of_phases_grow_and_lie_before_the_end(ends: tuple[int, ...], complaint: str) -> None:
    assert problem_of_phases(ends, 60).startswith(complaint)
    assert bool(problem_of_phases(ends, 60)) == bool(complaint)
