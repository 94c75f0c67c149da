"""`/api/v1/jobs`: what runs and ran, and what its owner, or for `fence` an operator, may ask of it.

A job is named as in the CLI, `ID` or `ID.RUN`; `owner` and `cluster` tell apart jobs of one id. Who may read a job sees all
of it, everybody else with a token its id, owner and state.
"""

import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NoReply
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from rsup.supervisor import story_views, views
from rsup.supervisor.job_selector import AmbiguousJob, FoundJob, UnknownJob, find_job
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


class AskedJob:
    """The job that a request names, and who asks: what all routes of one job take."""

    def __init__(self, context: Context, asker: Asker, job: JobName, owner: Name = "", cluster: Name = "") -> None:
        self.context = context
        self.asker: Principal = asker
        self.job = job
        self.owner = owner
        self.cluster = cluster

    def find(self, connection: Connection) -> FoundJob:
        """The job. Where several owners have one of that id a user means their own; an operator sees all and must say."""
        prefer = self.asker.name if self.asker.role is Role.USER else ""
        return find_job(connection, self.job, owner=self.owner, cluster=self.cluster, prefer_owner=prefer)

    @contextmanager
    def readable(self, what: str) -> Iterator[tuple[Connection, FoundJob]]:
        """The job, and a connection to read it, for who may read it; else 403."""
        with self.context.reading() as connection:
            found = self.find(connection)
            if not self.asker.may_read(found.key.owner):
                verb = "" if what.startswith("may") else "see "
                raise refused(403, f"job {found.key} belongs to {found.key.owner}: only its owner and operators {verb}{what}")
            yield connection, found


Asked = Annotated[AskedJob, Depends()]


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
    asked: Asked,
    limit: Limit = 1000,
    cursor: NumberCursor = "",
) -> Json:
    """Ranks of the newest attempt with their beats, by rank."""
    with asked.readable("its ranks") as (connection, found):
        snapshot = asked.context.live.beats(found.key) or views.stored_beats(connection, found)
        first = int(cursor or 0)
        ranks = [rank for rank in views.job_ranks(connection, found, snapshot) if rank["rank"] >= first]
    return page(ranks[:limit], ranks[limit]["rank"] if len(ranks) > limit else None)


@router.get("/{job:path}/events")
def job_events(
    asked: Asked,
    limit: Limit = 100,
    cursor: NumberCursor = "",
    last: Annotated[int | None, Query(ge=1, le=1000, description="only the newest ones")] = None,
) -> Json:
    """Events in order. The cursor is the number of the last event read: with it a reader also asks for news."""
    with asked.readable("its events") as (connection, found):
        items, following = story_views.list_events(connection, found, after=int(cursor or 0), limit=limit, last=last)
    return page(items, following)


@router.get("/{job:path}/incidents")
def job_incidents(
    asked: Asked,
    limit: Limit = 100,
    cursor: NumberCursor = "",
) -> Json:
    """Incidents in order, with their stacks."""
    with asked.readable("its incidents") as (connection, found):
        items, following = story_views.page_of_incidents(connection, found, after=int(cursor or 0), limit=limit)
    return page(items, following)


@router.get("/{job:path}/stacks")
def job_stacks(
    asked: Asked,
    rank: Annotated[int | None, Query(ge=0, le=10**9)] = None,
    incident: Annotated[int | None, Query(ge=1, le=10**9)] = None,
) -> Json:
    """Stacks of the newest incident that has some, or of that `incident`; of one `rank` if given."""
    with asked.readable("its stacks") as (connection, found):
        return story_views.job_stacks(connection, found, rank=rank, incident=incident)


@router.post("/{job:path}/stop", status_code=202)
def stop_job(asked: Asked, body: ChangeBody | None = None) -> Json:
    """Ask the ranks to save and leave; ranks that cannot are signalled."""
    return change_job(asked, "stop", body or ChangeBody(reason="", dry_run=False))


@router.post("/{job:path}/checkpoint", status_code=202)
def checkpoint_job(asked: Asked, body: ChangeBody | None = None) -> Json:
    """Ask the ranks for a checkpoint at their next common iteration."""
    return change_job(asked, "checkpoint", body or ChangeBody(reason="", dry_run=False))


@router.post("/{job:path}/fence", status_code=202)
def fence_node(asked: Asked, operator: Operator, body: FenceBody) -> Json:
    """Operators only. Declare a node dead that does not answer: whoever asks is sure that no process of the job lives on it.
    The job then goes on without it; were its ranks alive, two attempts could write the same checkpoints."""
    return change_job(asked, "fence", body, body.node)


@router.get("/{job:path}")  # after the others: an id may hold slashes
def job_status(
    asked: Asked,
    stacks: Annotated[bool, Query(description="with the stacks of incidents")] = True,
) -> Json:
    """Everything about a job: see `rsup status --json`. Who may not read it gets `job` only, with its public fields."""
    with asked.context.reading() as connection:
        try:
            found = asked.find(connection)
        except UnknownJob:
            if _is_part_of_a_job(connection, asked):
                raise refused(404, HTTPStatus.NOT_FOUND.phrase) from None
            raise
        status = _status(asked.context, connection, found, stacks)
    return status if asked.asker.may_read(found.key.owner) else {"job": views.public_fields(status["job"])}


def _is_part_of_a_job(connection: Connection, asked: AskedJob) -> bool:
    """Whether all but the last word of the path names a job: the question was for something of it that there is not."""
    try:
        find_job(connection, asked.job.rpartition("/")[0], owner=asked.owner, cluster=asked.cluster)
    except UnknownJob:
        return False
    except AmbiguousJob:
        pass
    return True


def change_job(asked: AskedJob, verb: str, body: ChangeBody, node: str = "") -> Json:
    """Have the loop take up a change of `verb` (a kind of `events.OperatorAsked`), and answer with what it says."""
    context = asked.context
    what = verb.partition("-")[0]
    with asked.readable(f"may {what} it" if what == verb else f"may switch {what}") as (connection, found):
        fields = _status(context, connection, found, stacks=False)["job"]
    if found.phase == "ended":
        over = f"job {found.key} has ended (exit code {fields['exit_code']})"
        raise refused(409, f"{over}: there is nothing to {verb if what == verb else 'switch'}")
    change = Change(verb, found.key, asked.asker, clean(body.reason), clean(node), body.dry_run)
    try:
        reply = context.submit(change).result(context.reply_timeout_s)
    except NoReply:
        raise refused(
            503, f"the supervisor did not answer within {context.reply_timeout_s:g} s; see `rsup events {found.key}`"
        ) from None
    if not reply.done:
        raise refused(409, reply.message)
    answer = {"verb": what, "dry_run": body.dry_run, "request_id": reply.request_id, "message": reply.message}
    return {"job": views.public_fields(fields), **answer}


def _status(context: RestContext, connection: Connection, found: FoundJob, stacks: bool) -> Json:
    return views.job_status(
        connection,
        found,
        now_us=time.time_ns() // 1000,
        live=None if found.phase == "ended" else context.live.beats(found.key),
        supervisor=context.supervisor(),
        with_stacks=stacks,
    )
