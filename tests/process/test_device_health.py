"""Health of devices while a job runs: NVML's edge is replaced, everything behind it is real."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rsup.launcher import health_process, health_watch
from rsup.launcher.device_health import HealthNews, Sample, Xids, bus_id, kernel_message, xid_of_line
from rsup.launcher.health_process import HealthProcess, News, Watch, watch_events, watch_file, watch_kernel_log
from rsup.launcher.health_watch import HealthWatch
from rsup.launcher.nvml_health import THROTTLED_FOR_S, NvmlHealth, XidEvents
from rsup.supervisor.wire import Device, HealthReading

DEVICES = [Device("GPU-a", pci_bus_id="00000000:1B:00.0"), Device("GPU-b", pci_bus_id="0000:1c:00.0")]
NOT_SUPPORTED, GPU_IS_LOST, UNKNOWN, TIMEOUT = 3, 15, 999, 10


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class FakeNvml:
    """Two boards. Every answer of a query is a value, an error to raise, or a function to call."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "ecc": {(0, 0): (0, 0), (1, 0): (0, 0)},
            "remap": (0, 0, 0, 0),
            "reasons": 0,
            "busy": 100,
            "links": (0, 0, 0),
            "recoveries": 0,
            "recovery": 0,
        }
        self.events: list[tuple[int, int]] = []
        self.registered: list[int] = []

    def _answer(self, name: str) -> Any:
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        return [b"GPU-a", b"GPU-b"].index(uuid)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert kind == 1
        if handle == 1:
            raise NVMLError(NOT_SUPPORTED)
        answer = self._answer("ecc")
        return int(answer if isinstance(answer, int) else answer[handle, 0][counter])

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self._answer("remap") if handle == 0 else (0, 0, 0, 0)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> Any:
        return self._answer("reasons") if handle == 0 else 0x1

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._answer("busy"))

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        def value(number: int, code: int = 0) -> Any:
            return SimpleNamespace(nvmlReturn=code, valueType=3, value=SimpleNamespace(ullVal=number))

        if handle == 1:
            return [value(0, NOT_SUPPORTED) for _ in fields]
        answers = {38: 0, 45: 1, 52: 2}
        return [
            value(self._answer("links")[answers[field]] if field in answers else self._answer(_OTHER[field]))
            for field in fields
        ]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        assert kinds == 8
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        if not self.events:
            raise NVMLError(TIMEOUT)
        handle, code = self.events.pop(0)
        return SimpleNamespace(device=handle, eventType=8, eventData=code)


_OTHER = {59: "recoveries", 230: "recovery"}


def told(readings: list[HealthReading]) -> list[tuple[str, str, str, int]]:
    return [(one.device, one.source, one.code, one.count) for one in readings]


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    """Samples of a fake, as news."""

    def __init__(self) -> None:
        self.nvml, self.clock, self.news = FakeNvml(), Clock(), HealthNews()
        self.health = NvmlHealth(self.nvml, DEVICES, self.clock)

    def sample(self, after_s: float = 15.0, **answers: Any) -> list[tuple[str, str, str, int]]:
        self.nvml.answers.update(answers)
        self.clock.now_s += after_s
        return told(self.news.take(Sample("nvml", tuple(self.health.sample()))))


def test_a_healthy_device_and_what_is_not_supported_say_nothing() -> None:
    watched = Watched()
    assert watched.sample() == [] and watched.sample() == []


def test_totals_are_told_when_they_grow_and_the_boards_past_is_not() -> None:
    """NVML's life-time counters are no evidence of this job unless they move."""
    watched = Watched()
    assert watched.sample(ecc={(0, 0): (0, 7)}, remap=(1, 2, 0, 0)) == []
    assert watched.sample(ecc={(0, 0): (2, 9)}) == [
        ("GPU-a", "ecc", "uncorrectable", 2),
        ("GPU-a", "ecc", "uncorrectable-aggregate", 9),
    ]
    assert watched.sample() == []
    assert watched.sample(remap=(1, 3, 1, 0)) == [("GPU-a", "remap", "pending", 1), ("GPU-a", "remap", "rows", 4)]
    assert watched.sample(remap=(1, 3, 0, 1)) == [("GPU-a", "remap", "failed", 1)]
    assert watched.sample(remap=(1, 3, 1, 1)) == [("GPU-a", "remap", "pending", 1)], "it came back"


def test_what_was_there_at_the_start_and_stands_is_told_at_once() -> None:
    assert Watched().sample(ecc={(0, 0): (1, 1)}, recovery=2) == [
        ("GPU-a", "ecc", "uncorrectable", 1),
        ("GPU-a", "recovery-action", "reboot", 1),
    ]


def test_the_recovery_action_of_a_binding_that_has_it() -> None:
    watched = Watched()
    actions = {0: 4, 1: 0}
    watched.nvml.nvmlDeviceGetGpuRecoveryAction = actions.__getitem__  # type: ignore[attr-defined]
    assert watched.sample() == [("GPU-a", "recovery-action", "drain-and-reset", 1)]
    actions[0] = 99
    assert watched.sample() == [("GPU-a", "recovery-action", "action-99", 1)], "one that this release does not know"


def test_slowed_down_counts_under_load_and_for_minutes() -> None:
    """node_health: nodes that idle, or are capped by software, are normal."""
    watched = Watched()
    assert watched.sample(reasons=0x40) == []
    assert watched.sample(THROTTLED_FOR_S - 1) == []
    assert watched.sample(2) == [("GPU-a", "throttle", "hw-thermal", 1)]
    assert watched.sample() == [], "once a spell"
    assert watched.sample(reasons=0) == [] and watched.sample(reasons=0x80 | 0x4, busy=3) == []
    assert watched.sample(THROTTLED_FOR_S + 1) == [], "idle"
    assert watched.sample(busy=90) == [] and watched.sample(THROTTLED_FOR_S) == [("GPU-a", "throttle", "hw-power-brake", 1)]


def test_links_count_by_their_rate() -> None:
    watched = Watched()
    assert watched.sample(links=(10_000, 0, 0)) == [], "of the board's past"
    assert watched.sample(60, links=(10_050, 20, 5)) == []
    assert watched.sample(60, links=(10_050, 20, 500)) == [("GPU-a", "link", "nvlink-errors", 10_570)]
    assert watched.sample(60) == []
    assert watched.sample(recoveries=1) == [("GPU-a", "link", "nvlink-recovery", 1)]


def test_an_error_is_evidence_the_second_time_and_a_lost_device_at_once() -> None:
    """node_health case 19: errors that are swallowed show a broken card as healthy."""
    watched = Watched()
    assert watched.sample(ecc=NVMLError(UNKNOWN)) == []
    assert watched.sample() == [("GPU-a", "unreadable", "ecc", 1)]
    assert watched.sample() == [] and watched.sample(ecc={(0, 0): (0, 0)}) == []
    assert watched.sample(remap=NVMLError(GPU_IS_LOST)) == [("GPU-a", "unreadable", "remapped-rows", 1)]
    assert watched.sample(remap=NVMLError(4)) == [], "we may not ask: not the device's fault"


def test_xids_of_two_origins_are_counted_once() -> None:
    news = HealthNews()
    assert told(news.take(Xids("nvml", "GPU-a", "79"))) == [("GPU-a", "xid", "79", 1)]
    assert news.take(Xids("kernel", "GPU-a", "79", detail="NVRM: Xid")) == []
    assert told(news.take(Xids("kernel", "GPU-a", "79", 2))) == [("GPU-a", "xid", "79", 2)]
    assert told(news.take(Xids("kernel", "GPU-b", "79"))) == [("GPU-b", "xid", "79", 1)]
    (long,) = news.take(Xids("kernel", "GPU-b", "31", detail="x" * 9000))
    assert len(long.detail) == 4096


@pytest.mark.parametrize("text", ["0000:1b:00", "PCI:0000:1B:00.0", "00000000:1b:00.0", "1b:00.0", "1B:0"])
def test_bus_ids_in_every_spelling(text: str) -> None:
    """node_health case 8: an Xid that was not mapped to its board."""
    assert bus_id(text) == "00000000:1b:00.0"


@pytest.mark.parametrize("text", ["", "1b", "0000:1b:00.9", "GPU-1", "0000:1b:00 x"])
def test_what_is_no_bus_id(text: str) -> None:
    assert bus_id(text) == ""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", ("GPU-a", "79")),
        ("NVRM: Xid (PCI:0000:1c:00): 13, pid=4, Graphics Exception", ("GPU-b", "13")),
        ("NVRM: Xid (PCI:0000:1f:00 GPU-a): 48, pid=1", ("GPU-a", "48")),
        ("NVRM: Xid (PCI:0000:3f:00): 79, of somebody else's board", None),
        ("NVRM: Xid (): 79", None),
        ("NVRM: GPU at PCI:0000:1b:00: GPU-a", None),
        ("a user writes NVRM: Xid", None),
    ],
)
def test_lines_of_the_kernels_log(line: str, found: tuple[str, str] | None) -> None:
    assert xid_of_line(line, {"00000000:1b:00.0": "GPU-a", "00000000:1c:00.0": "GPU-b"}) == found
    assert kernel_message(f"4,87,1234,-;{line}\n SUBSYSTEM=pci\n") == (87, line)


def test_the_drivers_events() -> None:
    nvml = FakeNvml()
    events = XidEvents(nvml, DEVICES)
    assert nvml.registered == [0, 1] and events.wait(1) is None
    nvml.events = [(1, 48), (7, 48)]
    assert events.wait(1) == ("GPU-b", "48") and events.wait(1) is None


def test_events_end_where_the_driver_has_none() -> None:
    nvml = FakeNvml()
    nvml.nvmlEventSetWait_v2 = lambda *_: (_ for _ in ()).throw(NVMLError(UNKNOWN))  # type: ignore[method-assign]
    watch_events(nvml, DEVICES, lambda found: pytest.fail(str(found)))


def test_the_kernels_log_from_now_on(tmp_path: Path) -> None:
    """Only messages after the start count: by the log's own sequence, not by a clock."""
    log = tmp_path / "log"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:1b:00): 79, long ago\n")
    found: list[Any] = []
    records: Iterator[bytes | Exception] = iter(
        [
            b"4,2,1,-;usb 1-1: new device\n",
            BrokenPipeError(),
            b"4,7,9,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n",
            b"4,7,9,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n",
        ]
    )

    def read(descriptor: int, size: int) -> bytes:
        assert os.read(descriptor, size) == b"", "what was there before has been passed over"
        record = next(records, b"")
        if isinstance(record, Exception):
            raise record
        return record

    with pytest.MonkeyPatch.context() as patch:
        constants = {"O_RDONLY": os.O_RDONLY, "O_CLOEXEC": os.O_CLOEXEC, "SEEK_END": os.SEEK_END}
        patch.setattr(health_process, "os", SimpleNamespace(open=os.open, lseek=os.lseek, read=read, **constants))
        watch_kernel_log(log, DEVICES, found.extend)
    assert [(one.device, one.code) for one in found] == [("GPU-a", "79")]
    watch_kernel_log(tmp_path / "none", DEVICES, found.extend)
    assert len(found) == 1


class EndOfTest(BaseException):
    pass


@pytest.fixture
def sleeps() -> Iterator[list[Callable[[], None]]]:
    """What is done while the file's watcher sleeps; then it ends."""
    steps: list[Callable[[], None]] = []

    def sleep(_: float) -> None:
        if not steps:
            raise EndOfTest
        steps.pop(0)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health_process, "time", SimpleNamespace(sleep=sleep))
        yield steps


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, sleeps: list[Callable[[], None]]) -> None:
    path, news = tmp_path / "inventory.json", HealthNews()
    found: list[HealthReading] = []

    def write(**health: Any) -> None:
        path.with_suffix(".new").write_text(json.dumps([{"uuid": "GPU-a", "health": health}, {"uuid": "GPU-b"}]))
        path.with_suffix(".new").rename(path)

    write(xid=[79, 79, 13], ecc_uncorrected=1, remap_pending=True)
    sleeps += [
        lambda: path.write_bytes(b"[{") and None,  # type: ignore[list-item]  # half written
        lambda: write(xid=[79, 79, 13, 13], ecc_uncorrected=3, remap_pending=True, recovery_action="reset"),
        lambda: path.unlink(),
        lambda: write(throttle=["hw-thermal"], unreadable=["ecc"], link_errors=9, remap_failed=True),
    ]
    with pytest.raises(EndOfTest):
        watch_file(path, lambda said: found.extend(new for one in said for new in news.take(one)))
    assert [(one.source, one.code, one.count) for one in found] == [
        ("ecc", "uncorrectable", 1),
        ("remap", "pending", 1),
        ("xid", "79", 2),
        ("xid", "13", 1),
        ("ecc", "uncorrectable", 3),
        ("recovery-action", "reset", 1),
        ("xid", "13", 1),
        ("remap", "failed", 1),
        ("link", "nvlink-errors", 9),
        ("throttle", "hw-thermal", 1),
        ("unreadable", "ecc", 1),
    ]


def test_a_query_that_hangs_is_told_once_and_holds_up_nothing() -> None:
    """node_health case 19: a call that never returns parks its own thread alone."""
    packets: list[News] = []
    process = HealthProcess(Watch(DEVICES), packets.append)
    nvml, let_go = FakeNvml(), threading.Event()
    nvml.answers["ecc"] = lambda: let_go.wait(100) and 0
    process.nvml = health = NvmlHealth(nvml, DEVICES)
    thread = threading.Thread(target=health.sample)
    thread.start()
    try:
        deadline_s = time.monotonic() + 60
        while health.doing != ("GPU-a", "ecc"):
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        for now_s in (0.0, 29.0):
            process.look_at_query(now_s)
        assert packets == []
        for now_s in (31.0, 90.0):
            process.look_at_query(now_s)
        process.report([Xids("kernel", "GPU-b", "79")])
        process.tell_news()
        assert [told(packet.readings) for packet in packets] == [
            [("GPU-a", "unreadable", "ecc", 1)],
            [("GPU-b", "xid", "79", 1)],
        ]
    finally:
        let_go.set()
        thread.join(60)
    process.look_at_query(100.0)
    assert len(packets) == 2 and health.doing is None
    process.close()


class Listening:
    """A `HealthWatch` with a loop around it."""

    def __init__(self, file: Path | None, has_gpus: bool = False) -> None:
        self.selector = selectors.DefaultSelector()
        self.heard: list[HealthReading] = []
        self.notes: list[str] = []
        self.watch = HealthWatch(DEVICES, has_gpus, file, self.selector, self.heard.extend, self.notes.append)

    def until(self, condition: Callable[[], Any], within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, (self.heard, self.notes)
            self.watch.look_after(is_running=True)
            for key, _ in self.selector.select(0.02):
                key.data()

    def close(self) -> None:
        self.watch.close()
        self.selector.close()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_process_is_started_again_when_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_watch, "AGAIN_AFTER_S", 0.0)
    path = tmp_path / "inventory.json"
    path.write_text('[{"uuid": "GPU-a", "health": {"xid": [79]}}]')
    listening = Listening(path)
    try:
        listening.watch.look_after(is_running=False)
        assert not listening.watch.pids, "not before ranks run"
        for num_told in range(1, health_watch.MAX_STARTS + 1):
            listening.until(lambda num_told=num_told: len(listening.heard) == num_told)  # type: ignore[misc]
            pid = listening.watch.pids[0]
            os.kill(pid, signal.SIGKILL)
            listening.until(lambda pid=pid: pid not in listening.watch.pids)  # type: ignore[misc]
        listening.until(lambda: listening.notes)
        assert "dies again and again" in listening.notes[0] and not listening.watch.pids
    finally:
        listening.close()


def test_it_ends_with_its_agent_and_there_is_none_without_gpus_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_watch, "KILLED_WITHIN_S", 60.0)
    path = tmp_path / "inventory.json"
    path.write_text('[{"uuid": "GPU-a", "health": {"ecc_uncorrected": 1}}]')
    listening, idle = Listening(path), Listening(None)
    try:
        listening.until(lambda: listening.heard)
        (pid,) = listening.watch.pids
        os.kill(pid, signal.SIGSTOP)
        listening.watch.close()
        assert not is_alive(pid), "a stopped one is ended, too"
        idle.watch.look_after(is_running=True)
        assert idle.watch.pids == ()
    finally:
        listening.close()
        idle.close()


def test_it_ends_when_its_link_does(tmp_path: Path) -> None:
    """An agent that is killed closes the link: nothing of ours is left on the node."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(msgspec.msgpack.encode(Watch(DEVICES)))
    command = [sys.executable, "-P", "-m", health_process.__name__, str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.close()
        assert process.wait(60) == 0
