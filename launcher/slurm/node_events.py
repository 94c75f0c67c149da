"""Events of a node's hardware: out of readings and the kernel's log, each with the key by which it is told once.

An Xid is known by boot and number of its line in the kernel's log, a counter by boot and value: neither by the wall clock.
Epilog and healthcheck may see the same; whoever spools it first is heard, and the supervisor applies the key once.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rsup.launcher.device_health import bus_id, xid_of_line
from rsup.launcher.slurm.kernel_log import records
from rsup.launcher.slurm.node_settings import UNUSABLE, NodePlaces, read_trusted
from rsup.launcher.slurm.node_spool import NodeEvent, now_us
from rsup.supervisor.wire import HealthReading

MAX_JOBS = 2000
READ_LOG_WITHIN_S = 1.0


def reading_events(readings: Iterable[HealthReading], boot: str, jobs: Mapping[str, str]) -> Iterator[NodeEvent]:
    """Events of what NVML says. `jobs`: by device."""
    for one in readings:
        key = f"{one.source}:{boot}:{one.device}:{one.code}:{one.count}"
        job = jobs.get(one.device)
        yield NodeEvent(key, now_us(), one.source, one.device, one.code, one.detail or f"{one.code} {one.count}", job)


def xid_events(
    places: NodePlaces,
    inventory: Mapping[str, Any],
    boot: str,
    after: int,
    jobs: Mapping[str, str],
    *,
    only: Sequence[str] = (),
) -> Iterator[tuple[int, NodeEvent | None]]:
    """Every line of the kernel's log with a number above `after`, and the Xid in it, if it tells of one. `only`: of these
    devices."""
    by_bus = {bus_id(one.get("pci_bus_id", "")): one["uuid"] for one in inventory["devices"]}
    by_bus.pop("", None)
    for sequence, text in records(places.kernel_log, READ_LOG_WITHIN_S):
        if sequence <= after:
            continue
        found = xid_of_line(text, by_bus)
        if found is None or (only and found[0] not in only):
            yield sequence, None
            continue
        device, code = found
        yield sequence, NodeEvent(f"xid:{boot}:{sequence}", now_us(), "xid", device, int(code), text, jobs.get(device))


def jobs_by_device(places: NodePlaces, boot: str) -> dict[str, str]:
    """Which job has each GPU now, by what prologs kept; drops what is too much, where no epilog runs."""
    starts = [(start["time_us"], job, start) for job, start in _starts(places) if start["boot_id"] == boot]
    starts.sort(key=lambda one: one[:2])
    for _, job, _ in starts[:-MAX_JOBS]:
        (places.jobs / job).unlink(missing_ok=True)
    return {uuid: job for _, job, start in starts for uuid in start["gpus"]}


def read_start(places: NodePlaces, job: str) -> dict[str, Any] | None:
    """What the prolog kept of a job's start; None where it kept nothing that can be read."""
    with suppress(*UNUSABLE):
        start = json.loads(read_trusted(places.jobs / job, 1 << 16))
        return {
            "boot_id": str(start["boot_id"]),
            "sequence": int(start["sequence"]),
            "gpus": [str(one) for one in start["gpus"]],
            "time_us": int(start["time_us"]),
            "gate_s": float(start.get("gate_s") or 0),
        }
    return None


def _starts(places: NodePlaces) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        names = [path.name for path in places.jobs.iterdir() if path.name.isdecimal()]
    except OSError:
        return
    for name in names:
        start = read_start(places, name)
        if start is not None:
            yield name, start
