"""What is read off a device while a job runs, in words, and which of it is news. Pure.

A reading (`wire.HealthReading`) is one of these:

| source | code | count |
|---|---|---|
| `xid` | number of the Xid | how many more since the last time it was told |
| `ecc` | `uncorrectable`; `uncorrectable-aggregate` once it grows | total since the driver's start; of its life |
| `remap` | `pending`, `failed`; `rows` once it grows | 1; rows remapped in its life |
| `recovery-action` | `reset`, `reboot`, `drain-p2p`, `drain-and-reset` and further ones of the driver | 1 |
| `throttle` | `hw-thermal`, `hw-power-brake`: under load and for minutes | 1 |
| `link` | `nvlink-errors` above a rate, `nvlink-recovery` | total since the driver's start |
| `unreadable` | the query that fails or hangs; what a device does not support is none | 1 |

The driver tells Xids twice, by an event and in the kernel's log; the log alone knows of a device that fell off the bus. What
two origins say of the same device and number is counted once, by whoever saw more.
"""

import re
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from rsup.supervisor.wire import HealthReading

MAX_DETAIL_CHARS = 4096
RECOVERY_ACTIONS = {
    1: "reset",
    2: "reboot",
    3: "drain-p2p",
    4: "drain-and-reset",
    5: "recover-imex-domain",
    6: "bus-reset",
    7: "system-reboot",
}
"""By NVML's number; 0 is none."""


class Sample(Struct, frozen=True):
    """All that `origin` reads of the devices now."""

    origin: str
    readings: tuple[HealthReading, ...]


class Xids(Struct, frozen=True):
    """Further Xids that `origin` saw."""

    origin: str
    device: str
    code: str
    count: int = 1
    detail: str = ""


class HealthNews:
    """What has been told of each device. One for all origins; use from one thread."""

    def __init__(self) -> None:
        self._standing: dict[str, dict[tuple[str, str, str], int]] = {}
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._told: Counter[tuple[str, str]] = Counter()

    def take(self, found: Sample | Xids) -> list[HealthReading]:
        """What of it is news: readings that were not there the last time, totals that have grown, and Xids of which another
        origin has not told as many before."""
        return self._of_sample(found) if isinstance(found, Sample) else self._of_xids(found)

    def _of_sample(self, sample: Sample) -> list[HealthReading]:
        before, news = self._standing.get(sample.origin, {}), []
        now: dict[tuple[str, str, str], int] = {}
        for reading in sample.readings:
            key = (reading.device, reading.source, reading.code)
            now[key] = max(reading.count, before.get(key, 0))
            if reading.count > before.get(key, 0):
                news.append(_clipped(reading))
        self._standing[sample.origin] = now
        return news

    def _of_xids(self, xids: Xids) -> list[HealthReading]:
        device, code = xids.device, xids.code
        self._seen[xids.origin, device, code] += xids.count
        most = max(count for (_, *what), count in self._seen.items() if what == [device, code])
        num_untold = most - self._told[device, code]
        if num_untold <= 0:
            return []
        self._told[device, code] = most
        return [_clipped(HealthReading(device, "xid", code, num_untold, xids.detail))]


def _clipped(reading: HealthReading) -> HealthReading:
    if len(reading.detail) <= MAX_DETAIL_CHARS:
        return reading
    return HealthReading(reading.device, reading.source, reading.code, reading.count, reading.detail[:MAX_DETAIL_CHARS])


# ------------------------------------------------------------------------------------------------------ the kernel's log

_BUS_ID = re.compile(r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?\Z", re.IGNORECASE)
_XID = re.compile(r"NVRM: Xid \((?P<bus>[^)]*)\): (?P<code>\d+)\b")
_GPU_NAME = re.compile(r"(GPU-[0-9a-f-]+)", re.IGNORECASE)


def bus_id(text: str) -> str:
    """A PCI address in one spelling, `00000000:1b:00.0`; empty for what is none."""
    match = _BUS_ID.match(text.strip())
    if match is None:
        return ""
    domain, bus, slot, function = match.groups()
    return f"{int(domain or '0', 16):08x}:{int(bus, 16):02x}:{int(slot, 16):02x}.{function or 0}"


def xid_of_line(line: str, by_bus: Mapping[str, str]) -> tuple[str, str] | None:
    """Device and number of an Xid that the driver printed; None for any other line, and for a device that is not ours.

    `by_bus`: UUIDs by `bus_id`. Some drivers add the UUID: `Xid (PCI:0000:1b:00 GPU-...)`.
    """
    match = _XID.search(line)
    if match is None:
        return None
    where = match["bus"]
    named = _GPU_NAME.search(where)
    if named and named[1] in by_bus.values():
        return named[1], match["code"]
    device = by_bus.get(bus_id(where.split()[0].rstrip(",") if where.split() else ""), "")
    return (device, match["code"]) if device else None


def kernel_message(record: str) -> tuple[int, str]:
    """Sequence number and text of a record of /dev/kmsg: `priority,sequence,time,flags;text`, then further lines."""
    head, _, text = record.partition(";")
    words = head.split(",")
    sequence = int(words[1]) if len(words) > 1 and words[1].isdigit() else -1
    return sequence, text.split("\n", 1)[0]
