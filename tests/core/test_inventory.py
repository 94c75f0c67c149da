"""Which devices the ranks get, with NVML's bindings replaced."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rsup.launcher.inventory import numbered_boards, read_inventory


class NVMLError(Exception):
    pass


class FakeNvml:
    """Four boards, the last without a serial; board 1 has a MIG instance."""

    NVMLError = NVMLError
    uuids = ("GPU-aa1", "GPU-aa2", "GPU-b", "GPU-c")

    def __init__(self, works: bool = True) -> None:
        self.works = works

    def nvmlInit(self) -> None:
        if not self.works:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        if uuid != b"MIG-1":
            raise NVMLError("Not Found")
        return 101

    def nvmlDeviceIsMigDeviceHandle(self, handle: int) -> bool:
        return handle > 100

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: int) -> int:
        return handle - 100

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"MIG-1" if handle > 100 else self.uuids[handle].encode()

    def nvmlDeviceGetSerial(self, handle: int) -> str:
        if handle == 3:
            raise NVMLError("Not Supported")
        return f"serial-{handle}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"0000:0{handle}:00.0")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aa1", "GPU-aa2", "GPU-b", "GPU-c"]),
        ("2,0", ["GPU-b", "GPU-aa1", "GPU-b", "GPU-aa1"]),
        ("GPU-b,GPU-aa2", ["GPU-b", "GPU-aa2", "GPU-b", "GPU-aa2"]),
        ("0,9,1", ["GPU-aa1"] * 4),
        ("MIG-1", ["MIG-1"] * 4),
    ],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [device.uuid for device in read_inventory(environ).devices(4)] == expected


def test_what_nvml_does_not_tell_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    (instance,) = read_inventory({"CUDA_VISIBLE_DEVICES": "MIG-1"}).devices(1)
    assert (instance.serial, instance.pci_bus_id, instance.driver) == ("serial-1", "0000:01:00.0", "570.1")
    (last,) = read_inventory({"CUDA_VISIBLE_DEVICES": "3"}).devices(1)
    assert (last.serial, last.vbios) == ("", "")


@pytest.mark.parametrize("visible", ["", "-1", "GPU-aa", "GPU-zz", "MIG-9", "nonsense"])
def test_cpu_stand_ins_where_no_gpu_is_left(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    devices = read_inventory({"CUDA_VISIBLE_DEVICES": visible}).devices(2)
    assert [device.model for device in devices] == ["CPU", "CPU"]
    assert devices[0].uuid != devices[1].uuid
    assert devices == read_inventory({"CUDA_VISIBLE_DEVICES": visible}).devices(2)


@pytest.mark.parametrize("nvml", [None, FakeNvml(works=False)])
def test_cpu_stand_ins_without_driver_or_bindings(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    assert [device.model for device in read_inventory({}).devices(1)] == ["CPU"]


class ShiftedNvml(FakeNvml):
    """Board 1 has fallen off the bus: NVML tells of it by an error, and knows what `/dev/nvidiaN` each of the others is."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        if handle == 3:
            raise NVMLError("Not Supported")
        return 7 - handle


def test_boards_are_numbered_by_their_device_files() -> None:
    """What gres.conf names; NVML's order is the second best."""
    found = [(number, device.uuid) for number, device in numbered_boards(ShiftedNvml())]
    assert found == [(7, "GPU-aa1"), (5, "GPU-b"), (3, "GPU-c")]
    assert [number for number, _ in numbered_boards(FakeNvml())] == [0, 1, 2, 3]
