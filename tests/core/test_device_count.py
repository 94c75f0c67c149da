"""What `--nproc-per-node gpu` counts, with NVML, with the driver's list in /proc alone, and with neither."""

import sys
from pathlib import Path

import pytest

from rsup.launcher import device_count
from rsup.launcher.inventory import boards_in_proc, read_inventory
from tests.core.test_inventory import FakeNvml


@pytest.mark.parametrize(
    ("shown", "each_sees_one", "expected"),
    [
        (None, False, 4),
        ("", False, 0),
        ("NoDevFiles", False, 0),
        ("0,1", False, 2),
        ("1,0,7", False, 2),
        ("0,GPU-b", False, 1),
        ("GPU-b,GPU-c", False, 2),
        ("GPU-b,GPU-zz,GPU-c", False, 1),
        ("GPU-aa", False, 0),
        ("MIG-1,MIG-2", False, 1),
        ("MIG-1,MIG-2", True, 2),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, shown: str | None, each_sees_one: bool, expected: int) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert device_count.count_gpus(environ, each_sees_one) == expected


def board(root: Path, address: str, uuid: str, minor: int) -> None:
    folder = root / address
    folder.mkdir(parents=True)
    folder.joinpath("information").write_text(
        f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 90\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00\n"
        f"Bus Location: \t {address}\nDevice Minor: \t {minor}\n"
    )


def test_the_drivers_list_where_nvml_is_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that was given the devices and not the library."""
    gpus, dev = tmp_path / "gpus", tmp_path / "dev"
    board(gpus, "0000:b0:00.0", "GPU-bbb", 1)
    board(gpus, "0000:a0:00.0", "GPU-aaa", 0)
    board(gpus, "0000:c0:00.0", "GPU-ccc", 2)
    dev.mkdir()
    for minor in (0, 1):  # the third board is somebody else's
        dev.joinpath(f"nvidia{minor}").touch()
    boards = boards_in_proc(gpus, dev)
    assert [(b.uuid, b.model, b.pci_bus_id, b.vbios) for b in boards] == [
        ("GPU-aaa", "NVIDIA H200", "0000:a0:00.0", "96.00"),
        ("GPU-bbb", "NVIDIA H200", "0000:b0:00.0", "96.00"),
    ]
    for name in ("device_count", "inventory"):
        monkeypatch.setattr(f"rsup.launcher.{name}.boards_in_proc", lambda: boards)
    for nvml in (None, FakeNvml(works=False)):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
        assert device_count.count_gpus({}) == 2
        assert device_count.count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-b"}) == 1
        assert [d.uuid for d in read_inventory({"CUDA_VISIBLE_DEVICES": "1"}).with_spares(1)] == ["GPU-bbb"]
        assert [d.uuid for d in read_inventory({}).with_spares(1)] == ["GPU-aaa", "GPU-bbb"]


def test_without_driver_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(device_count, "boards_in_proc", lambda: boards_in_proc(tmp_path))
    assert device_count.count_gpus({}) == 0
