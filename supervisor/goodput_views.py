"""Goodput of jobs from the store: which records tell of the times that `goodput` cuts up."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from rsup.supervisor.goodput import AttemptTimes, Trouble, goodput
from rsup.supervisor.metric_views import STEP_TIME
from rsup.supervisor.states import JobState
from rsup.supervisor.tables import attempts, cases, incidents, metric_points

ByAttempt = Mapping[tuple[int, int], Sequence[Any]]


def goodputs(
    connection: Connection,
    rows: Sequence[RowMapping],
    states: Mapping[int, JobState | None],
    now_us: int,
    reached: Mapping[int, int] | None = None,
) -> dict[int, dict[str, Any]]:
    """Goodput of each of these rows of `jobs` (their `id`, `created_us` and `ended_us`), by id; see `goodput.goodput`.

    `states`: the machines' states, None where one cannot be read. `reached`: iterations that beats show for live jobs, which
    no row holds yet. Four queries, however many jobs.
    """
    ids = [row["id"] for row in rows]
    troubles, replays = _troubles(connection, ids), _replays(connection, ids)
    told_s = _told_iterations_s(connection, ids)
    tries: dict[int, list[AttemptTimes]] = defaultdict(list)
    query = select(attempts).where(attempts.c.job.in_(ids)).order_by(attempts.c.job, attempts.c.attempt)
    for row in connection.execute(query).mappings():
        job = row["job"]
        tries[job].append(_times(row, states.get(job), (reached or {}).get(job, 0), troubles, replays))
    return {
        row["id"]: goodput(row["created_us"], row["ended_us"], tries[row["id"]], now_us, told_s.get(row["id"])) for row in rows
    }


def _times(row: RowMapping, state: JobState | None, reached: int, troubles: ByAttempt, replays: ByAttempt) -> AttemptTimes:
    key = (row["job"], row["attempt"])
    is_current = state is not None and state.attempt == row["attempt"] and row["stopped_us"] is None
    last_iteration = max(row["last_iteration"], iteration_of(row, state), reached if is_current else 0)
    return AttemptTimes(
        attempt=row["attempt"],
        started_us=row["started_us"],
        first_step_us=row["first_step_us"],
        stopped_us=row["stopped_us"],
        start_iteration=row["start_iteration"],
        last_iteration=last_iteration,
        troubles=troubles.get(key, ()),
        replays=replays.get(key, ()),
        stall_us=None if state is None else state.saves.stall_us.get(row["attempt"]),
        restarts_in_process=is_current and state is not None and state.in_process.open is not None,
    )


def iteration_of(row: RowMapping, state: JobState | None) -> int:
    """How far an attempt (a row of `attempts`) has come. While it runs only the machine knows."""
    if state is None or row["stopped_us"] is not None or state.attempt != row["attempt"]:
        return int(row["last_iteration"])
    return max(int(row["last_iteration"]), state.attempt_iteration)


def _troubles(connection: Connection, ids: Sequence[int]) -> dict[tuple[int, int], list[Trouble]]:
    kept = incidents.c
    query = select(kept.job, kept.attempt, kept.at_us, kept.detected_us, kept.recovered_us, kept.lost_iterations)
    query = query.add_columns(kept.kind, kept.found_by).where(kept.job.in_(ids), kept.kind != "suspected-hang")
    found: dict[tuple[int, int], list[Trouble]] = defaultdict(list)
    for row in connection.execute(query).mappings():
        is_hang = row["kind"] == "hang" or (row["kind"] == "in-process" and "limit" in row["found_by"])
        one = Trouble(row["at_us"], row["detected_us"], row["recovered_us"], is_hang, row["lost_iterations"])
        found[row["job"], row["attempt"]].append(one)
    return found


def _replays(connection: Connection, ids: Sequence[int]) -> dict[tuple[int, int], list[tuple[int, int | None]]]:
    query = select(cases.c.job, cases.c.attempt, cases.c.opened_us, cases.c.closed_us).where(cases.c.job.in_(ids))
    found: dict[tuple[int, int], list[tuple[int, int | None]]] = defaultdict(list)
    for job, attempt, opened_us, closed_us in connection.execute(query):
        found[job, attempt].append((opened_us, closed_us))
    return found


def _told_iterations_s(connection: Connection, ids: Sequence[int]) -> dict[int, float]:
    """How long an iteration took on average, as trainings told it: the mean of what the curve of it shows."""
    of = metric_points.c
    num = of.count - of.num_non_finite
    mean_s = func.sum(of.value * num) / func.nullif(func.sum(num), 0)
    query = select(of.job, mean_s).where(of.job.in_(ids), of.kind == "training", of.name == STEP_TIME).group_by(of.job)
    return {job: float(took_s) for job, took_s in connection.execute(query) if took_s is not None and took_s > 0}
