"""The node's side of the gate in tests: a folder per node in the place of /etc, /run, /var and /dev, signed snapshots, and the
hooks as `rsup slurm install` writes them."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rsup.launcher.slurm.hook_text import hook_text
from rsup.launcher.slurm.node_settings import NodePlaces, boot_id
from rsup.launcher.slurm.snapshot_file import key_id

BODY: dict[str, Any] = {"schema": 1, "cluster": "rsup", "serial": 7, "num_nodes": 40, "max_refused": 2, "guard_open": False}


def refusal(reason: str = "SDC vote 3/3 jobs", **more: Any) -> dict[str, Any]:
    """What stands against a node or, with `node`, a device."""
    return {"verdict": "refuse", "state": "quarantined", "id": "Q-17", "reason": reason, "until": None, **more}


class Signer:
    """A supervisor's key."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.raw = self._key.public_key().public_bytes_raw()

    @property
    def public(self) -> bytes:
        return base64.b64encode(self.raw) + b"\n"

    def signed(self, body: bytes) -> bytes:
        """The snapshot with those bytes."""
        return b"rsup-snapshot 1 %s %s\n%s" % (key_id(self.raw).encode(), base64.b64encode(self._key.sign(body)), body)

    def snapshot(self, **content: Any) -> bytes:
        """A snapshot made now, against nothing but what is named."""
        whole = {**BODY, "made_us": time.time_ns() // 1000, "nodes": {}, "devices": {}, **content}
        return self.signed(json.dumps(whole).encode())


class NodeSide:
    """One node below `root`."""

    def __init__(self, root: Path, name: str, signer: Signer) -> None:
        self.places, self.name, self.signer = NodePlaces(root), name, signer
        for folder in ("etc/rsup", "run/rsup/jobs", "var/spool/rsup", "dev", "var/log/rsup"):
            (root / folder).mkdir(parents=True)
        (root / "etc/rsup/supervisor.pub").write_bytes(signer.public)
        self.settings(mode="enforce")
        self.python()

    @property
    def environ(self) -> dict[str, str]:
        """What a hook has of its environment, at least."""
        return {"RSUP_NODE_ROOT": str(self.places.root), "SLURMD_NODENAME": self.name, "SLURM_CLUSTER_NAME": "rsup"}

    def settings(self, **values: Any) -> None:
        values = {"time_box_s": 4, **values}  # a test machine is busier than a node between two jobs
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        self.places.settings.write_text("\n".join(lines) + "\n")

    def tell(self, **content: Any) -> None:
        """A snapshot that was fetched just now."""
        self.places.snapshot.write_bytes(self.signer.snapshot(**content))
        self.confirm(content.get("serial", BODY["serial"]))

    def confirm(self, serial: int, age_s: float = 0.0) -> None:
        """A supervisor said so long ago that this one is its newest."""
        told_s = time.clock_gettime(time.CLOCK_BOOTTIME) - age_s
        self.places.confirmed.write_text(
            json.dumps({"boot_id": boot_id(), "boottime_s": told_s, "serial": serial, "etag": f'"{serial}"'})
        )

    def boards(self, boards: Mapping[str, list[str]], boot: str = "") -> None:
        """The inventory: UUIDs by index."""
        devices = [
            {"index": int(index), "uuid": uuid, "pci_bus_id": f"00000000:{int(index) + 16:02x}:00.0"}
            for index, uuids in boards.items()
            for uuid in uuids[-1:]
        ]
        content = {"schema": 1, "boot_id": boot or boot_id(), "boards": boards, "devices": devices}
        self.places.inventory.write_text(json.dumps(content))

    def events(self) -> list[dict[str, Any]]:
        """What is in the spool, oldest first."""
        return [json.loads(path.read_text()) for path in sorted(self.places.spool.glob("*.json"))]

    def refusals(self) -> list[dict[str, Any]]:
        """What prologs have spooled."""
        return [event for event in self.events() if event["kind"] != "job-end"]

    def log(self) -> str:
        """The hooks' log."""
        return self.places.log.read_text() if self.places.log.exists() else ""

    @property
    def was_slow(self) -> bool:
        """Whether the machine was too busy for the last prolog: then it lets a job in whatever the snapshot says."""
        lines = [line for line in self.log().splitlines() if " prolog " in line]
        return bool(lines) and ("exit 124" in lines[-1] or "the gate took longer" in lines[-1])

    def python(self, text: str = f'exec {sys.executable} "$@"') -> None:
        """From now on the hooks' interpreter is this shell script; with an empty text it is gone."""
        path = self.places.root / "python"
        path.unlink(missing_ok=True)
        if text:
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)

    def hook(self, slot: str) -> Path:
        """The hook as `rsup slurm install` writes it."""
        path = self.places.root / f"{slot}.sh"
        path.write_text(hook_text(slot, str(self.places.root / "python")))
        path.chmod(0o755)
        return path

    def run(self, slot: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A hook as slurmd starts it: no PATH, no HOME."""
        hook = self.hook(slot)
        mark = {name: value for name, value in os.environ.items() if name == "RSUP_TEST_RUN"}
        return subprocess.run(
            [str(hook)], env={**self.environ, **mark, **environ}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=90,
        )  # fmt: skip
