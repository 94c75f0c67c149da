"""Reads this node's GPUs and what stands against them now: through NVML, in a process of its own since a call into a sick
driver may never return; from `/etc/rsup/devices.json` (docs/devices.md) where that lists them.

`python -m rsup.launcher.slurm.node_devices` is that process: it prints one JSON object.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rsup.launcher.slurm.node_settings import NodePlaces, NodeProblem, places_of, write_atomically
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.wire import Device, HealthReading, RsupError

PROC_DRIVER = Path("/proc/driver/nvidia")
"""There where the driver is loaded; a node without it has no GPUs."""
END_WITHIN_S = 0.3
"""What a killed process gets to end; one in the midst of a call into the driver never does."""


MAX_LISTED = 256
MAX_CHARS = {"uuid": 120, "serial": 120, "pci_bus_id": 60, "model": 120, "board": 120, "vbios": 120, "driver": 120}
"""More, and longer, the supervisor does not take."""


class DriverHangs(NodeProblem):
    """NVML has not answered in time, which is evidence itself."""


@dataclass(frozen=True, slots=True)
class Found:
    """`devices`: as the inventory keeps them, with `index` and `uuid`. `readings`: what stands against them, no Xids.
    `is_listed`: they are the operator's list, whose order is SLURM's."""

    devices: list[dict[str, Any]]
    readings: list[HealthReading]
    is_listed: bool = False


def read_devices(places: NodePlaces, node: str, within_s: float) -> Found:
    """What is there now. Raise `DriverHangs`, and `NodeProblem` where neither NVML nor a list tells."""
    if places.devices.exists():
        return _listed(places, node)
    code, output, errors = _asked(
        [sys.executable, "-I", "-m", "rsup.launcher.slurm.node_devices"], within_s, places.run / "stuck"
    )
    try:
        told = json.loads(output)
        if told.get("problem"):
            raise NodeProblem(told["problem"])
        return Found(told["devices"], [HealthReading(**one) for one in told["readings"]])
    except (ValueError, KeyError, TypeError, AttributeError):
        words = errors.decode(errors="replace").strip().splitlines()
        raise NodeProblem(f"the GPUs could not be read: {words[-1][:200] if words else f'exit {code}'}") from None


def _asked(command: list[str], within_s: float, stuck: Path) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr. `subprocess.run` would wait without end for a process that a kill does not end. `stuck`:
    names that process, so that no round adds another."""
    with suppress(OSError, ValueError):
        pid, start_ticks = map(int, stuck.read_text().split())
        if start_ticks and process_start_ticks(pid) == start_ticks:
            raise DriverHangs(f"NVML has not answered process {pid}, which no kill ends")
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        raise NodeProblem(f"cannot start {sys.executable}: {error.strerror}") from None
    try:
        output, errors = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        _leave(process, stuck)
        raise DriverHangs(f"NVML has not answered for {within_s:g} s") from None
    return process.returncode, output, errors


def _leave(process: "subprocess.Popen[bytes]", stuck: Path) -> None:
    """Kill it with all that it started, and wait no longer than `END_WITHIN_S`."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=END_WITHIN_S)
    except subprocess.TimeoutExpired:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.returncode = -signal.SIGKILL  # it has its signal; when it ends is the driver's business
        with suppress(OSError):
            write_atomically(stuck, f"{process.pid} {process_start_ticks(process.pid)}".encode())


def _listed(places: NodePlaces, node: str) -> Found:
    from rsup.launcher.health_process import listed_readings
    from rsup.launcher.inventory_file import read_inventory_file

    try:
        records = read_inventory_file(places.devices, node, named_by="")
    except RsupError as error:
        raise NodeProblem(str(error)) from None
    if len(records) > MAX_LISTED:
        raise NodeProblem(f"{places.devices}: lists {len(records)} devices, a node has at most {MAX_LISTED}")
    devices = [_record(number, one.device) for number, one in enumerate(records)]
    for number, device in enumerate(devices):
        for name, max_chars in MAX_CHARS.items():
            if len(device[name]) > max_chars:
                raise NodeProblem(f"{places.devices}: record {number}: {name} is longer than {max_chars} characters")
    readings = [reading for one in records if one.health for reading in listed_readings(one.uuid, one.health)]
    return Found(devices, readings, is_listed=True)


def _record(number: int, device: Device) -> dict[str, Any]:
    return {"index": number, **msgspec.structs.asdict(device)}


def ask_driver(nvml: Any) -> dict[str, Any]:
    """What the process prints. `nvml`: the bindings, or None."""
    listed = places_of(os.environ).devices
    from rsup.launcher.inventory import begin_nvml, numbered_boards
    from rsup.launcher.nvml_health import NvmlHealth

    if not PROC_DRIVER.exists():
        return {"devices": [], "readings": []}
    if nvml is None or not begin_nvml(nvml):
        return {"problem": f"NVML is not to be had here; list this node's devices in {listed}"}
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
