"""Reads the health of devices through NVML. Calls may block for good on a sick device: use a process of its own, and look at
`doing` from another thread.

An error that says that a device does not know the question, or that we may not ask it, is no evidence; any other is, once it
has come twice in a row (at once where the driver has lost the device).
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rsup.launcher.device_health import RECOVERY_ACTIONS
from rsup.supervisor.wire import Device, HealthReading

UNCORRECTED, VOLATILE, AGGREGATE = 1, 0, 1
HW_THERMAL, HW_POWER_BRAKE = 0x40, 0x80
SPEED_WORDS = ((HW_THERMAL, "hw-thermal"), (HW_POWER_BRAKE, "hw-power-brake"))
THROTTLED_FOR_S = 180.0
LOADED_PERCENT = 50
LINK_ERRORS_PER_MINUTE = 100.0
LINK_FIELDS, RECOVERY_FIELDS = (38, 45, 52), (59,)
"""NVML_FI_DEV_NVLINK_*_ERROR_COUNT_TOTAL: CRC of flits, CRC of data, replays; recoveries."""
RECOVERY_ACTION_FIELD = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"""
XID_EVENT = 0x8
GPU_IS_LOST, TIMEOUT = 15, 10
NO_EVIDENCE = frozenset({*range(1, 8), 9, 10, 12, 13, *range(18, 28)})
"""NVML's return codes that speak of the question, of us or of the driver's state: not supported (3), no permission (4), not
found (6), driver not loaded (9), timeout (10), no such function (13), other versions (18, 25), no memory (20), not ready (27)
and such. Left are a device's: power (8), interrupts (11), infoROM (14), lost (15), reset required (16), unknown (999).
"""

Found = tuple[str, str, int, str]
"""Source, code, count, detail."""


@dataclass
class _Seen:
    """What is remembered of a device between samples."""

    handle: Any = None
    aggregate: int | None = None
    rows: int | None = None
    recoveries: int | None = None
    links: tuple[float, int] | None = None
    """When the error counters of its links were read, and their sum."""
    noisy: int = 0
    """That sum when it last grew too fast; 0: it has not."""
    throttled_since: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


class NvmlHealth:
    """The devices of one node. `nvml`: the bindings, initialised. Use `sample` from one thread."""

    def __init__(self, nvml: Any, devices: Sequence[Device], clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._devices = devices
        self._seen = {device.uuid: _Seen() for device in devices}
        self.doing: tuple[str, str] | None = None
        """Device and query of the call that is under way."""

    def sample(self) -> list[HealthReading]:
        """All that stands against the devices now. Never raises for what NVML says."""
        return [reading for device in self._devices for reading in self._sample_one(device)]

    def _sample_one(self, device: Device) -> list[HealthReading]:
        seen = self._seen[device.uuid]
        found: list[Found] = []
        failed: set[str] = set()
        for name, query in _QUERIES.items():
            if name != "handle" and seen.handle is None:
                break
            self.doing = (device.uuid, name)
            try:
                found += query(self, device, seen)
            except AttributeError:
                continue  # older bindings
            except self._nvml.NVMLError as error:
                code = getattr(error, "value", 0)
                if code in NO_EVIDENCE:
                    continue
                failed.add(name)
                if name in seen.failed or code == GPU_IS_LOST:
                    found.append(("unreadable", name, 1, f"NVML: {error}"))
            finally:
                self.doing = None
        seen.failed = failed
        return [HealthReading(device.uuid, *one) for one in found]

    # ------------------------------------------------------------------------------------------------------- the queries

    def _find(self, device: Device, seen: _Seen) -> list[Found]:
        if seen.handle is None:
            seen.handle = find_handle(self._nvml, device)
        return []

    def _ecc(self, device: Device, seen: _Seen) -> list[Found]:
        ask = self._nvml.nvmlDeviceGetTotalEccErrors
        volatile = int(ask(seen.handle, UNCORRECTED, VOLATILE))
        aggregate = int(ask(seen.handle, UNCORRECTED, AGGREGATE))
        first = seen.aggregate = aggregate if seen.aggregate is None else seen.aggregate
        found: list[Found] = []
        if volatile:
            found.append(("ecc", "uncorrectable", volatile, f"{volatile} uncorrectable memory errors"))
        if aggregate > first:
            found.append(("ecc", "uncorrectable-aggregate", aggregate, f"{aggregate}, {aggregate - first} of them new"))
        return found

    def _remap(self, device: Device, seen: _Seen) -> list[Found]:
        correctable, uncorrectable, pending, failure = self._nvml.nvmlDeviceGetRemappedRows(seen.handle)
        rows = int(correctable) + int(uncorrectable)
        first = seen.rows = rows if seen.rows is None else seen.rows
        text = f"rows remapped: {correctable} correctable, {uncorrectable} uncorrectable"
        found: list[Found] = [("remap", "pending", 1, text)] if pending else []
        found += [("remap", "failed", 1, text)] if failure else []
        return found + ([("remap", "rows", rows, text)] if rows > first else [])

    def _recovery(self, device: Device, seen: _Seen) -> list[Found]:
        if hasattr(self._nvml, "nvmlDeviceGetGpuRecoveryAction"):
            action = int(self._nvml.nvmlDeviceGetGpuRecoveryAction(seen.handle))
        else:
            action = self._field(seen.handle, (RECOVERY_ACTION_FIELD,)) or 0
        if not action:
            return []
        code = RECOVERY_ACTIONS.get(action, f"action-{action}")
        return [("recovery-action", code, 1, f"the driver asks for: {code}")]

    def _throttle(self, device: Device, seen: _Seen) -> list[Found]:
        nvml, handle, now_s = self._nvml, seen.handle, self._clock()
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        reasons = int(ask(handle))
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) if reasons & (HW_THERMAL | HW_POWER_BRAKE) else 0
        found: list[Found] = []
        for bit, code in SPEED_WORDS:
            if not reasons & bit or busy < LOADED_PERCENT:
                seen.throttled_since.pop(code, None)
                continue
            for_s = now_s - seen.throttled_since.setdefault(code, now_s)
            if for_s >= THROTTLED_FOR_S:
                found.append(("throttle", code, 1, f"slowed down for {for_s:.0f} s at {busy} % load"))
        return found

    def _links(self, device: Device, seen: _Seen) -> list[Found]:
        now_s, total = self._clock(), self._field(seen.handle, LINK_FIELDS)
        recoveries = self._field(seen.handle, RECOVERY_FIELDS)
        found: list[Found] = []
        if total is not None:
            before_s, before = seen.links or (now_s, total)
            minutes = max(now_s - before_s, 1.0) / 60
            if total - before > LINK_ERRORS_PER_MINUTE * minutes:
                seen.noisy = total
            seen.links = (now_s, total)
            if seen.noisy:
                found.append(("link", "nvlink-errors", seen.noisy, f"CRC errors and replays of its links: {seen.noisy}"))
        if recoveries is not None:
            first = seen.recoveries = recoveries if seen.recoveries is None else seen.recoveries
            if recoveries > first:
                found.append(("link", "nvlink-recovery", recoveries, f"its links recovered {recoveries - first} times"))
        return found

    def _field(self, handle: Any, fields: Sequence[int]) -> int | None:
        """Sum of those field values that the device has; None: it has none of them."""
        values = [value for value in self._nvml.nvmlDeviceGetFieldValues(handle, list(fields)) if value.nvmlReturn == 0]
        return sum(_number(value) for value in values) if values else None


_QUERIES: dict[str, Callable[[NvmlHealth, Device, _Seen], list[Found]]] = {
    "handle": NvmlHealth._find,
    "ecc": NvmlHealth._ecc,
    "remapped-rows": NvmlHealth._remap,
    "recovery-action": NvmlHealth._recovery,
    "clocks": NvmlHealth._throttle,
    "links": NvmlHealth._links,
}


def find_handle(nvml: Any, device: Device) -> Any:
    """NVML's handle of a device; of the board where it is a MIG instance. Raises NVML's error."""
    if device.uuid.startswith(("GPU-", "MIG-")):
        handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid.encode())
    else:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(device.pci_bus_id.encode())
    if device.uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle


class XidEvents:
    """The driver's Xid events of some devices; use from one thread."""

    def __init__(self, nvml: Any, devices: Sequence[Device]) -> None:
        """Register for them; raises NVML's error where that is impossible for all of the devices."""
        self._nvml = nvml
        self._devices: list[tuple[Any, str]] = []
        self._set = nvml.nvmlEventSetCreate()
        problem = None
        for device in devices:
            try:
                handle = find_handle(nvml, device)
                nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._set)
                self._devices.append((handle, device.uuid))
            except nvml.NVMLError as error:
                problem = error
        if problem is not None and not self._devices:
            raise problem

    def wait(self, timeout_ms: int) -> tuple[str, str] | None:
        """Device and number of the next one; None if there is none in that time, or it is of another device."""
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._set, timeout_ms)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", 0) == TIMEOUT:
                return None
            raise
        if not event.eventType & XID_EVENT:
            return None
        uuid = next((uuid for handle, uuid in self._devices if _same_handle(handle, event.device)), "")
        return (uuid, str(int(event.eventData))) if uuid else None


def _same_handle(one: Any, other: Any) -> bool:
    """Handles are pointers, of which the bindings make a new object each time."""
    if one is other or one == other:
        return True
    try:
        return ctypes.cast(one, ctypes.c_void_p).value == ctypes.cast(other, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return False


def _number(field_value: Any) -> int:
    """Of a field value, by its type: double, unsigned int, long or long long, signed long long or int."""
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return int(getattr(field_value.value, names[min(int(field_value.valueType), len(names) - 1)]))
