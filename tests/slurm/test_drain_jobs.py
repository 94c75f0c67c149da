"""A job whose GPU is found out while it runs: the node is drained, and the job ends well elsewhere."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.launcher.slurm.hook_text import hook_text
from tests.slurm.cluster import Cluster
from tests.slurm.drain_daemon import Daemon
from tests.slurm.launching import script

PLAYED = """
import os, sys
import rsup.worker
from rsup.supervisor.wire import CaseFinding, CaseReport
device, node = os.environ["RSUP_DEVICE_UUID"], os.environ["SLURMD_NODENAME"]
run = os.environ.get("SLURM_RESTART_COUNT", "0")
print("run", run, "on", node, device, flush=True)
rsup.worker.device_used(device)
if run == "0":
    found = [CaseFinding(0, device, "loss: NaN", True, "nan", "nan")]
    report = CaseReport(f"{os.environ['RSUP_JOB_ID']}.1-a1-i7", 7, True, found, "persistent", "as played", "elsewhere",
                        accused=[device], injected=True)
    assert rsup.worker.report_case(report, 20.0)
    rsup.worker.declare_exit(16, "rerun case")
    rsup.worker.shutdown()
    sys.exit(16)
"""
"""One rank on one GPU that gives wrong results, injected, in the job's first run."""


@pytest.fixture
def daemon(slurm: Cluster, own_directories: Path) -> Iterator[Daemon]:
    made = Daemon(own_directories, slurm.environ)
    yield made
    made.kill()


def test_an_outage_in_which_every_prolog_fails_drains_nothing(slurm: Cluster, daemon: Daemon) -> None:
    daemon.restart("--drains", "act")
    for node in slurm.names:
        daemon.report(node)
        (daemon.folder / node).mkdir()
    daemon.folder.chmod(0o755)
    hook = daemon.folder / "prolog.sh"
    hook.write_text(hook_text("prolog", "/nonexistent/python"))
    hook.chmod(0o755)
    slurm.hook("prolog", f"export RSUP_NODE_ROOT={daemon.folder}/$SLURMD_NODENAME\nexec {hook}")
    daemon.kill()
    jobs = [slurm.submit("srun hostname", "-N4"), slurm.submit("hostname", "-N2")]
    assert [slurm.wait_job(job) for job in jobs] == ["COMPLETED", "COMPLETED"]
    daemon.restart()
    status = daemon.rounds()
    assert {slurm.state(node) for node in slurm.names} == {("idle", "")} and not status["refused"]
    assert all("exit 127" in (daemon.folder / node / "var/log/rsup/hooks.log").read_text() for node in slurm.names)


def test_a_persistent_verdict_drains_the_node_and_the_job_ends_elsewhere(slurm: Cluster, daemon: Daemon) -> None:
    daemon.restart("--drains", "act", "--drain-after", "one", "--accept-injected")
    for node in slurm.names:
        boards = [{"uuid": f"GPU-{node}-0", "serial": f"S-{node}-0", "model": "NVIDIA H200"}]
        (daemon.folder / f"{node}.json").write_text(json.dumps(boards))
    rank = script(slurm, PLAYED, "played_rank.py")
    rpc = json.loads((Path(os.environ["RSUP_STATE_DIR"]) / "supervisor.json").read_text())["rpc"]
    launch = f"{slurm.rsup} launch --device-inventory {daemon.folder}/$SLURMD_NODENAME.json {rank}"
    job = slurm.submit(f"srun {launch}", "-N1", "--mem=100", environ={"RSUP_SUPERVISOR": rpc})
    assert slurm.wait_job(job) == "COMPLETED", slurm.output(job)
    first, second = (line.split() for line in slurm.output(job).splitlines() if line.startswith("run "))
    bad, good = first[3], second[3]
    assert bad != good, slurm.output(job)
    daemon.wait(lambda: slurm.state(bad)[0].startswith("drain"), "the node to be drained")
    assert slurm.state(bad)[1].startswith(f"rsup:Q-1 GPU-{bad}-0 quarantined: case ")
    assert [slurm.state(node)[1] for node in slurm.names if node != bad] == ["", "", ""]
    assert daemon.snapshot()["devices"][f"GPU-{bad}-0"]["verdict"] == "refuse"
    (device,) = json.loads(daemon.rsup("devices", "list", "--state", "quarantined", "--json"))
    assert (device["uuid"], device["node"], device["state"]) == (f"GPU-{bad}-0", bad, "quarantined")
