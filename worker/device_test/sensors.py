"""Temperature, clock and power of a GPU while it is screened, through NVML; None where NVML does not tell."""

import contextlib
import importlib
import warnings
from typing import Any

from rsup.worker.device_test.results import Range

TEMPERATURE_OF_GPU, SM_CLOCK = 0, 1
"""NVML_TEMPERATURE_GPU, NVML_CLOCK_SM"""


class Sensors:
    """Of one GPU, by UUID. Call `read` now and then; use from one thread."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        """`nvml`: the bindings; None: load them."""
        self.temperature_c: Range | None = None
        self.sm_clock_mhz: Range | None = None
        self.power_w: Range | None = None
        self.facts: dict[str, str] = {}
        """`serial`, `vbios` and `driver`, as far as they are known."""
        self._nvml = nvml if nvml is not None else _load()
        self._handle: Any = None
        if self._nvml is None or not uuid.startswith("GPU-"):
            return
        with contextlib.suppress(self._nvml.NVMLError, OSError):
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            for name, ask in (("serial", "nvmlDeviceGetSerial"), ("vbios", "nvmlDeviceGetVbiosVersion")):
                with contextlib.suppress(self._nvml.NVMLError):
                    self.facts[name] = _text(getattr(self._nvml, ask)(self._handle))
            self.facts["driver"] = _text(self._nvml.nvmlSystemGetDriverVersion())

    def read(self) -> None:
        """Take a reading."""
        nvml, handle = self._nvml, self._handle
        if handle is None:
            return
        with contextlib.suppress(nvml.NVMLError):
            self.temperature_c = _wider(self.temperature_c, nvml.nvmlDeviceGetTemperature(handle, TEMPERATURE_OF_GPU))
        with contextlib.suppress(nvml.NVMLError):
            self.sm_clock_mhz = _wider(self.sm_clock_mhz, nvml.nvmlDeviceGetClockInfo(handle, SM_CLOCK))
        with contextlib.suppress(nvml.NVMLError):
            self.power_w = _wider(self.power_w, nvml.nvmlDeviceGetPowerUsage(handle) / 1000)


def _wider(before: Range | None, value: float) -> Range:
    value = float(value)
    return Range(value, value) if before is None else Range(min(before.least, value), max(before.greatest, value))


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _load() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("pynvml")
    except (ImportError, OSError, AttributeError):
        return None
