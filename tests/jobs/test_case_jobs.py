"""Rerun cases in whole jobs, with ranks that play what `worker/rerun` finds: reports and declared exits, on the devices
of an inventory file, and a supervisor or a rank that is killed in the middle."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Place, wait_until

PLAYED = """
import os, sys, time
from pathlib import Path
import rsup.worker
from rsup.supervisor.wire import CaseFinding, CaseReport
rank, attempt, device = int(os.environ["RANK"]), int(os.environ["RSUP_ATTEMPT"]), os.environ["RSUP_DEVICE_UUID"]
out = Path(os.environ["OUT"])
rsup.worker.device_used(device)
(out / f"device-{attempt}-{rank}").write_text(device)

def tell(verdict="", action="", accused=(), within_s=60.0, of=1, **more):
    if rank == 0:
        found = [CaseFinding(of, "GPU-b", "loss: NaN", True, "nan", "nan")]
        report = CaseReport(f"{os.environ['RSUP_JOB_ID']}.1-a1-i7", 7, True, found, verdict, "as played", action,
                            accused=list(accused), **more)
        print("STORED", verdict, rsup.worker.report_case(report, within_s), flush=True)

def leave(code):
    # both ranks at once, as the real ones do
    (out / f"leaves-{attempt}-{rank}").touch()
    while not all((out / f"leaves-{attempt}-{r}").exists() for r in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    rsup.worker.declare_exit(code, "rerun case")
    rsup.worker.shutdown()
    sys.exit(code)

def wait_for(name):
    until = time.monotonic() + 60
    while not (out / name).exists():
        assert time.monotonic() < until, name
        time.sleep(0.01)
"""


@pytest.fixture
def inventory(own_directories: Path) -> str:
    """Three devices of one node."""
    path = own_directories / "devices.json"
    path.write_text(json.dumps([{"uuid": f"GPU-{letter}", "serial": f"S{letter}", "model": "H200"} for letter in "abc"]))
    return str(path)


def cases(place: Place, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(place.rsup("cases", *words, "--json"))
    return found


def device(place: Place, attempt: int, rank: int) -> str:
    return (place.folder / f"device-{attempt}-{rank}").read_text()


def test_a_case_is_replayed_on_a_spare_and_decided_without_costing_a_restart(place: Place, inventory: str) -> None:
    script = place.script(
        PLAYED
        + """
if attempt == 1:
    tell()
    tell("", "elsewhere", tried={1: ["GPU-b"]})
    leave(16)
if attempt == 2:
    tell("persistent", "elsewhere", ["GPU-b"])
    leave(16)
"""
    )
    launched = place.launch("--nproc-per-node", "2", "--device-inventory", inventory, "--job-id", "moved", script)
    launched.ends(0)
    assert [device(place, attempt, 1) for attempt in (1, 2, 3)] == ["GPU-b", "GPU-c", "GPU-c"]
    assert {device(place, attempt, 0) for attempt in (1, 2, 3)} == {"GPU-a"}
    assert launched.stdout.count("STORED") == 3 and "False" not in launched.stdout
    (one,) = cases(place, "show", "moved")
    assert (one["verdict"], one["accused"], one["state"], one["iteration"]) == ("persistent", ["GPU-b"], "closed", 7)
    assert [(p["attempt"], p["rank"], p["from"], p["to"]) for p in one["placements"]] == [(2, 1, "GPU-b", "GPU-c")]
    kinds = [event["kind"] for event in json.loads(place.rsup("events", "moved", "--json"))]
    story = [kind for kind in kinds if kind.startswith("Case") and kind != "CasePlaced"]
    assert story == ["CaseOpened", "CaseElsewhere", "CaseMoved", "CaseVerdict", "CaseMoved"]
    assert kinds.count("CasePlaced") == 1
    assert "runs it again on another device, which costs no restart" in launched.stderr.replace("it runs", "runs")


def test_an_application_fault_ends_17_and_names_the_case(place: Place, inventory: str) -> None:
    script = place.script(PLAYED + 'tell("application", "leave")\nleave(17)\n')
    launched = place.launch(
        "--max-restarts", "3", "--nproc-per-node", "2", "--device-inventory", inventory, "--job-id", "app", script
    )
    launched.ends(17)
    assert "rsup cases show app.1-a1-i7" in launched.stderr and "application" in launched.stderr
    assert "application" in place.rsup("cases", "list", "app")


def test_without_another_device_the_job_ends_16_and_names_the_node(place: Place, own_directories: Path) -> None:
    only = own_directories / "one.json"
    only.write_text(json.dumps([{"uuid": "GPU-b"}]))
    script = place.script(PLAYED + 'tell("", "elsewhere", tried={0: ["GPU-b"]}, of=0)\nleave(16)\n')
    launched = place.launch("--max-restarts", "3", "--device-inventory", str(only), "--job-id", "one", script)
    launched.ends(16)
    assert "no other device for rank 0" in launched.stderr and "exclude node" in launched.stderr
    (one,) = cases(place, "list", "one")
    assert one["state"] == "open" and one["waits_for_resume"]


def test_a_supervisor_killed_between_report_and_verdict_loses_neither(place: Place, inventory: str) -> None:
    script = place.script(
        PLAYED
        + """
if attempt == 1:
    tell()
    if rank == 0:
        Path(out / "told").touch()
    wait_for("killed")
    tell("persistent", "elsewhere", ["GPU-b"])
    leave(16)
"""
    )
    launched = place.launch("--nproc-per-node", "2", "--device-inventory", inventory, "--job-id", "killed", script)
    wait_until(lambda: (place.folder / "told").exists(), "the case is told")
    os.kill(place.supervisor_pid(), signal.SIGKILL)
    (place.folder / "killed").touch()
    launched.ends(0)
    assert launched.stdout.count("STORED") == 2 and "False" not in launched.stdout
    (one,) = cases(place, "list", "killed")
    assert (one["verdict"], one["accused"]) == ("persistent", ["GPU-b"])
    kinds = [event["kind"] for event in json.loads(place.rsup("events", "killed", "--json"))]
    assert kinds.count("CaseOpened") == kinds.count("CaseVerdict") == 1
    assert device(place, 2, 1) == "GPU-c"


def test_a_rank_killed_in_the_middle_leaves_no_open_case(place: Place, inventory: str) -> None:
    script = place.script(
        PLAYED
        + """
if attempt == 1:
    tell()
    Path(out / f"new-{rank}").write_text(str(os.getpid()))
    os.rename(out / f"new-{rank}", out / f"told-{rank}")
    wait_for("never")
"""
    )
    launched = place.launch(
        "--max-restarts", "1", "--nproc-per-node", "2", "--device-inventory", inventory, "--job-id", "dies", script
    )
    wait_until(lambda: all((place.folder / f"told-{rank}").exists() for rank in range(2)), "both ranks wait")
    os.kill(int((place.folder / "told-1").read_text()), signal.SIGKILL)
    launched.ends(0)
    (one,) = cases(place, "list", "dies")
    assert one["verdict"] == "undecided" and "SIGKILL" in one["reason"] and not one["accused"]
