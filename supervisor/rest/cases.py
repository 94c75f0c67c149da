"""`/api/v1/cases`: rerun cases. Who may read a job sees all of them, everybody else with a token what they say of hardware."""

from typing import Annotated, Any

from fastapi import APIRouter, Path

from rsup.supervisor import case_views
from rsup.supervisor.job_selector import find_job
from rsup.supervisor.principals import Principal, Role
from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import Asker
from rsup.supervisor.rest.paging import Limit, Name, NameCursor, page
from rsup.supervisor.rest.problems import documented

router = APIRouter(prefix="/cases", tags=["cases"], responses=documented(401, 404, 409, 422, 503))

CaseId = Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$")]
Json = dict[str, Any]


@router.get("")
def list_cases(
    context: Context,
    asker: Asker,
    limit: Limit = 100,
    cursor: NameCursor = "",
    job: Name = "",
    owner: Name = "",
    cluster: Name = "",
    verdict: Name = "",
) -> Json:
    """Cases, newest first; of one job if named. `verdict` is one of the verdicts, or `open`."""
    with context.reading() as connection:
        found = None
        if job:
            found = find_job(connection, job, owner=owner, cluster=cluster, prefer_owner=_own(asker))
        items, following = case_views.list_cases(connection, job=found, after=cursor, limit=limit, verdict=verdict)
    return page([case_views.readable(item, asker.may_read) for item in items], following)


@router.get("/{case_id:path}")
def case_detail(context: Context, asker: Asker, case_id: CaseId) -> Json:
    """Cases of that id, or of the one that begins so: one, unless a later run of its job went on with it."""
    with context.reading() as connection:
        return page(case_views.find_cases(connection, case_id, asker.may_read), None)


def _own(asker: Principal) -> str:
    return asker.name if asker.role is Role.USER else ""
