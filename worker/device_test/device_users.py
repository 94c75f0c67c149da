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
    wanted, found = set(uuids), {}
    for path in proc.glob("[0-9]*/environ"):
        try:
            words = dict(word.partition(b"=")[::2] for word in path.read_bytes().split(b"\0"))
        except OSError:
            continue
        uuid = words.get(b"RSUP_DEVICE_UUID", b"").decode("utf-8", "replace")
        if uuid in wanted and path.parent.name != str(os.getpid()):
            found[uuid] = f"job {words.get(b'RSUP_JOB_ID', b'?').decode('utf-8', 'replace')} uses it"
    return found


def _processes(pids: list[int]) -> str:
    some = ", ".join(map(str, pids[:3]))
    return f"process{'es' if len(pids) > 1 else ''} {some}{' and others' if len(pids) > 3 else ''} use{'s'[: len(pids) < 2]} it"
