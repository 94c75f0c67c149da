"""Launchers at work: what they print, how they end, and the several agents of a job that has several nodes."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat.comparison.row import Peer


def free_port() -> int:
    """A port of this host that nobody held a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def within(timeout_s: float, condition: Callable[[], object]) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@dataclass
class Launched:
    """One launcher; its stdout and stderr together are `text`."""

    process: "subprocess.Popen[str]"
    path: Path
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0

    @property
    def text(self) -> str:
        return self.path.read_text(errors="replace")

    @property
    def took_s(self) -> float:
        """From start to the end that `wait` saw."""
        return self.ended_s - self.started_s

    @property
    def age_s(self) -> float:
        """Since its start."""
        return time.monotonic() - self.started_s

    def wait(self, within_s: float) -> int | None:
        """Its exit code (negative: killed by that signal); None if it still runs after that time."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        self.ended_s = self.ended_s or time.monotonic()
        return code

    def lines(self, word: str) -> list[str]:
        """The lines with that word."""
        return [line for line in self.text.splitlines() if word in line]


def launch(peer: Peer, folder: Path, *words: str, name: str = "", env: dict[str, str] | None = None) -> Launched:
    """Start a launcher whose output goes to a file of the folder."""
    path = folder / f"output{name or f'-{time.monotonic_ns()}'}"
    with path.open("w") as output:
        process = peer.start(folder, *words, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return Launched(process, path)


def _listens(port: int) -> bool:
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)


def one_line(launched: Launched, *words: str) -> bool:
    """Whether it printed a single line, with all of these words in it."""
    lines = launched.text.splitlines()
    return len(lines) == 1 and all(word in lines[0] for word in words)


@dataclass
class Job:
    """The launches of a job of several nodes, all on this host: they meet at one port."""

    peer: Peer
    folder: Path
    options: tuple[str, ...] = ("--nnodes", "2")
    script: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)

    def node(self, rank: int | None, *options: str, apart: bool = False, **env: str) -> Launched:
        """Start a node. `apart`: with directories of its own, as on another host. With torchrun whoever binds the port first
        keeps the rendezvous, whatever its node rank: so that a recipe shows the same each time, node 0 is given the time."""
        words = [*self.options, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.host}:{self.port}", *options]
        if rank is not None:
            words += ["--node-rank", str(rank)]
        if apart:
            place = self.folder / f"node-{rank}"
            (place / "run").mkdir(parents=True)
            env = {"RSUP_STATE_DIR": str(place / "state"), "XDG_RUNTIME_DIR": str(place / "run"), "HOME": str(place)} | env
        launched = launch(self.peer, self.folder, *words, *self.script, name=f"-node-{rank}-{time.monotonic_ns()}", env=env)
        if rank == 0 and self.peer.name == "torchrun" and self.host == "127.0.0.1":
            within(15, lambda: _listens(self.port))
        return launched


def script(folder: Path, text: str, name: str = "script.py") -> str:
    """Write a script for the ranks and return its name. `rank`, `restart` and `say` are there without imports of its own."""
    (folder / name).write_text(PRELUDE + text)
    return name


PRELUDE = """import os, signal, subprocess, sys, threading, time
rank, restart, world = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"))
def say(name, text=""):  # a signal's handler may say the same in the midst of it
    new = f"{name}.{time.monotonic_ns()}"
    open(new, "w").write(str(text)); os.rename(new, name)
def wait_for(name, within_s=60):
    end = time.monotonic() + within_s
    while not os.path.exists(name) and time.monotonic() < end: time.sleep(0.02)
"""


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The story of the one job that rsup ran in that folder."""
    env = {"RSUP_STATE_DIR": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder)}
    (job,) = json.loads(_query(env, "jobs", "--json"))
    events: list[dict[str, Any]] = json.loads(_query(env, "events", job["id"], "--json"))
    return events


def _query(env: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "rsup.launcher", *words]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True, timeout=60).stdout
