"""Where a job's time went."""

import random

import pytest

from rsup.supervisor.goodput import PARTS, AttemptTimes, Trouble, goodput, time_parts
from rsup.supervisor.training_text import PART_NAMES

S = 1_000_000


def attempt(
    number: int,
    started: int,
    first: int | None,
    stopped: int | None,
    begin: int,
    last: int,
    *troubles: Trouble,
    stall: int | None = None,
    replays: tuple[tuple[int, int | None], ...] = (),
    restarts_now: bool = False,
) -> AttemptTimes:
    """An attempt with times in seconds."""
    first_us, stopped_us, stall_us = (None if time is None else time * S for time in (first, stopped, stall))
    us = [(from_s * S, None if to_s is None else to_s * S) for from_s, to_s in replays]
    return AttemptTimes(number, started * S, first_us, stopped_us, begin, last, troubles, us, stall_us, restarts_now)


def trouble(
    at: int, detected: int | None = None, recovered: int | None = None, *, hang: bool = False, again: int | None = None
) -> Trouble:
    """An incident with times in seconds."""
    times = [None if time is None else time * S for time in (detected, recovered)]
    return Trouble(at * S, times[0], times[1], hang, again)


def parts_of(created: int, ended: int | None, attempts: list[AttemptTimes], now: int = 0) -> dict[str, float]:
    """Seconds of the parts that are not empty. They add up to the wall time."""
    found, _ = time_parts(created * S, None if ended is None else ended * S, attempts, now * S)
    assert sum(found.values()) == max(0, (now if ended is None else ended) - created) * S
    return {name: us / S for name, us in found.items() if us}


def test_an_undisturbed_job_loses_nothing() -> None:
    found = goodput(0, 100 * S, [attempt(1, 5, 10, 100, 0, 90)], 0)
    assert (found["wall_s"], found["stepping_s"], found["down_s"]) == (100, 90, 10)
    assert (found["productive_s"], found["lost_s"], found["ratio"], found["iteration_s"]) == (90, 0, 0.9, 1.0)
    assert {name: s for name, s in found["parts"].items() if s} == {"productive": 90, "waiting": 5, "startup": 5}
    assert found["parts"]["checkpoint"] is None, "nobody said how long saves took"


def test_work_that_was_done_again_is_lost_and_a_restart_takes_its_time() -> None:
    attempts = [attempt(1, 0, 10, 62, 0, 50, trouble(60)), attempt(2, 65, 70, 120, 40, 90)]
    found = parts_of(0, 120, attempts)
    assert found == {"startup": 10, "productive": 90, "lost": 10, "restart": 7, "waiting": 3}


def test_standing_still_until_a_hang_is_found_is_the_hangs() -> None:
    attempts = [attempt(1, 0, 10, 60, 0, 40, trouble(50, 58, hang=True)), attempt(2, 60, 70, 80, 40, 50)]
    assert parts_of(0, 80, attempts) == {"startup": 10, "productive": 50, "hang": 8, "restart": 12}


def test_a_hang_before_the_first_iteration_is_one_too() -> None:
    attempts = [attempt(1, 0, None, 60, 0, 0, trouble(20, 50, hang=True)), attempt(2, 60, 70, 80, 0, 10)]
    assert parts_of(0, 80, attempts) == {"startup": 20, "hang": 30, "restart": 20, "productive": 10}


def test_starting_over_loses_all() -> None:
    attempts = [attempt(1, 0, 10, 60, 0, 50, trouble(60)), attempt(2, 60, 70, 120, 0, 50)]
    assert goodput(0, 120 * S, attempts, 0)["lost_s"] == pytest.approx(50)


def test_going_back_beyond_the_attempt_before_loses_what_that_one_had_kept() -> None:
    """The newest checkpoint was broken: attempt 3 goes on from where attempt 1 was half through."""
    attempts = [
        attempt(1, 0, 0, 50, 0, 50, trouble(50)),
        attempt(2, 50, 50, 60, 50, 60, trouble(60)),
        attempt(3, 60, 60, 100, 25, 65),
    ]
    assert parts_of(0, 100, attempts) == {"productive": 25 + 40, "lost": 25 + 10}


def test_an_attempt_that_never_stepped_is_start_up() -> None:
    attempts = [attempt(1, 0, None, 30, 0, 0, trouble(20)), attempt(2, 30, 40, 100, 0, 60)]
    assert parts_of(0, 100, attempts) == {"startup": 20, "restart": 20, "productive": 60}


def test_an_in_process_restart_splits_stepping_and_its_iterations_are_done_again() -> None:
    """From the fault until every rank got on is the restart's; 10 of 90 computed iterations were for nothing."""
    found = parts_of(0, 110, [attempt(1, 0, 10, 110, 0, 80, trouble(40, 41, 50, again=10))])
    assert found == {"startup": 10, "in_process_restart": 10, "lost": 10, "productive": 80}


def test_a_hang_that_an_in_process_restart_cured_counts_until_it_was_judged() -> None:
    found = parts_of(0, 100, [attempt(1, 0, 0, 100, 0, 80, trouble(40, 55, 60, hang=True, again=0))])
    assert found == {"productive": 80, "hang": 15, "in_process_restart": 5}


def test_an_in_process_restart_under_way_counts_until_now() -> None:
    running = attempt(1, 0, 0, None, 0, 50, trouble(50, 50), restarts_now=True)
    assert parts_of(0, None, [running], 60) == {"productive": 50, "in_process_restart": 10}


def test_one_that_was_given_up_is_the_restarts() -> None:
    attempts = [attempt(1, 0, 0, 70, 0, 50, trouble(50, 50, 80, again=10)), attempt(2, 70, 80, 100, 40, 60)]
    assert parts_of(0, 100, attempts) == {"productive": 60, "lost": 10, "restart": 30}


def test_saves_and_reruns_take_time_from_stepping() -> None:
    found = parts_of(0, 100, [attempt(1, 0, 0, 100, 0, 100, stall=6, replays=((20, 24),))])
    assert found == {"checkpoint": 6, "rerun": 4, "productive": 90}


def test_a_case_that_nobody_closed_ends_with_its_attempt() -> None:
    attempts = [attempt(1, 0, 0, 50, 0, 30, trouble(48), replays=((40, None),)), attempt(2, 50, 60, 70, 30, 40)]
    assert parts_of(0, 70, attempts) == {"productive": 50, "rerun": 8, "restart": 12}


def test_what_follows_a_failure_that_ends_the_job_is_its_end() -> None:
    assert parts_of(0, 60, [attempt(1, 0, 10, 58, 0, 40, trouble(50))]) == {"startup": 10, "productive": 40, "ending": 10}


def test_a_script_that_reports_nothing_is_unknown() -> None:
    found = goodput(0, None, [attempt(1, 5, None, None, 0, 0)], 50 * S)
    assert found["wall_s"] == 50 and found["ratio"] is None and found["lost_s"] is None and found["iteration_s"] is None
    assert {name: s for name, s in found["parts"].items() if s} == {"waiting": 5, "uncounted": 45}
    assert found["parts"]["productive"] is None


def test_ranks_that_ran_without_counting_are_unknown_too() -> None:
    attempts = [attempt(1, 0, 1, 50, 0, 0, trouble(45))]
    assert goodput(0, 50 * S, attempts, 0)["ratio"] is None
    assert parts_of(0, 50, attempts) == {"startup": 1, "uncounted": 44, "ending": 5}


def test_a_running_attempt_counts_until_now() -> None:
    found = goodput(0, None, [attempt(1, 0, 10, None, 0, 5)], 20 * S)
    assert found["stepping_s"] == 10 and found["ratio"] == 0.5 and found["iteration_s"] == 2.0


def test_an_iteration_takes_what_the_training_measured_and_only_else_what_the_records_say() -> None:
    """The records do not know of evaluations: an iteration here took 0.4 s, the rest of the second evaluations did."""
    attempts = [attempt(1, 0, 0, 100, 0, 100)]
    told, counted = goodput(0, 100 * S, attempts, 0, 0.4), goodput(0, 100 * S, attempts, 0)
    assert (told["iteration_s"], counted["iteration_s"]) == (0.4, 1.0)
    assert told["parts"] == counted["parts"] and told["ratio"] == 1, "evaluations are no part of their own"


def test_of_a_few_seconds_nobody_knows_how_long_an_iteration_took() -> None:
    """They are counted from the first on, the time only from when that was seen."""
    assert goodput(0, 9 * S, [attempt(1, 0, 1, 9, 0, 500)], 0)["iteration_s"] is None
    assert goodput(0, 11 * S, [attempt(1, 0, 1, 11, 0, 500)], 0)["iteration_s"] == 0.02


def test_a_short_attempt_stepped_as_long_as_the_training_says_that_its_iterations_take() -> None:
    """Beats come once a second: 12 iterations of 0.1 s were over before any showed, of the first attempt one second was."""
    attempts = [
        attempt(1, 0, 5, 8, 0, 40, trouble(8)),
        attempt(2, 8, None, 12, 20, 32, trouble(12)),
        attempt(3, 12, 13, 23, 20, 120),
    ]
    told = goodput(0, 23 * S, attempts, 0, 0.1)
    assert told["parts"]["startup"] == 4 and told["parts"]["restart"] == pytest.approx(4 - 1.2 + 1)
    assert told["lost_s"] == pytest.approx(2 + 1.2) and told["productive_s"] == pytest.approx(2 + 10)
    assert told["stepping_s"] == pytest.approx(4 + 1.2 + 10)
    counted = goodput(0, 23 * S, attempts, 0)
    assert counted["parts"]["restart"] == 5 and counted["lost_s"] == pytest.approx(1.5), "nobody told"


def test_a_first_step_is_moved_no_further_than_it_can_have_been_overlooked() -> None:
    slow_elsewhere = goodput(0, 100 * S, [attempt(1, 0, 20, 100, 0, 80)], 0, 1.2)
    assert slow_elsewhere["parts"]["startup"] == 18
    under_way = [attempt(1, 0, 1, 5, 0, 4), attempt(2, 5, None, None, 4, 5)]
    assert goodput(0, None, under_way, 10 * S, 1.0)["parts"]["restart"] == 5, "of one that runs it shows within that time"


def test_every_part_has_a_name_for_people() -> None:
    assert tuple(PART_NAMES) == PARTS


def a_story(rng: random.Random) -> tuple[int, int | None, list[AttemptTimes], int]:
    """Any story, also one that clocks which ran backwards could tell."""

    def moment() -> int:
        return rng.randrange(-10, 200) * S + rng.randrange(S)

    def maybe(chance: float = 0.7) -> int | None:
        return moment() if rng.random() < chance else None

    attempts = []
    for number in range(1, rng.randrange(5) + 1):
        hangs, again = rng.random() < 0.4, rng.choice([None, 0, 5, 500])
        troubles = [Trouble(moment(), maybe(), maybe(), hangs, again) for _ in range(rng.randrange(4))]
        replays = [(moment(), maybe()) for _ in range(rng.randrange(3))]
        begin = rng.randrange(60)
        last = rng.choice([0, begin, begin + 30, rng.randrange(90)])
        stall = rng.choice([None, 0, rng.randrange(500 * S)])
        times = (moment(), maybe(), maybe())
        if rng.random() < 0.7:  # in order
            first, second, third = sorted(moment() for _ in range(3))
            times = (first, second if rng.random() < 0.8 else None, third if rng.random() < 0.8 else None)
        attempts.append(AttemptTimes(number, *times, begin, last, troubles, replays, stall, rng.random() < 0.3))
    return moment(), maybe(0.5), sorted(attempts, key=lambda one: one.started_us), moment()


def test_the_parts_of_any_story_add_up_to_its_wall_time() -> None:
    seen = set()
    for seed in range(4000):
        created_us, ended_us, attempts, now_us = a_story(random.Random(seed))
        parts, iteration_s = time_parts(created_us, ended_us, attempts, now_us)
        wall_us = max(0, (now_us if ended_us is None else ended_us) - created_us)
        assert tuple(parts) == PARTS and sum(parts.values()) == wall_us, f"seed {seed}"
        assert min(parts.values()) >= 0 and (iteration_s is None or iteration_s >= 0), f"seed {seed}"
        found = goodput(created_us, ended_us, attempts, now_us)
        assert found["ratio"] is None or 0 <= found["ratio"] <= 1, f"seed {seed}"
        assert all(value is None or value >= 0 for value in found["parts"].values()), f"seed {seed}"
        seen |= {name for name, us in parts.items() if us}
    assert seen == set(PARTS), "the stories reach every part"
