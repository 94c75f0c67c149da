"""The inventory file: what it may say, what is refused in one line, and which seats its devices make."""

import itertools
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rsup.launcher.device_placement import place
from rsup.launcher.device_variables import device_environments
from rsup.launcher.inventory import Inventory, completed, read_inventory
from rsup.launcher.inventory_file import read_inventory_file
from rsup.launcher.rank_seats import choose_seats
from rsup.launcher.visible_devices import VisibleList, read_visible
from rsup.supervisor.places import this_host
from rsup.supervisor.wire import AvoidedDevice, Device, StartAttempt, UsageError

THREE = [{"uuid": f"GPU-{name}", "model": "X1", "serial": f"s-{name}"} for name in "abc"]


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "inventory.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def listed(tmp_path: Path, content: Any = THREE) -> Inventory:
    return completed(Inventory(), written(tmp_path, content))


def start(num_ranks: int, *avoid: AvoidedDevice) -> StartAttempt:
    return StartAttempt(1, "r", 1, 1, 0, num_ranks, num_ranks, 0, 1, "h", 1, "job", 1, max_restarts=1, avoid=list(avoid))


@pytest.mark.parametrize("form", [THREE, {"devices": THREE, "x-site": "x", "_comment": "of May"}])
def test_a_list_or_an_object_with_devices(tmp_path: Path, form: Any) -> None:
    found = read_inventory_file(written(tmp_path, form), "n1")
    assert found[1].device == Device("GPU-b", model="X1", serial="s-b")


def test_records_of_other_nodes_are_not_ours(tmp_path: Path) -> None:
    records = [{"uuid": "GPU-1", "node": "n1"}, {"uuid": "GPU-2", "node": "n2"}, {"uuid": "GPU-3"}]
    assert [one.uuid for one in read_inventory_file(written(tmp_path, records), "n2")] == ["GPU-2", "GPU-3"]
    elsewhere = listed(tmp_path, [{"uuid": "GPU-1", "node": "not-" + this_host()}])
    assert elsewhere.devices(1)[0].model == "CPU", "the file does not speak of this node"


def test_health_and_further_words_of_a_site(tmp_path: Path) -> None:
    record = {"uuid": "GPU-a", "x-rack": 7, "health": {"xid": [79], "remap_failed": True, "_fan": "loud"}}
    (found,) = read_inventory_file(written(tmp_path, [record]), "n")
    assert found.health is not None and found.health.xid == [79] and found.health.remap_failed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[{", "is no JSON"),
        (b"", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "Expected `object`"),
        ([{"serial": "1"}], "missing required field `uuid`"),
        ([{"uuid": " "}], "record 0 has an empty uuid"),
        ([{"uuid": 7}], "Expected `str`"),
        ({"gpus": []}, "missing required field `devices`"),
        ("GPU-a", "Expected `array`"),
        ([{"uuid": "GPU-a"}, {"uuid": "GPU-b"}, {"uuid": "GPU-a"}], "GPU-a comes twice"),
        ([{"uuid": "GPU-a\nRSUP_MARK=x"}], "printable"),
        ([{"uuid": "GPU-a", "serial": "x" * 300}], "printable"),
        ([{"uuid": "GPU-a", "health": {"xid": ["79"]}}], "Expected `int`"),
        ([{"uuid": "GPU-a", "modell": "X1"}], "record 0: unknown key 'modell'; there are uuid, serial, model,"),
        (
            [{"uuid": "GPU-a"}, {"uuid": "GPU-b", "health": {"xidd": [79]}}],
            "record 1: health: unknown key 'xidd'; there are xid,",
        ),
        ([{"uuid": "GPU-a", "index": 0}], "unknown key 'index'; the place in the list is the index; there are uuid,"),
        ({"devices": THREE, "device": []}, "unknown key 'device'; there are devices"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, content: Any, says: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UsageError) as refused:
        read_inventory_file(path, "n")
    text = str(refused.value)
    assert says in text and text.startswith(f"--device-inventory {path}: ") and text.isprintable()
    with pytest.raises(UsageError) as caught:
        read_inventory_file(path, "n1", named_by="")
    assert str(caught.value) == text.removeprefix("--device-inventory "), "in its usual place nobody has named it"


def test_a_file_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_inventory_file(path, "n")


def test_it_adds_to_a_known_gpu_and_never_invents_one(tmp_path: Path) -> None:
    gpus = [Device("GPU-a", model="H200", vbios="1"), Device("GPU-z", model="H200")]
    records = [{"uuid": "GPU-a", "model": "other", "serial": "s", "vbios": "9"}, {"uuid": "GPU-ghost"}]
    found = completed(Inventory(read_visible(None, None, gpus)), written(tmp_path, records))
    assert found.with_spares(1) == [Device("GPU-a", model="H200", vbios="1", serial="s"), Device("GPU-z", model="H200")]
    assert found.listed == ()


def test_without_gpus_its_devices_are_the_ranks_then_the_spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    inventory = completed(read_inventory({"CUDA_VISIBLE_DEVICES": ""}), written(tmp_path, THREE))
    assert [device.uuid for device in inventory.with_spares(2)] == ["GPU-a", "GPU-b", "GPU-c"]
    assert [device.uuid for device in inventory.devices(4)] == ["GPU-a", "GPU-b", "GPU-c", "GPU-a"]


def suspect(device: str, rank: int | None = None, ordinal: int = -1) -> AvoidedDevice:
    return AvoidedDevice(device, f"{device} failed", rank=rank, ordinal=ordinal)


def quarantined(device: str) -> AvoidedDevice:
    return AvoidedDevice(device, f"{device} is broken", quarantined=True)


@pytest.mark.parametrize(
    ("ranks", "avoid", "seats"),
    [
        (2, [], "a/0 b/1"),
        (2, [quarantined("GPU-b")], "a/0 c/1"),
        (2, [suspect("GPU-a")], "c/0 b/1"),
        (2, [suspect("GPU-c"), quarantined("GPU-a")], "c/0 b/1"),
        (3, [quarantined("GPU-b")], "a/0 b/1 c/2"),
        # a rank that must not run there again: permuted, and to a spare where that is not enough
        (2, [suspect("GPU-a", rank=0)], "c/0 b/1"),
        (3, [suspect("GPU-a", rank=0)], "b/1 a/0 c/2"),
        (2, [suspect("GPU-a", rank=0), suspect("GPU-b", rank=0)], "c/0 b/1"),
        (2, [suspect("GPU-a", rank=0), suspect("GPU-a", rank=1)], "c/0 b/1"),
        (2, [suspect("GPU-c", 0), suspect("GPU-a", 0), suspect("GPU-b", 1)], "b/1 a/0"),
        (2, [suspect("GPU-a", rank=0), suspect("GPU-b", rank=0), quarantined("GPU-c")], "a/0 b/1"),
        (1, [suspect("GPU-a", rank=0)], "b/0"),
        (1, [suspect("GPU-a", rank=0), suspect("GPU-b", rank=0)], "c/0"),
        (1, [suspect("GPU-a", rank=0), quarantined("GPU-b")], "c/0"),
        (1, [suspect("GPU-a", rank=0), quarantined("GPU-a")], "b/0"),
        # Megatron-LM tells devices apart by ordinal
        (1, [suspect("GPU-a", rank=0, ordinal=0)], "b/1"),
        (1, [suspect("GPU-a", rank=0, ordinal=0), quarantined("GPU-b")], "c/2"),
        # several at once, in a ring
        (3, [suspect("GPU-a", 0), suspect("GPU-b", 1), suspect("GPU-c", 2)], "b/1 c/2 a/0"),
        (3, [suspect("GPU-a", 0), suspect("GPU-b", 0), suspect("GPU-b", 1), suspect("GPU-c", 2)], "c/2 a/0 b/1"),
    ],
)
def test_seats_among_listed_devices(tmp_path: Path, ranks: int, avoid: list[AvoidedDevice], seats: str) -> None:
    """There is no list to write: what a rank is told of its device is its seat."""
    found = choose_seats(start(ranks, *avoid), None, listed(tmp_path))
    told = [environment["RSUP_DEVICE_UUID"] for environment in found.device_environments]
    assert told == found.device_names
    assert " ".join(f"{uuid[4:]}/{ordinal}" for uuid, ordinal in zip(told, found.ordinals, strict=True)) == seats
    assert found.environment == {} and bool(found.lines) == bool(avoid)


def test_what_stays_where_it_should_not_is_said(tmp_path: Path) -> None:
    found = choose_seats(start(3, quarantined("GPU-b"), suspect("GPU-a", 0)), None, listed(tmp_path))
    assert "GPU-b stays in use, no other device is free: GPU-b is broken" in found.lines
    moved = choose_seats(start(1, suspect("GPU-a", 0)), None, listed(tmp_path))
    assert moved.lines == ("GPU-b is used in place of GPU-a: GPU-a failed",)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_where_every_rank_can_have_another_device_it_gets_one(tmp_path: Path, ranks: int) -> None:
    """Several ranks at once that must not run again where they ran, on nodes with and without spares."""
    rng = random.Random(ranks)
    for _ in range(300):
        uuids = [f"GPU-{i}" for i in range(ranks + rng.randrange(3))]
        avoid = [suspect(uuid, rank) for rank in range(ranks) for uuid in uuids if rng.random() < 0.3]
        refused = {(one.rank, one.device) for one in avoid}
        gpus = [Device(uuid, model="X1") for uuid in uuids]
        can = any(not refused.intersection(enumerate(devices)) for devices in itertools.permutations(uuids, ranks))
        for visible in (VisibleList(), read_visible(None, None, gpus)):
            placed = place(visible, gpus, ranks, avoid)
            used = [device.uuid for device in placed.devices]
            assert len(set(used)) == ranks and used == [placed.listed[ordinal].uuid for ordinal in placed.ordinals]
            assert can == (not refused.intersection(enumerate(used))), (uuids, avoid)
            assert can != any("no other device for it here" in line for line in placed.lines)


def test_where_an_ordinal_means_a_device_it_is_not_taken_for_another(tmp_path: Path) -> None:
    """AMD boards, say: nobody writes their list, so only ranks may change places."""
    devices = listed(tmp_path).stand_ins(2)
    fixed = place(VisibleList(), devices, 2, [quarantined("GPU-a")], is_fixed=True)
    assert [device.uuid for device in fixed.devices] == ["GPU-a", "GPU-b"]
    swapped = place(VisibleList(), devices, 2, [suspect("GPU-a", rank=0)], is_fixed=True)
    assert swapped.ordinals == (1, 0)


def test_a_rank_is_told_of_a_gpu_only_what_is_certain() -> None:
    alike = [Device(f"GPU-{i}", model="H200", vbios="1", driver="570") for i in range(2)]
    unlike = [alike[0], Device("GPU-9", model="T4", vbios="1", driver="570")]
    same = {"RSUP_DEVICE_VBIOS": "1", "RSUP_DEVICE_DRIVER": "570"}

    def told(boards: list[Device], sees_one: bool = False, order: str | None = "PCI_BUS_ID") -> Any:
        visible = read_visible(None, order, boards)
        return device_environments(place(visible, [], 2, []), visible, sees_one)[1]

    assert told(alike) == same | {"RSUP_DEVICE_MODEL": "H200"}, "which one it takes only it knows"
    assert told(alike, sees_one=True) == same | {"RSUP_DEVICE_MODEL": "H200", "RSUP_DEVICE_UUID": "GPU-1"}
    assert told(unlike) == same and told(unlike, sees_one=True, order=None) == same
    assert told(alike[:1])["RSUP_DEVICE_UUID"] == "GPU-0", "there is no other"


def test_a_cpu_stand_in_is_told_too() -> None:
    (told, _) = choose_seats(start(2), None, Inventory()).device_environments
    assert told["RSUP_DEVICE_UUID"].startswith("CPU-") and told["RSUP_DEVICE_MODEL"] == "CPU"
    assert SimpleNamespace(**told).RSUP_DEVICE_UUID.endswith("-0")
