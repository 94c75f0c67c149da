"""Whether a failed attempt is followed by another. Pure; `judge` is the whole of it.

Rules, in order: an exit code that a rank declared on purpose ends the job with it (wrong usage only before the first iteration:
options that trained once are not wrong, something around them has changed); a spent `--max-restarts` (mode `count`, or
set beside `auto`) or no-progress budget (mode `auto`) ends it; `identical_limit` equal failures without progress between them
end it with 93, since the next attempt would fail alike; otherwise it restarts after a back-off.

Progress refills: a checkpoint that became durable since the last failure fills the budget of `auto`. Identical failures also
forget when the job came further than ever before, or, where its script shows no iterations, ran for `LONG_ATTEMPT_S`.
Sources: torchrun's `--max-restarts`; NVRx's progress tracker (3 cycles without progress, exit 93); DESIGN.md section 5.
"""

import re
import signal

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.states import Budget
from rsup.supervisor.wire import DECLARED_EXIT_CODES, EXIT_USAGE, RestartPolicy

LONG_ATTEMPT_S = 600.0
MAX_SIGNATURE_CHARS = 300
SENT_BY_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class FailedAttempt(Struct, frozen=True, kw_only=True):
    """What the policy looks at. `exit_code` is the job's if it ends now; `declared` that of the rank, 0: none."""

    exit_code: int
    signature: str
    declared: int = 0
    declared_reason: str = ""
    checkpoint: int = -1
    iteration: int = 0
    ran_s: float = 0.0
    counts_iterations: bool = False


class Verdict(Struct, frozen=True):
    """Restart after `delay_s`, or end with `exit_code`; `reason` is the sentence for people and names the knob."""

    restart: bool
    exit_code: int
    reason: str
    delay_s: float = 0.0


def signature(kind: str, exit_code: int, section: str, error: str, rank: int | None = None) -> str:
    """Two failures with the same text here are taken for the same: numbers in the error line (pids, ports) do not count.

    Empty for a death by a signal that others send (`SENT_BY_OTHERS`): it says nothing of the next attempt. A rank that says
    nothing when it ends is told apart from other ranks that do so; an error is the same on whichever rank is first.
    """
    if exit_code - 128 in SENT_BY_OTHERS:
        return ""
    who = "" if error or rank is None else f"|rank {rank}"
    return f"{kind}|{exit_code}|{section}|{re.sub(r'0x[0-9a-f]+|[0-9]+', '#', error)}{who}"[:MAX_SIGNATURE_CHARS]


def passed_on(exit_code: int, declared: int) -> int:
    """The job's exit code for a rank's: the codes with a meaning of ours count only when the rank declared them."""
    return 1 if exit_code in DECLARED_EXIT_CODES and declared != exit_code else exit_code


def judge(policy: RestartPolicy, budget: Budget, failed: FailedAttempt) -> tuple[Verdict, Budget]:
    """The verdict on a failed attempt, and the budget after it."""
    why = failed.declared_reason or "no reason given"
    if failed.declared == failed.exit_code == EXIT_USAGE and not failed.iteration:
        return Verdict(False, EXIT_USAGE, f"no restart: the next attempt would meet the same ({why})"), budget
    if failed.declared in DECLARED_EXIT_CODES and failed.declared == failed.exit_code:
        return Verdict(
            False, failed.declared, f"no restart: a rank left on purpose with exit code {failed.declared} ({why})"
        ), budget
    budget = _after_failure(policy, budget, failed)
    verdict = _spent(policy, budget, failed) or _identical(policy, budget)
    if verdict is not None:
        return verdict, budget
    budget = replace(budget, restarts=budget.restarts + 1, without_progress=budget.without_progress + 1)
    delay_s = _backoff_s(policy, budget)
    wait = f" after {delay_s:g} s of back-off" if delay_s else ""
    return Verdict(True, 0, f"{_left(policy, budget)}{wait}", delay_s), budget


def _after_failure(policy: RestartPolicy, budget: Budget, failed: FailedAttempt) -> Budget:
    saved = failed.checkpoint > budget.checkpoint
    if policy.min_progress_iterations > 1:
        saved = failed.checkpoint >= max(0, budget.checkpoint) + policy.min_progress_iterations
    further = failed.iteration > budget.iteration or (not failed.counts_iterations and failed.ran_s >= LONG_ATTEMPT_S)
    same = bool(failed.signature) and failed.signature == budget.signature and not saved and not further
    return replace(
        budget,
        without_progress=0 if saved else budget.without_progress,
        identical=budget.identical + 1 if same else 1,
        signature=failed.signature,
        checkpoint=max(budget.checkpoint, failed.checkpoint),
        iteration=max(budget.iteration, failed.iteration),
    )


def _spent(policy: RestartPolicy, budget: Budget, failed: FailedAttempt) -> Verdict | None:
    if policy.mode == "auto":
        if policy.max_restarts and budget.restarts >= policy.max_restarts:
            return _no_requeue(policy, f"all {policy.max_restarts} restarts of --max-restarts are used")
        return _without_progress(policy, budget, "--restart auto")
    if budget.restarts < policy.max_restarts:
        return _without_progress(policy, budget, "--ft-max-no-progress-cycles") if policy.bounds_progress else None
    if policy.max_restarts == 0:
        reason = "no restart: --max-restarts is 0; --restart auto would have restarted"
    else:
        used = f"all {policy.max_restarts} restarts of --max-restarts are used"
        reason = f"no restart: {used}; --restart auto refills them with progress"
    return Verdict(False, failed.exit_code, reason)


def _without_progress(policy: RestartPolicy, budget: Budget, option: str) -> Verdict | None:
    if budget.without_progress < policy.no_progress_limit:
        return None
    return _no_requeue(policy, f"{budget.without_progress} restarts in a row without a new durable checkpoint ({option})")


def _no_requeue(policy: RestartPolicy, why: str) -> Verdict:
    return Verdict(False, policy.no_requeue_exit_code, f"no restart: {why}")


def _identical(policy: RestartPolicy, budget: Budget) -> Verdict | None:
    if not policy.identical_limit or budget.identical < policy.identical_limit:
        return None
    return _no_requeue(
        policy, f"{budget.identical} identical failures without progress between them (limit {policy.identical_limit})"
    )


def _backoff_s(policy: RestartPolicy, budget: Budget) -> float:
    doublings = min(budget.without_progress - 1, 30)
    return min(policy.backoff_max_s, policy.backoff_first_s * 2.0**doublings)


def _left(policy: RestartPolicy, budget: Budget) -> str:
    if policy.mode == "auto":
        spent = f"{budget.without_progress} of {policy.no_progress_limit} without progress"
        return f"restart {budget.restarts} (--restart auto: {spent})"
    return f"restart {budget.restarts} of {policy.max_restarts} (--max-restarts)"
