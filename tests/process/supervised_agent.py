"""An agent for tests of the supervisor process, and ways to look at that process."""

import contextlib
import os
import secrets
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.launcher.supervisor_process import EmbeddedSupervisor, read_live
from rsup.supervisor import places
from rsup.supervisor.wire import AgentInfo, JobSpec, Order, ToAgent

MAIN = [sys.executable, "-P", "-m", "rsup.supervisor.main"]


def until(condition: Callable[[], object], poll: Callable[[], object] = lambda: None, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        poll()
        time.sleep(0.005)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill_supervisors(state: Path) -> None:
    """End every supervisor of that state directory, whatever its files say."""
    wanted = os.fsencode(state)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in command and b"rsup.supervisor.main" in command:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(int(path.name), signal.SIGKILL)
            until(lambda pid=int(path.name): not running(pid))  # type: ignore[misc]


class Agent:
    """A test's agent: a client and whoever starts its supervisor."""

    def __init__(self, state: Path, spec: JobSpec | None = None, *, in_job: bool = False, spool: Path | None = None) -> None:
        self.embedded = EmbeddedSupervisor(state, in_job=in_job)
        self.info = AgentInfo(secrets.token_hex(4), places.this_host(), "127.0.0.1", os.getpid(), places.boot_id())
        self.spool = Spool(spool)
        self.messages: list[ToAgent] = []
        self.acked_command = 0
        self.slowest_s = 0.0
        self._reported_s = 0.0
        self.client = SupervisorClient(self.embedded.ensure(), self.info, spec or JobSpec(owner="ann"), self.spool)

    def turn(self) -> None:
        """What an agent does again and again."""
        started = time.monotonic()
        for message in self.client.poll():
            self.messages.append(message)
            if isinstance(message, Order) and message.commands:
                self.acked_command = max(self.acked_command, message.commands[-1].sequence)
        if self.client.connected:
            self.embedded.heard()
        if started - self._reported_s > 0.2 or self.spool.last > self.spool.acked:
            self._reported_s = started
            self.client.send_report(1, self.acked_command, attempt=1)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        if not self.client.connected:
            address = self.embedded.ensure()
            if address != self.client.address:
                self.client.use_address(address)

    def first(self, kind: type[ToAgent]) -> ToAgent | None:
        return next((message for message in self.messages if isinstance(message, kind)), None)

    def close(self) -> None:
        self.client.close()


def served(state: Path) -> places.SupervisorFile:
    """The supervisor that serves that directory now."""
    found: list[places.SupervisorFile] = []

    def look() -> bool:
        file = places.read_supervisor_file(state)
        if file is not None and read_live(state):
            found.append(file)
        return bool(found)

    until(look)
    return found[0]


def notes(state: Path) -> list[str]:
    with sqlite3.connect(f"file:{state}/rsup.db?mode=ro", uri=True) as database:
        rows = database.execute("select text from events where kind = 'Note' order by number").fetchall()
    database.close()
    return [row[0] for row in rows]
