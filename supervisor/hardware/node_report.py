"""What a node's own root says of it (`rsup slurm healthcheck`): its boards, and what prolog and epilog have spooled. Pure.

A node speaks for itself only. A board that the store says sits elsewhere does not move by its word, and nothing that it says of
that board counts, until the other node no longer lists it: else one node could accuse the boards of all. Each event is applied
once, by its key, which is part of what tells one sighting from another.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.evidence import Evidence
from rsup.supervisor.hardware.identity import Seating, is_stand_in, seat
from rsup.supervisor.records import SeatSaved
from rsup.supervisor.wire import Device

MAX_BOARDS = 64
MAX_EVENTS = 256
HARDWARE_KINDS = ("xid", "ecc", "remap", "recovery-action", "link", "throttle", "unreadable")
"""Kinds that are sources of evidence too."""
GATE_KINDS = ("prolog-refused", "gate-unknown", "gate-cap")
"""What a gate did: kept with the node's history, moves nothing."""
USUAL_CODE = {"ecc": "uncorrectable", "unreadable": "driver", "missing": "missing"}
OLDEST_US = 7 * 86_400_000_000
"""A node's clock that tells of something older, or yet to come, is wrong: it was now."""
EVENT = " event:"
"""What stands before an event's key in the name of its episode; `scoring` counts what stands before it."""


class NodeEvent(Struct, frozen=True, kw_only=True):
    """One line of a node's spool."""

    key: str
    time_us: int
    kind: str
    device: str = ""
    code: str = ""
    detail: str = ""
    job: str = ""


class NodeReport(Struct, frozen=True, kw_only=True):
    """One report. `devices` None: it has not looked; `missing`: boards that were there in this boot."""

    node: str
    boot_id: str = ""
    devices: list[Device] | None = None
    missing: list[str] = []
    events: list[NodeEvent] = []
    principal: str = ""


class NodeReportReply(Struct, frozen=True):
    """How many events were new, known already or refused, and a line for each thing that was not believed."""

    new: int = 0
    known: int = 0
    lines: list[str] = []
    kinds: dict[str, int] = {}
    """The new ones by kind."""


def seating_of(
    report: NodeReport, known: Sequence[SeatSaved], is_alive: Callable[[str, str], bool], now_us: int
) -> tuple[Seating, list[str]]:
    """The seats that follow from the node's list of boards, and lines about claims that are not believed. `known`: open seats
    of these boards and of the node."""
    listed = [] if report.devices is None else report.devices[:MAX_BOARDS]
    believed, lines = list[Device](), list[str]()
    for device in listed:
        elsewhere = _elsewhere(device.uuid, device.serial, report.node, known)
        if elsewhere:
            lines.append(f"{device.uuid} sits on {elsewhere}, not on {report.node}, until that node no longer lists it")
        elif not is_stand_in(device.uuid):
            believed.append(device)
    seating = seat(believed, report.node, report.boot_id, known, is_alive, now_us)
    lines += seating.contested.values()
    if report.devices is not None:
        there = {device.uuid for device in listed} | set(report.missing)
        closed = {stay.uuid for stay in seating.seats}
        for stay in known:
            if stay.node == report.node and stay.to_us is None and stay.uuid not in there | closed:
                seating.seats.append(replace(stay, to_us=now_us, seen_us=max(stay.seen_us, now_us)))
    return seating, lines


def _elsewhere(uuid: str, serial: str, node: str, known: Iterable[SeatSaved]) -> str:
    """The other node where the store says that this board is, empty for none."""
    stays = [stay for stay in known if stay.to_us is None and stay.node != node]
    return next((stay.node for stay in stays if stay.uuid == uuid or (serial and stay.serial == serial)), "")


def evidence_of(
    report: NodeReport, event: NodeEvent, seats: Iterable[SeatSaved], last_node: str, now_us: int
) -> Evidence | str:
    """The evidence in an event, or the line that refuses it. Empty: it is none. `last_node`: where the device was last seen."""
    if event.kind == "job-end" or (event.kind == "missing" and not event.device):
        return ""
    if event.device and (event.kind in HARDWARE_KINDS or event.kind == "missing"):
        where = _elsewhere(event.device, "", report.node, seats)
        here = any(stay.uuid == event.device and stay.node == report.node for stay in seats)
        if where or (not here and last_node not in ("", report.node)):
            return f"{event.device} sits on {where or last_node}: what {report.node} says of it does not count"
        if is_stand_in(event.device):
            return f"{event.device} is no board"
        source = "unreadable" if event.kind == "missing" else event.kind
        code = event.code or USUAL_CODE.get(event.kind, "unknown")
        return _evidence(report, event, ("device", event.device), source, code, now_us)
    if event.kind in HARDWARE_KINDS or event.kind in GATE_KINDS:
        source = "gate" if event.kind in GATE_KINDS else event.kind
        return _evidence(report, event, ("node", report.node), source, event.code or event.kind, now_us)
    return f"{event.kind[:40]!r} is no kind of event that this supervisor knows"


def _evidence(report: NodeReport, event: NodeEvent, about: tuple[str, str], source: str, code: str, now_us: int) -> Evidence:
    job = f" during job {event.job}" if event.job else ""
    key = hashlib.sha256(f"{report.node}\0{event.key}".encode("utf-8", "replace")).hexdigest()[:24]
    text = f"{source} {code} on {report.node}{job}"
    return Evidence(
        kind=about[0],
        subject=about[1],
        source=source,
        code=code,
        episode=f"boot:{report.boot_id}{EVENT}{key}",
        at_us=event.time_us if now_us - OLDEST_US <= event.time_us <= now_us else now_us,
        text=f"{text}\n{event.detail}" if event.detail else text,
        is_total=True,
        node=report.node,
        principal=report.principal,
    )
