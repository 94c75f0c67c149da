"""The phase of the job that this attempt is in, as the launcher says it in the environment (`rsup launch --phases`)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rsup.supervisor.wire import UsageError


@dataclass(frozen=True)
class JobPhase:
    """`number` 0 is the first. `iteration_offset`, `sample_offset`: what the job had done and consumed where it began.

    `sample_offset` None: not known to the supervisor. `until_iteration` 0: it ends with the training.
    """

    number: int
    name: str = ""
    iteration_offset: int = 0
    sample_offset: int | None = None
    until_iteration: int = 0

    def problem_at(self, iteration: int) -> str:
        """Why a job that has done `iteration` iterations is not in this phase; empty: it is."""
        if iteration < self.iteration_offset:
            return f"{iteration} iterations are done, and this phase begins after {self.iteration_offset}"
        if self.until_iteration and iteration >= self.until_iteration:
            return f"{iteration} iterations are done, and this phase ends after {self.until_iteration}"
        return ""


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
    )


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "0")
    if not text.isdecimal():
        raise UsageError(f"{name}={text} is not a whole number; it is set by rsup launch --phases")
    return int(text)
