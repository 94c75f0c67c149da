"""Unexpectedly large values: S18."""

import math

import pytest

from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.large_values import LargeValues


def learned(*values: float, context: str = "loss") -> LargeValues:
    large = LargeValues()
    for value in values:
        assert not large.is_unexpectedly_large(value, 10, context, num_samples=len(values))
        large.commit()
    return large


def ask(large: LargeValues, value: float, context: str = "loss", num_samples: int = 10) -> bool:
    found = large.is_unexpectedly_large(value, 10, context, num_samples)
    large.rollback()
    return found


def test_learning_then_a_strict_threshold() -> None:
    """P13: the threshold itself is not beyond it; the sign does not count."""
    large = learned(*[1.0] * 10)
    assert not ask(large, 10.0)
    assert ask(large, 10.001)
    assert ask(large, -10.001)


def test_a_baseline_of_zeros_never_flags_zero() -> None:
    """P13"""
    large = learned(*[0.0] * 10)
    assert not ask(large, 0.0)
    assert not ask(large, 1e-6)
    assert ask(large, 1e30)


def test_nan_and_infinity_are_other_checks_business() -> None:
    large = learned(*[1.0] * 10)
    for value in (math.nan, math.inf, -math.inf):
        assert not large.is_unexpectedly_large(value, 10, "loss", 10)
        large.commit()
    assert ask(large, 11.0)


def test_the_baseline_follows_and_few_outliers_do_not_blind_it() -> None:
    """P13: an accepted outlier does not raise the threshold for good, a new level is learned within a window."""
    large = learned(*[1.0] * 10)
    assert large.is_unexpectedly_large(1e6, 10, "loss", 10)
    large.commit()
    assert ask(large, 20.0)
    for flagged in [True] + [False] * 10:
        assert large.is_unexpectedly_large(20.0, 10, "loss", 10) is flagged
        large.commit()
    for _ in range(10):
        large.is_unexpectedly_large(0.1, 10, "loss", 10)
        large.commit()
    assert ask(large, 1.1)


def test_each_place_and_evaluation_learns_by_itself() -> None:
    """P13, P15: buckets apart, and evaluation neither trips nor trains the baseline of training."""
    large = learned(*[1.0] * 10)
    assert not ask(large, 1e9, "bucket 3")
    large.evaluating = True
    for _ in range(10):
        assert not large.is_unexpectedly_large(1e9, 10, "loss", 10)
    assert large.is_unexpectedly_large(1e11, 10, "loss", 10)
    large.evaluating = False
    assert ask(large, 11.0)
    assert not ask(large, 9.0)


def test_resampling_really_forgets_and_then_detects_again() -> None:
    """P13: given all the time, it forgets once."""
    large = learned(*[1000.0] * 10)
    for _ in range(10):
        assert not large.is_unexpectedly_large(1.0, 10, "loss", 10, resample=True)
        large.commit()
    assert large.is_unexpectedly_large(11.0, 10, "loss", 10, resample=True)
    large.rollback()
    assert not large.is_unexpectedly_large(9.0, 10, "loss", 10)
    large.commit()
    assert not large.is_unexpectedly_large(1e6, 10, "loss", 10, resample=True)  # asked for anew after a call without


def test_a_rejected_pass_does_not_poison_the_baseline() -> None:
    large = learned(*[1.0] * 10)
    before = large.state_dict()
    for _ in range(50):
        large.is_unexpectedly_large(1e9, 10, "loss", 10)
        large.is_unexpectedly_large(1e9, 10, "loss", 10, resample=True)
    large.rollback()
    assert large.state_dict() == before
    assert ask(large, 11.0)


def test_it_survives_a_restart() -> None:
    """P14: baselines come back from any checkpoint, whether or not a rerun is pending."""
    state = learned(*[1.0] * 7).state_dict()
    large = LargeValues()
    large.load_state_dict(state)
    assert large.state_dict() == state
    assert ask(large, 11.0, num_samples=7)
    assert not ask(large, 11.0, num_samples=8)  # another window: one more sample is wanted


@pytest.mark.parametrize("damage", [{}, {"format": 2}, {"format": 1, "contexts": {"loss": {"recent": ["x"]}}}, None])
def test_unreadable_baselines_are_refused_and_what_is_there_stays(damage: dict[str, object]) -> None:
    large = learned(*[1.0] * 10)
    with pytest.raises(RerunError, match="learned anew"):
        large.load_state_dict(damage)
    assert ask(large, 11.0)


def test_memory_is_bounded() -> None:
    large = LargeValues()
    for i in range(1000):
        large.is_unexpectedly_large(float(i % 7), 10, "loss", 10)
        large.commit()
    assert len(large.state_dict()["contexts"]["loss"]["recent"]) == 10
