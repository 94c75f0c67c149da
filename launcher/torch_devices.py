"""Counts devices with the torch that the calling program has imported, as torchrun does."""

import sys
from typing import Any

from rsup.launcher.device_count import DeviceCounters, count_cpus


def counters_of_the_caller() -> DeviceCounters | None:
    """Counters that ask torch; None if it has not been imported. (That it is asked in this very process matters to those who
    have put something in the place of its functions, and to devices that only it knows.)"""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return DeviceCounters(
        cpus=count_cpus,
        gpus=lambda: _available(getattr(torch, "cuda", None)),
        xpus=lambda: _available(getattr(torch, "xpu", None)),
        accelerators=lambda: _count_any(torch),
        named=lambda name: _available(getattr(torch, name, None)) if name == _added_name(torch) else None,
    )


def _available(module: Any) -> int:
    return int(module.device_count()) if module is not None and module.is_available() else 0


def _count_any(torch: Any) -> int:
    if hasattr(torch, "accelerator"):
        return _available(torch.accelerator)
    return _available(getattr(torch, "cuda", None)) or _available(getattr(torch, "xpu", None))


def _added_name(torch: Any) -> str:
    """Name of the kind of device that a package has added to torch; `privateuseone` if none has."""
    return str(torch._C._get_privateuse1_backend_name())
