"""Launches with an inventory file: the devices that ranks are told of, over a restart on another seat, and their health."""

import json
from typing import Any

import pytest

from tests.jobs.conftest import Place, wait_until

SEATED = """
import json, os, sys, time
import torch
import rsup.worker

attempt, rank = os.environ["RSUP_ATTEMPT"], os.environ["RANK"]
told = {name[12:].lower(): value for name, value in os.environ.items() if name.startswith("RSUP_DEVICE_")}
told["warm"] = any(type(finder).__name__ == "Guard" for finder in sys.meta_path)
path = f"{os.environ['OUT']}/seat-{attempt}-{rank}"
with open(path + ".new", "w") as file:
    json.dump(told, file)
os.rename(path + ".new", path)
iteration = 0
while attempt == "1" and not os.path.exists(os.environ["OUT"] + "/go"):
    rsup.worker.set_iteration(iteration := iteration + 1)
    time.sleep(0.02)
if attempt == "1" and rank == "0":
    with open(sys.argv[2], "a") as file:
        file.write(f"ts=now node={os.uname().nodename} device=0 jobID=N/A rank=0 iteration=3 "
                   "status=RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE result=nan message='NaN'\\n")
sys.exit(16 if attempt == "1" and rank == "0" else 0)
"""


def inventory(place: Place, **health: dict[str, Any]) -> str:
    path = place.folder / "inventory.json"
    records = [{"uuid": f"GPU-{i}", "model": "X1", "serial": f"s{i}", "vbios": "1.0", "health": health.get(i)} for i in "abc"]
    path.with_suffix(".new").write_text(json.dumps({"devices": records}))
    path.with_suffix(".new").rename(path)
    return str(path)


def seat(place: Place, attempt: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.folder / f"seat-{attempt}-{rank}").read_text())
    return found


def events(place: Place, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(place.rsup("events", job, "--json")) if place.status(job) else []
    return found


@pytest.mark.timeout(240)
def test_ranks_take_listed_devices_and_a_restart_on_another_seat_is_told_so(place: Place) -> None:
    """Also where a warm standby, made for the seat before, becomes the rank."""
    path = inventory(place)
    script, tracker = place.script(SEATED), str(place.folder / "tracker")
    options = ("--job-id", "i1", "--nproc-per-node", "2", "--max-restarts", "1", "--device-inventory", path)
    job = place.launch(*options, script, "--result-rejected-tracker-filename", tracker)
    wait_until(lambda: "2 warm standbys are ready" in str(events(place, "i1")), "standbys", 60)
    wait_until(lambda: all((place.folder / f"seat-1-{rank}").exists() for rank in (0, 1)), "both ranks")
    assert seat(place, 1, 0) == {"uuid": "GPU-a", "model": "X1", "vbios": "1.0", "warm": False}
    (place.folder / "go").touch()
    job.ends(0)
    assert {rank: seat(place, 2, rank)["uuid"] for rank in (0, 1)} == {0: "GPU-b", 1: "GPU-c"}
    assert seat(place, 2, 0)["warm"] and seat(place, 2, 1)["warm"]
    started = [event["data"] for event in events(place, "i1") if event["kind"] == "AttemptStarted"]
    assert [event["devices"] for event in started] == [["GPU-a", "GPU-b"], ["GPU-b", "GPU-c"]]
    assert "rank 0 runs on GPU-b in place of GPU-c (LOCAL_RANK 1, was 0)" in job.stderr


def test_an_inventory_that_cannot_be_used_refuses_the_launch(place: Place) -> None:
    path = place.folder / "inventory.json"
    path.write_text('[{"uuid": "GPU-a"}, {"uuid": "GPU-a"}]')
    refused = place.launch("--device-inventory", str(path), place.script("")).ends(2)
    assert refused.stderr == (f"rsup launch: --device-inventory {path}: GPU-a comes twice; each device is listed once\n")
    by_variable = place.launch(place.script(""), RSUP_DEVICE_INVENTORY=str(place.folder / "none")).ends(2)
    assert "cannot be read: No such file" in by_variable.stderr


@pytest.mark.timeout(240)
def test_health_of_listed_devices_reaches_the_store(place: Place) -> None:
    """Through the same path as NVML's: what is there at the start, and what the file says later, once."""

    def told() -> list[str]:
        return [event["text"] for event in events(place, "i2") if event["kind"] == "HealthSeen"]

    waits = "import os, time\nwhile not os.path.exists(os.environ['OUT'] + '/go'): time.sleep(0.02)"
    options = ("--job-id", "i2", "--device-inventory", inventory(place, c={"xid": [79, 79], "remap_pending": True}))
    job = place.launch(*options, place.script(waits))
    wait_until(told, "the file's health")
    inventory(place, c={"xid": [79, 79, 48], "remap_pending": True}, a={"recovery_action": "reset"})
    wait_until(lambda: len(told()) > 1, "what has changed")
    (place.folder / "go").touch()
    job.ends(0)
    says = ["GPU-c: remap pending, GPU-c: xid 79", "GPU-a: recovery-action reset, GPU-c: xid 48"]
    assert [text.partition(" says of ")[2] for text in told()] == says
