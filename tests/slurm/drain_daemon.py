"""A real `rsup serve` beside the test cluster, and what tests ask and tell it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

RSUP = [sys.executable, "-m", "rsup.launcher"]


def gpu(node: str, index: int) -> str:
    return f"GPU-{node}-{index}"


@dataclass
class Daemon:
    """`restart` starts it (again) on the same state directory."""

    folder: Path
    environ: dict[str, str]
    options: list[str] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None
    client: httpx.Client = field(default_factory=httpx.Client)

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def restart(self, *options: str) -> None:
        self.kill()
        self.options = list(options) or self.options
        with (self.folder / "serve.log").open("ab") as log:
            command = [*RSUP, "serve", "--listen", "127.0.0.1:0", "--drain-interval", "0.2", *self.options]
            self.process = subprocess.Popen(command, env=os.environ | self.environ, stderr=log, stdin=subprocess.DEVNULL)
        path = Path(os.environ["RSUP_STATE_DIR"]) / "supervisor.json"
        self.wait(lambda: path.exists() and json.loads(path.read_text())["pid"] == self.process.pid, "rsup serve")  # type: ignore[union-attr]
        token = (path.parent / "token").read_text().strip()
        self.client = httpx.Client(
            base_url=json.loads(path.read_text())["rest"], headers={"Authorization": f"Bearer {token}"}, timeout=60
        )
        self.wait(lambda: self.client.get("/api/v1/slurm").status_code == 200, "the first round")

    def kill(self) -> None:
        """At once, as a crash does."""
        self.client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(60)

    def wait(self, condition: Callable[[], bool], what: str, within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.log[-4000:]}"
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/api/v1/slurm").raise_for_status().json()
        return found

    def rounds(self, num: int = 3) -> dict[str, Any]:
        """The status after so many more rounds: what could have been done has been."""
        first = self.status()["rounds"]
        self.wait(lambda: self.status()["rounds"] >= first + num, f"{num} rounds")
        return self.status()

    def snapshot(self) -> dict[str, Any]:
        """The content, unchecked."""
        found: dict[str, Any] = json.loads(
            self.client.get("/api/v1/gate/snapshot").raise_for_status().content.split(b"\n", 1)[1]
        )
        return found

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").raise_for_status().text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def report(self, node: str, num_gpus: int = 2, events: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
        """What `rsup slurm healthcheck` of that node sends."""
        boards = [
            {"index": i, "uuid": gpu(node, i), "serial": f"S-{node}-{i}", "pci_bus_id": f"0000:{i + 1:02x}:00.0"}
            for i in range(num_gpus)
        ]
        body = {"boot_id": f"boot-{node}", "inventory": boards, "events": events or [], **more}
        found: dict[str, Any] = self.client.post(f"/api/v1/nodes/{node}/report", json=body).raise_for_status().json()
        return found

    def say(self, kind: str, name: str, verb: str, **more: Any) -> httpx.Response:
        """A verb of `rsup devices`, `rsup nodes`."""
        return self.client.post(f"/api/v1/{kind}s/{name}/{verb}", json={"reason": "by the test", **more})

    def quarantine(self, node: str, index: int = 0) -> None:
        self.say("device", gpu(node, index), "quarantine").raise_for_status()

    def release(self, node: str, index: int = 0) -> None:
        self.say("device", gpu(node, index), "release", without_test=True).raise_for_status()

    def rsup(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*RSUP, *words], env=os.environ | self.environ, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr
