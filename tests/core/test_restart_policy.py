"""The restart policy as a table."""

import pytest

from rsup.supervisor.restart_policy import LONG_ATTEMPT_S, FailedAttempt, judge, passed_on, signature
from rsup.supervisor.states import Budget
from rsup.supervisor.wire import RestartPolicy

COUNT = RestartPolicy(max_restarts=2)
AUTO = RestartPolicy(mode="auto", identical_limit=0)


def failed(**fields: object) -> FailedAttempt:
    return FailedAttempt(**{"exit_code": 3, "signature": "a", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "budget", "failure", "restart", "exit_code", "words"),
    [
        (RestartPolicy(), Budget(), failed(), False, 3, "--max-restarts is 0; --restart auto would have restarted"),
        (COUNT, Budget(), failed(), True, 0, "restart 1 of 2"),
        (COUNT, Budget(restarts=1), failed(), True, 0, "restart 2 of 2"),
        (COUNT, Budget(restarts=2), failed(), False, 3, "all 2 restarts of --max-restarts are used"),
        (AUTO, Budget(without_progress=2), failed(), True, 0, "3 of 3 without progress"),
        (AUTO, Budget(without_progress=3), failed(), False, 93, "without a new durable checkpoint"),
        (AUTO, Budget(restarts=50, without_progress=3, checkpoint=10), failed(checkpoint=20), True, 0, "restart 51"),
        (RestartPolicy(mode="auto", max_restarts=4), Budget(restarts=4), failed(), False, 93, "--max-restarts"),
        (
            COUNT,
            Budget(),
            failed(exit_code=17, declared=17, declared_reason="NaN"),
            False,
            17,
            "on purpose with exit code 17 (NaN)",
        ),
        (COUNT, Budget(), failed(exit_code=3, declared=17), True, 0, "restart 1 of 2"),
        (COUNT, Budget(), failed(exit_code=2, declared=2, declared_reason="--lr"), False, 2, "would meet the same (--lr)"),
        (COUNT, Budget(), failed(exit_code=2), True, 0, "restart 1 of 2"),
        (COUNT, Budget(), failed(exit_code=2, declared=2, iteration=7), True, 0, "restart 1 of 2"),
    ],
)
def test_verdicts(
    policy: RestartPolicy, budget: Budget, failure: FailedAttempt, restart: bool, exit_code: int, words: str
) -> None:
    verdict, _ = judge(policy, budget, failure)
    assert (verdict.restart, verdict.exit_code) == (restart, exit_code)
    assert words in verdict.reason


def test_identical_failures_end_the_job_before_the_budget_does() -> None:
    policy, budget = RestartPolicy(max_restarts=9, identical_limit=3), Budget()
    for expected in (True, True, False):
        verdict, budget = judge(policy, budget, failed())
        assert verdict.restart == expected
    assert verdict.exit_code == 93 and "3 identical failures" in verdict.reason


@pytest.mark.parametrize(
    "third",
    [
        failed(signature="b"),
        failed(checkpoint=5),
        failed(iteration=7, counts_iterations=True),
        failed(ran_s=LONG_ATTEMPT_S),
    ],
)
def test_what_makes_failures_not_identical(third: FailedAttempt) -> None:
    policy, budget = RestartPolicy(max_restarts=9, identical_limit=3), Budget()
    for failure in (failed(), failed(), third):
        verdict, budget = judge(policy, budget, failure)
        assert verdict.restart


def test_running_for_long_is_no_progress_of_a_script_that_counts_iterations() -> None:
    policy, budget = RestartPolicy(max_restarts=9, identical_limit=2), Budget()
    _, budget = judge(policy, budget, failed(counts_iterations=True, iteration=5))
    verdict, _ = judge(policy, budget, failed(counts_iterations=True, iteration=5, ran_s=LONG_ATTEMPT_S))
    assert not verdict.restart


def test_backoff_doubles_without_progress_and_has_a_bound() -> None:
    policy = RestartPolicy(mode="auto", no_progress_limit=99, identical_limit=0, backoff_first_s=1.0, backoff_max_s=5.0)
    budget, delays = Budget(), []
    for _ in range(5):
        verdict, budget = judge(policy, budget, failed())
        delays.append(verdict.delay_s)
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]
    verdict, _ = judge(policy, budget, failed(checkpoint=1))
    assert verdict.delay_s == 1.0


def test_the_budget_is_never_overrun() -> None:
    for max_restarts in range(4):
        policy, budget = RestartPolicy(max_restarts=max_restarts, identical_limit=0), Budget()
        restarts = 0
        while True:
            verdict, budget = judge(policy, budget, failed())
            if not verdict.restart:
                break
            restarts += 1
        assert restarts == max_restarts


@pytest.mark.parametrize(
    ("exit_code", "declared", "expected"),
    [(3, 0, 3), (137, 0, 137), (17, 17, 17), (17, 0, 1), (16, 17, 1), (75, 0, 1), (88, 88, 88)],
)
def test_codes_with_a_meaning_of_ours_must_be_declared(exit_code: int, declared: int, expected: int) -> None:
    assert passed_on(exit_code, declared) == expected


def test_deaths_that_say_nothing_of_the_next_attempt_are_never_equal() -> None:
    policy, budget = RestartPolicy(max_restarts=9, identical_limit=2), Budget()
    for _ in range(5):
        verdict, budget = judge(policy, budget, failed(exit_code=137, signature=signature("signal", 137, "step", "", 1)))
        assert verdict.restart
    assert signature("signal", 139, "", "", 1) == signature("signal", 139, "", "", 1) != "", "a crash of the rank's own"


def test_a_silent_exit_is_told_apart_by_its_rank_and_an_error_is_not() -> None:
    assert signature("exit", 4, "", "", 0) != signature("exit", 4, "", "", 1)
    assert signature("exit", 1, "", "ImportError: x", 0) == signature("exit", 1, "", "ImportError: x", 1)


def test_numbers_in_an_error_do_not_make_it_another() -> None:
    one = signature("exit", 1, "step", "ConnectionError: port 12345 at 0x7f3a")
    assert one == signature("exit", 1, "step", "ConnectionError: port 999 at 0x1")
    assert one != signature("exit", 1, "setup", "ConnectionError: port 999 at 0x1")
    assert one != signature("exit", 2, "step", "ConnectionError: port 999 at 0x1")
