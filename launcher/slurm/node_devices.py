"""Reads this node's GPUs and what stands against them now: through NVML, in a process of its own since a call into a sick
driver may never return; from `/etc/rsup/devices.json` (docs/devices.md) where that lists them.

`python -m rsup.launcher.slurm.node_devices` is that process: it prints one JSON object.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rsup.launcher.slurm.node_settings import NodePlaces, NodeProblem
from rsup.supervisor.wire import Device, HealthReading, RsupError

PROC_DRIVER = Path("/proc/driver/nvidia")
"""There where the driver is loaded; a node without it has no GPUs."""


class DriverHangs(NodeProblem):
    """NVML has not answered in time, which is evidence itself."""


@dataclass(frozen=True, slots=True)
class Found:
    """`devices`: as the inventory keeps them, with `index` and `uuid`. `readings`: what stands against them, no Xids."""

    devices: list[dict[str, Any]]
    readings: list[HealthReading]


def read_devices(places: NodePlaces, node: str, within_s: float) -> Found:
    """What is there now. Raise `DriverHangs`, and `NodeProblem` where neither NVML nor a list tells."""
    if places.devices.exists():
        return _listed(places, node)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-m", "rsup.launcher.slurm.node_devices"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        raise DriverHangs(f"NVML has not answered for {within_s:g} s") from None
    except OSError as error:
        raise NodeProblem(f"cannot start {sys.executable}: {error.strerror}") from None
    try:
        told = json.loads(done.stdout)
        if told.get("problem"):
            raise NodeProblem(told["problem"])
        return Found(told["devices"], [HealthReading(**one) for one in told["readings"]])
    except (ValueError, KeyError, TypeError, AttributeError):
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise NodeProblem(f"the GPUs could not be read: {words[-1][:200] if words else f'exit {done.returncode}'}") from None


def _listed(places: NodePlaces, node: str) -> Found:
    from rsup.launcher.health_process import listed_readings
    from rsup.launcher.inventory_file import read_inventory_file

    try:
        records = read_inventory_file(places.devices, node)
    except RsupError as error:
        raise NodeProblem(str(error)) from None
    devices = [_record(number, one.device) for number, one in enumerate(records)]
    return Found(devices, [reading for one in records if one.health for reading in listed_readings(one.uuid, one.health)])


def _record(number: int, device: Device) -> dict[str, Any]:
    return {"index": number, **msgspec.structs.asdict(device)}


def ask_driver(nvml: Any) -> dict[str, Any]:
    """What the process prints. `nvml`: the bindings, or None."""
    from rsup.launcher.inventory import begin_nvml, numbered_boards
    from rsup.launcher.nvml_health import NvmlHealth

    if not PROC_DRIVER.exists():
        return {"devices": [], "readings": []}
    if nvml is None or not begin_nvml(nvml):
        return {"problem": "NVML is not to be had here; list this node's devices in /etc/rsup/devices.json"}
    try:
        boards = numbered_boards(nvml)
    except nvml.NVMLError as error:
        return {"problem": f"NVML: {error}"}
    readings = NvmlHealth(nvml, [device for _, device in boards]).sample()
    return {
        "devices": [_record(number, device) for number, device in boards],
        "readings": [msgspec.structs.asdict(one) for one in readings],
    }


if __name__ == "__main__":
    from rsup.launcher.inventory import load_nvml

    print(json.dumps(ask_driver(load_nvml())))
