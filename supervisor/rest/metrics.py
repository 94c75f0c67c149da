"""`/api/v1/jobs/JOB/metrics` and `/stragglers`: a job's curves, its slow ranks, and the switch of their detection."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select

from rsup.supervisor.metric_views import MAX_POINTS, latest_of, series_of
from rsup.supervisor.rest.jobs import Asked, ChangeBody, Json, change_job
from rsup.supervisor.rest.problems import documented
from rsup.supervisor.straggler_views import straggler_fields
from rsup.supervisor.tables import jobs
from rsup.supervisor.training_views import machine_state
from rsup.supervisor.wire import MAX_METRIC_NAME_BYTES, MAX_METRICS_A_KIND, METRIC_KINDS

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=documented(401, 403, 404, 409, 422, 503))

MetricName = Annotated[str, Field(min_length=1, max_length=MAX_METRIC_NAME_BYTES)]


class SwitchBody(ChangeBody):
    """Body of a switch."""

    on: bool = Field(description="whether it is to be on")


@router.get("/{job:path}/metrics")
def job_metrics(
    asked: Asked,
    name: Annotated[list[MetricName] | None, Query(max_length=MAX_METRICS_A_KIND, description="only these series")] = None,
    kind: Annotated[str, Query(pattern=f"^({'|'.join(METRIC_KINDS)})?$", description="only of this kind")] = "",
    points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="at most so many of each series")] = 400,
) -> Json:
    """Curves by name: `points` of iteration, time (UTC microseconds), value, lowest, highest (null where nothing was finite),
    first iteration, how many were not finite: each is a stretch of iterations, `value` the mean of it. `newest`: the newest
    value. `holes`: iterations that nobody told. And the `latest` values of all series by kind and name."""
    with asked.readable("its metrics") as (connection, found):
        series = series_of(connection, found.id, name, kind or None, points)
        return {"series": series, "latest": latest_of(connection, found.id)}


@router.get("/{job:path}/stragglers")
def job_stragglers(asked: Asked) -> Json:
    """Whether the detection is switched, and the episodes in which a rank held the others up."""
    with asked.readable("its stragglers") as (connection, found):
        state = machine_state(connection.execute(select(jobs.c.state).where(jobs.c.id == found.id)).scalar())
        return straggler_fields(connection, found.id, state)


@router.post("/{job:path}/stragglers", status_code=202)
def switch_stragglers(asked: Asked, body: SwitchBody) -> Json:
    """Switch the detection of slow ranks on or off while the job runs; ranks follow at their next report."""
    return change_job(asked, f"stragglers-{'on' if body.on else 'off'}", body)
