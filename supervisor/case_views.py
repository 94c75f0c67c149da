"""Rerun cases from the store: what was compared, where, the verdict, what followed. See `views` for what holds of every view.

Who may read the job sees all of its cases; everybody with a token sees what a case says of hardware (`PUBLIC_FIELDS`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, and_, or_, select

from rsup.supervisor.job_selector import FoundJob
from rsup.supervisor.records import JobKey
from rsup.supervisor.tables import cases, jobs
from rsup.supervisor.view_times import iso, seconds_between
from rsup.supervisor.wire import RsupError, UsageError

MAX_CASES = 100
"""How many of the newest a job's status holds."""

PUBLIC_FIELDS = (
    *("case_id", "job", "state", "iteration", "attempt", "opened", "closed", "verdict", "data_dependent", "accused"),
    *("suspect_of", "found_by", "injected", "note"),
)

Json = dict[str, Any]
MayRead = Callable[[str], bool]
"""Whether who asks may read jobs of that owner."""


class UnknownCase(RsupError):
    """The store has no such case."""


class AmbiguousCase(UsageError):
    """Several cases begin so."""


class BadCaseCursor(RsupError):
    """A place in a list of cases that no list gave."""


def job_cases(connection: Connection, job: FoundJob, limit: int = MAX_CASES) -> list[Json]:
    """The newest cases of a job, oldest of them first."""
    query = _query().where(cases.c.job == job.id).order_by(cases.c.opened_us.desc(), cases.c.case_id.desc()).limit(limit)
    return [case_fields(row) for row in reversed(connection.execute(query).mappings().all())]


def list_cases(
    connection: Connection, *, job: FoundJob | None = None, after: str = "", limit: int = 100, verdict: str = ""
) -> tuple[list[Json], str | None]:
    """Newest first: at most `limit` cases, and the `after` that continues the list (None at its end). `verdict`: only those
    with that one, or `open`."""
    query = _query().order_by(cases.c.opened_us.desc(), cases.c.case_id.desc(), cases.c.job.desc()).limit(limit + 1)
    if job is not None:
        query = query.where(cases.c.job == job.id)
    if verdict:
        query = query.where(cases.c.verdict == ("" if verdict == "open" else verdict))
    if after:
        query = query.where(_behind(after))
    rows = connection.execute(query).mappings().all()
    shown = rows[:limit]
    following = _cursor(shown[-1]) if len(rows) > limit else None
    return [case_fields(row) for row in shown], following


def find_cases(
    connection: Connection, case_id: str, may_read: MayRead = lambda owner: True, *, by_prefix: bool = True
) -> list[Json]:
    """Cases of that id: one, unless a later run went on with it, or several owners have a job of that name. With `by_prefix`
    the beginning of an id does, where it is that of one id only. Raise `UnknownCase` or `AmbiguousCase`."""
    rows = _rows_of(connection, case_id)
    if not rows and by_prefix:
        rows = _rows_of(connection, _begun_by(connection, case_id))
    if not rows:
        raise UnknownCase(f"no case {case_id[:200]!r} in this store; `rsup cases list` lists them")
    return [readable(case_fields(row), may_read) for row in rows]


def _rows_of(connection: Connection, case_id: str) -> Sequence[RowMapping]:
    query = _query().where(cases.c.case_id == case_id).order_by(cases.c.opened_us)
    return connection.execute(query).mappings().all()


def _begun_by(connection: Connection, start: str) -> str:
    """The one id that begins so, empty where there is none."""
    query = select(cases.c.case_id).distinct().where(cases.c.case_id.startswith(start, autoescape=True)).limit(MAX_CASES)
    found = sorted(name for name in connection.execute(query).scalars() if name.startswith(start))
    if len(found) > 1:
        names = ", ".join(found[:4]) + (", ..." if found[4:] else "")
        raise AmbiguousCase(f"{start[:200]!r} may be any of {names}; write more of it")
    return found[0] if found else ""


def readable(case: Json, may_read: MayRead) -> Json:
    """The case as who asks may see it."""
    return case if may_read(case["job"]["owner"]) else public_case(case)


def public_case(case: Mapping[str, Any]) -> Json:
    """What of `case_fields` everybody with a token may see."""
    return {name: case[name] for name in PUBLIC_FIELDS}


def case_fields(row: RowMapping) -> Json:
    """A case, from a row of `_query`. `state` is `open` or `closed`; an open case of an ended job waits for `--resume`."""
    key = JobKey(row["cluster"], row["owner"], row["job_id"], row["run"])
    same = ("case_id", "iteration", "attempt", "fatal", "verdict", "reason", "action", "data_dependent", "accused")
    more = ("suspect_of", "tried", "findings", "checkpoint", "data_position", "found_by", "note")
    return {
        **{name: row[name] for name in same},
        "job": {"id": key.job_id, "run": key.run, "name": str(key), "cluster": key.cluster, "owner": key.owner},
        "state": "closed" if row["verdict"] else "open",
        "waits_for_resume": not row["verdict"] and row["phase"] == "ended",
        "opened": iso(row["opened_us"]),
        "closed": iso(row["closed_us"]),
        "took_s": seconds_between(row["opened_us"], row["closed_us"]),
        **{name: row[name] for name in more},
        "injected": bool(row["injected"]),
        "placements": [_placement(one) for one in row["placements"]],
    }


def _placement(one: Mapping[str, Any]) -> Json:
    return {"at": iso(one["at_us"]), **{name: one[name] for name in ("attempt", "rank", "from", "to", "how")}}


def _query() -> Select[Any]:
    named = (jobs.c.cluster, jobs.c.owner, jobs.c.job_id, jobs.c.run, jobs.c.phase)
    return select(*(column for column in cases.c if column.name != "job"), cases.c.job.label("number"), *named).join(
        jobs, cases.c.job == jobs.c.id
    )


def _cursor(row: RowMapping) -> str:
    return f"{row['opened_us']}/{row['number']}/{row['case_id']}"


def _behind(cursor: str) -> Any:
    """The rows after that one, newest first."""
    opened, number, case_id = _split(cursor)
    same_time = cases.c.opened_us == opened
    earlier_id = or_(cases.c.case_id < case_id, and_(cases.c.case_id == case_id, cases.c.job < number))
    return or_(cases.c.opened_us < opened, and_(same_time, earlier_id))


def _split(cursor: str) -> tuple[int, int, str]:
    parts: Sequence[str] = cursor.split("/", 2)
    try:
        return int(parts[0]), int(parts[1]), parts[2]
    except (ValueError, IndexError):
        raise BadCaseCursor(f"{cursor[:100]!r} is no cursor of a list of cases: use `next_cursor` of the page before") from None
