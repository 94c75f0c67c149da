"""Whether the supervisor lives (`/healthz`), can do its work (`/readyz`), who it is, and its `/metrics`.

`/healthz` and `/readyz` need no token: they say nothing but yes or no. `/metrics` shows totals to everybody with a token,
single jobs to who may read them.
"""

from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import RowMapping
from sqlalchemy.exc import DBAPIError

from rsup.supervisor import metrics, views
from rsup.supervisor.metric_views import live_values
from rsup.supervisor.records import JobKey
from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import Asker
from rsup.supervisor.rest.problems import documented, problem
from rsup.supervisor.slurm.drain_status import metrics_of
from rsup.supervisor.training_views import live_training
from rsup.supervisor.value_metrics import value_metrics
from rsup.supervisor.wire import RELEASE, now_us

MAX_LOOP_AGE_S = 10.0
MAX_JOBS = 1000

router = APIRouter(tags=["supervisor"])


@router.get("/healthz")
def alive() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=documented(503))
def ready(request: Request, context: Context) -> Response:
    """The loop turns and the store can be written."""
    if why := _not_ready(context):
        return problem(request, 503, why)
    return Response('{"status":"ready"}', media_type="application/json")


def _not_ready(context: Context) -> str:
    """Why the supervisor decides nothing now, empty if it does."""
    if context.live.store_error():
        return "the store does not answer or cannot be written now; the supervisor's log says why"
    loop_age_s = context.live.loop_age_s()
    return f"the supervisor's loop has not turned for {loop_age_s:.0f} s" if loop_age_s > MAX_LOOP_AGE_S else ""


@router.get("/api/v1/supervisor", responses=documented(401))
def supervisor(context: Context, asker: Asker) -> dict[str, Any]:
    """This supervisor, and who you are to it."""
    principal = {"name": asker.name, "role": asker.role.name.lower()}
    return {"supervisor": context.supervisor(), "release": RELEASE, "principal": principal}


@router.get("/metrics", responses=documented(401), response_class=Response)
def prometheus(context: Context, asker: Asker) -> Response:
    """Metrics in Prometheus' text format. Where the store cannot be read, what the supervisor knows without it."""
    try:
        families = _of_store(context, asker)
    except DBAPIError:
        if not context.live.store_error():
            raise
        families = _of_supervisor(context, [])
    return Response(metrics.render(families), media_type=metrics.CONTENT_TYPE)


def _of_supervisor(context: Context, beat_ages_s: list[float]) -> list[metrics.Metric]:
    is_ready = not _not_ready(context)
    families = metrics.live_metrics(RELEASE, beat_ages_s, context.live.loop_age_s(), context.live.counters(), is_ready)
    if context.gates is not None:
        families += metrics_of(context.gates.status(), context.gates.counters, now_us())
    return families


def _of_store(context: Context, asker: Asker) -> list[metrics.Metric]:
    with context.reading() as connection:
        live_jobs, _ = views.list_jobs(connection, state="live", limit=MAX_JOBS)
        families = [*metrics.store_metrics(connection), *metrics.hardware_metrics(connection)]
        training = live_training(
            connection, asker.may_read, lambda row: _reached(context.live.beats(_key_of(row))), now_us(), MAX_JOBS
        )
        values, left_out = live_values(connection, [row["id"] for row, _ in training])
    ages_s = {metrics.job_label(job): _beat_ages_s(context.live.beats(_key(job))) for job in live_jobs}
    every = [age for ages in ages_s.values() for age in ages]
    families += _of_supervisor(context, every)
    families += metrics.job_metrics([job for job in live_jobs if asker.may_read(job["owner"])], ages_s)
    families += metrics.training_metrics(training)
    families += value_metrics([(row, found["machine"]) for row, found in training], values, left_out, now_us())
    return families


def _key(job: dict[str, Any]) -> JobKey:
    return JobKey(job["cluster"], job["owner"], job["id"], job["run"])


def _key_of(row: RowMapping) -> JobKey:
    return JobKey(row["cluster"], row["owner"], row["job_id"], row["run"])


def _reached(snapshot: views.LiveBeats | None) -> int:
    """The iteration that all ranks have come to."""
    return min((beat.get("iteration", 0) for beat in (snapshot.ranks if snapshot else ())), default=0)


def _beat_ages_s(snapshot: views.LiveBeats | None) -> list[float]:
    return [beat["beat_age_s"] for beat in (snapshot.ranks if snapshot else ()) if beat.get("beat_age_s", -1) >= 0]
