"""Finds what is overdue on the heartbeat board. Pure: samples, limits and the time go in, facts for the supervisor come out.

Rules (`DESIGN.md` section 4). Only limits that exist are checked. Any expired open section counts, also an outer one; with
none open, the time since the last one closed has its own limit. Heartbeat limits run between explicit heartbeats, the start-up
limit ends with the first call of rsup.worker. With a warm-up limit, the first `num_warmup_iters` training steps fall under it
instead of under `step` and the out-of-section limit.

Something is overdue when two samples in a row show the same *entry* (the same visit of a section, the same gap between
heartbeats) past its limit, and is told once. Time in which the agent itself did not run (`Gap`) does not count, nor time in
which a debugger held the rank.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rsup.launcher.process_state import Gap
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import (
    FLAG_ASYNC_SAVE,
    FLAG_DEBUGGER,
    FLAG_LEFT,
    FLAG_LOADED_PERSISTENT,
    NAME_BYTES,
    SectionSample,
    SlotSample,
    name_on_board,
)

OUT_OF_SECTION = "out-of-section"
HEARTBEAT = "heartbeat"
INITIAL_HEARTBEAT = "initial-heartbeat"
STARTUP = "startup"
WARMUP = "warmup"
SHORTEST_FROM_CLIENT_S = 5.0
"""NVRx's clients calculate limits of some hundred milliseconds, which a hiccup passes: its server looks every 5 s only."""
STEP = "step"


class WatchedRank(Struct, frozen=True):
    """One local rank that is alive, and its slot as just read. `sample` None: it has not called rsup.worker."""

    rank: int
    pid: int
    started_ns: int
    sample: SlotSample | None


class Expired(Struct, frozen=True):
    """One limit of one rank, past in one sample. `key` names the visit: (rank, limit, entry)."""

    key: tuple[int, str, int]
    age_s: float
    limit_s: float


class RankMemory(Struct, frozen=True):
    """What is remembered of one rank between samples."""

    first_call_ns: int = 0
    calls: int = 0
    """Grows when a client of NVRx's begins anew: the wait for its first heartbeat then does too."""
    forgiven_until_ns: int = 0
    """A debugger held the rank until then: nothing older counts."""
    longest_out_of_section_ns: int = 0


class WatchState(Struct, frozen=True):
    """What one attempt's watch remembers; start each attempt with a new one."""

    ranks: dict[int, RankMemory] = {}
    past: frozenset[tuple[int, str, int]] = frozenset()
    """Keys past their limit in the sample before."""
    told: frozenset[tuple[int, str, int]] = frozenset()


def watch(
    state: WatchState,
    watched: Sequence[WatchedRank],
    limits: wire.Limits,
    now_ns: int,
    gaps: Sequence[Gap],
    attempt: int,
    at_us: int,
    is_held: Callable[[int], bool] = lambda pid: False,
) -> tuple[WatchState, list[wire.RankOverdue]]:
    """Look at one sample of all local ranks.

    `is_held(pid)` says whether a debugger holds the process; it is asked only about ranks that look overdue.
    """
    memories, past, overdue = dict(state.ranks), set(), []
    told = set(state.told)
    for rank in watched:
        memory = _remember(memories.get(rank.rank, RankMemory()), rank.sample, now_ns, gaps)
        expired = _expired(rank, memory, limits, now_ns, gaps)
        if expired and is_held(rank.pid):
            memory, expired = replace(memory, forgiven_until_ns=now_ns), []
        memories[rank.rank] = memory
        for one in expired:
            past.add(one.key)
            if one.key in state.past and one.key not in told:
                told.add(one.key)
                overdue.append(_fact(one, rank, limits, now_ns, attempt, at_us))
    return WatchState(memories, frozenset(past), frozenset(told)), overdue


def age_ns(since_ns: int, now_ns: int, gaps: Sequence[Gap]) -> int:
    """Time since `since_ns`, without the gaps in it."""
    missed_ns = sum(max(0, min(gap.end_ns, now_ns) - max(gap.start_ns, since_ns)) for gap in gaps)
    return max(0, now_ns - since_ns - missed_ns)


# ---------------------------------------------------------------------------------------------------- the rules


def _remember(memory: RankMemory, sample: SlotSample | None, now_ns: int, gaps: Sequence[Gap]) -> RankMemory:
    if sample is None or not sample.calls:
        return memory
    first_call_ns = memory.first_call_ns if sample.calls == memory.calls else now_ns
    forgiven_ns = now_ns if sample.flags & FLAG_DEBUGGER else memory.forgiven_until_ns
    longest_ns = memory.longest_out_of_section_ns
    if sample.closed_since_ns and not sample.flags & FLAG_LEFT:
        opened_ns = [section.open_since_ns for section in sample.sections if section.open_since_ns]
        until_ns = min(opened_ns) if opened_ns else now_ns
        if until_ns > sample.closed_since_ns:
            longest_ns = max(longest_ns, age_ns(max(sample.closed_since_ns, forgiven_ns), until_ns, gaps))
    now = RankMemory(first_call_ns, sample.calls, forgiven_ns, longest_ns)
    return memory if now == memory else now


def _expired(rank: WatchedRank, memory: RankMemory, limits: wire.Limits, now_ns: int, gaps: Sequence[Gap]) -> list[Expired]:
    found: list[Expired] = []

    def check(limit: str, entry: int, since_ns: int, limit_s: float | None) -> None:
        if limit_s is None or not since_ns:
            return
        if limit in limits.from_client:
            limit_s = max(limit_s, SHORTEST_FROM_CLIENT_S)
        age_s = age_ns(max(since_ns, memory.forgiven_until_ns), now_ns, gaps) / 1e9
        if age_s > limit_s:
            visit = entry + (sample.calls << 40 if sample else 0)  # a client that begins anew counts its visits anew
            found.append(Expired((rank.rank, limit, visit), age_s, limit_s))

    sample = rank.sample
    if sample is None or not sample.calls:
        check(STARTUP, 0, rank.started_ns, limits.startup_s)
        return found
    if sample.flags & FLAG_LEFT:
        return found
    if sample.heartbeats:
        check(HEARTBEAT, sample.heartbeats, sample.heartbeat_ns, limits.heartbeat_s)
    else:
        check(INITIAL_HEARTBEAT, 0, memory.first_call_ns, limits.initial_heartbeat_s)
    open_sections = [section for section in sample.sections if section.open_since_ns]
    warming_up = _warms_up(sample, limits)
    for section in open_sections:
        if warming_up and section.name == STEP:
            check(WARMUP, section.entered, section.open_since_ns, limits.warmup_s)
        else:
            check(section.name, section.entered, section.open_since_ns, _limit_of(section.name, limits))
    if not open_sections:
        entry = sum(section.entered for section in sample.sections)
        if warming_up:
            # each warm-up iteration has the limit for itself: the training thread's calls mark where one begins
            check(WARMUP, entry + sample.train_steps, max(sample.closed_since_ns, sample.main_ns), limits.warmup_s)
        else:
            check(OUT_OF_SECTION, entry, sample.closed_since_ns, limits.out_of_section_s)
    return found


def _limit_of(name: str, limits: wire.Limits) -> float | None:
    """The limit of a section by its name on the board, where a long one is cut."""
    if name not in limits.sections and len(name.encode()) > NAME_BYTES - 5:
        return next((limit_s for whole, limit_s in limits.sections.items() if name_on_board(whole) == name), None)
    return limits.sections.get(name)


def _warms_up(sample: SlotSample, limits: wire.Limits) -> bool:
    if limits.warmup_s is None:
        return False
    return sample.phase == "warmup" or (sample.phase == "train" and sample.train_steps < limits.num_warmup_iters)


def _fact(expired: Expired, rank: WatchedRank, limits: wire.Limits, now_ns: int, attempt: int, at_us: int) -> wire.RankOverdue:
    sample = rank.sample
    main_ns = sample.main_ns if sample else 0
    limit = expired.key[1]
    return wire.RankOverdue(
        at_us=at_us,
        attempt=attempt,
        rank=rank.rank,
        limit=limit,
        age_s=round(expired.age_s, 3),
        limit_s=expired.limit_s,
        iteration=sample.iteration if sample else 0,
        main_beat_age_s=round((now_ns - main_ns) / 1e9, 3) if main_ns else -1.0,
        calculated=limit in limits.calculated,
        beat_age_s=_age_s(sample.liveness_ns, now_ns) if sample else -1.0,
    )


# -------------------------------------------------------------------------------------------------- what was observed


def beats(watched: Sequence[WatchedRank], now_ns: int) -> list[wire.RankBeat]:
    """Snapshot for the supervisor's readers; a rank that does not use rsup.worker has ages of -1."""
    return [_beat(rank, now_ns) for rank in watched]


def _beat(rank: WatchedRank, now_ns: int) -> wire.RankBeat:
    sample = rank.sample
    if sample is None:
        return wire.RankBeat(rank.rank, rank.pid, 0, -1.0, -1.0)
    return wire.RankBeat(
        rank.rank,
        rank.pid,
        sample.iteration,
        _age_s(sample.liveness_ns, now_ns),
        _age_s(sample.main_ns, now_ns),
        [
            wire.OpenSection(section.name, _age_s(section.open_since_ns, now_ns))
            for section in open_sections(sample)
            if not sample.flags & FLAG_LEFT
        ],
        sample.phase,
    )


def open_sections(sample: SlotSample) -> list[SectionSample]:
    """The open sections, outermost first."""
    return sorted((section for section in sample.sections if section.open_since_ns), key=lambda section: section.open_since_ns)


def _age_s(since_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - since_ns) / 1e9, 3) if since_ns else -1.0


def observed(
    state: WatchState, samples: Sequence[SlotSample], attempt: int, at_us: int, closing: bool = False
) -> wire.SectionsObserved | None:
    """Maxima over this node's ranks since the attempt began; None while no rank uses rsup.worker.

    Counts are the smallest of any rank, so that a limit is never derived from steps that some rank has not done.
    """
    samples = [sample for sample in samples if sample.calls]
    if not samples:
        return None
    sections: dict[str, wire.SectionSeen] = {}
    for sample in samples:
        for section in sample.sections:
            times = section.entered - (1 if section.open_since_ns else 0)
            before = sections.get(section.name, wire.SectionSeen(0.0, 0))
            longest_s = max(before.longest_s, section.longest_ns / 1e9)
            sections[section.name] = wire.SectionSeen(longest_s, max(before.times, times))
    return wire.SectionsObserved(
        at_us=at_us,
        attempt=attempt,
        sections=sections,
        out_of_section_s=max((memory.longest_out_of_section_ns for memory in state.ranks.values()), default=0) / 1e9,
        num_train_steps=min(sample.train_steps for sample in samples),
        num_checkpoints=min(sample.checkpoints for sample in samples),
        async_save=any(sample.flags & FLAG_ASYNC_SAVE for sample in samples),
        loaded_persistent=any(sample.flags & FLAG_LOADED_PERSISTENT for sample in samples),
        closing=closing,
    )
