"""The learning rate at the corners of every schedule."""

import math

import pytest

from rsup.worker.reference.optimizer_schedule import DECAY_STYLES, LearningRate


def schedule(style: str, **changes: float) -> LearningRate:
    values = {"min_lr": 0.1, "warmup_samples": 100, "decay_samples": 1100, "wsd_decay_samples": 200} | changes
    return LearningRate(lr=1.0, decay_style=style, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_warm_up_is_a_line_to_the_top(style: str) -> None:
    rate = schedule(style, warmup_init=0.2)
    assert rate.at(0) == 0.2
    assert rate.at(50) == pytest.approx(0.6)
    assert rate.at(100) == 1.0


@pytest.mark.parametrize(
    ("style", "middle", "end"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.55, 0.1),
        ("cosine", 0.55, 0.1),
        ("inverse-square-root", math.sqrt(100 / 600), math.sqrt(100 / 1100)),
        ("WSD", 1.0, 0.1),
    ],
)
def test_decay(style: str, middle: float, end: float) -> None:
    rate = schedule(style)
    assert rate.at(600) == pytest.approx(middle)
    assert rate.at(1100) == pytest.approx(max(end, 0.1))
    assert rate.at(1101) == (1.0 if style == "constant" else 0.1)


def test_cosine_is_not_a_line_and_wsd_falls_at_the_end() -> None:
    assert schedule("cosine").at(350) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule("WSD").at(900) == 1.0
    assert schedule("WSD").at(1000) == pytest.approx(0.55)


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_it_never_leaves_its_bounds_and_never_rises_after_warm_up(style: str) -> None:
    rate = schedule(style)
    values = [rate.at(samples) for samples in range(100, 2000, 7)]
    assert all(0.1 <= value <= 1.0 for value in values)
    assert values == sorted(values, reverse=True)


def test_no_warm_up_begins_at_the_top() -> None:
    assert schedule("linear", warmup_samples=0).at(0) == 1.0
