"""What nodes and gates ask and tell, and drains: `gate/snapshot`, `nodes/{name}/report|verdict|drain|undrain`, `slurm`.

A node's token reads the snapshot and reports for its own node; verdicts and the status are for everybody else with a token,
drains for operators. An embedded supervisor has no gates.
"""

from concurrent.futures import TimeoutError as NoReply
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from rsup.supervisor.hardware.hostlist import expand
from rsup.supervisor.hardware.node_report import MAX_EVENTS, NodeEvent, NodeReport
from rsup.supervisor.principals import Principal, Role
from rsup.supervisor.render import clean, clean_line
from rsup.supervisor.rest.context import Context, Gates, RestContext
from rsup.supervisor.rest.guards import AnyPrincipal, Asker, Operator, Reporter
from rsup.supervisor.rest.problems import documented, refused
from rsup.supervisor.slurm.drain_status import running_nodes
from rsup.supervisor.slurm.drain_words import Word
from rsup.supervisor.slurm.gate_watch import OBSERVED, gates_of
from rsup.supervisor.slurm.snapshot import verdict_of
from rsup.supervisor.wire import Device, now_us

router = APIRouter(responses=documented(401, 403, 404, 409, 422, 503))

NodeName = Annotated[str, Path(max_length=300, pattern=r"^[^\x00-\x1f]+$")]
Nodes = Annotated[str, Path(max_length=4000, pattern=r"^[^\x00-\x1f]+$")]
Json = dict[str, Any]

WORD_WITHIN_S = 30.0
NO_SNAPSHOT_YET = "there is no snapshot yet; ask again in a moment"
MAX_FETCHERS = 65_536
SNAPSHOT_TYPE = "application/vnd.rsup.snapshot"


class Board(BaseModel):
    """One GPU of a node's inventory; what else it says is left out."""

    index: int | None = None
    uuid: str = Field(max_length=120, min_length=1)
    serial: str | None = Field(None, max_length=120)
    pci_bus_id: str | None = Field(None, max_length=60)
    model: str | None = Field(None, max_length=120)
    board: str | None = Field(None, max_length=120)
    vbios: str | None = Field(None, max_length=120)
    driver: str | None = Field(None, max_length=120)
    missing: bool = False


class Event(BaseModel):
    """One line of a node's spool."""

    key: str = Field(max_length=400, min_length=1)
    time_us: int = Field(ge=0, le=10**16)
    kind: str = Field(max_length=60)
    device: str | None = Field(None, max_length=120)
    code: int | str | None = None
    detail: str | None = Field(None, max_length=4096)
    job: str | int | None = None
    seconds: float | None = Field(None, ge=0, le=3600, description="of a `job-end`: how long the gate took")


class GateBody(BaseModel):
    """What a node says of its own gate."""

    mode: str = Field("", max_length=20)
    trouble: str = Field("", max_length=1000, description="why it decides nothing; empty: it sees")


class ReportBody(BaseModel):
    """Body of a node's report. Fields of newer nodes that are not known here are left out."""

    boot_id: str = Field("", max_length=120)
    inventory: list[Board] | None = Field(None, max_length=256)
    events: list[Event] = Field(default=[], max_length=MAX_EVENTS)
    gate: GateBody | None = None


class DrainBody(BaseModel):
    """Body of `drain` and `undrain`."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=500, description="required; SLURM shows it")
    dry_run: bool = Field(False, description="say what would be done, and do nothing")
    beyond_guard: bool = Field(False, description="drain though the guard would hold it back")


@router.get("/gate/snapshot", tags=["gate"], response_class=Response)
async def snapshot(
    context: Context, principal: AnyPrincipal, if_none_match: Annotated[str, Header(max_length=200)] = ""
) -> Response:
    """What gates refuse and avoid, signed; 304 where `If-None-Match` names the newest."""
    gates = _gates(context)
    newest = gates.snapshot
    if newest is None:
        raise refused(503, gates.no_snapshot or NO_SNAPSHOT_YET)
    if principal.role is Role.NODE:
        fetched = gates.counters.fetched_us
        if principal.node in fetched or len(fetched) < MAX_FETCHERS:
            fetched[principal.node] = now_us()
        gates.counters.watch.asked(principal.node, now_us(), refuses=principal.node in newest.refused)
    headers = {"ETag": newest.etag, "Cache-Control": "no-cache"}
    if newest.etag in (tag.strip().removeprefix("W/") for tag in if_none_match.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(newest.data, media_type=SNAPSHOT_TYPE, headers=headers)


@router.post("/nodes/{name}/report", tags=["gate"])
def report(context: Context, reporter: Reporter, name: NodeName, body: ReportBody) -> Json:
    """What happened on a node, by its own root; each event is applied once, by its key. `lines`: what was not believed."""
    if context.report_node is None:
        raise refused(404, "this supervisor takes no reports of nodes: that is for `rsup serve`")
    if body.gate is not None and context.gates is not None:
        context.gates.counters.watch.told(name, clean(body.gate.mode), clean_line(body.gate.trouble), now_us())
        if body.inventory is None and not body.events:
            return {"node": name, "new": 0, "known": 0, "lines": []}
    try:
        reply = context.report_node(_report(name, body, reporter)).result(context.reply_timeout_s)
    except NoReply:
        reply = None
    if reply is None:
        raise refused(503, "the report was not taken up now; send it again")
    if context.gates is not None:
        counters = context.gates.counters
        if not reply.known:  # told once
            counters.time_gates([event.seconds for event in body.events if event.seconds is not None])
        for event in body.events:
            if event.kind in ("prolog-refused", "gate-unknown"):
                counters.watch.decided(name, event.kind, clean_line(event.detail or ""), min(event.time_us, now_us()))
        for kind, num in reply.kinds.items():
            counters.events[kind] += num
            if kind in ("prolog-refused", "gate-unknown", "gate-cap"):
                if kind == "prolog-refused":  # a mode that only observes lets those jobs in
                    seen = sum(one.kind == kind and (one.detail or "").startswith(OBSERVED) for one in body.events)
                    counters.decisions["observed"] += min(num, seen)
                    num -= min(num, seen)
                counters.decisions[kind] += num
    return {"node": name, "new": reply.new, "known": reply.known, "lines": reply.lines}


def _report(name: str, body: ReportBody, reporter: Principal) -> NodeReport:
    there = [board for board in body.inventory or [] if not board.missing]
    devices = [
        Device(
            clean(one.uuid),
            clean(one.model or ""),
            clean(one.serial or ""),
            clean(one.board or ""),
            clean(one.pci_bus_id or ""),
            clean(one.vbios or ""),
            clean(one.driver or ""),
        )
        for one in there
    ]
    events = [
        NodeEvent(
            key=one.key,
            time_us=one.time_us,
            kind=clean(one.kind),
            device=clean(one.device or ""),
            code="" if one.code is None else clean(str(one.code))[:120],
            detail=clean(one.detail or ""),
            job="" if one.job is None else clean(str(one.job))[:120],
        )
        for one in body.events
    ]
    missing = [clean(board.uuid) for board in body.inventory or [] if board.missing]
    listed = None if body.inventory is None else devices
    boot = clean(body.boot_id)
    return NodeReport(node=name, boot_id=boot, devices=listed, missing=missing, events=events, principal=reporter.name)


@router.get("/nodes/{name}/verdict", tags=["gate"])
def verdict(
    context: Context,
    asker: AnyPrincipal,
    name: NodeName,
    gpu: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006
) -> Json:
    """What a gate with the newest snapshot says of a job on that node: `accept`, `avoid` or `refuse`. `gpu`: UUIDs that the job
    holds; without: any of the node's."""
    gates = _gates(context)
    newest = gates.snapshot
    if newest is None:
        raise refused(503, gates.no_snapshot or NO_SNAPSHOT_YET)
    return {**verdict_of(newest.content, name, gpu), "serial": newest.serial, "guard_open": newest.content["guard_open"]}


@router.get("/slurm", tags=["gate"])
def slurm_status(context: Context, asker: Asker) -> Json:
    """Drains: what is proposed, refused and drained, the guard, and the difference to what SLURM shows."""
    gates = _gates(context)
    status = gates.status()
    if not status:
        raise refused(503, "nothing was decided about nodes yet; ask again in a moment")
    return {**status, "gates": gates_of(gates.counters.watch, running_nodes(status), now_us())}


@router.post("/nodes/{name}/drain", tags=["nodes"])
def drain(context: Context, asker: Operator, name: Nodes, body: DrainBody) -> Json:
    """Drain nodes in SLURM (`n[1-4]` for several), until `undrain`."""
    return _say(context, asker, "drain", name, body)


@router.post("/nodes/{name}/undrain", tags=["nodes"])
def undrain(context: Context, asker: Operator, name: Nodes, body: DrainBody) -> Json:
    """End drains of ours; nothing is drained again until new evidence speaks against it."""
    return _say(context, asker, "undrain", name, body)


def _say(context: RestContext, asker: Principal, verb: str, names: str, body: DrainBody) -> Json:
    reason = clean(body.reason).strip()
    if not reason:
        raise refused(422, f"reason: say why you {verb} {names[:200]}: SLURM shows it")
    nodes = tuple(expand(names))
    word = Word(
        verb=verb, nodes=nodes, reason=reason, principal=asker.name, dry_run=body.dry_run, beyond_guard=body.beyond_guard
    )
    try:
        answer = _gates(context).ask(word).result(WORD_WITHIN_S)
    except NoReply:
        raise refused(503, f"no answer within {WORD_WITHIN_S:g} s; see rsup slurm status, then look again") from None
    if answer.refused:
        raise refused(409, answer.refused)
    return {
        "kind": "node",
        "name": names,
        "verb": verb,
        "dry_run": body.dry_run,
        "message": answer.message,
        "undone": answer.undone,
    }


def _gates(context: RestContext) -> Gates:
    if context.gates is None:
        raise refused(404, "this supervisor has no gates and drains nothing: that is for `rsup serve` (see its log)")
    return context.gates
