"""A job's story from the store: events, incidents, stacks. See `views` for what holds of every view."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, select

from rsup.supervisor.exit_views import failed_exits
from rsup.supervisor.job_selector import FoundJob
from rsup.supervisor.tables import events, incidents
from rsup.supervisor.training_views import in_process_rows
from rsup.supervisor.view_times import iso, seconds_between

NO_STACKS = "no stacks were taken: they are when a limit expires, a rank fails of a timeout, or one does not die of SIGTERM"


def list_events(
    connection: Connection, job: FoundJob, *, after: int = 0, limit: int = 100, last: int | None = None
) -> tuple[list[dict[str, Any]], int | None]:
    """Events in order: at most `limit` after number `after`, and the number to continue after (None where no more are).
    With `last` only the newest `last` of them."""
    query = select(events).where(events.c.job == job.id, events.c.number > after)
    if last is not None:
        newest = connection.execute(query.order_by(events.c.number.desc()).limit(last)).mappings().all()
        return [event_fields(row) for row in reversed(newest)], None
    rows = connection.execute(query.order_by(events.c.number).limit(limit + 1)).mappings().all()
    shown = rows[:limit]
    return [event_fields(row) for row in shown], shown[-1]["number"] if len(rows) > limit else None


def event_fields(row: RowMapping) -> dict[str, Any]:
    """One line of the story. `at` is by the clock of whoever saw it, `recorded` by the supervisor's."""
    same = ("kind", "text", "level", "attempt", "rank", "node", "principal", "data")
    return {"number": row["number"], "at": iso(row["at_us"]), "recorded": iso(row["recorded_us"]), **{k: row[k] for k in same}}


def list_incidents(
    connection: Connection, job: FoundJob, *, after: int = 0, last: int = 100, with_stacks: bool = True
) -> list[dict[str, Any]]:
    """The newest `last` incidents with a number above `after`, oldest of them first."""
    query = select(incidents).where(incidents.c.job == job.id, incidents.c.incident > after)
    rows = connection.execute(query.order_by(incidents.c.incident.desc()).limit(last)).mappings().all()
    exits = failed_exits(connection, job, {row["attempt"] for row in rows})
    return [incident_fields(row, exits, with_stacks) for row in reversed(rows)]


def mark_cured(found: list[dict[str, Any]], cured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Say of each incident whether an in-process restart cured it (`training_views.in_process_rows`)."""
    numbers = {row["incident"] for row in cured}
    return [{**one, "in_process": one["incident"] in numbers} for one in found]


def page_of_incidents(
    connection: Connection, job: FoundJob, *, after: int = 0, limit: int = 100
) -> tuple[list[dict[str, Any]], int | None]:
    """Incidents in order: at most `limit` after number `after`, and the number to continue after."""
    query = select(incidents).where(incidents.c.job == job.id, incidents.c.incident > after)
    rows = connection.execute(query.order_by(incidents.c.incident).limit(limit + 1)).mappings().all()
    shown = rows[:limit]
    exits = failed_exits(connection, job, {row["attempt"] for row in shown})
    items = mark_cured([incident_fields(row, exits) for row in shown], in_process_rows(connection, job.id))
    return items, shown[-1]["incident"] if len(rows) > limit else None


def incident_fields(row: RowMapping, exits: Mapping[int, list[dict[str, Any]]], with_stacks: bool = True) -> dict[str, Any]:
    """One incident. `exits`: by attempt, how its ranks ended. `detection_s` and `recovery_s` count from when it happened (a
    hang: from when the rank last got on): to when it was noticed, and to when every rank of the next attempt had stepped.
    `culprit` is the first mover or likely culprit, `victims` those who only waited."""
    same = ("kind", "rank", "node", "device", "iteration", "signal", "signal_name", "exit_code", "section", "found_by", "text")
    return {
        "incident": row["incident"],
        "attempt": row["attempt"],
        "at": iso(row["at_us"]),
        **{name: row[name] for name in same},
        "culprit": row["rank"],
        "victims": row["victims"],
        "detected": iso(row["detected_us"]),
        "recovered": iso(row["recovered_us"]),
        "detection_s": seconds_between(row["at_us"], row["detected_us"]),
        "recovery_s": seconds_between(row["at_us"], row["recovered_us"]),
        "lost_iterations": row["lost_iterations"],
        "exits": [] if row["kind"] == "suspected-hang" else exits.get(row["attempt"], []),
        "num_stacks": len(row["stacks"]),
        "stacks": row["stacks"] if with_stacks else [],
    }


def job_stacks(
    connection: Connection, job: FoundJob, *, rank: int | None = None, incident: int | None = None
) -> dict[str, Any]:
    """The stacks of the newest incident that has some, or of that `incident`; of `rank` only if given. Equal stacks stand once,
    with their ranks. `message` says why there are none."""
    query = select(incidents).where(incidents.c.job == job.id).order_by(incidents.c.incident.desc())
    if incident is not None:
        query = query.where(incidents.c.incident == incident)
    for row in connection.execute(query).mappings():
        if not row["stacks"]:
            continue
        stacks = [stack for stack in row["stacks"] if rank is None or rank in stack.get("ranks", ())]
        names = ("incident", "attempt", "kind", "text")
        found = {"at": iso(row["at_us"]), **{name: row[name] for name in names}, "stacks": stacks}
        return {**found, "message": "" if stacks else f"no stack of rank {rank} among those of incident {row['incident']}"}
    return {"incident": None, "attempt": None, "kind": None, "text": "", "at": None, "stacks": [], "message": NO_STACKS}
