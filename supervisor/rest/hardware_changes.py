"""`POST /api/v1/devices/{id}/{verb}` and `/api/v1/nodes/{name}/{verb}`: what people decide about hardware, and point to.

Anyone with a token may `flag` and `note`; the rest is for operators. Each change is stored with its principal. A change that
names the version that it was made for (`if_version`) is refused with 409 once somebody else has changed the device since.
"""

from concurrent.futures import TimeoutError as NoReply
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from rsup.supervisor.device_selector import find_device, find_node
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.hardware.hardware_rows import node_of
from rsup.supervisor.hardware.standing_views import record_of, standings
from rsup.supervisor.hardware.verbs import VerbRequest
from rsup.supervisor.principals import Principal, Role
from rsup.supervisor.render import clean
from rsup.supervisor.rest.context import Context, RestContext
from rsup.supervisor.rest.guards import Asker
from rsup.supervisor.rest.problems import documented, refused

router = APIRouter(responses=documented(401, 403, 404, 409, 422, 503))

Named = Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$")]
Verb = Annotated[str, Path(pattern="^(flag|note|quarantine|allow|repair|release|retire|tested|import)$")]
Json = dict[str, Any]
STATUS_OF = {"refused": 409, "conflict": 409, "forbidden": 403, "busy": 503}


class Sighting(BaseModel):
    """What another tool saw: body of `import`."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(max_length=60)
    code: str = Field(max_length=120)
    at_us: int = Field(ge=0, le=10**16, description="UTC microseconds")
    text: str = Field("", max_length=4096)
    count: int = Field(1, ge=1, le=10**12)
    episode: str = Field("", max_length=300, description="sightings of one episode are one; default: the day")


class HardwareBody(BaseModel):
    """Body of a change."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=500, description="required; for the history")
    dry_run: bool = Field(False, description="say what would be done, and do nothing")
    if_version: int | None = Field(None, ge=0, le=10**12, description="refuse it if the device has another version by now")
    until_us: int | None = Field(None, ge=0, le=10**16, description="end of an `allow`, UTC microseconds")
    without_test: bool = Field(False, description="`release` without a passed test")
    ticket: str = Field("", max_length=120)
    result: str = Field("", max_length=20, description="of `tested`: passed, failed or skipped")
    sighting: Sighting | None = None


@router.post("/devices/{uuid}/{verb}", tags=["devices"])
def change_device(context: Context, asker: Asker, uuid: Named, verb: Verb, body: HardwareBody) -> Json:
    """`flag`, `note` (anyone); `quarantine`, `allow`, `repair`, `release`, `retire`, `tested`, `import` (operators)."""
    with context.reading() as connection:
        found = find_device(connection, uuid)
        name = record_of(connection, "device", found.uuid, found.serial)
        seat = node_of(connection, found.uuid)
    return _change(context, asker, "device", name, verb, body, serial=found.serial, node=seat)


@router.post("/nodes/{name}/{verb}", tags=["nodes"])
def change_node(context: Context, asker: Asker, name: Named, verb: Verb, body: HardwareBody) -> Json:
    """The same of a node."""
    with context.reading() as connection:
        find_node(connection, name, context.slurm_nodes)
    return _change(context, asker, "node", name, verb, body, node=name)


def _change(
    context: RestContext,
    asker: Principal,
    kind: str,
    name: str,
    verb: str,
    body: HardwareBody,
    *,
    serial: str = "",
    node: str = "",
) -> Json:
    if not clean(body.reason).strip():
        raise refused(422, f"reason: say why you {verb} {kind} {name}, for the history")
    request = VerbRequest(
        kind=kind,
        subject=name,
        verb="sighted" if verb == "import" else verb,
        principal=asker.name,
        is_operator=asker.role is Role.OPERATOR,
        reason=clean(body.reason),
        if_version=body.if_version,
        until_us=body.until_us,
        without_test=body.without_test,
        ticket=clean(body.ticket),
        result=body.result,
        evidence=None if body.sighting is None else _evidence(kind, name, body.sighting, asker, serial, node),
        dry_run=body.dry_run,
        serial=serial,
        node=node,
    )
    assert context.change_hardware is not None
    try:
        reply = context.change_hardware(request).result(context.reply_timeout_s)
    except NoReply:
        raise refused(503, f"the supervisor did not answer within {context.reply_timeout_s:g} s; look again") from None
    if reply.status in STATUS_OF:
        raise refused(STATUS_OF[reply.status], reply.message)
    with context.reading() as connection:
        (standing,) = standings(connection, kind, [(name, serial)]).values()
    return {"kind": kind, "name": name, "verb": verb, "dry_run": body.dry_run, "message": reply.message, "standing": standing}


def _evidence(kind: str, name: str, told: Sighting, asker: Principal, serial: str, node: str) -> Evidence:
    return Evidence(
        kind=kind,
        subject=name,
        source=clean(told.source),
        code=clean(told.code),
        episode=clean(told.episode) or f"import:{told.at_us // 86_400_000_000}",
        at_us=told.at_us,
        text=told.text,
        count=told.count,
        is_total=True,
        serial=serial,
        node=node,
        principal=asker.name,
    )
