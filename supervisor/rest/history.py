"""Questions about the history of devices and nodes: `/devices/ID/timeline|touched|export`, `/nodes/NAME/timeline|export`, and
`/history/...`. Everybody with a token may ask; of jobs that are not theirs people see the public fields only. `ID` is a UUID
or its beginning, a serial, or `NODE:PCI`."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from rsup.supervisor import (
    common_devices,
    contamination,
    hardware_clusters,
    history_views,
    offenders,
    repair_times,
    rule_replay,
    vendor_export,
)
from rsup.supervisor.hardware import policy
from rsup.supervisor.history_questions import now_us
from rsup.supervisor.job_selector import find_job
from rsup.supervisor.moments import parse_moment
from rsup.supervisor.principals import Role
from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import Asker, Operator
from rsup.supervisor.rest.hardware import Named
from rsup.supervisor.rest.paging import Limit, NameCursor
from rsup.supervisor.rest.problems import documented, refused

router = APIRouter(tags=["history"], responses=documented(401, 403, 404, 409, 422, 503))

Json = dict[str, Any]
Kind = Literal["device", "node"]
Days = Annotated[float, Query(gt=0, le=3650, description="how many days back, or ahead")]
Moment = Annotated[
    str, Query(max_length=60, description="ISO time (UTC unless it says otherwise), or how long ago: `36h`, `30d`")
]
MAX_REPLAY_DAYS = 92.0
MAX_REPLAYED = 100_000
"""Pieces of evidence: a few seconds of the supervisor's time. `rsup devices replay` beside the store takes more."""


def _at(text: str, name: str) -> int | None:
    return parse_moment(text, now_us(), name) if text else None


@router.get("/devices/{uuid}/timeline")
def device_timeline(
    context: Context, asker: Asker, uuid: Named, at: Moment = "", cursor: NameCursor = "", limit: Limit = 100
) -> Json:
    """Everything about a device, newest first: seats, users, evidence, decisions, cases, incidents; with `at`, as of then."""
    with context.reading() as connection:
        same = {"cursor": cursor, "limit": limit, "may_read": asker.may_read}
        return history_views.timeline(connection, uuid, _at(at, "at"), **same)  # type: ignore[arg-type]


@router.get("/nodes/{name}/timeline")
def node_timeline(
    context: Context, asker: Asker, name: Named, at: Moment = "", cursor: NameCursor = "", limit: Limit = 100
) -> Json:
    """Everything about a node, newest first."""
    with context.reading() as connection:
        same = {"kind": "node", "cursor": cursor, "limit": limit, "may_read": asker.may_read, "others": context.slurm_nodes}
        return history_views.timeline(connection, name, _at(at, "at"), **same)  # type: ignore[arg-type]


@router.get("/devices/{uuid}/touched")
def device_touched(context: Context, asker: Asker, uuid: Named, since: Moment = "") -> Json:
    """Jobs, iterations and checkpoints that a device may have spoiled since its first suspected moment, or since `since`."""
    with context.reading() as connection:
        return contamination.touched(connection, uuid, _at(since, "since"), may_read=asker.may_read)


@router.get("/devices/{uuid}/export")
def device_export(context: Context, asker: Asker, uuid: Named, with_jobs: bool = False) -> Json:
    """A device's record for the vendor's ticket. `with_jobs`, for operators: with names of jobs and people."""
    if with_jobs and asker.role is not Role.OPERATOR:
        raise refused(403, f"{asker} may not see all jobs: only operators may; leave with_jobs out")
    with context.reading() as connection:
        return vendor_export.device_record(connection, uuid, now_us=now_us(), with_jobs=with_jobs)


@router.get("/nodes/{name}/export")
def node_export(context: Context, asker: Asker, name: Named, with_jobs: bool = False) -> Json:
    """The same of a node."""
    if with_jobs and asker.role is not Role.OPERATOR:
        raise refused(403, f"{asker} may not see all jobs: only operators may; leave with_jobs out")
    with context.reading() as connection:
        return vendor_export.device_record(connection, name, now_us=now_us(), with_jobs=with_jobs, kind="node")


@router.get("/history/common")
def common(
    context: Context,
    asker: Asker,
    job: Annotated[list[str] | None, Query(max_length=50, description="failed jobs, as in the CLI")] = None,
    failed_since: Moment = "",
    limit: Limit = 20,
) -> Json:
    """What these failed jobs, or all that failed since then, have in common."""
    if bool(job) == bool(failed_since):
        raise refused(422, "name failed jobs, or give failed_since, not both")
    prefer = asker.name if asker.role is Role.USER else ""
    with context.reading() as connection:
        found = [find_job(connection, name, prefer_owner=prefer) for name in job or ()]
        since_us = _at(failed_since, "failed_since")
        return common_devices.common_devices(connection, found, failed_since_us=since_us, now_us=now_us(), limit=limit)


@router.get("/history/offenders")
def repeat_offenders(context: Context, asker: Asker, days: Days = 30, kind: Kind = "device", limit: Limit = 100) -> Json:
    """What fails again and again, and what failed again after a repair."""
    with context.reading() as connection:
        return offenders.offenders(connection, now_us=now_us(), days=days, kind=kind, limit=limit)


@router.get("/history/clusters")
def device_clusters(
    context: Context, asker: Asker, by: Literal["vbios", "driver", "model", "node", "rack"], days: Days = 30, limit: Limit = 50
) -> Json:
    """Whether trouble clusters; a rack is what stands in a node's name before its last number."""
    with context.reading() as connection:
        return hardware_clusters.clusters(connection, by, now_us=now_us(), days=days, limit=limit)


@router.get("/history/expiring")
def expiring(context: Context, asker: Asker, days: Days = 7, limit: Limit = 200) -> Json:
    """Suspicion and overrides that end soon."""
    with context.reading() as connection:
        return repair_times.expiring(connection, now_us=now_us(), days=days, limit=limit)


@router.get("/history/stats")
def stats(context: Context, asker: Asker, days: Days = 90, kind: Kind = "device") -> Json:
    """States, repair times, and how often quarantine was right."""
    with context.reading() as connection:
        return repair_times.history_stats(connection, now_us=now_us(), days=days, kind=kind)


class ReplayBody(BaseModel):
    """Body of a replay."""

    model_config = ConfigDict(extra="forbid")

    policy: str = Field(max_length=60_000, description="text of a policy file")
    name: str = Field("the policy", min_length=1, max_length=300, description="what messages call it")
    days: float = Field(30, gt=0, le=MAX_REPLAY_DAYS)


@router.post("/history/replay")
def replay(context: Context, operator: Operator, body: ReplayBody) -> Json:
    """Operators only, since it costs seconds: what another policy would have done."""
    tried = policy.parse(body.policy, body.name)
    with context.reading() as connection:
        limits = {"days": body.days, "max_evidence": MAX_REPLAYED}
        return rule_replay.replay_policy(connection, tried, now_us=now_us(), **limits)  # type: ignore[arg-type]
