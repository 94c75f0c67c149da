"""The REST interface as one FastAPI application: a router a resource, see DESIGN.md sections 11 and 12."""

from fastapi import APIRouter, FastAPI

from rsup.supervisor.rest import cases, gate, hardware, hardware_changes, health, history, jobs, metrics, page, problems
from rsup.supervisor.rest.context import RestContext
from rsup.supervisor.rest.guards import Guard
from rsup.supervisor.wire import RELEASE

DESCRIPTION = """Jobs, nodes and devices of one rsup supervisor. Lists are paged by cursor, errors are RFC 9457 problem
documents, times are ISO UTC. Send `Authorization: Bearer TOKEN` with the token of the supervisor's state directory."""


def make_app(context: RestContext) -> FastAPI:
    """The application over `context`. It starts nothing and may be made several times."""
    app = FastAPI(title="rsup", version=RELEASE, description=DESCRIPTION, docs_url=None, redoc_url=None)
    app.state.context = context
    api = APIRouter(prefix="/api/v1")
    for resource in (metrics, jobs, cases, gate, hardware_changes, hardware, history):
        api.include_router(resource.router)
    for router in (api, health.router, page.router):
        app.include_router(router)
    problems.install(app)
    app.add_middleware(Guard, allowed_hosts=context.allowed_hosts)
    return app
