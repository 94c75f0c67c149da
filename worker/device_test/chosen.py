"""Which devices of this node are screened: as NVML lists them, as an inventory file does, or stand-ins for a CPU's cores."""

import argparse
import importlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rsup.supervisor.places import boot_id, this_node
from rsup.supervisor.wire import UsageError


class Chosen(Struct, frozen=True):
    """A device of this node."""

    uuid: str
    kind: str
    model: str = ""
    index: int = -1
    serial: str = ""
    vbios: str = ""
    driver: str = ""


def devices_here(arguments: argparse.Namespace) -> list[Chosen]:
    """Those of this node that can be named: GPUs as NVML lists them; without any, an inventory file's or two CPU stand-ins."""
    if gpus := _gpus():
        return gpus
    file = arguments.device_inventory or os.environ.get("RSUP_DEVICE_INVENTORY", "")
    if file:
        return _listed(Path(file))
    return [Chosen(f"CPU-{boot_id() or 'unknown'}-{number}", "cpu", index=number) for number in range(2)]


def choose(arguments: argparse.Namespace, found: Sequence[Chosen]) -> list[Chosen]:
    """Those that were named. Raise `UsageError` for a name that none has, or several."""
    if arguments.all or arguments.device == ["cpu"]:
        if arguments.device and arguments.device != ["cpu"]:
            raise UsageError("--all: name no devices with it")
        if arguments.device == ["cpu"]:
            return [Chosen(f"CPU-{boot_id() or 'unknown'}-{number}", "cpu", index=number) for number in range(2)]
        return list(found)
    if not arguments.device:
        raise UsageError("which device? Name one, or --all; `rsup devices list` shows them")
    chosen: list[Chosen] = []
    for name in arguments.device:
        exact = [one for one in found if name in (one.uuid, one.serial, str(one.index))]
        fitting = exact or [one for one in found if len(name) >= 4 and one.uuid.startswith(name)]
        if len(fitting) != 1:
            which = "several devices have" if fitting else "this node has no device"
            names = ", ".join(one.uuid for one in (fitting or found)[:4])
            raise UsageError(f"{name}: {which} that name: {names}{', ...' if len(found) > 4 else ''}")
        chosen += [one for one in fitting if one not in chosen]
    return chosen


def _gpus() -> list[Chosen]:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return []
    nvml = begin_nvml()
    found: list[Chosen] = []
    if nvml is None:
        return found
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found.append(
            Chosen(
                _text(nvml.nvmlDeviceGetUUID(handle)),
                "cuda",
                _text(nvml.nvmlDeviceGetName(handle)),
                index,
                _ask(nvml, "nvmlDeviceGetSerial", handle),
                _ask(nvml, "nvmlDeviceGetVbiosVersion", handle),
                _ask(nvml, "nvmlSystemGetDriverVersion"),
            )
        )
    return found


def _ask(nvml: Any, query: str, *arguments: Any) -> str:
    """Empty where NVML does not tell."""
    try:
        return _text(getattr(nvml, query)(*arguments))
    except nvml.NVMLError:
        return ""


def begin_nvml() -> Any:
    """NVML's bindings, ready for questions; None where there are none, or no driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml
    except Exception:  # no bindings, no driver, no library
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class _Record(Struct):
    uuid: str
    model: str = ""
    serial: str = ""
    node: str = ""
    vbios: str = ""
    driver: str = ""


class _Listing(Struct):
    devices: list[_Record]


def _listed(path: Path) -> list[Chosen]:
    try:
        data = path.read_bytes()
        is_object = data.lstrip()[:1] == b"{"
        records = (
            msgspec.json.decode(data, type=_Listing).devices if is_object else msgspec.json.decode(data, type=list[_Record])
        )
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--device-inventory {path}: {str(error).splitlines()[0]}") from None
    here = [record for record in records if record.node in ("", this_node())]
    return [
        Chosen(record.uuid, "cpu", record.model, index, record.serial, record.vbios, record.driver)
        for index, record in enumerate(here)
    ]
