"""The time at which a scheduler ends the job, and what remains of a grace before it. Pure.

SLURM tells the end of the allocation in SLURM_JOB_END_TIME (seconds since 1970). At that time it sends SIGTERM, and KillWait
later (30 s unless the site changed it, and nothing tells it) SIGKILL to everything, the launcher and its report included. An
end that lies further back than that has been moved by somebody: it is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SLURM_JOB_END_TIME"
KILL_WAIT_S = 30.0
MIN_SHARE = 0.5
"""Of what is left before the end, ranks always have at least this share."""


@dataclass(frozen=True)
class FittedGrace:
    """`grace_s`: what ranks have. `why`: one clause, where that is less than was asked for; else empty."""

    grace_s: float
    why: str = ""


def read_end_time(environ: Mapping[str, str]) -> float | None:
    """Seconds since 1970 at which the scheduler ends the job; None if it does not say, or says what makes no sense."""
    text = environ.get(VARIABLE, "").strip()
    return float(text) if text.isdecimal() and 0 < int(text) < 1 << 40 else None


def fitted_grace(grace_s: float, end_s: float | None, wall_s: float, margin_s: float) -> FittedGrace:
    """The grace, or what of it fits into the time before the scheduler's end at `end_s`, both clocks in seconds since 1970.
    `margin_s`: what this side needs afterwards, to clean up and to report."""
    left_s = _left_s(end_s, wall_s)
    if left_s is None:
        return FittedGrace(grace_s)
    fits_s = max(left_s - margin_s, left_s * MIN_SHARE)
    if fits_s >= grace_s:
        return FittedGrace(grace_s)
    return FittedGrace(
        fits_s, f"the scheduler ends the job in {left_s:.0f} s: ranks have {fits_s:.0f} s instead of {grace_s:g} s"
    )


def is_over(end_s: float | None, wall_s: float, margin_s: float) -> bool:
    """Whether so little time is left that nothing may be waited for any more."""
    left_s = _left_s(end_s, wall_s)
    return left_s is not None and left_s <= margin_s


def is_moved(end_s: float, wall_s: float) -> bool:
    """Whether that end is so long over that everything would have been killed: it has been moved, or was never right."""
    return wall_s >= end_s + KILL_WAIT_S


def _left_s(end_s: float | None, wall_s: float) -> float | None:
    """Until everything is killed; None if that is not known."""
    if end_s is None or is_moved(end_s, wall_s):
        return None
    return end_s - wall_s if wall_s < end_s else end_s + KILL_WAIT_S - wall_s
