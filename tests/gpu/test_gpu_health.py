"""Real boards: what an inventory file adds to them, what NVML says of their health, and the SDC screen on each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher.device_health import HealthNews, Sample
from rsup.launcher.inventory import begin_nvml, load_nvml, read_inventory
from rsup.launcher.nvml_health import RECOVERY_ACTION_FIELD, NvmlHealth, XidEvents
from tests.jobs.conftest import Place, wait_until

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(400)]

TELLS = """
import json, os, time, torch
torch.zeros(1, device="cuda")
told = {name: value for name, value in os.environ.items() if name.startswith("RSUP_DEVICE_")}
told |= {"count": torch.cuda.device_count(), "uuid": str(torch.cuda.get_device_properties(0).uuid)}
print(json.dumps(told), flush=True)
while not os.path.exists(os.environ["OUT"] + "/go"): time.sleep(0.05)
"""


def health_processes() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"rsup.launcher.health_process" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_healthy_board_says_nothing_and_every_query_is_answered() -> None:
    nvml = load_nvml()
    assert nvml is not None and begin_nvml(nvml)
    devices = [one.device for one in read_inventory({}).visible.devices]
    health = NvmlHealth(nvml, devices)
    first = HealthNews().take(Sample("nvml", tuple(health.sample())))
    print([(one.device, one.source, one.code, one.count) for one in first])
    assert not [one for one in first if one.source in ("unreadable", "throttle", "link")]
    assert not [one for one in first if one.source == "remap" and one.code == "rows"], "of the board's past"
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    print("recovery action:", [value.nvmlReturn for value in nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION_FIELD])])
    try:
        events = XidEvents(nvml, devices)
    except nvml.NVMLError as error:
        pytest.skip(f"no Xid events on this machine: {error}")
    assert events.wait(50) is None


def test_a_rank_is_told_of_its_board_and_its_health_is_watched(place: Place) -> None:
    boards = [one.device for one in read_inventory({}).visible.devices]
    path = place.folder / "inventory.json"
    path.write_text(json.dumps([{"uuid": boards[0].uuid, "serial": "from-the-file", "board": "B1"}, {"uuid": "GPU-ghost"}]))
    job = place.launch("--job-id", "h1", "--device-inventory", str(path), place.script(TELLS))
    wait_until(lambda: "{" in job.stdout, "what the rank was told", 120)
    wait_until(health_processes, "the process that reads their health", 30)
    told: dict[str, Any] = json.loads(job.stdout[job.stdout.index("{") :].splitlines()[0])
    if told["count"] == 1:
        assert told["RSUP_DEVICE_UUID"].removeprefix("GPU-") == told["uuid"].removeprefix("GPU-")
    else:
        assert "RSUP_DEVICE_UUID" not in told, "which one it takes only it knows"
    assert told["RSUP_DEVICE_MODEL"] == boards[0].model
    (place.folder / "go").touch()
    job.ends(0)
    wait_until(lambda: not health_processes(), "no such process left", 20)
    story = place.rsup("events", "h1")
    assert "not watched" not in story and "NVML is not to be had" not in story and "unreadable" not in story


def screen(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-m", "rsup.launcher", "devices", "test", *words]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=390)


def test_each_gpu_passes_the_screen_and_like_ones_agree_bit_by_bit(place: Place) -> None:
    done = screen("--all", "--force", "--duration", "10", "--json")  # this process may have a context of its own there
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    reports = json.loads(done.stdout)
    for report in reports:
        names = {test["name"].split()[0] for test in report["tests"] if test["outcome"] == "passed"}
        assert {"fp32", "bf16", "fp16", "attention", "reductions", "memory"} <= names
        assert report["temperature_c"] and report["sm_clock_mhz"] and report["driver"]
        like = [other["uuid"] for other in reports if other is not report and other["likeness"] == report["likeness"]]
        compared = [test["compared_with"] for test in report["tests"] if test["digest"]]
        assert compared and all(set(like) <= set(names) for names in compared)


def test_a_faulty_gpu_is_found(place: Place) -> None:
    uuid = read_inventory({}).visible.devices[0].device.uuid
    done = screen(uuid, "--force", "--duration", "2", "--fault", f"kind=bitflip,device={uuid},bit=12")
    assert done.returncode == 1 and "repetition 2 differs from the first: 1 of" in done.stdout, done.stdout[-3000:]
