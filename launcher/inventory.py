"""The devices of this node, as NVML names them, and which of them the ranks see; CPU stand-ins where there are none."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rsup.launcher.inventory_file import read_inventory_file
from rsup.launcher.visible_devices import VisibleList, read_visible
from rsup.supervisor.places import boot_id, this_node
from rsup.supervisor.wire import Device

PROC_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the ranks may use. `visible` is empty on a node without GPUs, or where none is to be seen."""

    visible: VisibleList = field(default_factory=VisibleList)
    listed: tuple[Device, ...] = ()
    """Those of a file (`inventory_file`), where no GPU is visible."""

    @property
    def has_gpus(self) -> bool:
        """Whether there are boards of a driver's to ask, rather than a file's or stand-ins."""
        return bool(self.visible.devices)

    def stand_ins(self, num_ranks: int) -> list[Device]:
        """What ranks use where no GPU is visible, by ordinal: all that the file lists, else one for each local rank."""
        return list(self.listed) or [cpu_device(local_rank) for local_rank in range(num_ranks)]

    def devices(self, num_ranks: int) -> list[Device]:
        """One device per local rank, in local-rank order, as long as nothing moves a rank. Fewer GPUs than ranks: the ranks
        beyond get the GPUs again from the first."""
        found = self._by_ordinal(num_ranks)
        return [found[local_rank % len(found)] for local_rank in range(num_ranks)]

    def with_spares(self, num_ranks: int) -> list[Device]:
        """`devices`, then those that no rank uses."""
        return self.devices(num_ranks) + self._by_ordinal(num_ranks)[num_ranks:]

    def _by_ordinal(self, num_ranks: int) -> list[Device]:
        return [one.device for one in self.visible.devices] or self.stand_ins(num_ranks)


def read_inventory(environ: Mapping[str, str] | None = None) -> Inventory:
    """What CUDA_VISIBLE_DEVICES of `environ` (default: ours) leaves. Loads NVML only here; without it the driver's own list
    in /proc is read. Takes up to a second on a node with GPUs. Never raises."""
    environ = os.environ if environ is None else environ
    shown, order = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER")
    if shown is not None and shown.strip() in ("", "-1"):
        return Inventory()
    nvml = load_nvml()
    if nvml is None or not begin_nvml(nvml):
        return Inventory(read_visible(shown, order, boards_in_proc()))
    try:
        boards = [_describe(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        return Inventory(read_visible(shown, order, boards, lambda name: _mig_instance(nvml, name)))
    except nvml.NVMLError:
        return Inventory()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def completed(found: Inventory, path: Path | None) -> Inventory:
    """`found` with what a file says (`--device-inventory`): it fills in what is not known of a GPU with the same UUID, and
    stands for the devices where no GPU is visible. Raise `UsageError` for a file that cannot be used."""
    if path is None:
        return found
    records = {record.uuid: record.device for record in read_inventory_file(path, this_node())}
    if not found.visible.devices:
        return Inventory(listed=tuple(records.values()))
    gpus = tuple(replace(one, device=_filled_in(one.device, records)) for one in found.visible.devices)
    return Inventory(replace(found.visible, devices=gpus))


def _filled_in(device: Device, records: Mapping[str, Device]) -> Device:
    known = records.get(device.uuid, device)
    return msgspec.structs.replace(known, **{name: value for name, value in msgspec.structs.asdict(device).items() if value})


def cpu_device(local_rank: int) -> Device:
    """The stand-in of a rank without a GPU: the same for the same local rank until the next boot."""
    return Device(uuid=f"CPU-{boot_id() or 'unknown'}-{local_rank}", model="CPU")


def boards_in_proc(root: Path = PROC_GPUS, dev: Path = Path("/dev")) -> list[Device]:
    """NVIDIA boards by PCI address as the driver lists them, those without a device file of ours left out."""
    found: list[Device] = []
    for path in sorted(root.glob("*/information")):
        try:
            lines = [line.partition(":") for line in path.read_text(errors="replace").splitlines()]
        except OSError:
            continue
        values = {name.strip(): value.strip() for name, _, value in lines}
        uuid, minor = values.get("GPU UUID", ""), values.get("Device Minor", "")
        if minor.isdecimal() and not (dev / f"nvidia{minor}").exists():
            continue
        found.append(
            Device(
                uuid=f"PCI-{path.parent.name}" if "?" in uuid or not uuid else uuid,
                model=values.get("Model", ""),
                pci_bus_id=values.get("Bus Location", path.parent.name),
                vbios=values.get("Video BIOS", ""),
            )
        )
    return found


def numbered_boards(nvml: Any) -> list[tuple[int, Device]]:
    """Each board that answers, with the number N of its `/dev/nvidiaN`: what gres.conf names. NVML's own order shifts when a
    board falls off the bus, these numbers do not. Raises NVML's error where it answers nothing at all."""
    found: list[tuple[int, Device]] = []
    for ordinal in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):  # a lost board has no handle
            handle = nvml.nvmlDeviceGetHandleByIndex(ordinal)
            number = ordinal
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                number = int(nvml.nvmlDeviceGetMinorNumber(handle))
            found.append((number, _describe(nvml, handle)))
    return found


def load_nvml() -> Any:
    """The bindings; None where they are not installed or do not load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package of the same name says at its import that it is deprecated
            return importlib.import_module("pynvml")
    except (ImportError, OSError, AttributeError):
        return None


def begin_nvml(nvml: Any) -> bool:
    """Whether NVML answers; `nvmlShutdown` then is due."""
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):  # no driver, or its library is not in this container
        return False
    return True


def _mig_instance(nvml: Any, name: str) -> Device | None:
    with contextlib.suppress(nvml.NVMLError):
        return _describe(nvml, nvml.nvmlDeviceGetHandleByUUID(name.encode()))
    return None


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
