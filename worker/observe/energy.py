"""How much energy this rank's GPU has taken, by NVML and by the GPU's UUID: an index would name another GPU wherever
`CUDA_VISIBLE_DEVICES` is set.

NVML counts millijoules since the driver was loaded (Volta and newer). A GPU without the counter has its power integrated by a
thread that samples it, as a lap's ends alone say nothing of what lies between.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rsup.worker.observe.contract import Warn
from rsup.worker.observe.error_text import one_line
from rsup.worker.observe.nvml_bindings import load_nvml

SAMPLE_EVERY_S = 0.1
MAX_FAILURES = 5
"""Readings that fail one behind the other before a meter gives up."""
MJ_PER_J = 1000


class _Source(Protocol):
    def read_j(self) -> float:
        """Joules since some moment, never less than before. Raises what NVML does."""
        ...

    def close(self) -> None: ...


class EnergyMeter:
    """The energy of this rank's device while the meter runs; it starts paused. On the training thread; a reading takes up to a
    millisecond, so take it at log points.

    Every method does nothing where there is no NVML, or no device: readings are None then. Where NVML fails in the middle the
    last reading counts again, and the next one that works brings what was missed, unless a pause lay between; the first
    failure is warned of, and `MAX_FAILURES` in a row end the measuring. Two ranks on one GPU both measure all of it.
    """

    def __init__(self, device_uuid: str | None, warn: Warn, *, nvml: Any = None) -> None:
        """`device_uuid`: as `GPU-...`; None, or of another kind, for a rank without a GPU. `nvml`: the bindings; None: load."""
        self._warn = warn
        self._source = self._open(device_uuid, nvml)
        self._runs = False
        self._since_j: float | None = None
        """The reading up to which laps are complete; None: the next one is, as there is none since it was resumed."""
        self._lap_j = 0.0
        self._total_j = 0.0
        self._num_failures = 0
        """Since the last reading that worked."""
        self._has_failed = False

    @property
    def works(self) -> bool:
        """Whether there are readings."""
        return self._source is not None

    def resume(self) -> None:
        """Measure from now on. Has no effect while it runs."""
        if not self._runs:
            self._runs, self._since_j = True, self._read()

    def pause(self) -> None:
        """What is taken from now on belongs to no lap: evaluation, saves. Has no effect while it is paused."""
        self._collect()
        self._runs, self._since_j = False, None

    def peek_j(self) -> float | None:
        """Joules of this lap so far, which goes on."""
        self._collect()
        return self._lap_j if self.works else None

    def lap_j(self) -> float | None:
        """Joules of this lap, which ends; the next one begins."""
        lap_j = self.peek_j()
        self._lap_j = 0.0
        return lap_j

    def total_j(self) -> float | None:
        """Joules of all laps, with the one that goes on."""
        self._collect()
        return self._total_j if self.works else None

    def close(self) -> None:
        """Give up NVML. May be repeated."""
        source, self._source, self._runs, self._since_j = self._source, None, False, None
        if source is not None:
            source.close()

    def _collect(self) -> None:
        if not self._runs or (now_j := self._read()) is None:
            return
        since_j = now_j if self._since_j is None else self._since_j
        taken_j = max(0.0, now_j - since_j)  # a driver that was loaded anew counts from 0 again
        self._lap_j += taken_j
        self._total_j += taken_j
        self._since_j = now_j

    def _read(self) -> float | None:
        if self._source is None:
            return None
        try:
            now_j = self._source.read_j()
        except Exception as error:  # NVML's bindings raise errors of their own, and ctypes' where a library is older
            self._failed(error)
            return None
        self._num_failures = 0
        return now_j

    def _failed(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._warn(f"energy is not measured any more: NVML says {one_line(error)}, {MAX_FAILURES} times in a row")
            self.close()
        elif not self._has_failed:
            self._has_failed = True
            self._warn(f"energy: NVML says {one_line(error)}; the last reading counts again")

    def _open(self, device_uuid: str | None, nvml: Any) -> _Source | None:
        if device_uuid is None or not device_uuid.startswith(("GPU-", "MIG-")):
            self._warn("energy is not measured: this rank has no GPU")
            return None
        nvml = nvml if nvml is not None else load_nvml()
        if nvml is None:
            self._warn("energy is not measured: NVML's bindings cannot be loaded (pip install nvidia-ml-py)")
            return None
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(device_uuid.encode())
        except Exception as error:  # see _read
            self._warn(f"energy of {device_uuid} is not measured: NVML says {one_line(error)}")
            return None
        return self._source_of(nvml, handle, device_uuid)

    def _source_of(self, nvml: Any, handle: Any, device_uuid: str) -> _Source | None:
        try:
            counter = _Counter(nvml, handle)
            counter.read_j()
            return counter
        except Exception as error:  # see _read
            no_counter = one_line(error)
        try:
            integral = PowerIntegral(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        except Exception as error:  # see _read
            self._warn(
                f"energy of {device_uuid} is not measured: NVML has no counter ({no_counter}), no power ({one_line(error)})"
            )
            return None
        self._warn(f"{device_uuid} has no energy counter ({no_counter}): its power is sampled every {SAMPLE_EVERY_S} s instead")
        return integral


class _Counter:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def read_j(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / MJ_PER_J

    def close(self) -> None:
        """NVML stays initialised: others in this process may use it, and it counts nobody."""


class PowerIntegral:
    """Energy from power, by trapezoids. `read_w` is called on a thread of its own, and in `read_j`."""

    def __init__(
        self, read_w: Callable[[], float], *, every_s: float = SAMPLE_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read_w = read_w
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._energy_j = 0.0
        self._at_s, self._power_w = clock(), read_w()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="rsup-power", daemon=True).start()

    def read_j(self) -> float:
        """Joules since it was made. Raises what `read_w` does."""
        self._sample()
        return self._energy_j

    def close(self) -> None:
        """Sample no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            with contextlib.suppress(Exception):  # the thread's outermost frame: whether NVML is gone shows in `read_j`
                self._sample()

    def _sample(self) -> None:
        power_w = self._read_w()
        with self._lock:
            now_s = self._clock()
            self._energy_j += (self._power_w + power_w) / 2 * (now_s - self._at_s)
            self._at_s, self._power_w = now_s, power_w
