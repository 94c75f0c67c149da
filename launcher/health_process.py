"""The process beside an agent that reads the health of its node's devices: `python -m rsup.launcher.health_process LINK_FD`.

A call into the driver may block for good when a device is sick. So it is not the agent that calls: this process does, in a
thread for each source (NVML's numbers, NVML's events, the kernel's log, the inventory file), and its main thread only waits for
them and for the end of the link. A query that takes longer than `HUNG_AFTER_S` is evidence itself. The agent hears news alone.

It is told first what to watch (`Watch`), answers with `News`, and ends when the agent's end of the link closes.
"""

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rsup.launcher.device_health import HealthNews, Sample, Xids, bus_id, kernel_message, xid_of_line
from rsup.launcher.inventory import begin_nvml, load_nvml
from rsup.launcher.inventory_file import ListedHealth, read_inventory_file
from rsup.launcher.nvml_health import NvmlHealth, XidEvents
from rsup.supervisor import places
from rsup.supervisor.wire import Device, HealthReading, RsupError

SAMPLE_EVERY_S = 15.0
HUNG_AFTER_S = 30.0
FILE_EVERY_S = 1.0
TICK_S = 1.0
LATE_S = 5.0
"""A tick that comes so late means that this process did not run: no query is then taken for hung."""
EVENT_WAIT_MS = 5000
KERNEL_LOG = Path("/dev/kmsg")
MAX_READINGS = 16
"""In one packet of the link."""
NICENESS = 5
SAID_BY_FILE = "said by the inventory file"


class Watch(Struct, frozen=True):
    """What to look at. `file`: the inventory file, empty if there is none; `asks_driver`: there are real GPUs."""

    devices: list[Device]
    file: str = ""
    asks_driver: bool = False


class News(Struct, frozen=True):
    """Readings that are new, or a line for the job's story."""

    readings: list[HealthReading] = []
    note: str = ""


Report = Callable[[Sequence[Sample | Xids]], None]
"""May be called from any thread; what is new of one call is told together."""


class HealthProcess:
    """Its main thread. `send` takes one packet."""

    def __init__(self, watch: Watch, send: Callable[[News], None]) -> None:
        self._watch = watch
        self._send = send
        self._news = HealthNews()
        self._found: queue.SimpleQueue[Sequence[Sample | Xids]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.nvml: NvmlHealth | None = None
        self._doing: tuple[tuple[str, str], float] | None = None

    def start(self) -> None:
        """Start a thread for each source."""
        sources: list[Callable[[], None]] = []
        if self._watch.file:
            sources.append(lambda: watch_file(Path(self._watch.file), self.report))
        if self._watch.asks_driver:
            sources += [self._ask_driver, lambda: watch_kernel_log(KERNEL_LOG, self._watch.devices, self.report)]
        for source in sources:
            threading.Thread(target=source, daemon=True).start()

    def report(self, found: Sequence[Sample | Xids]) -> None:
        """From any thread."""
        self._found.put(found)
        os.eventfd_write(self._wake_fd, 1)

    def run(self, link_fd: int) -> None:
        """Until the link ends."""
        ticked_s = time.monotonic()
        while True:
            ready, _, _ = select.select([link_fd, self._wake_fd], [], [], TICK_S)
            if link_fd in ready:
                return  # nothing more is said to us: it is the end of the link
            now_s = time.monotonic()
            if now_s - ticked_s > TICK_S + LATE_S:
                self._doing = None
            ticked_s = now_s
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self.tell_news()
            self.look_at_query(now_s)

    def close(self) -> None:
        """Give back its descriptor; no thread may report any more."""
        os.close(self._wake_fd)

    def tell_news(self) -> None:
        """Send what is new of all that was reported."""
        readings: list[HealthReading] = []
        while not self._found.empty():
            for found in self._found.get():
                readings += self._news.take(found)
        self._tell(readings)

    def look_at_query(self, now_s: float) -> None:
        """Tell of a query that hangs."""
        doing = self.nvml.doing if self.nvml else None
        if doing is None or self._doing is None or self._doing[0] != doing:
            self._doing = (doing, now_s) if doing else None
        elif now_s - self._doing[1] > HUNG_AFTER_S:
            text = f"NVML has not answered for {now_s - self._doing[1]:.0f} s"
            self._tell(self._news.take(Sample("hang", (HealthReading(doing[0], "unreadable", doing[1], 1, text),))))

    def _tell(self, readings: Sequence[HealthReading]) -> None:
        for start in range(0, len(readings), MAX_READINGS):
            self._send(News(list(readings[start : start + MAX_READINGS])))

    def _ask_driver(self) -> None:
        nvml = load_nvml()
        if nvml is None or not begin_nvml(nvml):
            self._send(News(note="NVML is not to be had here: of the devices' health only the kernel's log speaks"))
            return
        self.nvml = health = NvmlHealth(nvml, self._watch.devices)
        threading.Thread(target=lambda: watch_events(nvml, self._watch.devices, self.report), daemon=True).start()
        while True:
            self.report([Sample("nvml", tuple(health.sample()))])
            time.sleep(SAMPLE_EVERY_S)


# ------------------------------------------------------------------------------------------------------------ the sources


def watch_events(nvml: Any, devices: Sequence[Device], report: Report) -> None:
    """The driver's Xid events, for good; ends where the driver has none."""
    try:
        events = XidEvents(nvml, devices)
        while True:
            found = events.wait(EVENT_WAIT_MS)
            if found is not None:
                report([Xids("nvml", *found, detail="event of NVML")])
    except (nvml.NVMLError, AttributeError):
        return


def watch_kernel_log(path: Path, devices: Sequence[Device], report: Report) -> None:
    """Xids of our devices among the messages from now on, for good; ends where the log cannot be read."""
    by_bus = {bus_id(device.pci_bus_id): device.uuid for device in devices if bus_id(device.pci_bus_id)}
    try:
        log = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return
    last = -1
    while True:
        try:
            record = os.read(log, 16384).decode("utf-8", "replace")
        except BrokenPipeError:  # messages were written over before we read them
            continue
        except OSError:
            return
        if not record:
            return
        sequence, text = kernel_message(record)
        found = xid_of_line(text, by_bus)
        if found is None or sequence <= last:
            continue
        last = sequence
        report([Xids("kernel", *found, detail=text)])


def watch_file(path: Path, report: Report) -> None:
    """What the inventory file says of the devices' health, again whenever it has changed, for good."""
    stamp: tuple[int, int, int] | None = None
    told: Counter[tuple[str, str]] = Counter()
    while True:
        try:
            found = path.stat()
            new = (found.st_mtime_ns, found.st_size, found.st_ino)
            records = read_inventory_file(path, places.this_node()) if new != stamp else None
            stamp = new
        except (OSError, RsupError):
            records = None  # half written, or gone for a moment
        ill = [(record.uuid, record.health) for record in records or () if record.health is not None]
        said: list[Sample | Xids] = []
        if records is not None:
            said.append(Sample("file", tuple(one for uuid, health in ill for one in listed_readings(uuid, health))))
        for uuid, health in ill:
            for code, count in Counter(map(str, health.xid)).items():
                if more := count - told[uuid, code]:
                    told[uuid, code] = count
                    said.append(Xids("file", uuid, code, max(0, more), SAID_BY_FILE))
        if said:
            report(said)
        time.sleep(FILE_EVERY_S)


def listed_readings(uuid: str, health: ListedHealth) -> list[HealthReading]:
    """What a file's record stands for, its Xids apart."""
    found = [
        ("ecc", "uncorrectable", health.ecc_uncorrected),
        ("remap", "rows", health.remapped_rows),
        ("remap", "pending", int(health.remap_pending)),
        ("remap", "failed", int(health.remap_failed)),
        ("link", "nvlink-errors", health.link_errors),
        ("recovery-action", health.recovery_action, int(health.recovery_action not in ("", "none"))),
        *(("throttle", code, 1) for code in health.throttle),
        *(("unreadable", code, 1) for code in health.unreadable),
    ]
    return [HealthReading(uuid, source, code, count, SAID_BY_FILE) for source, code, count in found if count > 0]


# --------------------------------------------------------------------------------------------------------------- the link

_news_encoder = msgspec.msgpack.Encoder()
MAX_WATCH_BYTES = 1 << 17


def main(argv: Sequence[str]) -> None:
    """Serve the agent on the other end of descriptor `argv[0]`, a SOCK_SEQPACKET socket."""
    link = socket.socket(fileno=int(argv[0]))
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    watch = msgspec.msgpack.decode(link.recv(MAX_WATCH_BYTES), type=Watch)

    def send(news: News) -> None:
        with contextlib.suppress(OSError):  # the agent has gone: `run` sees it
            link.send(_news_encoder.encode(news), socket.MSG_NOSIGNAL)

    process = HealthProcess(watch, send)
    process.start()
    process.run(link.fileno())
    os._exit(0)  # a thread may be stuck in the driver


if __name__ == "__main__":
    main(sys.argv[1:])
