"""Slow ranks of a job for readers: what is switched on, and the episodes. Plain dicts from the store."""

from typing import Any

from sqlalchemy import Connection, func, select

from rsup.supervisor.states import JobState, Phase
from rsup.supervisor.tables import stragglers
from rsup.supervisor.view_times import iso

MAX_EPISODES = 50
_SAME = (
    "episode", "attempt", "rank", "device", "node", "section", "num_reports", "slowdown", "individual", "cause", "text",
    "verdict",
)  # fmt: skip


def straggler_fields(connection: Connection, job_id: int, state: JobState | None) -> dict[str, Any]:
    """`switched` (true or false once people have said so, else null: as the script has it), `num_reports` of the newest
    attempt, the newest `episodes`, oldest of them first, and how many there were in all."""
    query = select(stragglers).where(stragglers.c.job == job_id).order_by(stragglers.c.episode.desc()).limit(MAX_EPISODES)
    open_ones = () if state is None or state.phase is Phase.ENDED else tuple(one.episode for one in state.stragglers.open)
    is_current = state is not None and state.stragglers.attempt == state.attempt
    is_off = state is not None and state.switches.get("stragglers") is False
    episodes = [
        {
            **{name: row[name] for name in _SAME},
            "first_iteration": row["first"],
            "last_iteration": row["iteration"],
            "from": iso(row["from_us"]),
            "seen": iso(row["seen_us"]),
            "to": iso(row["to_us"]),
            "goes_on": is_current and not is_off and row["episode"] in open_ones,
        }
        for row in reversed(connection.execute(query).mappings().all())
    ]
    num = connection.execute(select(func.count()).select_from(stragglers).where(stragglers.c.job == job_id)).scalar()
    return {
        "switched": None if state is None else state.switches.get("stragglers"),
        "num_reports": state.stragglers.num_reports if state is not None and is_current else 0,
        "num_episodes": int(num or 0),
        "episodes": episodes,
    }
