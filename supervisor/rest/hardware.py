"""`/api/v1/nodes` and `/api/v1/devices`: machines that took part in jobs, by name, and their physical GPUs (and the CPU
stand-ins), by UUID. Everybody with a token may see them."""

from typing import Annotated, Any

from fastapi import APIRouter, Path

from rsup.supervisor import hardware_views
from rsup.supervisor.device_selector import find_device, find_node
from rsup.supervisor.hardware import standing_views, why_view
from rsup.supervisor.node_story import node_story
from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import Asker
from rsup.supervisor.rest.paging import Limit, Name, NameCursor, page
from rsup.supervisor.rest.problems import documented

router = APIRouter(responses=documented(401, 404, 422, 503))

Named = Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$")]
Json = dict[str, Any]


@router.get("/nodes", tags=["nodes"])
def list_nodes(context: Context, asker: Asker, limit: Limit = 100, cursor: NameCursor = "", state: Name = "") -> Json:
    """Nodes by name, only those in `state` if given."""
    with context.reading() as connection:
        return page(*hardware_views.list_nodes(connection, after=cursor, limit=limit, state=state, others=context.slurm_nodes))


@router.get("/nodes/{name}", tags=["nodes"])
def node_detail(context: Context, asker: Asker, name: Named) -> Json:
    """One node with the jobs it took part in, the incidents on it, what speaks against it and where it stands in SLURM."""
    with context.reading() as connection:
        return node_story(connection, name, asker.may_read, context.slurm_nodes)


@router.get("/devices", tags=["devices"])
def list_devices(
    context: Context, asker: Asker, limit: Limit = 100, cursor: NameCursor = "", state: Name = "", node: Name = ""
) -> Json:
    """Devices by UUID, with state and the rank that uses each now; only those in `state`, on `node`, if given."""
    with context.reading() as connection:
        return page(*hardware_views.list_devices(connection, after=cursor, limit=limit, state=state, node=node))


@router.get("/devices/{uuid}", tags=["devices"])
def device_detail(context: Context, asker: Asker, uuid: Named) -> Json:
    """One device (a UUID or its beginning, a serial, `NODE:PCI`, `NODE:INDEX`) with its state, what led to it, the ranks that
    used it and the incidents on it."""
    with context.reading() as connection:
        return hardware_views.device_detail(connection, find_device(connection, uuid).uuid, asker.may_read)


@router.get("/devices/{uuid}/why", tags=["devices"])
def device_why(context: Context, asker: Asker, uuid: Named) -> Json:
    """Why a device is in its state: its detail, and the rerun cases that its newest evidence names."""
    with context.reading() as connection:
        return why_view.why(connection, "device", uuid, asker.may_read)


@router.get("/nodes/{name}/why", tags=["nodes"])
def node_why(context: Context, asker: Asker, name: Named) -> Json:
    """The same of a node."""
    with context.reading() as connection:
        return why_view.why(connection, "node", name, asker.may_read, context.slurm_nodes)


@router.get("/devices/{uuid}/evidence", tags=["devices"])
def device_evidence(context: Context, asker: Asker, uuid: Named, limit: Limit = 100, cursor: NameCursor = "") -> Json:
    """What speaks for or against a device, the newest first; what moves no state says why."""
    with context.reading() as connection:
        found = find_device(connection, uuid)
        name = standing_views.record_of(connection, "device", found.uuid, found.serial)
        same = {"cursor": cursor, "limit": limit, "may_read": asker.may_read}
        return page(*standing_views.list_evidence(connection, "device", name, **same))  # type: ignore[arg-type]


@router.get("/nodes/{name}/evidence", tags=["nodes"])
def node_evidence(context: Context, asker: Asker, name: Named, limit: Limit = 100, cursor: NameCursor = "") -> Json:
    """The same of a node."""
    with context.reading() as connection:
        same = {"cursor": cursor, "limit": limit, "may_read": asker.may_read}
        found = standing_views.list_evidence(connection, "node", find_node(connection, name, context.slurm_nodes), **same)  # type: ignore[arg-type]
        return page(*found)
