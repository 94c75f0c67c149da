"""Devices by name on real boards: what we say a rank gets is what CUDA gives it."""

import json
import os
import subprocess
import sys

import pytest

from rsup.launcher.device_placement import place
from rsup.launcher.inventory import read_inventory
from rsup.supervisor.wire import AvoidedDevice
from tests.jobs.conftest import Place

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

PRINTS_UUID = """
import sys, torch
uuid = str(torch.cuda.get_device_properties(int(sys.argv[1])).uuid)
print(uuid if uuid.startswith("GPU-") else "GPU-" + uuid)
"""

ASKS_ELSEWHERE = """
import json, os, sys, time, torch
rank, ordinal, attempt = os.environ["RANK"], int(os.environ["LOCAL_RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
torch.cuda.set_device(ordinal)
torch.zeros(1, device="cuda")
uuid = str(torch.cuda.get_device_properties(ordinal).uuid).removeprefix("GPU-")
cores = sorted(os.sched_getaffinity(0))
with open(f"{os.environ['OUT']}/used-{attempt}-{rank}", "w") as file:
    json.dump({"uuid": "GPU-" + uuid, "cores": cores}, file)
while len([name for name in os.listdir(os.environ["OUT"]) if name.startswith(f"used-{attempt}-")]) < 2: time.sleep(0.01)
if attempt == "0":
    if rank == "0":
        with open(sys.argv[2], "a") as file:
            file.write(f"ts=now node={os.uname().nodename} device={torch.cuda.current_device()} jobID=N/A rank=0 iteration=3 "
                       "status=RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE result=nan message='NaN'\\n")
    sys.exit(16 if rank == "0" else 0)
"""


def device_at(ordinal: int, environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRINTS_UUID, str(ordinal)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("form", ["unset", "indices", "uuids", "prefixes"])
def test_a_suspect_gives_way_to_a_spare(form: str) -> None:
    boards = [one.device.uuid for one in read_inventory({}).visible.devices]
    shown = {"unset": None, "indices": "1,0", "uuids": ",".join(boards), "prefixes": f"{boards[1][:12]},{boards[0][:12]}"}[form]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    environ = clean if shown is None else clean | {"CUDA_VISIBLE_DEVICES": shown}
    visible = read_inventory(environ).visible
    first = visible.devices[0].device.uuid
    assert device_at(0, environ) == first
    placed = place(visible, [], 1, [AvoidedDevice(first, "it is suspect")])
    assert placed.devices[0].uuid != first
    assert device_at(0, environ | placed.environment()) == placed.devices[0].uuid


def test_16_moves_a_rank_to_the_other_board(place: Place) -> None:
    script, tracker = place.script(ASKS_ELSEWHERE), place.folder / "tracker"
    options = ("--nproc-per-node", "2", "--job-id", "m", "--numa-binding", "node")
    place.launch(*options, script, "--result-rejected-tracker-filename", str(tracker)).ends(0, within_s=200)
    used = {
        (attempt, rank): json.loads((place.folder / f"used-{attempt}-{rank}").read_text())["uuid"]
        for attempt in (0, 1)
        for rank in (0, 1)
    }
    assert used[1, 0] == used[0, 1] and used[1, 1] == used[0, 0]
    started = [e for e in json.loads(place.rsup("events", "m", "--json")) if e["kind"] == "AttemptStarted"]
    for attempt, event in enumerate(started):
        assert event["data"]["devices"] == [used[attempt, 0], used[attempt, 1]]
