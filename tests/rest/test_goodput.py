"""Where a job's time went."""

import pytest

from rsup.supervisor.goodput import AttemptTimes, goodput

S = 1_000_000


def attempt(
    number: int, started: int, first: int | None, stopped: int | None, begin: int, last: int, fault: int | None = None
) -> AttemptTimes:
    """An attempt with times in seconds."""
    times = [None if time is None else time * S for time in (first, stopped, fault)]
    return AttemptTimes(number, started * S, times[0], times[1], begin, last, times[2])


def test_an_undisturbed_job_loses_nothing() -> None:
    found = goodput(0, 100 * S, [attempt(1, 5, 10, 100, 0, 90)], 0)
    assert found == {"wall_s": 100, "stepping_s": 90, "lost_s": 0, "down_s": 10, "productive_s": 90, "ratio": 0.9}


def test_work_that_was_done_again_is_lost() -> None:
    attempts = [attempt(1, 0, 10, 60, 0, 50, fault=60), attempt(2, 60, 70, 120, 40, 90)]
    found = goodput(0, 120 * S, attempts, 0)
    assert found["lost_s"] == pytest.approx(10) and found["productive_s"] == pytest.approx(90)


def test_standing_still_until_a_hang_is_found_is_lost() -> None:
    attempts = [attempt(1, 0, 10, 60, 0, 40, fault=50), attempt(2, 60, 70, 80, 40, 50)]
    assert goodput(0, 80 * S, attempts, 0)["lost_s"] == pytest.approx(10)


def test_starting_over_loses_all() -> None:
    attempts = [attempt(1, 0, 10, 60, 0, 50, fault=60), attempt(2, 60, 70, 120, 0, 50)]
    assert goodput(0, 120 * S, attempts, 0)["lost_s"] == pytest.approx(50)


def test_an_attempt_that_never_stepped_is_down_time() -> None:
    attempts = [attempt(1, 0, None, 30, 0, 0, fault=20), attempt(2, 30, 40, 100, 0, 60)]
    found = goodput(0, 100 * S, attempts, 0)
    assert found["stepping_s"] == 60 and found["lost_s"] == 0 and found["down_s"] == 40


def test_a_script_that_reports_nothing_is_unknown() -> None:
    found = goodput(0, None, [attempt(1, 0, None, None, 0, 0)], 50 * S)
    assert found["wall_s"] == 50 and found["ratio"] is None and found["lost_s"] is None


def test_ranks_that_ran_without_counting_are_unknown_too() -> None:
    assert goodput(0, 50 * S, [attempt(1, 0, 1, 50, 0, 0)], 0)["ratio"] is None


def test_a_running_attempt_counts_until_now() -> None:
    found = goodput(0, None, [attempt(1, 0, 10, None, 0, 5)], 20 * S)
    assert found["stepping_s"] == 10 and found["ratio"] == 0.5


def test_clocks_that_ran_backwards_make_no_negative_times() -> None:
    found = goodput(100 * S, 50 * S, [attempt(1, 100, 90, 80, 0, 5, fault=70), attempt(2, 80, 85, 50, 3, 9)], 0)
    assert all(value is None or value >= 0 for value in found.values())
