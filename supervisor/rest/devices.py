"""`/api/v1/devices`: physical GPUs (and the CPU stand-ins), by UUID. Everybody with a token may see them."""

from typing import Annotated, Any

from fastapi import APIRouter, Path

from rsup.supervisor import hardware_views
from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import Asker
from rsup.supervisor.rest.paging import Limit, NameCursor, page
from rsup.supervisor.rest.problems import documented

router = APIRouter(prefix="/devices", tags=["devices"], responses=documented(401, 404, 422, 503))


@router.get("")
def list_devices(context: Context, asker: Asker, limit: Limit = 100, cursor: NameCursor = "") -> dict[str, Any]:
    """Devices by UUID, with the rank that uses each now."""
    with context.reading() as connection:
        return page(*hardware_views.list_devices(connection, after=cursor, limit=limit))


@router.get("/{uuid}")
def device_detail(
    context: Context, asker: Asker, uuid: Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$")]
) -> dict[str, Any]:
    """One device with the ranks that used it and the incidents on it."""
    with context.reading() as connection:
        return hardware_views.device_detail(connection, uuid)
