"""The phase of the job that this attempt is in, as the launcher says it in the environment (`rsup launch --phases`)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rsup.supervisor.wire import UsageError


@dataclass(frozen=True)
class JobPhase:
    """`number` 0 is the first. `iteration_offset`, `sample_offset`: what the job had done and consumed where it began.

    `sample_offset` None: not known to the supervisor. `until_iteration` 0: it ends with the training. `ends`: where each phase
    of the job but the last ends; empty: not known.
    """

    number: int
    name: str = ""
    iteration_offset: int = 0
    sample_offset: int | None = None
    until_iteration: int = 0
    ends: tuple[int, ...] = ()

    def problem_at(self, iteration: int) -> str:
        """Why a job that has done `iteration` iterations is not in this phase; empty: it is."""
        if iteration < self.iteration_offset:
            return f"{iteration} iterations are done, and this phase begins after {self.iteration_offset}"
        if self.until_iteration and iteration >= self.until_iteration:
            return f"{iteration} iterations are done, and this phase ends after {self.until_iteration}"
        return ""

    def left_out(self, last: int) -> str:
        """Which phases get no iterations where the training ends after `last`, in one sentence; empty: none."""
        number, end = next(((number, end) for number, end in enumerate(self.ends, 1) if end >= last), (0, 0))
        if not number:
            return ""
        rest = "the last phase gets" if number == len(self.ends) else f"phases {number + 1} to {len(self.ends) + 1} get"
        return f"phase {number} ends after iteration {end} and the training after {last}: {rest} no iterations"


def current_phase(environ: Mapping[str, str] = os.environ) -> JobPhase | None:
    """The phase that `RSUP_PHASE` and its companions name; None without them. Raise `UsageError` for what is no number."""
    if "RSUP_PHASE" not in environ:
        return None
    return JobPhase(
        number=_count(environ, "RSUP_PHASE"),
        name=environ.get("RSUP_PHASE_NAME", ""),
        iteration_offset=_count(environ, "RSUP_PHASE_ITERATION_OFFSET"),
        sample_offset=_count(environ, "RSUP_PHASE_SAMPLE_OFFSET") if "RSUP_PHASE_SAMPLE_OFFSET" in environ else None,
        until_iteration=_count(environ, "RSUP_PHASE_UNTIL_ITERATION"),
        ends=tuple(_number("RSUP_PHASE_ENDS", end) for end in filter(None, environ.get("RSUP_PHASE_ENDS", "").split(","))),
    )


def _count(environ: Mapping[str, str], name: str) -> int:
    return _number(name, environ.get(name, "0"))


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name}={text} is not a whole number; it is set by rsup launch --phases")
    return int(text)
