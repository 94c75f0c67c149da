"""`/api/v1/jobs`: what runs and ran, and what its owner, or for `fence` an operator, may ask of it.

A job is named as in the CLI, `ID` or `ID.RUN`; `owner` and `cluster` tell apart jobs of one id. Who may read a job sees all
of it, everybody else with a token its id, owner and state.
"""

import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NoReply
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from rsup.supervisor import story_views, views
from rsup.supervisor.job_selector import FoundJob, find_job
from rsup.supervisor.principals import Principal, Role
from rsup.supervisor.render import clean
from rsup.supervisor.rest.context import Change, Context, RestContext
from rsup.supervisor.rest.guards import Asker, Operator
from rsup.supervisor.rest.paging import Limit, Name, NumberCursor, page
from rsup.supervisor.rest.problems import documented, refused

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=documented(401, 403, 404, 409, 422, 503))

JobName = Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$", description="`ID` or `ID.RUN`")]
Json = dict[str, Any]


class ChangeBody(BaseModel):
    """Body of a change."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=500, description="for the job's story")
    dry_run: bool = Field(False, description="say what would be done, and do nothing")


class FenceBody(ChangeBody):
    """Body of a fence."""

    node: str = Field(min_length=1, max_length=300, description="a lost node's name, or an agent's id")


@router.get("")
def list_jobs(
    context: Context, asker: Asker, limit: Limit = 100, cursor: NumberCursor = "", state: Name = "", owner: Name = ""
) -> Json:
    """Jobs, newest first. `state` is one of the states, or `live` for all that have not ended."""
    with context.reading() as connection:
        before = int(cursor) if cursor else None
        items, following = views.list_jobs(connection, before=before, limit=limit, state=state, owner=owner)
    return page([item if asker.may_read(item["owner"]) else views.public_fields(item) for item in items], following)


@router.get("/{job:path}/ranks")
def job_ranks(
    context: Context,
    asker: Asker,
    job: JobName,
    owner: Name = "",
    cluster: Name = "",
    limit: Limit = 1000,
    cursor: NumberCursor = "",
) -> Json:
    """Ranks of the newest attempt with their beats, by rank."""
    with _readable(context, asker, job, owner, cluster, "its ranks") as (connection, found):
        snapshot = context.live.beats(found.key) or views.stored_beats(connection, found)
        first = int(cursor or 0)
        ranks = [rank for rank in views.job_ranks(connection, found, snapshot) if rank["rank"] >= first]
    return page(ranks[:limit], ranks[limit]["rank"] if len(ranks) > limit else None)


@router.get("/{job:path}/events")
def job_events(
    context: Context,
    asker: Asker,
    job: JobName,
    owner: Name = "",
    cluster: Name = "",
    limit: Limit = 100,
    cursor: NumberCursor = "",
    last: Annotated[int | None, Query(ge=1, le=1000, description="only the newest ones")] = None,
) -> Json:
    """Events in order. The cursor is the number of the last event read: with it a reader also asks for news."""
    with _readable(context, asker, job, owner, cluster, "its events") as (connection, found):
        items, following = story_views.list_events(connection, found, after=int(cursor or 0), limit=limit, last=last)
    return page(items, following)


@router.get("/{job:path}/incidents")
def job_incidents(
    context: Context,
    asker: Asker,
    job: JobName,
    owner: Name = "",
    cluster: Name = "",
    limit: Limit = 100,
    cursor: NumberCursor = "",
) -> Json:
    """Incidents in order, with their stacks."""
    with _readable(context, asker, job, owner, cluster, "its incidents") as (connection, found):
        items, following = story_views.page_of_incidents(connection, found, after=int(cursor or 0), limit=limit)
    return page(items, following)


@router.get("/{job:path}/stacks")
def job_stacks(
    context: Context,
    asker: Asker,
    job: JobName,
    owner: Name = "",
    cluster: Name = "",
    rank: Annotated[int | None, Query(ge=0, le=10**9)] = None,
    incident: Annotated[int | None, Query(ge=1, le=10**9)] = None,
) -> Json:
    """Stacks of the newest incident that has some, or of that `incident`; of one `rank` if given."""
    with _readable(context, asker, job, owner, cluster, "its stacks") as (connection, found):
        return story_views.job_stacks(connection, found, rank=rank, incident=incident)


@router.post("/{job:path}/stop", status_code=202)
def stop_job(
    context: Context, asker: Asker, job: JobName, body: ChangeBody | None = None, owner: Name = "", cluster: Name = ""
) -> Json:
    """Ask the ranks to save and leave; ranks that cannot are signalled."""
    return _change(context, asker, "stop", job, owner, cluster, body or ChangeBody(reason="", dry_run=False))


@router.post("/{job:path}/checkpoint", status_code=202)
def checkpoint_job(
    context: Context, asker: Asker, job: JobName, body: ChangeBody | None = None, owner: Name = "", cluster: Name = ""
) -> Json:
    """Ask the ranks for a checkpoint at their next common iteration."""
    return _change(context, asker, "checkpoint", job, owner, cluster, body or ChangeBody(reason="", dry_run=False))


@router.post("/{job:path}/fence", status_code=202)
def fence_node(
    context: Context, operator: Operator, job: JobName, body: FenceBody, owner: Name = "", cluster: Name = ""
) -> Json:
    """Operators only. Declare a node dead that does not answer: whoever asks is sure that no process of the job lives on it.
    The job then goes on without it; were its ranks alive, two attempts could write the same checkpoints."""
    return _change(context, operator, "fence", job, owner, cluster, body, body.node)


@router.get("/{job:path}")  # after the others: an id may hold slashes
def job_status(
    context: Context,
    asker: Asker,
    job: JobName,
    owner: Name = "",
    cluster: Name = "",
    stacks: Annotated[bool, Query(description="with the stacks of incidents")] = True,
) -> Json:
    """Everything about a job: see `rsup status --json`. Who may not read it gets `job` only, with its public fields."""
    with context.reading() as connection:
        found = find_job(connection, job, owner=owner, cluster=cluster, prefer_owner=_preferred(asker))
        status = _status(context, connection, found, stacks)
    return status if asker.may_read(found.key.owner) else {"job": views.public_fields(status["job"])}


def _change(
    context: RestContext, asker: Principal, verb: str, job: str, owner: str, cluster: str, body: ChangeBody, node: str = ""
) -> Json:
    with _readable(context, asker, job, owner, cluster, f"may {verb} it") as (connection, found):
        fields = _status(context, connection, found, stacks=False)["job"]
    if found.phase == "ended":
        raise refused(409, f"job {found.key} has ended (exit code {fields['exit_code']}): there is nothing to {verb}")
    change = Change(verb, found.key, asker, clean(body.reason), clean(node), body.dry_run)
    try:
        reply = context.submit(change).result(context.reply_timeout_s)
    except NoReply:
        raise refused(
            503, f"the supervisor did not answer within {context.reply_timeout_s:g} s; see `rsup events {found.key}`"
        ) from None
    if not reply.done:
        raise refused(409, reply.message)
    return {"job": views.public_fields(fields), "verb": verb, "dry_run": body.dry_run, "message": reply.message}


@contextmanager
def _readable(
    context: RestContext, asker: Principal, job: str, owner: str, cluster: str, what: str
) -> Iterator[tuple[Connection, FoundJob]]:
    """The job, and a connection to read it, for who may read it; else 403."""
    with context.reading() as connection:
        found = find_job(connection, job, owner=owner, cluster=cluster, prefer_owner=_preferred(asker))
        if not asker.may_read(found.key.owner):
            verb = "" if what.startswith("may") else "see "
            raise refused(403, f"job {found.key} belongs to {found.key.owner}: only its owner and operators {verb}{what}")
        yield connection, found


def _status(context: RestContext, connection: Connection, found: FoundJob, stacks: bool) -> Json:
    return views.job_status(
        connection,
        found,
        now_us=time.time_ns() // 1000,
        live=None if found.phase == "ended" else context.live.beats(found.key),
        supervisor=context.supervisor(),
        with_stacks=stacks,
    )


def _preferred(asker: Principal) -> str:
    """Whose job is meant where several owners have one of that id: a user's own; an operator sees all and must say."""
    return asker.name if asker.role is Role.USER else ""
