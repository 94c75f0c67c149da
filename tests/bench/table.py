"""The one table format of the benchmarks, and small tools they share."""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured thing. `samples` in `unit`; `goal` is what DESIGN asks for, empty for a peer."""

    what: str
    who: str
    samples: Sequence[float]
    unit: str
    goal: str = ""
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        if not self.samples:
            return (self.what, self.who, "0", "-", "-", "-", self.goal, self.note)
        ordered = sorted(self.samples)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        figures = (statistics.median(ordered), p99, ordered[-1])
        return (self.what, self.who, str(len(ordered)), *(f"{x:.3g} {self.unit}" for x in figures), self.goal, self.note)


def print_table(rows: Sequence[Row]) -> None:
    """Print `rows` as aligned columns. With few samples p99 is the maximum."""
    table = [("what", "who", "n", "median", "p99", "max", "goal", "note"), *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def peer(name: str) -> str | None:
    """Path of a peer's command beside this interpreter, or None."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else shutil.which(name)


RSUP = [sys.executable, "-m", "rsup.launcher"]


class Workplace:
    """A folder with a state and a runtime directory of its own, removed at the end."""

    def __enter__(self) -> "Workplace":
        self.folder = Path(tempfile.mkdtemp(prefix="rb-", dir="/tmp"))
        (self.folder / "run").mkdir(mode=0o700)
        left_out = ("RSUP_", "PET_", "TORCHELASTIC_", "PYTHONDONTWRITEBYTECODE")  # users have their bytecode cached
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        self.environment |= {
            "RSUP_STATE_DIR": str(self.folder / "state"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "OMP_NUM_THREADS": "1",
            "OUT": str(self.folder),
            "TMPDIR": str(self.folder),
        }
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def script(self, name: str, text: str) -> str:
        """Write a script; return its path."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a command in a session of its own, output into `last.log`. The caller ends it with `kill`."""
        with (self.folder / "last.log").open("wb") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill what still runs of a command, and the ranks that it left behind: they have our OUT in their environment."""
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        if process.poll() is None:
            process.kill()
            process.wait()
        mark = f"OUT={self.folder}".encode()
        for listing in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in listing.read_bytes().split(b"\0"):
                    os.kill(int(listing.parent.name), 9)

    def run(self, command: Sequence[str], timeout_s: float = 120, **environment: str) -> tuple[int, float]:
        """Run a command, output into `last.log`; return exit code and wall seconds. On a time-out its session is killed."""
        started = time.monotonic()
        with (self.folder / "last.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=self.environment | environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)

            late = threading.Timer(timeout_s, end)
            late.start()
            code = process.wait()  # with a time limit it polls, up to 50 ms behind the end
            took_s = time.monotonic() - started
            late.cancel()
        return -1 if is_late.is_set() else code, took_s

    def log_tail(self) -> str:
        """The last lines of the last command's output."""
        return (self.folder / "last.log").read_text(errors="replace")[-2000:]
