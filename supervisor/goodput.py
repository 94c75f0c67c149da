"""How much of a job's time went into work that was kept, and what took the rest. Pure: rows in, times out.

A job's wall time is cut into `PARTS`, each microsecond into exactly one, so that they add up. From the begin of the job on:

    waiting | startup | stepping ... | hang | restart | waiting | restart | stepping ... | ending
            ^ attempt 1              ^ fault         ^ stopped ^ attempt 2               ^ stopped, job's end a moment later

An attempt *steps* from its first iteration on every rank until it stops, or until the fault that ends it. Its stepping is cut
again: into in-process restarts (from the fault until every rank has done an iteration again; of a hang what passed until it was
judged is `hang`), reruns (while a case was open), standing still for saves, and the iterations themselves. Of these some were
done again, after an in-process restart or in a later attempt: they are `lost`, at the attempt's own pace. The rest is
`productive`, evaluations among it: no record tells when these were. An in-process restart that was given up is no part of its
own: the restart that followed took the time.

First steps are known from when they were *seen*, which the beats of ranks let be late: where the training tells how long an
iteration takes, its iterations count with at least that, at the cost of the start-up before them.

Of a script that never reports iterations nobody knows what it kept: its ranks' time is `uncounted` and its goodput null, not
zero. What the last attempt has done counts as kept: whether it will be is not known yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PARTS = (
    "productive",
    "lost",
    "checkpoint",
    "rerun",
    "hang",
    "in_process_restart",
    "restart",
    "startup",
    "waiting",
    "ending",
    "uncounted",
)
"""Names of the parts, as in JSON and metrics. What each is: `docs/goodput.md`."""
MOST_LATE_US = 2_000_000
"""A first step is seen at most so long after it: ranks beat once a second."""
LEAST_STEPPING_US = 10_000_000
"""Of less nobody can tell from the records how long an iteration takes: they miss up to `MOST_LATE_US`, not its iterations."""


@dataclass(frozen=True)
class Trouble:
    """An incident. Times in UTC microseconds; `recovered_us` is when every rank of the job had stepped again."""

    at_us: int
    detected_us: int | None = None
    recovered_us: int | None = None
    is_hang: bool = False
    lost_iterations: int | None = None
    """Done again after it, of one that an in-process restart cured."""


@dataclass(frozen=True)
class AttemptTimes:
    """What of an attempt counts here. Times in UTC microseconds, None where not reached; iterations as in the records."""

    attempt: int
    started_us: int
    first_step_us: int | None
    stopped_us: int | None
    start_iteration: int
    last_iteration: int
    troubles: Sequence[Trouble] = ()
    replays: Sequence[tuple[int, int | None]] = ()
    """When cases were opened in it, and when they got their verdict."""
    stall_us: int | None = None
    """How long training stood still for saves, as far as its ranks told; None: they told nothing."""
    restarts_in_process: bool = False
    """Its last trouble is being cured by an in-process restart right now."""

    @property
    def steps(self) -> bool:
        """Whether it got anywhere. Scripts that do not count have a first step too: the moment their ranks ran."""
        return self.first_step_us is not None and self.last_iteration > 0

    @property
    def num_computed(self) -> int:
        """Iterations that it did, those that it did again among them."""
        return max(0, self.last_iteration - self.start_iteration) + sum(one.lost_iterations or 0 for one in self.cured())

    def cured(self) -> list[Trouble]:
        """What in-process restarts have cured, or are about to."""
        known = sorted(self.troubles, key=lambda one: one.at_us)
        open_one = [known[-1]] if known and self.restarts_in_process and not self._is_over(known[-1]) else []
        return [one for one in known if self._is_over(one)] + open_one

    def fatal(self) -> Trouble | None:
        """What ended it."""
        cured = self.cured()
        return min((one for one in self.troubles if one not in cured), key=lambda one: one.at_us, default=None)

    def _is_over(self, one: Trouble) -> bool:
        return one.recovered_us is not None and (self.stopped_us is None or one.recovered_us <= self.stopped_us)


@dataclass
class _Cut:
    """Cuts time off at its front, piece by piece."""

    at_us: int
    end_us: int
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def until(self, to_us: int | None, part: str) -> int:
        """Give the time up to `to_us` (None: to the end) to a part; return how much it was. What is past is nobody's."""
        took_us = max(0, (self.end_us if to_us is None else min(to_us, self.end_us)) - self.at_us)
        self.parts[part] += took_us
        self.at_us += took_us
        return took_us


@dataclass(frozen=True)
class _Pace:
    """Time that went into iterations, and how many these were."""

    moving_us: int = 0
    num_computed: int = 0


def time_parts(
    created_us: int, ended_us: int | None, attempts: Sequence[AttemptTimes], now_us: int
) -> tuple[dict[str, int], float | None]:
    """Microseconds of the job's life by `PARTS`, which add up to it, and how long an iteration took on average, in
    seconds (None: unknown), with evaluations and whatever else lay between iterations and is no part."""
    end_us = max(created_us, now_us if ended_us is None else ended_us)
    cut = _Cut(created_us, end_us)
    counts = any(attempt.steps for attempt in attempts)
    pace = _Pace()
    for number, attempt in enumerate(attempts):
        later = attempts[number + 1 :]
        cut.until(attempt.started_us, "waiting")
        found = _cut_attempt(cut, attempt, later, is_first=number == 0, counts=counts, is_live=ended_us is None)
        pace = _Pace(pace.moving_us + found.moving_us, pace.num_computed + found.num_computed)
    cut.until(None, "waiting" if ended_us is None else "ending")
    is_known = pace.num_computed and pace.moving_us >= LEAST_STEPPING_US
    return cut.parts, pace.moving_us / pace.num_computed / 1e6 if is_known else None


def goodput(
    created_us: int,
    ended_us: int | None,
    attempts: Sequence[AttemptTimes],
    now_us: int,
    told_iteration_s: float | None = None,
) -> dict[str, Any]:
    """What JSON shows: `wall_s`, `ratio` of productive to wall time, `productive_s`, `lost_s`, `stepping_s` (from first steps
    to stops), `down_s` (the rest), `iteration_s`, and `parts` in seconds. Null where the records do not say.

    `told_iteration_s`: how long an iteration took as the training measured it, which alone knows its evaluations.
    """
    if told_iteration_s:
        end_us = now_us if ended_us is None else ended_us
        attempts = [_begun_earlier(one, end_us, told_iteration_s) for one in attempts]
    parts_us, counted_s = time_parts(created_us, ended_us, attempts, now_us)
    wall_us = sum(parts_us.values())
    parts: dict[str, float | None] = {name: us / 1e6 for name, us in parts_us.items()}
    if all(attempt.stall_us is None for attempt in attempts):
        parts["checkpoint"] = None
    counts = any(attempt.steps for attempt in attempts)
    if not counts:
        parts |= dict.fromkeys(("productive", "lost", "checkpoint", "rerun", "in_process_restart"))
    stepping_us = sum(_stepping_us(attempt, now_us if ended_us is None else ended_us) for attempt in attempts)
    return {
        "wall_s": wall_us / 1e6,
        "ratio": parts_us["productive"] / wall_us if counts and wall_us else None,
        "productive_s": parts["productive"],
        "lost_s": parts["lost"],
        "stepping_s": stepping_us / 1e6 if counts else None,
        "down_s": max(0, wall_us - stepping_us) / 1e6 if counts else None,
        "iteration_s": told_iteration_s or counted_s,
        "parts": parts,
    }


def _begun_earlier(attempt: AttemptTimes, end_us: int, iteration_s: float) -> AttemptTimes:
    """With its first step as early as its iterations need, of what can have been overlooked."""
    if attempt.first_step_us is None and attempt.stopped_us is None:
        return attempt
    fatal = attempt.fatal()
    until_us = min(end_us if one is None else one for one in (attempt.stopped_us, None if fatal is None else fatal.at_us))
    seen_us = until_us if attempt.first_step_us is None else attempt.first_step_us
    late_us = min(MOST_LATE_US, round(attempt.num_computed * iteration_s * 1e6) - max(0, until_us - seen_us))
    if late_us <= 0:
        return attempt
    return replace(attempt, first_step_us=max(attempt.started_us, seen_us - late_us))


def _stepping_us(attempt: AttemptTimes, end_us: int) -> int:
    if attempt.first_step_us is None or not attempt.steps:
        return 0
    return max(0, (end_us if attempt.stopped_us is None else attempt.stopped_us) - attempt.first_step_us)


def _cut_attempt(
    cut: _Cut, attempt: AttemptTimes, later: Sequence[AttemptTimes], *, is_first: bool, counts: bool, is_live: bool
) -> _Pace:
    """Give an attempt's time to its parts; how its iterations went."""
    fatal = attempt.fatal()
    stopped_us = min(cut.end_us, attempt.stopped_us or (later[0].started_us if later else cut.end_us))
    moving_until_us = stopped_us if fatal is None else min(stopped_us, fatal.at_us)
    pace = _Pace()
    if attempt.steps or attempt.first_step_us is not None:
        cut.until(attempt.first_step_us, "startup" if is_first else "restart")
        if attempt.steps:
            pace = _cut_stepping(cut, attempt, later, moving_until_us)
        else:
            cut.until(moving_until_us, "uncounted")
    elif not counts and attempt.stopped_us is None and not later:
        cut.until(moving_until_us, "uncounted")
    else:
        cut.until(moving_until_us, "startup" if is_first else "restart")
    if fatal is not None:
        if fatal.is_hang and fatal.detected_us is not None:
            cut.until(min(fatal.detected_us, stopped_us), "hang")
        cut.until(stopped_us, "restart" if later or is_live else "ending")
    return pace


def _cut_stepping(cut: _Cut, attempt: AttemptTimes, later: Sequence[AttemptTimes], until_us: int) -> _Pace:
    """Give stepping time to what interrupted it, to saves, to work that was done again, and to work that was kept."""
    moving_us = 0
    for from_us, to_us, part in _interruptions(attempt):
        moving_us += _only_measure(cut, min(from_us, until_us))
        cut.until(until_us if to_us is None else min(to_us, until_us), part)
    moving_us += _only_measure(cut, until_us)
    stall_us = min(attempt.stall_us or 0, moving_us)
    moving_us -= stall_us
    again = sum(one.lost_iterations or 0 for one in attempt.cured())
    num_computed = attempt.num_computed
    if later:
        kept_to = max(attempt.start_iteration, min(one.start_iteration for one in later))
        again += max(0, attempt.last_iteration - kept_to)
    lost_us = moving_us * min(again, num_computed) // num_computed if num_computed else 0
    cut.parts["checkpoint"] += stall_us
    cut.parts["lost"] += lost_us
    cut.parts["productive"] += moving_us - lost_us
    return _Pace(moving_us, num_computed) if num_computed else _Pace()


def _only_measure(cut: _Cut, to_us: int) -> int:
    """Pass over the time up to `to_us` and return it: whose it is follows from all of it."""
    took_us = max(0, min(to_us, cut.end_us) - cut.at_us)
    cut.at_us += took_us
    return took_us


def _interruptions(attempt: AttemptTimes) -> list[tuple[int, int | None, str]]:
    """What iterations were interrupted by, in order of its begin: from, to (None: not over), part."""
    found: list[tuple[int, int | None, str]] = [(from_us, to_us, "rerun") for from_us, to_us in attempt.replays]
    for one in attempt.cured():
        judged_us = one.at_us if one.detected_us is None or not one.is_hang else one.detected_us
        if judged_us > one.at_us:
            found.append((one.at_us, judged_us, "hang"))
        is_over = one.recovered_us is not None
        found.append((max(one.at_us, judged_us), one.recovered_us if is_over else None, "in_process_restart"))
    return sorted(found, key=lambda piece: piece[0])
