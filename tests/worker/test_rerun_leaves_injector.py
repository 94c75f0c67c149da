"""Injected errors and determinism statistics."""

import json
import math
import random

import pytest

from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.injector import ErrorInjector
from rsup.worker.rerun.statistics import DeterminismStatistics, Sketch


def hits(injector: ErrorInjector, iterations: int = 400) -> list[int]:
    found = []
    for iteration in range(1, iterations + 1):
        if injector.fires(iteration, "loss"):
            found.append(iteration)
        injector.clear()
    return found


def test_it_draws_nothing_and_follows_from_seed_iteration_check_and_rank() -> None:
    """P37"""
    before = random.getstate()
    found = hits(ErrorInjector(20, "transient_error", seed=1, rank=0))
    assert random.getstate() == before
    assert 8 <= len(found) <= 40
    assert hits(ErrorInjector(20, "persistent_error", seed=1, rank=0)) == found
    assert hits(ErrorInjector(20, "transient_error", seed=2, rank=0)) != found
    assert hits(ErrorInjector(20, "transient_error", seed=1, rank=1)) != found
    assert hits(ErrorInjector(0)) == [] and len(hits(ErrorInjector(1))) == 400


@pytest.mark.parametrize(
    ("kind", "in_place", "elsewhere"),
    [("transient_error", False, False), ("persistent_error", True, False), ("correct_result", True, True)],
)
def test_each_type_fakes_its_outcomes_of_its_own_check_only(kind: str, in_place: bool, elsewhere: bool) -> None:
    """P37: a real comparison of another check is never faked, and nothing stays pending."""
    injector = ErrorInjector(1, kind)
    assert injector.fires(3, "loss")
    assert injector.outcome("loss", elsewhere=False) is in_place
    assert injector.outcome("loss", elsewhere=True) is elsewhere
    assert injector.outcome("grad", elsewhere=False) is None
    assert injector.is_injected("loss") and not injector.is_injected("grad")
    injector.clear()
    assert injector.outcome("loss", elsewhere=False) is None


def test_what_was_hit_travels_to_the_replay_from_a_checkpoint() -> None:
    injector = ErrorInjector(1, "persistent_error")
    injector.fires(3, "loss")
    resumed = ErrorInjector(0)
    assert not resumed.is_armed
    resumed.load_state_dict(json.loads(json.dumps(injector.state_dict())))
    assert resumed.is_armed and resumed.outcome("loss", elsewhere=True) is False
    resumed.clear()
    assert not resumed.is_armed


def test_a_wrong_rate_or_type_is_refused() -> None:
    with pytest.raises(RerunError, match="negative"):
        ErrorInjector(-1)
    with pytest.raises(RerunError, match="correct_result, transient_error, persistent_error"):
        ErrorInjector(1, "cosmic_ray")


# ---------------------------------------------------------------------------------------------------------- statistics


def test_percentiles_of_any_number_of_samples() -> None:
    """P38, S19: unbiased, however many; zeros count."""
    draw = random.Random(5)
    differences = [0.0] * 30_000 + [10 ** draw.uniform(-9, 0) for _ in range(120_000)]
    draw.shuffle(differences)
    sketch = Sketch()
    for difference in differences:
        sketch.add(difference)
    ordered = sorted(differences)
    for percent in (10, 50, 90, 99, 99.9, 100):
        exact = ordered[math.ceil(len(ordered) * percent / 100) - 1]
        assert sketch.percentile(percent) == pytest.approx(exact, rel=0.0101), percent
    assert sketch.count == 150_000 and sketch.num_zeros == 30_000 and sketch.max == ordered[-1]
    assert sketch.average == pytest.approx(sum(differences) / len(differences))


def test_infinite_differences_are_counted_apart() -> None:
    """P38: the average is never infinite."""
    sketch = Sketch()
    for difference in (0.0, 1.0, math.inf, math.nan, 1e308, 1e308):
        sketch.add(difference)
    assert sketch.num_infinite == 2 and sketch.count == 6
    assert math.isfinite(sketch.average) and math.isfinite(sketch.max) and math.isfinite(sketch.percentile(100))


def test_extreme_and_empty_ones() -> None:
    assert Sketch().percentile(50) == 0.0 and Sketch().average == 0.0
    sketch = Sketch()
    sketch.add(5e-324)
    assert 0 <= sketch.percentile(50) <= 1e-322
    sketch.add(-2.0)
    assert sketch.max == 2.0


def test_ranks_are_merged_by_adding_and_each_window_is_reported_alone() -> None:
    """P38, S19: reset per window on every rank, rank 0 too."""
    ranks = [DeterminismStatistics() for _ in range(3)]
    alone = DeterminismStatistics()
    draw = random.Random(1)
    for window in range(2):
        for statistics in ranks:
            for _ in range(200):
                difference = draw.choice([0.0, draw.random()])
                statistics.add("gradient", difference)
                alone.add("gradient", difference)
            statistics.add("loss", 0.0)
            alone.add("loss", 0.0)
        states = [json.loads(json.dumps(statistics.state_dict())) for statistics in ranks]
        merged = DeterminismStatistics.merged(states)
        assert merged.report_lines() == alone.report_lines(), window
        assert merged.checks["loss"].count == 3
        for statistics in (*ranks, alone):
            statistics.reset()
    assert [statistics.report_lines() for statistics in ranks] == [[], [], []]
    with pytest.raises(ValueError, match="another release"):
        DeterminismStatistics.of_state({"format": 2, "checks": {}})


def test_the_report_says_what_was_counted() -> None:
    statistics = DeterminismStatistics()
    for _ in range(4):
        statistics.add("loss", 0.0)
    for difference in (0.0, 0.5, math.inf):
        statistics.add("grad", difference)
    grad, loss = statistics.report_lines()
    assert loss == "determinism of 'loss': 4 samples, all identical"
    assert grad.startswith(
        "determinism of 'grad': 3 samples, 1 identical, 1 not finite in one pass only, average 2.500e-01, p50"
    )
    assert "p99.9" in grad and grad.endswith("max 5.000e-01")
