"""Whole jobs: `rsup launch` as users run it, with real ranks, and the reading commands against their store."""

import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher import cli
from rsup.supervisor import places
from rsup.supervisor.heartbeat_board import process_start_ticks

RSUP = [sys.executable, "-m", "rsup.launcher"]


def wait_until(condition: Callable[[], Any], what: str, within_s: float = 90.0) -> Any:
    """Poll until `condition` gives something true, and return it."""
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """A port that nobody holds, below those that the system gives to whoever asks for any: nobody gets it by chance."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def running(module: str, folder: Path) -> list[int]:
    """Processes that run that module of ours for launches whose directories lie in `folder`."""
    found = []
    runtime_dir = b"XDG_RUNTIME_DIR=" + os.fsencode(folder) + b"/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if module.encode() not in (process / "cmdline").read_bytes().split(b"\0"):
                continue
            if any(word.startswith(runtime_dir) for word in (process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def keepers_end(folder: Path) -> None:
    """Wait for a test's keepers, before its directories go. One that has still to tell a supervisor something goes on for
    minutes if that, idle for a second, went first; it is ended here."""
    alone_since = now = time.monotonic()
    deadline = now + 60
    while now < deadline and (keepers := running("rsup.launcher.keeper_process", folder)):
        if running("rsup.supervisor.main", folder):
            alone_since = now
        elif now > alone_since + 10:
            for pid in keepers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        now = time.monotonic()


READING = ("cases", "events", "jobs", "status")


def read_in_process(*arguments: str) -> tuple[int, str, str]:
    """Call a reading command of `rsup` here, which spares an interpreter's start: exit code, stdout, stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(list(arguments))
        except SystemExit as ended:
            code = int(str(ended.code))
    said, complained = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return code, said, complained


@dataclass
class Launched:
    """One running `rsup launch`."""

    process: "subprocess.Popen[str]"
    stdout_path: Path
    stderr_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def wait(self, within_s: float = 90.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {within_s:.0f} s:\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}"
            ) from None

    def ends(self, exit_code: int, within_s: float = 90.0) -> "Launched":
        """Assert that it ends with that code."""
        code = self.wait(within_s)
        assert code == exit_code, f"exit code {code}\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}"
        return self


@dataclass
class Place:
    """A machine's worth of directories, and what runs there."""

    folder: Path
    launched: list[Launched] = field(default_factory=list)

    def environment(self, **extra: str) -> dict[str, str]:
        return os.environ | {"OUT": str(self.folder), "OMP_NUM_THREADS": "1"} | extra

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def launch(self, *arguments: str, cwd: Path | None = None, **extra: str) -> Launched:
        """Start `rsup launch ARGUMENTS` in a session of its own."""
        number = len(self.launched)
        stdout_path, stderr_path = self.folder / f"out-{number}", self.folder / f"err-{number}"
        with stdout_path.open("w") as out, stderr_path.open("w") as err:
            process = subprocess.Popen(
                [*RSUP, "launch", *arguments],
                env=self.environment(**extra),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
                cwd=cwd,
            )
        self.launched.append(Launched(process, stdout_path, stderr_path))
        return self.launched[-1]

    def rsup(self, *arguments: str, code: int = 0, **extra: str) -> str:
        """Run another rsup command to its end; return what it printed on stdout."""
        if arguments[0] in READING and not extra:
            found, out, err = read_in_process(*arguments)
            assert found == code, f"rsup {' '.join(arguments)}: {found}\n{out}\n{err}"
            return out
        done = subprocess.run([*RSUP, *arguments], env=self.environment(**extra), capture_output=True, text=True, timeout=60)
        assert done.returncode == code, f"rsup {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def status(self, job: str) -> dict[str, Any]:
        """`rsup status JOB --json`; empty while the job is unknown."""
        code, out, _ = read_in_process("status", job, "--json")
        status: dict[str, Any] = json.loads(out) if code == 0 else {}
        return status

    def iteration_of(self, job: str) -> int:
        """The highest iteration that the job's ranks show."""
        return max((rank["iteration"] or 0 for rank in self.status(job).get("ranks", [])), default=0)

    def supervisor_pid(self) -> int:
        """Of the one that runs. It says where it is when it already serves, so there may be none yet: wait for it."""

        def announced() -> int:
            file = places.read_supervisor_file(Path(os.environ["RSUP_STATE_DIR"]))
            return file.pid if file and process_start_ticks(file.pid) == file.start_ticks else 0

        return int(wait_until(announced, "a supervisor"))

    def supervisors_end(self) -> None:
        """Wait until no supervisor of this test runs, whether or not it has said where it is."""
        wait_until(lambda: not running("rsup.supervisor.main", self.folder), "the supervisor's end")


@pytest.fixture
def place(own_directories: Path) -> Iterator[Place]:
    """A place whose launches are ended, whatever the test did to them."""
    made = Place(own_directories)
    yield made
    for launched in made.launched:
        if launched.process.poll() is None:
            launched.process.send_signal(signal.SIGCONT)
            launched.process.terminate()
            try:
                launched.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                launched.process.kill()
                launched.process.wait()
    keepers_end(own_directories)
