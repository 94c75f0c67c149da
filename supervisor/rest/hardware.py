"""`/api/v1/nodes` and `/api/v1/devices`: machines that took part in jobs, by name, and their physical GPUs (and the CPU
stand-ins), by UUID. Everybody with a token may see them."""

from typing import Annotated, Any

from fastapi import APIRouter, Path

from rsup.supervisor import hardware_views
from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import Asker
from rsup.supervisor.rest.paging import Limit, NameCursor, page
from rsup.supervisor.rest.problems import documented

router = APIRouter(responses=documented(401, 404, 422, 503))

Named = Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$")]
Json = dict[str, Any]


@router.get("/nodes", tags=["nodes"])
def list_nodes(context: Context, asker: Asker, limit: Limit = 100, cursor: NameCursor = "") -> Json:
    """Nodes by name."""
    with context.reading() as connection:
        return page(*hardware_views.list_nodes(connection, after=cursor, limit=limit))


@router.get("/nodes/{name}", tags=["nodes"])
def node_detail(context: Context, asker: Asker, name: Named) -> Json:
    """One node with the jobs it took part in and the incidents on it."""
    with context.reading() as connection:
        return hardware_views.node_detail(connection, name)


@router.get("/devices", tags=["devices"])
def list_devices(context: Context, asker: Asker, limit: Limit = 100, cursor: NameCursor = "") -> Json:
    """Devices by UUID, with the rank that uses each now."""
    with context.reading() as connection:
        return page(*hardware_views.list_devices(connection, after=cursor, limit=limit))


@router.get("/devices/{uuid}", tags=["devices"])
def device_detail(context: Context, asker: Asker, uuid: Named) -> Json:
    """One device with the ranks that used it and the incidents on it."""
    with context.reading() as connection:
        return hardware_views.device_detail(connection, uuid)
