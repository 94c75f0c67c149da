"""`/api/v1/nodes`: machines that took part in jobs. Everybody with a token may see them."""

from typing import Annotated, Any

from fastapi import APIRouter, Path

from rsup.supervisor import hardware_views
from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import Asker
from rsup.supervisor.rest.paging import Limit, NameCursor, page
from rsup.supervisor.rest.problems import documented

router = APIRouter(prefix="/nodes", tags=["nodes"], responses=documented(401, 404, 422, 503))


@router.get("")
def list_nodes(context: Context, asker: Asker, limit: Limit = 100, cursor: NameCursor = "") -> dict[str, Any]:
    """Nodes by name."""
    with context.reading() as connection:
        return page(*hardware_views.list_nodes(connection, after=cursor, limit=limit))


@router.get("/{name}")
def node_detail(
    context: Context, asker: Asker, name: Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$")]
) -> dict[str, Any]:
    """One node with the jobs it took part in and the incidents on it."""
    with context.reading() as connection:
        return hardware_views.node_detail(connection, name)
