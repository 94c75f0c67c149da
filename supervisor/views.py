"""Jobs as the store tells them: plain dicts that go to JSON unchanged, for REST, the CLI and the page alike.

Every function reads over a connection that the caller opened (one read transaction, so one answer is one moment) and writes
nothing. Times are ISO UTC with microseconds, durations seconds; null means that the records do not say. What only a running
supervisor knows, the beats of this moment, comes in as `LiveBeats`; without it the last snapshot in the store is used, with
its time. Events, incidents and stacks: `story_views`; nodes and devices: `hardware_views`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from rsup.supervisor.case_views import job_cases
from rsup.supervisor.goodput_views import goodputs, iteration_of
from rsup.supervisor.job_selector import FoundJob
from rsup.supervisor.metric_views import curves_of, latest_of
from rsup.supervisor.records import GIVEN_UP
from rsup.supervisor.states import JobState, Phase, Role
from rsup.supervisor.story_views import list_incidents, mark_cured
from rsup.supervisor.straggler_views import straggler_fields
from rsup.supervisor.tables import attempts, beats, cases, checkpoints, incidents, jobs, ranks, sections
from rsup.supervisor.training_views import in_process_fields, in_process_rows, left_fields, machine_state, work_fields
from rsup.supervisor.view_times import iso, seconds_between
from rsup.supervisor.waiting_view import waiting_for
from rsup.supervisor.wire import EXIT_NO_SUPERVISOR

Fields = Mapping[str, Any]

MAX_ATTEMPTS = 200
MAX_INCIDENTS = 100
MAX_CHECKPOINTS = 100
"""How many of the newest a job's status holds; `counts` says how many there are."""

_LISTED = tuple(column for column in jobs.c if column is not jobs.c.state)
"""Of each job of a list. The machine's state is 21 kB at 32 nodes, and grows with them."""

PUBLIC_FIELDS = ("id", "run", "name", "cluster", "owner", "state")
"""What of a job everybody with a token may see."""


@dataclass(frozen=True)
class LiveBeats:
    """The latest beats of a job's ranks, as `records.BeatsSaved` has them; ages are as at `at_us`."""

    at_us: int
    ranks: Sequence[Fields]


def list_jobs(
    connection: Connection, *, before: int | None = None, limit: int = 100, state: str = "", owner: str = ""
) -> tuple[list[dict[str, Any]], int | None]:
    """Newest first: at most `limit` jobs, and the `before` that continues the list (None at its end). `state` is a phase,
    or `live` for all that have not ended."""
    query = select(*_LISTED).order_by(jobs.c.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(jobs.c.id < before)
    if owner:
        query = query.where(jobs.c.owner == owner)
    if state == "live":
        query = query.where(jobs.c.phase != "ended")
    elif state:
        query = query.where(jobs.c.phase == state)
    rows = connection.execute(query).mappings().all()
    shown = rows[:limit]
    numbers = [row["id"] for row in shown]
    num_attempts = _counts(connection, attempts.c.job, numbers)
    num_incidents = _counts(connection, incidents.c.job, numbers)
    items = [
        {**job_fields(row), "num_attempts": num_attempts.get(row["id"], 0), "num_incidents": num_incidents.get(row["id"], 0)}
        for row in shown
    ]
    return items, shown[-1]["id"] if len(rows) > limit else None


def job_fields(row: RowMapping) -> dict[str, Any]:
    """The job itself, from a row of `jobs`. `state` is the phase; `outcome` is null until the job has ended."""
    ended = row["phase"] == "ended"
    run = row["run"]
    return {
        "id": row["job_id"],
        "run": run,
        "name": f"{row['job_id']}.{run}" if run > 1 else row["job_id"],
        "cluster": row["cluster"],
        "owner": row["owner"],
        "state": row["phase"],
        "outcome": _outcome(row) if ended else None,
        "reason": row["reason"],
        "exit_code": row["exit_code"],
        "command": row["command"],
        "iteration": row["iteration"],
        "attempt": row["attempt"],
        "epoch": row["epoch"],
        "num_nodes": row["num_nodes"],
        "num_ranks": row["num_ranks"],
        "injected": bool(row["injected"]),
        "created": iso(row["created_us"]),
        "updated": iso(row["updated_us"]),
        "ended": iso(row["ended_us"]),
    }


def _outcome(row: RowMapping) -> str:
    if row["exit_code"] == EXIT_NO_SUPERVISOR and row["reason"].startswith(GIVEN_UP):
        return GIVEN_UP.partition(" before")[0]
    return "succeeded" if row["exit_code"] == 0 else "failed"


def public_fields(job: Fields) -> dict[str, Any]:
    """What of `job_fields` everybody with a token may see."""
    return {name: job[name] for name in PUBLIC_FIELDS}


def job_status(
    connection: Connection,
    job: FoundJob,
    *,
    now_us: int,
    live: LiveBeats | None = None,
    supervisor: dict[str, Any] | None = None,
    with_stacks: bool = True,
) -> dict[str, Any]:
    """All that `rsup status JOB --json` prints. `supervisor` (pid, address, ...) is handed through."""
    row = connection.execute(select(jobs).where(jobs.c.id == job.id)).mappings().one()
    fields = job_fields(row)
    tries = _attempt_rows(connection, job)
    found = list_incidents(connection, job, last=MAX_INCIDENTS, with_stacks=with_stacks)
    seen = None if fields["state"] == "ended" else live
    snapshot = seen or stored_beats(connection, job)
    rank_rows = job_ranks(connection, job, snapshot)
    state = machine_state(row["state"])
    fields["num_spares"] = _num_spares(state)
    fields["waiting_for"] = waiting_for(state, row["updated_us"], now_us) if state is not None else ""
    current = [rank["iteration"] for rank in rank_rows if rank["beat_age_s"] is not None and rank["iteration"]]
    if current and fields["state"] == "running":
        fields["iteration"] = min(current)
    reached = min(current, default=0) if fields["state"] == "running" else 0
    goodput = goodputs(connection, [row], {job.id: state}, now_us, {job.id: reached})[job.id]
    cured = in_process_rows(connection, job.id)
    saved = list_checkpoints(connection, job)
    latest = latest_of(connection, job.id)
    return {
        "job": fields,
        "supervisor": supervisor,
        "attempts": [attempt_fields(entry, state, cured) for entry in tries[-MAX_ATTEMPTS:]],
        "ranks": rank_rows,
        "beats_at": iso(snapshot.at_us) if snapshot else None,
        "incidents": mark_cured(found, cured),
        "suspects": _suspects(fields, found, rank_rows),
        "checkpoints": saved,
        "work": work_fields(fields, state, _newest(saved), goodput["iteration_s"], now_us, reached),
        "in_process": in_process_fields(state, cured, fields["attempt"]),
        "left": left_fields(state),
        "cases": job_cases(connection, job),
        "sections": list_sections(connection, job),
        "standbys": _standbys(state),
        "goodput": goodput,
        "metrics": latest,
        "curves": curves_of(connection, job.id, latest),
        "stragglers": straggler_fields(connection, job.id, state, now_us),
        "counts": {
            "attempts": len(tries),
            "free_restarts": 0 if state is None else state.free_restarts,
            "in_process_restarts": len(cured),
            "incidents": _counts(connection, incidents.c.job, [job.id]).get(job.id, 0),
            "checkpoints": _counts(connection, checkpoints.c.job, [job.id]).get(job.id, 0),
            "cases": _counts(connection, cases.c.job, [job.id]).get(job.id, 0),
        },
    }


def _num_spares(state: JobState | None) -> int:
    """Nodes that wait for another one's loss; none once the job has ended."""
    if state is None or state.phase is Phase.ENDED:
        return 0
    return sum(agent.role is Role.SPARE for agent in state.agents.values())


def _standbys(state: JobState | None) -> list[dict[str, Any]]:
    """The warm standbys that wait for a live job's next restart, by node."""
    if state is None or state.phase is Phase.ENDED:
        return []
    return [
        {"node": agent.info.node, "ready": agent.num_standbys, "size_bytes": agent.standby_bytes}
        for agent in state.agents.values()
        if agent.num_standbys
    ]


def stored_beats(connection: Connection, job: FoundJob) -> LiveBeats | None:
    """The last snapshot of beats in the store."""
    row = connection.execute(select(beats).where(beats.c.job == job.id)).mappings().first()
    return LiveBeats(row["at_us"], row["ranks"]) if row else None


def job_ranks(connection: Connection, job: FoundJob, snapshot: LiveBeats | None) -> list[dict[str, Any]]:
    """The ranks of the newest attempt with what their beats say; a rank that has ended has no beat age."""
    newest = select(func.max(ranks.c.attempt)).where(ranks.c.job == job.id).scalar_subquery()
    query = select(ranks).where(ranks.c.job == job.id, ranks.c.attempt == newest).order_by(ranks.c.rank)
    beats_of = {beat["rank"]: beat for beat in (snapshot.ranks if snapshot else ())}
    rows = connection.execute(query).mappings().all()
    ended = _ended_at(connection, job) if any(row["exit_code"] is not None for row in rows) else {}
    return [_rank_fields(row, beats_of.get(row["rank"]), job.phase, ended.get((row["attempt"], row["rank"]))) for row in rows]


def _ended_at(connection: Connection, job: FoundJob) -> dict[tuple[int, int], int]:
    """Iterations at which ranks of the newest attempt ended, by attempt and rank: the last beats were kept a while before."""
    state = machine_state(connection.execute(select(jobs.c.state).where(jobs.c.id == job.id)).scalar())
    exits = [exit_ for agent in state.agents.values() for exit_ in agent.exits.items()] if state is not None else []
    return {(state.attempt, rank): exit_.iteration for rank, exit_ in exits if exit_.iteration} if state is not None else {}


def _rank_fields(row: RowMapping, beat: Fields | None, phase: str, ended_at: int | None) -> dict[str, Any]:
    if beat is not None and row["pid"] and beat.get("pid") not in (0, None, row["pid"]):
        beat = None  # of an earlier attempt's process
    ended = row["exit_code"] is not None or phase == "ended"
    opened = [] if beat is None or ended else beat.get("open_sections", [])
    return {
        "rank": row["rank"],
        "attempt": row["attempt"],
        "node": row["node"],
        "device": row["device"] or None,
        "iteration": ended_at or (beat.get("iteration") if beat else None),
        "open_sections": [{"name": name, "age_s": age_s} for name, age_s in opened],
        "beat_age_s": _age(beat, "beat_age_s", ended),
        "main_beat_age_s": _age(beat, "main_beat_age_s", ended),
        "phase": "" if beat is None or ended else beat.get("phase", ""),
        "pid": row["pid"] or (beat.get("pid") if beat is not None else None) or None,
        "exit_code": row["exit_code"],
        "signal": row["signal"],
        "reason": row["reason"],
    }


def _age(beat: Fields | None, name: str, ended: bool) -> float | None:
    age_s = None if beat is None or ended else beat.get(name)
    return None if age_s is None or age_s < 0 else float(age_s)


def attempt_fields(row: RowMapping, state: JobState | None, cured: Sequence[Fields]) -> dict[str, Any]:
    """An attempt, from a row of `attempts`. `start_s`: from its start until every rank had stepped. `cured`: incidents of the
    job that an in-process restart has cured."""
    return {
        "attempt": row["attempt"],
        "started": iso(row["started_us"]),
        "first_step": iso(row["first_step_us"]),
        "stopped": iso(row["stopped_us"]),
        "start_s": seconds_between(row["started_us"], row["first_step_us"]),
        "duration_s": seconds_between(row["started_us"], row["stopped_us"]),
        "world_size": row["world_size"],
        "nodes": row["nodes"],
        "outcome": row["outcome"],
        "reason": row["reason"],
        "start_iteration": row["start_iteration"],
        "last_iteration": iteration_of(row, state),
        "in_process_restarts": sum(one["attempt"] == row["attempt"] for one in cured),
    }


def list_checkpoints(connection: Connection, job: FoundJob) -> list[dict[str, Any]]:
    """The newest `MAX_CHECKPOINTS`, oldest of them first."""
    query = (
        select(checkpoints)
        .where(checkpoints.c.job == job.id)
        .order_by(checkpoints.c.at_us.desc(), checkpoints.c.iteration.desc())
    )
    rows = connection.execute(query.limit(MAX_CHECKPOINTS)).mappings().all()
    return [
        {
            "attempt": row["attempt"],
            "iteration": row["iteration"],
            "path": row["path"],
            "at": iso(row["at_us"]),
            "duration_s": row["duration_s"],
        }
        for row in reversed(rows)
    ]


def _newest(saved: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    names = ("attempt", "iteration", "path", "at")
    return {name: saved[-1][name] for name in names} if saved else None


def list_sections(connection: Connection, job: FoundJob) -> list[dict[str, Any]]:
    """Limits in force and what was observed, by name."""
    rows = connection.execute(select(sections).where(sections.c.job == job.id).order_by(sections.c.section)).mappings()
    names = ("section", "limit_s", "calculated", "longest_s", "times")
    return [{name: row[name] for name in names} for row in rows]


def _attempt_rows(connection: Connection, job: FoundJob) -> list[RowMapping]:
    query = select(attempts).where(attempts.c.job == job.id).order_by(attempts.c.attempt)
    return list(connection.execute(query).mappings())


def _suspects(job: Fields, found: Sequence[Fields], rank_rows: Sequence[Fields]) -> list[dict[str, Any]]:
    """What looks stuck now: suspected hangs of this attempt whose rank has not moved since."""
    if job["state"] == "ended":
        return []
    rank_of = {rank["rank"]: rank for rank in rank_rows}
    stuck = []
    for incident in found:
        rank = rank_of.get(incident["rank"])
        if incident["kind"] != "suspected-hang" or incident["attempt"] != job["attempt"] or incident["recovered"]:
            continue
        if rank and ((rank["iteration"] or 0) > incident["iteration"] or rank["exit_code"] is not None):
            continue
        ages = [entry["age_s"] for entry in (rank["open_sections"] if rank else ()) if entry["name"] == incident["section"]]
        names = ("incident", "rank", "node", "device", "section", "iteration", "found_by", "text")
        stuck.append({**{name: incident[name] for name in names}, "since": incident["at"], "age_s": max(ages, default=None)})
    return stuck


def _counts(connection: Connection, column: Any, numbers: Sequence[int]) -> dict[int, int]:
    query = select(column, func.count()).where(column.in_(numbers)).group_by(column)
    return {job: count for job, count in connection.execute(query)}
