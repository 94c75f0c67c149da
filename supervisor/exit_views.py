"""How the ranks of failed attempts ended, from the story in the store: who failed by himself, whom we ended and why."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, RowMapping, select

from rsup.supervisor.failure import signal_name
from rsup.supervisor.job_selector import FoundJob
from rsup.supervisor.tables import events
from rsup.supervisor.view_times import iso

MAX_ROWS = 4096
MAX_EXITS = 64
"""Of one attempt."""
MAX_LAST_LINES = 15


def failed_exits(connection: Connection, job: FoundJob, attempts: Collection[int]) -> dict[int, list[dict[str, Any]]]:
    """By attempt, its ranks that did not exit 0, in the order in which that became known, at most `MAX_EXITS`. What the store
    no longer has (`retention`) is not there."""
    query = select(events).where(events.c.job == job.id, events.c.kind == "RankExited", events.c.attempt.in_(attempts))
    rows = connection.execute(query.order_by(events.c.number).limit(MAX_ROWS)).mappings().all() if attempts else []
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        exits = found.setdefault(row["attempt"], [])
        if row["data"].get("exit_code") and len(exits) < MAX_EXITS:
            exits.append(_fields(row))
    return found


def _fields(row: RowMapping) -> dict[str, Any]:
    """One rank's end. `by_us`: why we had signalled it, empty if we had not. `killer`: where another signal came from, as far
    as known. `last_lines`: of its stderr, of ranks that failed by themselves."""
    data = row["data"]
    lines = str(data.get("log_tail") or data.get("traceback") or "").rstrip().splitlines()
    return {
        "rank": row["rank"],
        "node": row["node"],
        "at": iso(row["at_us"]),
        "exit_code": data["exit_code"],
        "signal_name": signal_name(data.get("signal", 0)),
        "iteration": data.get("iteration", 0),
        "by_us": data.get("by_us", ""),
        "killer": data.get("killer", ""),
        "error": data.get("error", ""),
        "last_lines": lines[-MAX_LAST_LINES:],
    }
