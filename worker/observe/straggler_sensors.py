"""Clock, power, temperature and throttle reasons of this rank's GPU while it computes, through NVML, by UUID.

A thread of its own reads them once a second: at the moment of a report the device may stand idle, and a driver that answers
late holds nobody up. No torch.
"""

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

from rsup.supervisor.wire import DeviceSensors

SM_CLOCK, TEMPERATURE_OF_GPU = 1, 0
"""NVML_CLOCK_SM, NVML_TEMPERATURE_GPU"""
REASONS = {
    0x04: "sw-power-cap",
    0x08: "hw-slowdown",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "hw-power-brake",
}
"""Bits of NVML's clock event reasons that say why a clock is lower than it could be."""
READ_EVERY_S = 1.0


class SensorReader:
    """Readings of one device since the last `take`. Use `read` from one thread, `take` from another.

    `nvml`: the bindings; None: load them. Raises `LookupError` with what is missing.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self._nvml = nvml if nvml is not None else _load()
        if self._nvml is None:
            raise LookupError("NVML's Python bindings (nvidia-ml-py) are not installed")
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        except (self._nvml.NVMLError, OSError) as error:
            raise LookupError(f"NVML does not give {uuid}: {error}") from None
        self._max_clock_mhz = self._ask(self._nvml.nvmlDeviceGetMaxClockInfo, SM_CLOCK)
        self._lock = threading.Lock()
        self._readings: list[tuple[float | None, float | None, float | None, int]] = []

    def read(self) -> bool:
        """Take a reading; whether the device told anything."""
        nvml = self._nvml
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        clock_mhz = self._ask(nvml.nvmlDeviceGetClockInfo, SM_CLOCK)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage)
        temperature_c = self._ask(nvml.nvmlDeviceGetTemperature, TEMPERATURE_OF_GPU)
        bits = self._ask(reasons)
        if clock_mhz is None and power_mw is None and temperature_c is None and bits is None:
            return False
        with self._lock:
            self._readings.append((clock_mhz, None if power_mw is None else power_mw / 1e3, temperature_c, int(bits or 0)))
            del self._readings[:-3600]
        return True

    def take(self) -> DeviceSensors | None:
        """Of the readings since the last call: mean clock and power, the highest temperature, and the reasons that held in
        at least half of them. None without one."""
        with self._lock:
            readings, self._readings = self._readings, []
        if not readings:
            return None
        clock_mhz, power_w = (_mean([r[place] for r in readings]) for place in (0, 1))
        temperatures = [r[2] for r in readings if r[2] is not None]
        return DeviceSensors(
            sm_clock_mhz=None if clock_mhz is None else round(clock_mhz),
            max_sm_clock_mhz=None if self._max_clock_mhz is None else int(self._max_clock_mhz),
            power_w=power_w,
            temperature_c=int(max(temperatures)) if temperatures else None,
            throttle_reasons=[n for bit, n in REASONS.items() if 2 * sum(bool(r[3] & bit) for r in readings) >= len(readings)],
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> float | None:
        try:
            return float(question(self._handle, *arguments))
        except (self._nvml.NVMLError, OSError):
            return None


class SensorWatch:
    """Reads the sensors of a device in the background while it is on. A device that cannot be read is warned of once, and then
    there are no readings."""

    def __init__(self, uuid: str, warn: Callable[[str], None], nvml: Any = None, read_every_s: float = READ_EVERY_S) -> None:
        self._uuid = uuid
        self._warn = warn
        self._nvml = nvml
        self._read_every_s = read_every_s
        self._reader: SensorReader | None = None
        self._trouble = ""
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read; a rank on a CPU has no sensors."""
        if self._thread is not None or not self._uuid.startswith(("GPU-", "MIG-")):
            return
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._is_over,), name="rsup-sensors", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no more. Does not wait for the driver."""
        self._is_over.set()
        self._thread = None

    def take(self) -> DeviceSensors | None:
        """See `SensorReader.take`."""
        if self._trouble:
            self._warn(self._trouble)
            self._trouble = ""
        reader = self._reader
        return None if reader is None else reader.take()

    def _run(self, is_over: threading.Event) -> None:
        try:
            reader = SensorReader(self._uuid, self._nvml) if self._reader is None else self._reader
        except LookupError as error:
            self._trouble = f"stragglers are reported without sensors: {error}"
            return
        self._reader = reader
        while not is_over.is_set():
            if not reader.read():
                self._reader = None
                self._trouble = f"the sensors of {self._uuid} answer no more: stragglers are reported without them"
                return
            is_over.wait(self._read_every_s)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _load() -> Any:
    with contextlib.suppress(ImportError, OSError, AttributeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("pynvml")
    return None
