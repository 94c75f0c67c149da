"""Limits calculated from observed section times (Megatron-LM's `--calc-ft-timeouts`; NVRx's `TimeoutsCalc`). Pure.

A section's limit is `safety_factor` times the longest time that any rank of this attempt took for it, averaged (0.5) with the
limit calculated before. Enough must have been seen: `setup` counts only if a persistent checkpoint was loaded, `step` after 16
training steps, `checkpointing` after a checkpoint and never with asynchronous saves, the user's own sections after 16 times,
out-of-section at the end of an attempt that had all of it. Calculation is due when a checkpoint has been made, when a section
gets its first limit, and at the end of an attempt. A configured limit is replaced only if calculation was asked for
(`enforce_calculated`). One departure: nothing below ten seconds is ever calculated, for a hiccup of the scheduler, the file
system or the network is no hang.
"""

from msgspec.structs import replace

from rsup.supervisor.states import Observed
from rsup.supervisor.wire import Limits, SectionSeen, SectionsObserved

MIN_STEPS = 16
EMA_ALPHA = 0.5
SHORTEST_LIMIT_S = 10.0
OUT_OF_SECTION = "out-of-section"


def merge(observed: Observed, fact: SectionsObserved) -> Observed:
    """What has been observed with one node's report added: the maximum over nodes."""
    sections = dict(observed.sections)
    for name, seen in fact.sections.items():
        before = sections.get(name, SectionSeen(0.0, 0))
        sections[name] = SectionSeen(max(before.longest_s, seen.longest_s), max(before.times, seen.times))
    return replace(
        observed,
        sections=sections,
        out_of_section_s=max(observed.out_of_section_s, fact.out_of_section_s),
        train_steps=max(observed.train_steps, fact.num_train_steps),
        checkpoints=max(observed.checkpoints, fact.num_checkpoints),
        async_save=observed.async_save or fact.async_save,
        loaded_persistent=observed.loaded_persistent or fact.loaded_persistent,
    )


def eligible(observed: Observed, closing: bool) -> list[str]:
    """The sections of which enough has been seen; `out-of-section` among them at the end."""
    ready = [name for name, seen in observed.sections.items() if seen.longest_s > 0.0 and _enough(name, seen, observed)]
    whole = {"setup", "step"} <= set(ready) and observed.checkpoints > 0 and observed.out_of_section_s > 0.0
    return [*ready, OUT_OF_SECTION] if closing and whole else ready


def _enough(name: str, seen: SectionSeen, observed: Observed) -> bool:
    if name == "setup":
        return observed.loaded_persistent
    if name == "step":
        return observed.train_steps >= MIN_STEPS
    if name == "checkpointing":
        return observed.checkpoints > 0 and not observed.async_save
    return seen.times >= MIN_STEPS


def calculate(limits: Limits, configured: Limits, observed: Observed, closing: bool = False) -> tuple[Limits, Observed]:
    """The limits in force after what has been observed; the same object if nothing changed."""
    ready = [
        name for name in eligible(observed, closing) if configured.enforce_calculated or not _is_configured(configured, name)
    ]
    grown = observed.checkpoints > observed.calculated_at
    if not (closing or (grown and observed.checkpoints > 0)):
        ready = [name for name in ready if name not in limits.calculated]
    else:
        observed = replace(observed, calculated_at=observed.checkpoints)
    if not ready:
        return limits, observed
    sections, out_of_section_s = dict(limits.sections), limits.out_of_section_s
    for name in ready:
        if name == OUT_OF_SECTION:
            out_of_section_s = _new_limit(out_of_section_s, name, observed.out_of_section_s, limits)
        else:
            sections[name] = _new_limit(sections.get(name), name, observed.sections[name].longest_s, limits)
    calculated = sorted({*limits.calculated, *ready})
    changed = replace(limits, sections=sections, out_of_section_s=out_of_section_s, calculated=calculated)
    return (limits if changed == limits else changed), observed


def take_over(limits: Limits, configured: Limits, loaded: Limits) -> Limits:
    """`limits` with those calculated ones of `loaded` that this job neither has configured nor calculated itself."""
    free = [
        name
        for name in loaded.calculated
        if name not in limits.calculated and (configured.enforce_calculated or not _is_configured(configured, name))
    ]
    sections, out_of_section_s = dict(limits.sections), limits.out_of_section_s
    for name in free:
        if name == OUT_OF_SECTION:
            out_of_section_s = loaded.out_of_section_s
        elif loaded.sections.get(name) is not None:
            sections[name] = loaded.sections[name]
    calculated = sorted({*limits.calculated, *free})
    if not free:
        return limits
    return replace(limits, sections=sections, out_of_section_s=out_of_section_s, calculated=calculated)


def _is_configured(configured: Limits, name: str) -> bool:
    if name == OUT_OF_SECTION:
        return configured.out_of_section_s is not None
    return configured.sections.get(name) is not None


def _new_limit(before_s: float | None, name: str, longest_s: float, limits: Limits) -> float:
    limit_s = limits.safety_factor * longest_s
    if before_s is not None and name in limits.calculated:
        limit_s = EMA_ALPHA * limit_s + (1 - EMA_ALPHA) * before_s
    return max(SHORTEST_LIMIT_S, limit_s)
