"""CUDA_VISIBLE_DEVICES as found, what is to be avoided, and what becomes of it: tables."""

import itertools

import pytest

from rsup.launcher.device_placement import place
from rsup.launcher.visible_devices import Naming, VisibleList, read_visible
from rsup.supervisor.wire import AvoidedDevice, Device

BOARDS = [
    Device(f"GPU-{name}", model="H200", pci_bus_id=f"00000000:0{i}:00.0") for i, name in enumerate(("aa1", "aa2", "b", "c"))
]
MIXED = [*BOARDS[:3], Device("GPU-d", model="T4")]
INSTANCES = {f"MIG-{i}": Device(f"MIG-{i}", model="H200 MIG") for i in range(3)}


def visible(shown: str | None, order: str | None = None, boards: list[Device] = BOARDS) -> VisibleList:
    return read_visible(shown, order, boards, INSTANCES.get)


def suspect(*devices: str) -> list[AvoidedDevice]:
    return [AvoidedDevice(device, f"{device} failed a check") for device in devices]


def bad(*devices: str) -> list[AvoidedDevice]:
    return [AvoidedDevice(device, f"{device} is broken", quarantined=True) for device in devices]


def flagged(rank: int, device: str, ordinal: int) -> AvoidedDevice:
    return AvoidedDevice(device, "its loss was NaN", rank=rank, ordinal=ordinal)


@pytest.mark.parametrize(
    ("shown", "words", "naming"),
    [
        (None, ["GPU-aa1", "GPU-aa2", "GPU-b", "GPU-c"], Naming.INDEX),
        ("2,0", ["GPU-b", "GPU-aa1"], Naming.INDEX),
        (" 2 , 0 ", ["GPU-b", "GPU-aa1"], Naming.INDEX),
        ("1gpu2,2ampere", ["GPU-aa2", "GPU-b"], Naming.INDEX),
        ("0,-1,2", ["GPU-aa1"], Naming.INDEX),
        ("0,9,2", ["GPU-aa1"], Naming.INDEX),
        ("0,GPU-b", ["GPU-aa1"], Naming.INDEX),
        ("0,0", [], Naming.INDEX),
        ("NoDevFiles", [], Naming.INDEX),
        ("", [], Naming.INDEX),
        ("GPU-b,GPU-aa2", ["GPU-b", "GPU-aa2"], Naming.UUID),
        ("GPU-b,GPU-aa,GPU-c", ["GPU-b"], Naming.UUID),
        ("GPU-b,1", ["GPU-b"], Naming.UUID),
        ("GPU-zz", [], Naming.UUID),
        ("GPU-b,GPU-b", [], Naming.UUID),
        ("MIG-2,MIG-0", ["MIG-2", "MIG-0"], Naming.MIG),
        ("MIG-2,0", ["MIG-2"], Naming.MIG),
        ("MIG-9", [], Naming.MIG),
    ],
)
def test_a_list_is_read_as_cuda_reads_it(shown: str | None, words: list[str], naming: Naming) -> None:
    found = visible(shown)
    assert ([one.device.uuid for one in found.devices], found.naming) == (words, naming)


@pytest.mark.parametrize(
    ("shown", "ranks", "avoided", "new", "devices"),
    [
        # nothing to avoid among the visible: not even set
        (None, 4, [], None, "aa1 aa2 b c"),
        ("2,0", 2, suspect("GPU-c"), None, "b aa1"),
        (None, 2, suspect("GPU-elsewhere"), None, "aa1 aa2"),
        # a suspect swaps with a spare, the others keep their device
        (None, 2, suspect("GPU-aa1"), "2,1,3,0", "b aa2"),
        (None, 3, suspect("GPU-aa2"), "0,3,2,1", "aa1 c b"),
        ("2,0,3", 2, suspect("GPU-b"), "3,0,2", "c aa1"),
        # suspects come last, also where no rank had one
        (None, 2, suspect("GPU-b"), "0,1,3,2", "aa1 aa2"),
        (None, 2, suspect("GPU-c"), None, "aa1 aa2"),
        # quarantined stays out where the others suffice
        (None, 3, bad("GPU-aa1"), "3,1,2", "c aa2 b"),
        (None, 2, bad("GPU-c"), "0,1,2", "aa1 aa2"),
        (None, 4, bad("GPU-aa1"), None, "aa1 aa2 b c"),
        (None, 3, bad("GPU-aa1", "GPU-c"), "0,1,2", "aa1 aa2 b"),
        # a quarantined one gives way before a suspect, and to a suspect if need be
        (None, 3, suspect("GPU-aa1") + bad("GPU-aa2"), "0,3,2", "aa1 c b"),
        (None, 3, bad("GPU-aa1") + suspect("GPU-c"), "3,1,2", "c aa2 b"),
        # named as the user named them
        ("GPU-b,GPU-aa2,GPU-c", 2, suspect("GPU-b"), "GPU-c,GPU-aa2,GPU-b", "c aa2"),
        ("GPU-aa1,GPU-c", 1, bad("GPU-aa1"), "GPU-c", "c"),
        ("MIG-0,MIG-1,MIG-2", 2, suspect("MIG-1"), "MIG-0,MIG-2,MIG-1", "0 2"),
        # more ranks than devices: nothing is free
        ("0,1", 3, suspect("GPU-aa1"), None, "aa1 aa2 aa1"),
    ],
)
def test_devices_that_no_rank_should_use(
    shown: str | None, ranks: int, avoided: list[AvoidedDevice], new: str | None, devices: str
) -> None:
    placed = place(visible(shown), [], ranks, avoided)
    assert placed.shown == new
    assert " ".join(device.uuid[4:] for device in placed.devices) == devices
    assert placed.ordinals == tuple(range(ranks))
    indices = new is not None and new[0].isdecimal()
    assert placed.environment() == (
        {} if new is None else {"CUDA_VISIBLE_DEVICES": new} | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if indices else {})
    )
    if new is not None:
        assert any("broken" in line or "check" in line for line in placed.lines) or avoided == suspect("GPU-b")


def test_what_has_to_stay_in_use_is_said() -> None:
    placed = place(visible(None), [], 4, suspect("GPU-b"))
    assert placed.shown is None and placed.lines == ("GPU-b stays in use, no other device is free: GPU-b failed a check",)


@pytest.mark.parametrize(
    ("shown", "order", "new"),
    [
        ("0,1,2", None, None),
        ("0,1,2", "PCI_BUS_ID", "2,1,0"),
        (None, None, "2,1,3,0"),
        ("GPU-aa1,GPU-b", None, "GPU-b,GPU-aa1"),
    ],
)
def test_with_unlike_boards_indices_of_the_user_are_not_touched(shown: str | None, order: str | None, new: str | None) -> None:
    ranks = 1 if shown and shown.startswith("GPU") else 2
    placed = place(visible(shown, order, MIXED), [], ranks, suspect("GPU-aa1"))
    assert placed.shown == new
    assert (new is None) == any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in line for line in placed.lines)


def test_a_flagged_rank_gets_another_device_and_another_ordinal() -> None:
    everyone = place(visible(None), [], 4, [flagged(0, "GPU-aa1", 0)])
    assert everyone.shown is None and everyone.ordinals == (1, 0, 2, 3)
    assert [device.uuid for device in everyone.devices] == ["GPU-aa2", "GPU-aa1", "GPU-b", "GPU-c"]
    assert "rank 0 runs on GPU-aa2 in place of GPU-aa1 (LOCAL_RANK 1, was 0): its loss was NaN" in everyone.lines[0]
    assert "rank 1 takes its place" in everyone.lines[0]


def test_with_a_spare_the_suspect_is_left_alone_too() -> None:
    placed = place(visible(None), [], 2, [flagged(5, "GPU-aa2", 1)], first_rank=4)
    assert placed.shown == "0,2,3,1" and placed.ordinals == (1, 0)
    assert [device.uuid for device in placed.devices] == ["GPU-b", "GPU-aa1"]


def test_where_all_ranks_failed_a_spare_on_which_nothing_has_comes_first() -> None:
    """Two ranks that only changed places could not be told from their devices."""
    stand_ins = [Device(f"D{i}", model="M") for i in range(3)]
    avoid = [flagged(0, "D0", -1), flagged(1, "D1", -1)]
    placed = place(VisibleList(), stand_ins, 2, avoid)
    assert [device.uuid for device in placed.devices] == ["D2", "D0"]
    later = place(VisibleList(), stand_ins, 2, [*avoid, flagged(1, "D0", -1)])
    assert [device.uuid for device in later.devices] == ["D1", "D2"]
    beside = place(VisibleList(), [*stand_ins, Device("D3", model="M")], 3, avoid)
    assert [device.uuid for device in beside.devices] == ["D3", "D2", "D1"], "the spare, and a healthy rank's"
    alone = place(VisibleList(), stand_ins[:2], 2, avoid)
    assert [device.uuid for device in alone.devices] == ["D1", "D0"]


def test_a_lone_rank_takes_a_spare_by_its_ordinal() -> None:
    placed = place(visible("3,1"), [], 1, [flagged(0, "GPU-c", 0)])
    assert (placed.shown, placed.ordinals, placed.devices[0].uuid) == (None, (1,), "GPU-aa2")


def test_a_lone_rank_without_a_spare_stays_and_that_is_said() -> None:
    placed = place(visible("3"), [], 1, [flagged(0, "GPU-c", 0)])
    assert placed.ordinals == (0,) and placed.lines == ("rank 0 stays on GPU-c: there is no other device for it here",)


def test_ranks_without_gpus_change_places_too() -> None:
    stand_ins = [Device(f"CPU-{i}", model="CPU") for i in range(3)]
    placed = place(VisibleList(), stand_ins, 3, [flagged(2, "CPU-2", 2), flagged(0, "CPU-9", 0)])
    assert placed.ordinals == (0, 2, 1) and placed.environment() == {}
    assert [device.uuid for device in placed.devices] == ["CPU-0", "CPU-2", "CPU-1"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_whatever_is_avoided_the_placement_is_whole(ranks: int) -> None:
    """Every pair of things to avoid: ordinals are a permutation, no device twice, a flagged rank is elsewhere."""
    uuids = [board.uuid for board in BOARDS]
    things = [*suspect(*uuids), *bad(*uuids), *(flagged(r, uuids[r], r) for r in range(ranks))]
    for pair in itertools.combinations(things, 2):
        placed = place(visible(None), [], ranks, list(pair))
        assert len({device.uuid for device in placed.devices}) == ranks
        if ranks > 1:
            assert sorted(placed.ordinals) == list(range(ranks))
        used = [device.uuid for device in placed.devices]
        assert list(used) == [placed.listed[ordinal].uuid for ordinal in placed.ordinals]
        for one in pair:
            if one.rank is not None:
                assert used[one.rank] != one.device and placed.ordinals[one.rank] != one.ordinal
            elif len(BOARDS) - len({a.device for a in pair}) >= ranks:
                assert one.device not in used
