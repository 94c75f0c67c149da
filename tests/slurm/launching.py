"""What the tests of launches under SLURM have in common: scripts that every user can read, and signed snapshots on nodes."""

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rsup.launcher.slurm.node_settings import boot_id
from tests.slurm.cluster import Cluster

ANN, BEN = 20001, 20002

DECLARES = """
import os, sys, time
import rsup.worker
run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
print("run", run, "rank", os.environ["RANK"], "on", os.environ["SLURMD_NODENAME"], flush=True)
rsup.worker.init()
code = int(sys.argv[1])
if run == 0 and os.environ["RANK"] == "0":
    rsup.worker.declare_exit(code, "by the test")
    sys.exit(code)
time.sleep(0 if run else 60)
"""
"""A rank that leaves with a declared exit code in the job's first run, and ends well in the next."""


def script(cluster: Cluster, text: str, name: str) -> Path:
    """A file that every user can read."""
    path = cluster.folder / "out" / name
    path.write_text(text)
    return path


def snapshot(root: Path, nodes: Mapping[str, str], mode: str = "enforce") -> None:
    """A node's files below `root` (RSUP_NODE_ROOT): settings, the supervisor's key, and a snapshot that refuses these nodes,
    with a reason for each, and that was confirmed just now. However often a job is sent away, it is not let in."""
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    listed = {name: {"verdict": "refuse", "state": "quarantined", "id": "Q-7", "reason": why} for name, why in nodes.items()}
    content = {"schema": 1, "cluster": "rsup", "serial": 1, "made_us": 0, "num_nodes": 4, "max_refused": 2, "guard_open": False}
    body = json.dumps({**content, "nodes": listed, "devices": {}}).encode()
    head = f"rsup-snapshot 1 {hashlib.sha256(public).hexdigest()[:16]} {base64.b64encode(key.sign(body)).decode()}\n"
    confirmed = {"boot_id": boot_id(), "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME), "serial": 1, "etag": '"1"'}
    for path, data in (
        ("etc/rsup/node.toml", f'mode = "{mode}"\nmax_restarts = 1000\n'.encode()),
        ("etc/rsup/supervisor.pub", base64.b64encode(public) + b"\n"),
        ("run/rsup/snapshot", head.encode() + body),
        ("run/rsup/confirmed.json", json.dumps(confirmed).encode()),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
        (root / path).chmod(0o644)
    root.chmod(0o755)
