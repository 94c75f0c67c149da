"""The devices that this node's ranks will use, as NVML names them; CPU stand-ins where there are none."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from rsup.supervisor.places import boot_id
from rsup.supervisor.wire import Device


def local_devices(num_ranks: int, environ: Mapping[str, str] | None = None) -> list[Device]:
    """One device per local rank, in local-rank order: what CUDA_VISIBLE_DEVICES of `environ` (default: ours) leaves.

    Loads NVML only here; any failure of it gives CPU devices. Fewer GPUs than ranks: the ranks beyond get the GPUs again
    from the first. Takes up to a second on a node with GPUs. Never raises.
    """
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = _gpus(visible) if visible is None or visible.strip() not in ("", "-1") else []
    if not gpus:
        return [cpu_device(local_rank) for local_rank in range(num_ranks)]
    return [gpus[local_rank % len(gpus)] for local_rank in range(num_ranks)]


def cpu_device(local_rank: int) -> Device:
    """The stand-in of a rank without a GPU: the same for the same local rank until the next boot."""
    return Device(uuid=f"CPU-{boot_id() or 'unknown'}-{local_rank}", model="CPU")


def _gpus(visible: str | None) -> list[Device]:
    nvml = _load_nvml()
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):  # no driver
        return []
    try:
        return [_describe(nvml, handle) for handle in _visible_handles(nvml, visible)]
    except nvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _load_nvml() -> Any:
    """The bindings; None where they are not installed or do not load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package of the same name says at its import that it is deprecated
            return importlib.import_module("pynvml")
    except (ImportError, OSError, AttributeError):
        return None


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """Handles in CUDA's order. As CUDA does it, the list ends at the first entry that names nothing."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return handles
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    chosen: list[Any] = []
    for name in (entry.strip() for entry in visible.split(",")):
        found = _find(nvml, name, handles, uuids)
        if found is None:
            break
        chosen.append(found)
    return chosen


def _find(nvml: Any, name: str, handles: list[Any], uuids: list[str]) -> Any:
    if name.isdigit():
        return handles[int(name)] if int(name) < len(handles) else None
    if name.startswith("MIG-"):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name.encode())
        return None
    # CUDA takes any unambiguous beginning of a UUID
    matches = [handle for handle, uuid in zip(handles, uuids, strict=True) if name and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _describe(nvml: Any, handle: Any) -> Device:
    """Whatever of it NVML tells: consumer boards have no serial, a MIG instance has its parent's board."""
    board = handle
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceIsMigDeviceHandle(handle):
            board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)

    def ask(question: str, of: Any) -> str:
        try:
            function: Callable[[Any], Any] = getattr(nvml, question)
            return _text(function(of))
        except (nvml.NVMLError, AttributeError):
            return ""

    try:
        pci_bus_id = _text(nvml.nvmlDeviceGetPciInfo(board).busId)
    except nvml.NVMLError:
        pci_bus_id = ""
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        driver = ""
    return Device(
        uuid=ask("nvmlDeviceGetUUID", handle),
        model=ask("nvmlDeviceGetName", handle),
        serial=ask("nvmlDeviceGetSerial", board),
        board=ask("nvmlDeviceGetBoardPartNumber", board),
        pci_bus_id=pci_bus_id,
        vbios=ask("nvmlDeviceGetVbiosVersion", board),
        driver=driver,
    )


def _text(value: Any) -> str:
    """NVML's bindings give bytes or text, by version."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
