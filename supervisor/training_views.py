"""What a job's training stands to lose, from the store: checkpoints and saves, in-process restarts, why ranks left.

See `views` for what holds of every view. What an older release kept says nothing of saves: null, or what its rows tell.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, select

from rsup.supervisor.goodput_views import goodputs
from rsup.supervisor.save_states import SaveNoted
from rsup.supervisor.states import JobState, Phase, StateUnreadable, decode
from rsup.supervisor.tables import attempts, incidents, jobs
from rsup.supervisor.view_times import iso, seconds_between

Fields = Mapping[str, Any]


def machine_state(data: bytes | None) -> JobState | None:
    """The machine's state out of a row of `jobs`, None where it is not for us to read."""
    try:
        return decode(data) if data else None
    except StateUnreadable:
        return None


def work_fields(
    job: Fields, state: JobState | None, checkpoint: Fields | None, iteration_s: float | None, now_us: int, reached: int = 0
) -> dict[str, Any]:
    """What is saved, and what is not. `job`: `outcome` and `iteration` of its `job_fields`; `checkpoint`: its newest durable
    one as a row, else that of the state counts; `reached`: the iteration that beats of all ranks show, 0 where none do.

    `at_risk`: iterations since the newest durable checkpoint and about how long they took (`about_s`); of a failed job they
    are lost, of one that succeeded it is null. `saving`: the save under way longest. `failed`: the newest failure, unless a
    durable checkpoint came after it.
    """
    saves = state.saves if state is not None else None
    durable = checkpoint or (_noted(saves.durable) if saves is not None else None)
    base = durable["iteration"] if durable is not None else max(0, state.checkpoint) if state is not None else 0
    failed = saves.failed if saves is not None else None
    if saves is not None and failed is not None and saves.durable is not None and saves.durable.at_us >= failed.at_us:
        failed = None
    return {
        "at_risk": _at_risk(job, base, _iteration(job, state, reached), iteration_s),
        "durable": durable,
        "local": _noted(saves.local) if saves is not None else None,
        "saving": _saving(state, now_us),
        "failed": {**(_noted(failed) or {}), "text": failed.text} if failed is not None else None,
        "saves": None
        if saves is None
        else {
            "begun": saves.num_begun,
            "durable": saves.num_durable,
            "local": saves.num_local,
            "failed": saves.num_failed,
            "stall_s": sum(saves.stall_us.values()) / 1e6 if saves.stall_us else None,
        },
    }


def _noted(saved: SaveNoted | None) -> dict[str, Any] | None:
    if saved is None:
        return None
    return {"attempt": saved.attempt, "iteration": saved.iteration, "path": saved.path, "at": iso(saved.at_us)}


def _iteration(job: Fields, state: JobState | None, reached: int) -> int:
    """How far the ranks have come now: after a restart that is less than the job had reached before."""
    if state is not None and state.attempt and not reached:
        return state.attempt_iteration
    return int(reached or job["iteration"])


def _at_risk(job: Fields, base: int, iteration: int, iteration_s: float | None) -> dict[str, Any] | None:
    if job["outcome"] == "succeeded" or not job["iteration"]:
        return None
    num = max(0, iteration - base)
    return {"iterations": num, "since_iteration": base, "about_s": None if iteration_s is None else num * iteration_s}


def _saving(state: JobState | None, now_us: int) -> dict[str, Any] | None:
    if state is None or state.phase is Phase.ENDED or state.saves.attempt != state.attempt or not state.saves.under_way:
        return None
    iteration, since_us = min(state.saves.under_way.items(), key=lambda item: item[1])
    return {"iteration": iteration, "since": iso(since_us), "for_s": max(0.0, (now_us - since_us) / 1e6)}


def left_fields(state: JobState | None) -> dict[str, Any] | None:
    """Why the ranks of the newest attempt left on purpose, None if they did not say so."""
    left = state.left if state is not None else None
    if left is None:
        return None
    same = ("attempt", "iteration", "kind", "reason", "durable", "consumed_samples", "phase")
    return {"at": iso(left.at_us), **{name: getattr(left, name) for name in same}}


# ------------------------------------------------------------------------------------------------- in-process restarts


def in_process_rows(connection: Connection, *ids: int) -> list[Fields]:
    """The incidents of these jobs that an in-process restart has cured: every rank got on again before the attempt ended."""
    names = ("job", "attempt", "incident", "at_us", "detected_us", "recovered_us", "rank", "text", "lost_iterations")
    query = (
        select(*(incidents.c[name] for name in names))
        .join(attempts, (attempts.c.job == incidents.c.job) & (attempts.c.attempt == incidents.c.attempt))
        .where(incidents.c.job.in_(ids), incidents.c.kind != "suspected-hang", incidents.c.recovered_us.is_not(None))
        .where(attempts.c.stopped_us.is_(None) | (incidents.c.recovered_us <= attempts.c.stopped_us))
        .order_by(incidents.c.job, incidents.c.incident)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def in_process_fields(state: JobState | None, cured: Sequence[Fields], attempt: int) -> dict[str, Any]:
    """In-process restarts: how many there were in the newest attempt and in all, the last one that helped, and one that is
    under way. `took_s`: from the fault's detection until every rank had done an iteration again. `restartable`: whether the
    ranks run under in-process restart; null where nobody knows."""
    last = cured[-1] if cured else None
    under_way = state.in_process.open if state is not None and state.phase is not Phase.ENDED else None
    return {
        "restartable": None if state is None else state.in_process.restartable,
        "attempt": attempt,
        "restarts": sum(row["attempt"] == attempt for row in cured),
        "restarts_in_all": len(cured),
        "last": None
        if last is None
        else {
            "attempt": last["attempt"],
            "incident": last["incident"],
            "at": iso(last["at_us"]),
            "took_s": seconds_between(last["detected_us"] or last["at_us"], last["recovered_us"]),
            "rank": last["rank"],
            "why": last["text"],
            "lost_iterations": last["lost_iterations"],
        },
        "under_way": None if under_way is None else {"since": iso(under_way.since_us), "why": under_way.text},
    }


# ------------------------------------------------------------------------------------------------------ many jobs at once


def live_training(
    connection: Connection,
    may_read: Callable[[str], bool],
    reached: Callable[[RowMapping], int],
    now_us: int,
    limit: int,
) -> list[tuple[RowMapping, dict[str, Any]]]:
    """`goodput`, `work` and the number of `in_process_restarts` of the newest `limit` live jobs whose owner `may_read` allows,
    and its `machine` state, each with its row of `jobs`. `reached(row)`: the iteration that its beats show."""
    query = select(jobs).where(jobs.c.phase != "ended").order_by(jobs.c.id.desc()).limit(limit)
    rows = [row for row in connection.execute(query).mappings() if may_read(row["owner"])]
    states = {row["id"]: machine_state(row["state"]) for row in rows}
    iterations = {row["id"]: reached(row) for row in rows}
    found = goodputs(connection, rows, states, now_us, iterations)
    cured = Counter((one["job"], one["attempt"]) for one in in_process_rows(connection, *states))
    result = []
    for row in rows:
        state, goodput = states[row["id"]], found[row["id"]]
        reached_now = iterations[row["id"]] if row["phase"] == "running" else 0
        work = work_fields({**row, "outcome": None}, state, None, goodput["iteration_s"], now_us, reached_now)
        num_cured = cured[row["id"], row["attempt"]]
        result.append((row, {"goodput": goodput, "work": work, "in_process_restarts": num_cured, "machine": state}))
    return result
