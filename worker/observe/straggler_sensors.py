"""Clock, power, temperature and throttle reasons of this rank's GPU while it computes, through NVML, by UUID.

A thread of its own reads them once a second: at the moment of a report the device may stand idle, and a driver that answers
late holds nobody up. No torch.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rsup.supervisor.wire import DeviceSensors
from rsup.worker.observe.nvml_bindings import load_nvml

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
        self._nvml = nvml if nvml is not None else load_nvml()
        if self._nvml is None:
            raise LookupError("NVML's Python bindings (nvidia-ml-py) are not installed")
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        except Exception as error:  # the bindings' own, and ctypes' where a library is older or broken
            raise LookupError(f"NVML does not give {uuid}: {error}") from None
        self._max_clock_mhz = self._ask(self._nvml.nvmlDeviceGetMaxClockInfo, SM_CLOCK)
        self._lock = threading.Lock()
        self._readings: list[tuple[float | None, float | None, float | None, int]] = []

    def read(self) -> bool:
        """Take a reading; whether the device told anything."""
        nvml = self._nvml
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
        clock_mhz = self._ask(nvml.nvmlDeviceGetClockInfo, SM_CLOCK)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage)
        temperature_c = self._ask(nvml.nvmlDeviceGetTemperature, TEMPERATURE_OF_GPU)
        bits = None if reasons is None else self._ask(reasons)
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
        except Exception:  # as above: what the device does not say is left out
            return None


class SensorWatch:
    """Reads the sensors of a device in the background while it is on. A device that cannot be read is warned of once, and then
    there are no readings."""

    def __init__(self, uuid: str, warn: Callable[[str], None], nvml: Any = None, read_every_s: float = READ_EVERY_S) -> None:
        self._uuid = uuid
        self._warn = warn
        self._nvml = nvml
        self._read_every_s = read_every_s
        self._readings = _Readings()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read; a rank on a CPU has no sensors."""
        if self._thread is not None or not self._uuid.startswith(("GPU-", "MIG-")):
            return
        self._is_over = threading.Event()
        told = (self._uuid, self._nvml, self._readings, self._is_over, self._read_every_s)
        self._thread = threading.Thread(target=_read_until, args=told, name="rsup-sensors", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no more. Does not wait for the driver."""
        self._is_over.set()
        self._thread = None

    def pause(self) -> None:
        """What the device does now is no step: it is not read."""
        self._readings.is_paused = True

    def resume(self) -> None:
        """The end of `pause`."""
        self._readings.is_paused = False

    def take(self) -> DeviceSensors | None:
        """See `SensorReader.take`."""
        readings = self._readings
        if readings.trouble:
            self._warn(readings.trouble)
            readings.trouble = ""
        reader = readings.reader
        return None if reader is None else reader.take()


@dataclass
class _Readings:
    """What the thread and its watch share. The thread knows nobody else: in a driver that never answers it would keep the
    trainer alive whose `warn` it had."""

    reader: SensorReader | None = None
    trouble: str = ""
    is_paused: bool = False


def _read_until(uuid: str, nvml: Any, readings: _Readings, is_over: threading.Event, every_s: float) -> None:
    try:
        reader = SensorReader(uuid, nvml) if readings.reader is None else readings.reader
        readings.reader = reader
        while not is_over.is_set():
            if not readings.is_paused and not reader.read():
                readings.reader = None
                readings.trouble = f"the sensors of {uuid} answer no more: stragglers are reported without them"
                return
            is_over.wait(every_s)
    except Exception as error:  # the thread's outermost frame: it becomes a warning
        readings.reader = None
        readings.trouble = f"stragglers are reported without sensors: {error}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
