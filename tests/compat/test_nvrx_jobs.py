"""Whole jobs whose ranks use NVRx's own client 0.4.1, and ft_launcher's command lines with one word changed."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Place, free_port, place, wait_until

__all__ = ["place"]
ROOT = str(Path(__file__).parents[2])

HEARTBEATS = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
rank, run = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
client = RankMonitorClient()
client.init_workload_monitoring()
print(f"RESTART #{run} rank {rank}", flush=True)
if run == 0 and rank == 0:
    sys.exit(0)          # before any heartbeat
if run == 0:
    time.sleep(600)      # misses its first heartbeat
client.send_heartbeat()
client.send_heartbeat()
if run == 1:
    sys.exit(5 * rank)
client.shutdown_workload_monitoring()
time.sleep(6.5)          # past every limit, and not watched
"""

MEGATRON = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
dist.init_process_group("gloo")
rank, run, out = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["OUT"]
state_file = out + "/ft_state.json"
client = RankMonitorClient()
if os.path.exists(state_file):
    client.load_state_dict(json.load(open(state_file)))
client.init_workload_monitoring()
seen = {"sections": client.section_timeouts.section, "out": client.section_timeouts.out_of_section, "cfg": client.cfg.__dict__}
client.start_section("setup")
time.sleep(0.1)
dist.barrier()
client.end_section("setup")
for iteration in range(4):
    client.start_section("step")
    time.sleep(0.05 * (1 + rank))
    dist.barrier()
    client.end_section("step")
client.start_section("checkpointing")
time.sleep(0.05)
client.end_section("checkpointing")
client.calculate_and_set_section_timeouts(selected_sections=["setup", "step", "checkpointing"], calc_out_of_section=True)
seen["calculated"] = client.section_timeouts.section
client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue, "as usual"))
if rank == 0:
    json.dump(client.state_dict(), open(state_file, "w"))
seen["state"] = client.state_dict()
json.dump(seen, open(f"{out}/seen-{rank}-{run}", "w"), default=str)
dist.barrier()
client.start_section("step")
if run == 0 and rank == 1:
    time.sleep(600)
dist.barrier()
client.end_section("step")
client.shutdown_workload_monitoring()
time.sleep(1.5)
"""


def in_rank(body: str) -> str:
    """A script of a rank that speaks the protocol itself: no torch is imported."""
    return f"import os, sys, time\nsys.path.insert(0, {ROOT!r})\nfrom tests.compat.nvrx_client import *\n{body}"


def texts(place: Place, job: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(place.rsup("events", job, "--json"))
    return events


@pytest.mark.timeout(240)
def test_hang_failure_success(place: Place) -> None:
    """NVRx's own scenario with `--max-restarts=2`, the command line as for ft_launcher; and what its test of init asks for."""
    launched = place.launch(
        *("--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=1", "--rdzv-backend=c10d", "--job-id", "hb"),
        *("--rdzv-endpoint=localhost:0", "--term-timeout=5", "--workers-stop-timeout=5"),
        *("--ft-initial-rank-heartbeat-timeout=5", "--ft-param-rank_heartbeat_timeout=5", "--ft-log-level=DEBUG"),
        place.script(HEARTBEATS),
    ).ends(0, within_s=200)
    assert [f"RESTART #{run}" in launched.stdout for run in range(4)] == [True, True, True, False]
    status = place.status("hb")
    assert [(i["kind"], i["rank"]) for i in status["incidents"]] == [("hang", 1), ("exit", 1)]
    assert "first heartbeat" in str(status["incidents"][0]) or "initial" in str(status["incidents"][0])


@pytest.mark.timeout(240)
def test_a_script_shaped_as_megatrons(place: Place) -> None:
    launched = place.launch(
        *("--nproc-per-node", "2", "--max-restarts", "1", "--job-id", "mg"),
        *("--ft-rank_section_timeouts", "setup:600,step:180,checkpointing:420", "--ft-rank_out_of_section_timeout", "300"),
        *("--ft-initial-rank-heartbeat-timeout", "null", "--ft-rank-heartbeat-timeout", "None"),
        place.script(MEGATRON),
    ).ends(0, within_s=200)
    status = place.status("mg")
    assert len(status["attempts"]) == 2, launched.stderr
    (hang,) = status["incidents"]
    assert (hang["kind"], hang["rank"], hang["section"]) == ("hang", 1, "step"), "by a limit that the client calculated"
    assert {rank for stack in hang["stacks"] for rank in stack["ranks"]} == {0, 1}
    seen = {(r, a): json.loads(Path(place.folder, f"seen-{r}-{a}").read_text()) for r in (0, 1) for a in (0, 1)}
    first, second = seen[0, 0], seen[0, 1]
    assert first["sections"] == {"setup": 600.0, "step": 180.0, "checkpointing": 420.0}
    assert first["cfg"]["skip_section_response"] is False
    assert seen[0, 0]["state"] == seen[1, 0]["state"], "the same on all ranks"
    assert 0.5 < first["calculated"]["step"] < 120
    assert second["cfg"]["rank_section_timeouts"] == first["calculated"], "a restarted client is told what was calculated"
    assert second["sections"] == first["calculated"] and second["out"] == pytest.approx(
        second["cfg"]["rank_out_of_section_timeout"]
    )
    events = texts(place, "mg")
    assert [event["rank"] for event in events if event["kind"] == "WorkloadControl"]
    assert any(event["kind"] == "SetLimits" and "NVRx" in event["text"] for event in events)


def test_shutdown_ends_the_job_once_its_rank_has_failed(place: Place) -> None:
    script = in_rank(
        "rank = os.environ['RANK']\n"
        "if rank == '1':\n"
        "    assert control(WorkloadAction.ShutdownWorkload, 'data is bad', rank) == b'ok'\n"
        "    time.sleep(0.5)\n"
        "    sys.exit(123)\n"
        "time.sleep(600)\n"
    )
    launched = place.launch("--nproc-per-node", "2", "--max-restarts", "5", "--job-id", "sd", place.script(script)).ends(123)
    status = place.status("sd")
    assert len(status["attempts"]) == 1 and "data is bad" in status["job"]["reason"], launched.stderr
    assert [e["level"] for e in texts(place, "sd") if e["kind"] == "WorkloadControl"] == ["warning"]


def test_a_request_of_a_rank_that_succeeds_changes_nothing(place: Place) -> None:
    script = in_rank("control(WorkloadAction.ShutdownWorkload); control(WorkloadAction.ExcludeThisNode)\n")
    place.launch("--nproc-per-node", "1", "--job-id", "ok", place.script(script)).ends(0)


def test_exclude_of_the_only_node_ends_the_job(place: Place) -> None:
    script = in_rank("control(WorkloadAction.ExcludeThisNode, 'GPU 3 is hot'); sys.exit(7)\n")
    place.launch("--nproc-per-node", "1", "--max-restarts", "5", "--job-id", "x1", place.script(script)).ends(1)
    assert "GPU 3 is hot" in place.status("x1")["job"]["reason"] and len(place.status("x1")["attempts"]) == 1


@pytest.mark.timeout(240)
def test_exclude_forms_the_job_again_without_the_node(place: Place) -> None:
    port = free_port()
    script = place.script(
        in_rank(
            "if os.environ['WORLD_SIZE'] == '2' and os.environ['RANK'] == '1':\n"
            "    control(WorkloadAction.ExcludeThisNode, 'hot', 1)\n"
            "    sys.exit(9)\n"
            "if os.environ['WORLD_SIZE'] == '2': time.sleep(600)\n"
        )
    )
    common = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=6", "--job-id", "x2")
    stays = place.launch(*common, "--nproc-per-node", "1", "--node-rank", "0", script)
    leaves = place.launch(*common, "--nproc-per-node", "1", "--node-rank", "1", script)
    leaves.ends(1)
    stays.ends(0)
    assert "leaves the job" in leaves.stderr or "asked to leave this node out" in leaves.stderr
    events = texts(place, "x2")
    assert [e["kind"] for e in events if e["kind"] in ("AgentExcluded", "Restart")] == ["AgentExcluded", "Restart"]


def test_sections_without_limits_are_seen_while_a_stopped_launcher_holds_nobody_up(place: Place) -> None:
    script = in_rank(
        "client = NvrxClient(generation=6)\n"
        "assert set(client.init().rank_section_timeouts) == {'setup', 'step', 'checkpointing'}\n"
        "client.start('step', 6)\n"
        "open(os.environ['OUT'] + '/open', 'w').close()\n"
        "while not os.path.exists(os.environ['OUT'] + '/stopped'): time.sleep(0.02)\n"
        "for i in range(2000): client.end('step', 6 + i); client.start('step', 7 + i)\n"
        "other = NvrxClient(); other.init(); other.heartbeat()\n"
        "open(os.environ['OUT'] + '/done', 'w').close()\n"
        "time.sleep(0.3)\n"
    )
    launched = place.launch("--nproc-per-node", "1", "--job-id", "st", place.script(script))
    wait_until(lambda: Path(place.folder, "open").exists(), "the section")
    rank = wait_until(lambda: (r := place.status("st").get("ranks")) and r[0]["open_sections"] and r[0], "the status")
    assert rank["open_sections"][0]["name"] == "step" and rank["iteration"] == 7
    os.kill(launched.pid, signal.SIGSTOP)
    Path(place.folder, "stopped").touch()
    try:
        wait_until(lambda: Path(place.folder, "done").exists(), "the rank goes on while its launcher is stopped")
    finally:
        os.kill(launched.pid, signal.SIGCONT)
    launched.ends(0)


def test_a_hung_step_of_a_newer_client_is_found_soon(place: Place) -> None:
    script = in_rank(
        "client = NvrxClient(generation=6); client.init()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': sys.exit(0)\n"
        "client.start('setup'); client.end('setup'); time.sleep(1.5)\n"  # out of section before the first step
        "client.start('step', 0)\n"
        "open(os.environ['OUT'] + '/opened', 'w').write(str(time.monotonic()))\n"
        "time.sleep(600)\n"
    )
    place.launch(
        *("--nproc-per-node", "1", "--max-restarts", "1", "--job-id", "nh", "--ft-rank-out-of-section-timeout", "1"),
        *("--ft-rank-section-timeouts", "step:2", place.script(script)),
    ).ends(0)
    ended = time.monotonic()
    (hang,) = place.status("nh")["incidents"]
    assert (hang["kind"], hang["section"]) == ("hang", "step")
    assert ended - float(Path(place.folder, "opened").read_text()) < 60


def test_an_iteration_file_shows_progress_and_its_lack(place: Place) -> None:
    latest = Path(place.folder, "latest_checkpointed_iteration.txt")
    latest.write_text("500")  # of an earlier job
    script = (
        "import os, sys\n"
        "run = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        f"open({str(latest)!r}, 'w').write(str(600 + 10 * min(run, 1)))\n"
        "sys.exit(3)\n"
    )
    place.launch(
        *("--nproc-per-node", "1", "--max-restarts", "9", "--job-id", "it", "--identical-failures", "99"),
        *("--ft-checkpoint-iteration-file", str(latest), "--ft-no-restart-exit-code", "77", place.script(script)),
    ).ends(77)
    status = place.status("it")
    assert len(status["attempts"]) == 4, "600 and 610 were progress, and then two restarts were not"
    assert {checkpoint["iteration"] for checkpoint in status["checkpoints"]} == {600, 610}
