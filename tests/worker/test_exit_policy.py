"""The seed's order of ways out, as a table."""

import pytest

from rsup.worker.exit_policy import Asked, Decision, ExitPlan, decide, may_save_at

PLAN = ExitPlan(last_iteration=100, can_save=True, save_interval=10, exit_interval=40, phase_transitions=(25,))
ALL = Asked(signal="SIGTERM", save=True, leave=True, duration_over=True)


@pytest.mark.parametrize(
    ("asked", "iteration", "decision"),
    [
        (Asked(), 7, Decision(False, False, "")),
        (Asked(), 10, Decision(True, False, "")),
        (Asked(save=True), 7, Decision(True, False, "asked for")),
        (ALL, 40, Decision(True, True, "signal SIGTERM")),
        (Asked(save=True, leave=True, duration_over=True), 40, Decision(True, True, "asked to stop")),
        (Asked(duration_over=True), 40, Decision(True, True, "the time budget is used up")),
        (Asked(), 40, Decision(True, True, "iteration 40 is a multiple of the exit interval")),
        (Asked(), 25, Decision(True, True, "iteration 25 ends a phase")),
        (Asked(), 100, Decision(True, True, "")),
    ],
)
def test_order(asked: Asked, iteration: int, decision: Decision) -> None:
    assert decide(PLAN, asked, iteration) == decision


def test_without_a_directory_every_way_out_still_leaves() -> None:
    plan = ExitPlan(last_iteration=100, can_save=False, exit_interval=40, phase_transitions=(25,))
    for asked, iteration in ((ALL, 7), (Asked(duration_over=True), 7), (Asked(), 40), (Asked(), 25), (Asked(), 100)):
        decision = decide(plan, asked, iteration)
        assert decision.leave and not decision.save


def test_where_an_undisturbed_run_saves() -> None:
    plan = ExitPlan(last_iteration=25, can_save=True, save_interval=10)
    assert [iteration for iteration in range(1, 26) if may_save_at(plan, iteration)] == [10, 20, 25]
    assert not may_save_at(ExitPlan(last_iteration=25, can_save=False), 25)
