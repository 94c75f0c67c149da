"""`rsup serve` processes on one database, for tests and benchmarks of takeover; and a wire to the database that can be cut."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.process.supervised_agent import MAIN

_SERVES = re.compile(r"serves agents at (\S+), REST at (\S+), store")
_STANDS_BY = re.compile(r"standing by at (\S+), REST at (\S+):")


def wait_for(condition: Callable[[], Any], what: str, within_s: float = 60.0) -> Any:
    """Poll until `condition` gives something true, and return it."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)
    return found


class Serving:
    """One `rsup serve` with a state directory of its own, reached by agents over TCP with the key of `key_file`."""

    def __init__(self, folder: Path, url: str, key_file: Path, *options: str) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.state = folder
        self.log_path = folder / "serve.log"
        where = ["--rpc", "tcp://127.0.0.1:0", "--listen", "127.0.0.1:0", "--key-file", str(key_file)]
        self.command = [*MAIN, "--state-dir", str(folder), "--database-url", url, *where, *options]
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RSUP_") or "TEST" in name}
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment, start_new_session=True
            )

    def restart(self) -> None:
        """Start it again, once it has ended, where it was and at the same addresses."""
        self.process.wait(60)
        for flag, value in (("--rpc", self.rpc), ("--listen", self.rest.removeprefix("http://"))):
            self.command[self.command.index(flag) + 1] = value
        self.process = self._start()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _said(self) -> "re.Match[str] | None":
        return ([*_SERVES.finditer(self.log), *_STANDS_BY.finditer(self.log)] or [None])[-1]

    @property
    def rpc(self) -> str:
        """Where agents find it, once it has said so."""
        wait_for(self._said, f"a word of {self.state}")
        return str((_SERVES.search(self.log) or _STANDS_BY.search(self.log))[1])  # type: ignore[index]

    @property
    def rest(self) -> str:
        """Its REST address now."""
        found = sorted([*_SERVES.finditer(self.log), *_STANDS_BY.finditer(self.log)], key=lambda match: match.start())
        return str(found[-1][2])

    @property
    def times_led(self) -> int:
        return len(_SERVES.findall(self.log))

    @property
    def times_stood_by(self) -> int:
        return len(_STANDS_BY.findall(self.log))

    def leads(self, times: int = 1, within_s: float = 60.0) -> "Serving":
        """Wait until it leads for the `times`-th time."""
        wait_for(lambda: self.times_led >= times, f"{self.state} leads:\n{self.log[-3000:]}", within_s)
        return self

    def stands_by(self, times: int = 1, within_s: float = 60.0) -> "Serving":
        """Wait until it stands by for the `times`-th time."""
        wait_for(lambda: self.times_stood_by >= times, f"{self.state} stands by:\n{self.log[-3000:]}", within_s)
        return self

    def ask(self, path: str, token: str = "") -> tuple[int, dict[str, Any]]:
        """Status and content of a GET."""
        request = urllib.request.Request(self.rest + path, headers={"Authorization": f"Bearer {token}"} if token else {})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status), json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return int(error.code), json.load(error)

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Wire:
    """Passes on what goes between a client and the database's UNIX socket, until it is cut: then it holds everything back, and
    neither end hears that the other is gone."""

    def __init__(self, folder: Path, target: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._target = str(target / ".s.PGSQL.5432")
        self._is_cut = threading.Event()
        self._stop = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / ".s.PGSQL.5432"))
        self._listening.listen(16)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut.set()

    def mend(self) -> None:
        self._is_cut.clear()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        for one in (self._listening, *(end for pair in self._pairs for end in pair)):
            one.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._is_cut.is_set():
                self._stop.wait(0.05)
                continue
            peers = {end: other for pair in self._pairs for end, other in (pair, pair[::-1])}
            ready, _, _ = select.select([self._listening, *peers], [], [], 0.05)
            for one in [] if self._is_cut.is_set() else ready:
                if one is self._listening:
                    self._accept()
                else:
                    self._pass_on(one, peers[one])

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self._target)
        except OSError:
            client.close()
            server.close()
            return
        self._pairs.append((client, server))

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            data = one.recv(65536)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for pair in [pair for pair in self._pairs if one in pair]:
            self._pairs.remove(pair)
            for end in pair:
                end.close()
