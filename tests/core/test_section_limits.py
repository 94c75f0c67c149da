"""Calculated limits."""

import pytest

from rsup.supervisor.section_limits import OUT_OF_SECTION, calculate, eligible, merge
from rsup.supervisor.states import Observed
from rsup.supervisor.wire import Limits, SectionSeen, SectionsObserved


def seen(step_s: float = 2.0, steps: int = 20, checkpoints: int = 1, **fields: object) -> Observed:
    sections = {
        "step": SectionSeen(step_s, steps),
        "setup": SectionSeen(30.0, 1),
        "checkpointing": SectionSeen(4.0, checkpoints),
    }
    fact = SectionsObserved(0, 1, sections, 1.5, steps, checkpoints, **fields)  # type: ignore[arg-type]
    return merge(Observed(), fact)


@pytest.mark.parametrize(
    ("observed", "closing", "expected"),
    [
        (seen(), False, {"step", "checkpointing"}),
        (seen(steps=15), False, {"checkpointing"}),
        (seen(async_save=True), False, {"step"}),
        (seen(loaded_persistent=True), False, {"step", "setup", "checkpointing"}),
        (seen(loaded_persistent=True), True, {"step", "setup", "checkpointing", OUT_OF_SECTION}),
        (seen(loaded_persistent=True, checkpoints=0), True, {"step", "setup"}),
        (seen(), True, {"step", "checkpointing"}),
    ],
)
def test_what_has_been_seen_enough(observed: Observed, closing: bool, expected: set[str]) -> None:
    assert set(eligible(observed, closing)) == expected


def test_a_users_own_section_needs_sixteen_times() -> None:
    for times, expected in [(15, []), (16, ["load"])]:
        observed = merge(Observed(), SectionsObserved(0, 1, {"load": SectionSeen(1.0, times)}))
        assert eligible(observed, False) == expected


def test_factor_five_and_the_average_with_the_limit_before() -> None:
    limits, observed = calculate(Limits(), Limits(), seen(step_s=2.0))
    assert limits.sections == {"step": 10.0, "checkpointing": 20.0} and limits.calculated == ["checkpointing", "step"]
    again, observed = calculate(limits, Limits(), observed)
    assert again is limits, "nothing new: no checkpoint since"
    later = merge(observed, SectionsObserved(0, 1, {"step": SectionSeen(4.0, 40)}, 0.0, 40, 2))
    third, _ = calculate(limits, Limits(), later)
    assert third.sections["step"] == 15.0


def test_the_maximum_over_nodes_counts() -> None:
    observed = merge(seen(step_s=2.0), SectionsObserved(0, 1, {"step": SectionSeen(7.0, 3)}))
    assert observed.sections["step"] == SectionSeen(7.0, 20)


@pytest.mark.parametrize(("enforce", "expected"), [(False, 60.0), (True, 10.0)])
def test_a_configured_limit_gives_way_only_if_that_was_asked_for(enforce: bool, expected: float) -> None:
    configured = Limits(sections={"step": 60.0}, enforce_calculated=enforce)
    limits, _ = calculate(configured, configured, seen(step_s=2.0))
    assert limits.sections["step"] == expected


def test_no_limit_below_ten_seconds() -> None:
    limits, _ = calculate(Limits(), Limits(), seen(step_s=0.001))
    assert limits.sections["step"] == 10.0
