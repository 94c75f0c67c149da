"""From a supervisor's quarantine to a refused job, and from a node's kernel log to the supervisor's evidence: nothing in
between is made up."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.supervisor import node_tokens
from tests.slurm.cluster import Cluster, refused_job
from tests.slurm.drain_daemon import Daemon, gpu
from tests.slurm.node_side import NodeSide, Signer


@pytest.fixture
def daemon(slurm: Cluster, own_directories: Path) -> Iterator[Daemon]:
    made = Daemon(own_directories, slurm.environ)
    yield made
    made.kill()


def joined(daemon: Daemon, folder: Path, name: str) -> NodeSide:
    """A node that has the supervisor's public key and a token of its own, and whose GPUs are listed."""
    state = Path(os.environ["RSUP_STATE_DIR"])
    node = NodeSide(folder / name, name, Signer())
    (node.places.root / "etc/rsup/supervisor.pub").write_bytes((state / "signing-key.pub").read_bytes())
    token = node.places.root / "etc/rsup/token"
    token.write_text(node_tokens.node_token(node_tokens.make_secret(state), name) + "\n")
    token.chmod(0o600)
    devices = [{"uuid": gpu(name, i), "serial": f"S-{name}-{i}", "pci_bus_id": f"0{i + 1}:00.0"} for i in range(4)]
    node.places.devices.write_text(json.dumps(devices))
    for slot in ("prolog", "epilog", "healthcheck"):
        node.hook(slot)
    reach(node, daemon)
    return node


def reach(node: NodeSide, daemon: Daemon, mode: str = "enforce") -> None:
    node.settings(mode=mode, supervisor=str(daemon.client.base_url), jitter_s=0)


def test_from_a_quarantine_to_a_refusal_and_back(slurm: Cluster, daemon: Daemon, tmp_path: Path) -> None:
    daemon.restart("--bad-gpu", "refuse")
    nodes = {name: joined(daemon, tmp_path, name) for name in ("n0", "n1")}
    for slot in ("prolog", "epilog"):
        path = f"$RSUP_NODE_ROOT/{slot}.sh"
        slurm.hook(slot, f"export RSUP_NODE_ROOT={tmp_path}/$SLURMD_NODENAME\n[ ! -x {path} ] || exec {path}")
    for node in nodes.values():
        assert node.run("healthcheck").returncode == 0 and node.log() == ""
    bad = nodes["n1"]
    assert daemon.client.get(f"/api/v1/devices/{gpu('n1', 3)}").json()["serial"] == "S-n1-3", "the inventory has arrived"

    daemon.quarantine("n1", 0)
    daemon.wait(lambda: gpu("n1", 0) in daemon.snapshot()["devices"], "the snapshot")
    assert bad.run("healthcheck").returncode == 0 and bad.log() == ""
    daemon.kill()  # an outage: what is known stays known, what is told waits
    assert bad.run("healthcheck").returncode == 0 and "refused" in bad.log()
    began = slurm.run("srun", "-w", "n0", "--gres=gpu:4", "echo", "begun")
    assert began.stdout == "begun\n"
    job = refused_job(slurm, bad, "echo begun", "-w", "n1", "--gres=gpu:1")
    assert [(one["kind"], one["device"], one["job"]) for one in bad.refusals()] == [("prolog-refused", gpu("n1", 0), str(job))]
    slurm.run("scancel", str(job))
    nodes["n0"].places.kernel_log.write_text("4,5,1,-;NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus\n")

    daemon.restart()
    for node in nodes.values():
        reach(node, daemon)
        assert node.run("healthcheck").returncode == 0
        assert node.events() == [], "delivered after the outage"
    evidence = daemon.client.get(f"/api/v1/devices/{gpu('n0', 1)}/evidence").json()["items"]
    assert [(one["source"], one["code"]) for one in evidence] == [("xid", "79")]
    assert daemon.metric("rsup_gates_timed_total") == 1, "of the job on n0"
    assert 0 < daemon.metric("rsup_gate_seconds_total") == daemon.metric("rsup_gate_seconds_max") < 60
    assert daemon.metric('rsup_gate_decisions_total{verdict="refuse",why="prolog-refused"}') == 1

    # Gates that do not ask, and one that is blind, are named.
    key = bad.places.root / "etc/rsup/supervisor.pub"
    sound = key.read_bytes()
    key.write_bytes(Signer().public)
    assert bad.run("healthcheck").returncode == 0
    told = daemon.rsup("slurm", "status")
    assert "gates: 2 of 4 nodes ask" in told and "not asked since" in told and ": n[2-3]" in told
    assert "blind n1: the snapshot was signed by key" in told
    assert daemon.metric('rsup_gate_nodes{state="blind"}') == 1
    refused = next(line for line in told.splitlines() if "n1: Prolog error" in line)
    assert "its gate refused a job" in refused and "rsup:Q-1 GPU 0" in refused
    daemon.restart()
    refused = next(line for line in daemon.rsup("slurm", "status").splitlines() if "n1: Prolog error" in line)
    assert "its gate refused a job" in refused and "rsup:Q-1 GPU 0" in refused, "by the store"
    seen = {"key": "o", "time_us": time.time_ns() // 1000, "kind": "prolog-refused", "detail": "observe: rsup:Q-1 GPU 0"}
    for _ in range(2):
        answer = daemon.client.post("/api/v1/nodes/n3/report", json={"boot_id": "b", "events": [seen]}).raise_for_status()
    assert answer.json()["known"] == 1 and daemon.metric('rsup_gate_decisions_total{verdict="accept",why="observed"}') == 1
    assert daemon.metric('rsup_gate_decisions_total{verdict="refuse",why="prolog-refused"}') == 0
    assert "  would refuse n3, at 20" in daemon.rsup("slurm", "status")
    for node in nodes.values():
        reach(node, daemon)
    key.write_bytes(sound)
    assert bad.run("healthcheck").returncode == 0 and "blind" not in daemon.rsup("slurm", "status")

    # A node's token speaks of that node alone.
    liar = NodeSide(tmp_path / "liar", "n0", Signer())
    for name in ("supervisor.pub", "token"):
        (liar.places.root / "etc/rsup" / name).write_bytes((bad.places.root / "etc/rsup" / name).read_bytes())
    (liar.places.root / "etc/rsup/token").chmod(0o600)
    liar.places.devices.write_text("[]")
    reach(liar, daemon)
    assert liar.run("healthcheck").returncode == 0 and "refuses the report: 403" in liar.log()

    daemon.release("n1", 0)
    daemon.wait(lambda: gpu("n1", 0) not in daemon.snapshot()["devices"], "the release")
    program = "$RSUP_NODE_ROOT/healthcheck.sh"  # now as slurmd runs it, every 5 s: it has no more than the node's name
    slurm.hook("healthcheck", f"export RSUP_NODE_ROOT={tmp_path}/$SLURMD_NODENAME\n[ ! -x {program} ] || exec {program}")
    slurm.wait(lambda: gpu("n1", 0).encode() not in bad.places.snapshot.read_bytes(), "a round of slurmd's HealthCheckProgram")
    slurm.hook("healthcheck", "exit 0")
    assert slurm.state("n1")[0] == "drained", "it drains and resumes nothing"
    slurm.run("scontrol", "update", "nodename=n1", "state=resume")
    slurm.wait(lambda: slurm.state("n1")[0] == "idle", "n1")
    assert slurm.run("srun", "-w", "n1", "--gres=gpu:1", "echo", "begun").stdout == "begun\n"
