"""Slow ranks of a job for readers: what is switched on, and the episodes. Plain dicts from the store."""

import time
from typing import Any

from sqlalchemy import Connection, func, select

from rsup.supervisor.records import StragglerSaved
from rsup.supervisor.states import JobState, Phase
from rsup.supervisor.straggler_states import OPEN_AFTER
from rsup.supervisor.tables import stragglers
from rsup.supervisor.view_times import iso

MAX_EPISODES = 50
STALE_US = 1_800_000_000
"""Without a report for so long, and for several times as long as reports took to come, nobody knows whether a rank is slow."""
_SAME = (
    "episode", "attempt", "rank", "device", "node", "section", "num_reports", "slowdown", "individual", "usual", "cause",
    "text", "verdict",
)  # fmt: skip


def open_now(state: JobState | None, now_us: int) -> list[StragglerSaved]:
    """Episodes that go on: of the present attempt, while the detection is not switched off, and as long as somebody reports."""
    if state is None or state.phase is Phase.ENDED or state.switches.get("stragglers") is False:
        return []
    if state.stragglers.attempt != state.attempt:
        return []
    return [one for one in state.stragglers.open if now_us - one.seen_us <= _silence_us(one)]


def _silence_us(one: StragglerSaved) -> int:
    """How long after its last slow report an episode counts as over: several times as long as reports took to come."""
    every_us = (one.seen_us - one.from_us) // max(1, one.num_reports - 1)
    return max(STALE_US, 2 * OPEN_AFTER * every_us)


def straggler_fields(connection: Connection, job_id: int, state: JobState | None, now_us: int | None = None) -> dict[str, Any]:
    """`switched` (true or false once people have said so, else null: as the script has it), `num_reports` of the newest
    attempt, the newest `episodes`, oldest of them first, and how many there were in all."""
    query = select(stragglers).where(stragglers.c.job == job_id).order_by(stragglers.c.episode.desc()).limit(MAX_EPISODES)
    open_ones = {one.episode for one in open_now(state, time.time_ns() // 1000 if now_us is None else now_us)}
    is_current = state is not None and state.stragglers.attempt == state.attempt
    episodes = [
        {
            **{name: row[name] for name in _SAME},
            "first_iteration": row["first"],
            "last_iteration": row["iteration"],
            "from": iso(row["from_us"]),
            "seen": iso(row["seen_us"]),
            "to": iso(row["to_us"]),
            "goes_on": row["episode"] in open_ones,
        }
        for row in reversed(connection.execute(query).mappings().all())
    ]
    num = connection.execute(select(func.count()).select_from(stragglers).where(stragglers.c.job == job_id)).scalar()
    return {
        "switched": None if state is None else state.switches.get("stragglers"),
        "num_reports": state.stragglers.num_reports if state is not None and is_current else 0,
        "num_episodes": int(num or 0) + (0 if state is None else state.stragglers.num_untold),
        "episodes": episodes,
    }
