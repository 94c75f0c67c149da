"""Records of a few devices and jobs for the tests of the hardware's history, at times counted in seconds from a fixed begin."""

import hashlib
from collections.abc import Sequence
from typing import Any

from rsup.supervisor.records import (
    AttemptSaved,
    CaseSaved,
    CheckpointSaved,
    DeviceSeen,
    EvidenceSaved,
    JobKey,
    JobSaved,
    NodeSeen,
    Record,
    ResumeSaved,
    SeatSaved,
    SubjectSaved,
    TransitionSaved,
)

BEGIN_US = 1_764_450_000_000_000
HOUR = 3600.0
DAY = 24 * HOUR

A, B, C = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-cccc3333-0000"
SERIALS = {A: "1650000000001", B: "1650000000002", C: "1650000000003"}
FACTS = {"model": "NVIDIA H200", "board": "699-1", "vbios": "96.00", "driver": "570.1"}


def at(seconds: float) -> int:
    """Microseconds of that many seconds after the begin."""
    return BEGIN_US + round(seconds * 1_000_000)


def key(name: str, owner: str = "ann", run: int = 1) -> JobKey:
    return JobKey("local", owner, name, run)


def job(of: JobKey, begin: float, end: float | None) -> JobSaved:
    """A job's row."""
    phase = "running" if end is None else "ended"
    ended_us = None if end is None else at(end)
    return JobSaved(of, b"s", phase, 1, 1, at(begin), at(end or begin), ended_us=ended_us)


def device(uuid: str, begin: float, node: str = "n1", pci: str = "1b", **more: Any) -> list[Record]:
    """A device that sits there from then on."""
    bus = f"00000000:{pci}:00.0"
    facts: dict[str, Any] = FACTS | {"serial": SERIALS.get(uuid, "")} | more
    seat = SeatSaved(uuid, at(begin), node, bus, facts["serial"], facts["board"], None, at(begin), "boot1")
    return [DeviceSeen(uuid, at(begin), node, pci_bus_id=bus, **facts), seat]


def attempt(
    of: JobKey, number: int, begin: float, end: float | None, devices: Sequence[str], outcome: str = "", **more: Any
) -> list[Record]:
    """An attempt, one rank a device, in the order given; `more`: `start_iteration`, `last_iteration`. Nodes: `uuid@node`."""
    seats = [name.partition("@")[::2] for name in devices]
    stopped_us = None if end is None else at(end)
    outcome = outcome or ("running" if end is None else "succeeded")
    nodes = sorted({node or "n1" for _, node in seats})
    row = AttemptSaved(of, number, 1, at(begin), stopped_us, None, len(devices), nodes, outcome, **more)
    used: list[Record] = [
        DeviceSeen(uuid, at(begin), node or "n1", job=of, attempt=number, rank=rank, serial=SERIALS.get(uuid, ""), **FACTS)
        for rank, (uuid, node) in enumerate(seats)
    ]
    return [*used, row, *(NodeSeen(node, at(begin), of, "active") for node in nodes)]


def checkpoint(of: JobKey, number: int, iteration: int, when: float, path: str = "") -> CheckpointSaved:
    return CheckpointSaved(of, number, iteration, path or f"/{of.owner}/{of.job_id}/{iteration}", at(when), 0.1)


def resume(of: JobKey, number: int, iteration: int, when: float, path: str) -> ResumeSaved:
    return ResumeSaved(of, number, iteration, path, at(when))


def evidence(subject: str, when: float, source: str = "xid", code: str = "94", **more: object) -> EvidenceSaved:
    """A piece of evidence that counts, unless told otherwise."""
    values: dict[str, object] = {
        "kind": "device",
        "episode": f"boot:{when}",
        "last_us": at(when),
        "count": 1,
        "weight": 0.8,
        "text": f"{source} {code} seen\nNVRM: Xid (PCI:0000:1b:00): {code}, pid=7, raw line",
        "serial": SERIALS.get(subject, ""),
        "rule": "rsup-1/some",
    } | more
    kind = str(values.pop("kind"))
    fingerprint = hashlib.sha256(repr((subject, source, code, when, sorted(more))).encode()).hexdigest()[:32]
    return EvidenceSaved(
        kind=kind,
        subject=subject,
        fingerprint=fingerprint,
        source=source,
        code=code,
        first_us=at(when),
        recorded_us=at(when),
        **values,  # type: ignore[arg-type]
    )


def moves(subject: str, *steps: tuple[float, str, str], kind: str = "device", **more: Any) -> list[Record]:
    """Transitions `(when, state, verb)` from clear on, and the state that follows. `more`: fields of the state."""
    records: list[Record] = []
    before = "clear"
    for version, (when, after, verb) in enumerate(steps, 1):
        person = "root" if verb in ("quarantine", "repair", "release", "retire", "allow") else ""
        change = TransitionSaved(
            kind, subject, version, at(when), before, after, f"because of {verb}", person, verb, "rsup-1/some"
        )
        records.append(change)
        before = after
    when, state, verb = steps[-1]
    values: dict[str, Any] = {"serial": SERIALS.get(subject, ""), "rule": "rsup-1/some"} | more
    saved = SubjectSaved(kind, subject, state, at(when), f"because of {verb}", len(steps), **values)  # type: ignore[arg-type]
    return [*records, saved]


def case(of: JobKey, number: int, iteration: int, when: float, accused: str, **more: object) -> CaseSaved:
    """A closed case that accuses a device."""
    finding = {"rank": 1, "device": accused, "check": "NaN in loss", "fatal": True, "initial": "nan", "in_place": "nan"}
    values: dict[str, object] = {
        "closed_us": at(when + 1),
        "verdict": "persistent",
        "reason": "another device computes another value",
        "findings": [finding],
        "accused": [accused],
        "checkpoint": "/secret/place",
        "fatal": True,
    } | more
    return CaseSaved(of, f"{of}-a{number}-i{iteration}", number, iteration, at(when), **values)  # type: ignore[arg-type]
