"""How much of a job's time went into work that was kept. Pure: rows in, seconds out, null where the story does not say.

An attempt *steps* from its first iteration on every rank until it stops. Of that, what the next attempt had to do again is
*lost*: iterations after the one it resumed from, at the attempt's own pace, and the time from the fault until it was
noticed. Everything outside stepping (start-up, recovery, waiting for nodes) is *down*.

    goodput = (stepping - lost) / wall

Of a script that never reports iterations nobody knows what it kept, so its goodput is unknown (null), not zero. What the last
attempt has done counts as kept: whether it will be is not known yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AttemptTimes:
    """What of an attempt counts here. Times in UTC microseconds, None where not reached; iterations as in the records."""

    attempt: int
    started_us: int
    first_step_us: int | None
    stopped_us: int | None
    start_iteration: int
    last_iteration: int
    fault_us: int | None = None
    """When the first incident that ended it happened, None if none did."""


def goodput(created_us: int, ended_us: int | None, attempts: Sequence[AttemptTimes], now_us: int) -> dict[str, float | None]:
    """Seconds of a job's life by what became of them: `wall_s`, `stepping_s`, `lost_s`, `down_s`, `productive_s`, and
    `ratio` of productive to wall time. Null where the records do not say."""
    wall_s = max(0.0, ((ended_us or now_us) - created_us) / 1e6)
    result: dict[str, float | None] = {
        "wall_s": wall_s,
        "stepping_s": None,
        "lost_s": None,
        "down_s": None,
        "productive_s": None,
        "ratio": None,
    }
    if not any(_stepped(attempt) for attempt in attempts):
        return result
    end_us = ended_us or now_us
    stepping_s = sum(_stepping_s(attempt, end_us) for attempt in attempts)
    following = [*attempts[1:], None]
    lost_s = sum(_lost_s(attempt, after, end_us) for attempt, after in zip(attempts, following, strict=True))
    productive_s = max(0.0, stepping_s - lost_s)
    result.update(stepping_s=stepping_s, lost_s=lost_s, down_s=max(0.0, wall_s - stepping_s), productive_s=productive_s)
    if wall_s > 0:
        result["ratio"] = min(1.0, productive_s / wall_s)
    return result


def _stepped(attempt: AttemptTimes) -> bool:
    """Whether it got anywhere. Scripts that do not count have a first step too: the moment their ranks ran."""
    return attempt.first_step_us is not None and attempt.last_iteration > 0


def _stepping_s(attempt: AttemptTimes, end_us: int) -> float:
    if attempt.first_step_us is None or not _stepped(attempt):
        return 0.0
    return max(0.0, ((attempt.stopped_us or end_us) - attempt.first_step_us) / 1e6)


def _lost_s(attempt: AttemptTimes, after: AttemptTimes | None, end_us: int) -> float:
    """Seconds of `attempt` that were for nothing: standing still after its fault, and steps that `after` did again."""
    stepping_s = _stepping_s(attempt, end_us)
    if attempt.first_step_us is None or (attempt.fault_us is None and after is None):
        return 0.0
    moving_s = stepping_s
    if attempt.fault_us is not None:
        moving_s = min(stepping_s, max(0.0, (attempt.fault_us - attempt.first_step_us) / 1e6))
    standing_s = stepping_s - moving_s
    num_done = attempt.last_iteration - attempt.start_iteration
    if after is None or num_done <= 0:
        return standing_s
    num_again = min(num_done, max(0, attempt.last_iteration - after.start_iteration))
    return standing_s + moving_s * num_again / num_done
