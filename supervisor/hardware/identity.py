"""Which board a device is, and where it sits: by UUID, serial, and PCI bus id, never by a host's ordinal. Pure.

A board's record goes with its serial: the same serial under another UUID, or on another node, continues it. A claim that cannot
be true, since the board is alive elsewhere, is contested: no seat moves for it, and nothing is believed of it. Boards with
several GPUs, and MIG instances, share one serial on one node; that is no contradiction.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from rsup.supervisor.records import SeatSaved
from rsup.supervisor.wire import Device

STAND_IN = "CPU-"
"""UUIDs of CPU stand-ins begin so: they are no boards, and sit nowhere."""

_PCI = re.compile(r"(?:pci:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.ASCII)


def is_stand_in(uuid: str) -> bool:
    """Whether it stands for a rank's CPU."""
    return uuid.startswith(STAND_IN)


def normal_pci(text: str) -> str:
    """A PCI bus id in the one form that is stored, `00000000:1b:00.0`; text that is none comes back in lower case."""
    low = text.strip().lower()
    found = _PCI.fullmatch(low)
    if found is None:
        return low
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):08x}:{int(bus, 16):02x}:{int(slot, 16):02x}.{int(function or '0')}"


@dataclass
class Seating:
    """What a node's list of devices changes. `contested`: for devices whose claim cannot be true, why, by UUID."""

    seats: list[SeatSaved] = field(default_factory=list)
    contested: dict[str, str] = field(default_factory=dict)


def seat(
    devices: Iterable[Device],
    node: str,
    boot_id: str,
    known: Sequence[SeatSaved],
    is_alive: Callable[[str, str], bool],
    now_us: int,
) -> Seating:
    """Where these devices sit from now on. `known`: open seats of their UUIDs and serials, and of the node. `is_alive(uuid,
    node)`: an agent on that node, which answers, has that device."""
    listed = [device for device in devices if not is_stand_in(device.uuid)]
    here = {device.uuid for device in listed}
    found, closed = Seating(), set[str]()
    for device in listed:
        why = _contradiction(device, node, known, is_alive)
        if why:
            found.contested[device.uuid] = why
            continue
        pci = normal_pci(device.pci_bus_id)
        mine = next((one for one in known if one.uuid == device.uuid), None)
        for other in known:
            if other.uuid != device.uuid and other.uuid not in closed and _gave_way(other, device, node, pci, here):
                closed.add(other.uuid)
                found.seats.append(replace(other, to_us=now_us, seen_us=max(other.seen_us, now_us)))
        if mine is not None and (mine.node, mine.pci_bus_id) == (node, pci):
            same = {"serial": device.serial or mine.serial, "board": device.board or mine.board}
            found.seats.append(replace(mine, seen_us=max(mine.seen_us, now_us), boot_id=boot_id or mine.boot_id, **same))
            continue
        if mine is not None:
            found.seats.append(replace(mine, to_us=now_us, seen_us=max(mine.seen_us, now_us)))
        from_us = now_us if mine is None else max(now_us, mine.from_us + 1)
        new = SeatSaved(device.uuid, from_us, node, pci, device.serial, device.board, None, now_us, boot_id)
        found.seats.append(new)
    return found


def _contradiction(device: Device, node: str, known: Sequence[SeatSaved], is_alive: Callable[[str, str], bool]) -> str:
    for other in known:
        if other.uuid == device.uuid and other.node != node and is_alive(other.uuid, other.node):
            return f"{device.uuid} is alive on node {other.node}"
        same_serial = bool(device.serial) and other.serial == device.serial
        if same_serial and other.node != node and is_alive(other.uuid, other.node):
            return f"serial {device.serial} is that of {other.uuid}, alive on node {other.node}"
        if other.uuid == device.uuid and device.serial and other.serial and other.serial != device.serial:
            return f"{device.uuid} has serial {other.serial}, not {device.serial}"
        if same_serial and other.board and device.board and other.board != device.board:
            return f"serial {device.serial} is that of a board {other.board}, not {device.board}"
    return ""


def _gave_way(other: SeatSaved, device: Device, node: str, pci: str, here: set[str]) -> bool:
    """Whether the other stay is over: another board is in its place, or the same board has moved under a new UUID."""
    if other.uuid in here:
        return False
    if bool(device.serial) and other.serial == device.serial and other.node != node:
        return True
    return bool(pci) and (other.node, other.pci_bus_id) == (node, pci)
