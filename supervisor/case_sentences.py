"""Rerun cases in sentences: for the job's story, for evidence, and for the job's end. Pure."""

import msgspec

from rsup.supervisor.records import CaseSaved
from rsup.supervisor.wire import CaseFinding

MAX_TEXT_CHARS = 1000


def finding_text(one: CaseFinding) -> str:
    """What one check compared, where: `rank 1 on GPU-b, loss: NaN: nan, nan again in place, 2.31 on GPU-a (rank 0)`."""
    text = f"rank {one.rank} on {one.device or 'an unknown device'}, {one.check}: {one.initial}"
    if one.in_place:
        text += f", {one.in_place} again in place" if one.in_place == one.initial else f", then {one.in_place} in place"
    if one.elsewhere:
        there = one.elsewhere_device or "another device"
        text += f", {one.elsewhere} on {there}" + (f" (rank {one.elsewhere_rank})" if one.elsewhere_rank >= 0 else "")
    return text


def findings_text(findings: list[CaseFinding]) -> str:
    """The findings in a sentence: the first, and how many more."""
    first = first_finding(findings)
    if first is None:
        return "no values were told"
    more = len(findings) - 1
    return finding_text(first)[:MAX_TEXT_CHARS] + (f"; and {more} more finding{'s' * (more > 1)}" if more else "")


def first_finding(findings: list[CaseFinding]) -> CaseFinding | None:
    """The first fatal one, else the first; None where there is none."""
    return next((one for one in findings if one.fatal), findings[0] if findings else None)


def findings_of(saved: CaseSaved) -> list[CaseFinding]:
    """The findings of a case that was kept."""
    return [msgspec.convert(one, CaseFinding) for one in saved.findings]


def verdict_text(saved: CaseSaved) -> str:
    """The sentence about a closed case."""
    what = f"{saved.verdict} (data-dependent)" if saved.data_dependent else saved.verdict
    if saved.accused and saved.verdict != "application":
        devices = ", ".join(saved.accused[:4]) + (", ..." if saved.accused[4:] else "")
        of_group = f"one of {saved.suspect_of}: " if saved.suspect_of > 1 else ""
        what += f", {of_group}{devices}"
    injected = " [a fault injector was armed]" if saved.injected else ""
    reason = f": {saved.reason}" if saved.reason else ""
    note = f"; {saved.note}" if saved.note else ""
    compared = findings_text(findings_of(saved))
    return f"case {saved.case_id}, iteration {saved.iteration}: {what}{reason}; {compared}{note}{injected}"
