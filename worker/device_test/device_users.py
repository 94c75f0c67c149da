"""Who uses a device of this node now: processes on a GPU, as NVML lists them, and ranks that were given a stand-in."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def processes_on_gpus(nvml: Any, uuids: Iterable[str]) -> dict[str, str]:
    """By UUID, a text for people; GPUs that nobody computes on are left out. `nvml`: the bindings, initialised."""
    found: dict[str, str] = {}
    for uuid in uuids:
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            if pids:
                found[uuid] = _processes(pids)
    return found


def ranks_with(uuids: Iterable[str], proc: Path = PROC) -> dict[str, str]:
    """By UUID of a stand-in, the live job whose ranks were given it (`RSUP_DEVICE_UUID`), as far as we may look."""
    wanted = set(uuids)
    found: dict[str, str] = {}
    for path in proc.glob("[0-9]*/environ"):
        try:
            words = path.read_text("utf-8", "replace").split("\0")
        except OSError:
            continue
        uuid = _value(words, "RSUP_DEVICE_UUID")
        if uuid in wanted and path.parent.name != str(os.getpid()):
            found[uuid] = f"job {_value(words, 'RSUP_JOB_ID') or '?'} uses it"
    return found


def _value(words: list[str], name: str) -> str:
    return next((word[len(name) + 1 :] for word in words if word.startswith(f"{name}=")), "")


def _processes(pids: list[int]) -> str:
    some = ", ".join(map(str, pids[:3]))
    return f"process{'es' if len(pids) > 1 else ''} {some}{' and others' if len(pids) > 3 else ''} use{'s'[: len(pids) < 2]} it"
