"""Which device or node a person means: a UUID or the beginning of one, a serial, `NODE:INDEX`, or `NODE:PCI` for what sat there
at a time.

The serial belongs to the board: what was seen of it under another UUID at another time is part of its story. Several UUIDs of
one serial at one time are several GPUs of a board, or MIG instances: each has its own. Serials that boards without one report
(`0`, `N/A`, ...) name nothing.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Select, or_, select

from rsup.supervisor.hardware.identity import normal_pci
from rsup.supervisor.hardware_views import UnknownHardware, is_known_node
from rsup.supervisor.tables import devices, seats, subjects
from rsup.supervisor.wire import UsageError

MIN_PREFIX_CHARS = 4
MAX_BOARD_UUIDS = 16
_PLACE = re.compile(r"(?P<node>.+?):(?P<pci>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-9a-fA-F])?)")
_NO_SERIAL = ("", "n/a", "na", "none", "null", "unknown", "unset", "[n/a]", "not available", "default string")


class AmbiguousHardware(UsageError):
    """The words name several devices."""


@dataclass(frozen=True)
class FoundDevice:
    """A device of this store. `uuids`: all under which its board was seen, `uuid` among them."""

    uuid: str
    uuids: tuple[str, ...]
    serial: str = ""


def find_device(connection: Connection, selector: str, at_us: int | None = None) -> FoundDevice:
    """The device that `selector` names; `NODE:PCI` means what sits there now, or sat there at `at_us`.
    Raise `UnknownHardware` or `AmbiguousHardware`."""
    found = _of_uuid(connection, selector) or _of_place(connection, selector, at_us) or _of_serial(connection, selector)
    found = found or _of_index(connection, selector) or _of_prefix(connection, selector)
    if not found and len(selector.removeprefix("GPU-")) < MIN_PREFIX_CHARS:
        what = f"the beginning of a UUID needs at least {MIN_PREFIX_CHARS} characters (without `GPU-`)"
        raise UnknownHardware(f"no device {selector[:200]!r} in this store; {what}; `rsup devices list` lists them")
    if not found:
        raise UnknownHardware(f"no device {selector[:200]!r} in this store; `rsup devices list` lists them")
    boards = {device.uuids: device for device in (_board(connection, uuid) for uuid in _newest_last(connection, found))}
    if len(boards) > 1:
        names = ", ".join(sorted(found)[:4]) + (", ..." if len(found) > 4 else "")
        raise AmbiguousHardware(f"{selector[:200]!r} may be any of {names}; write more of it")
    return next(iter(boards.values()))


def _newest_last(connection: Connection, uuids: list[str]) -> list[str]:
    if len(uuids) < 2:
        return uuids
    seen = connection.execute(select(devices.c.uuid, devices.c.at_us).where(devices.c.uuid.in_(uuids)))
    at_us = {uuid: last_us for uuid, last_us in seen}
    return sorted(uuids, key=lambda uuid: at_us.get(uuid, 0))


def find_node(connection: Connection, name: str, others: Collection[str] = ()) -> str:
    """`name`, if the store knows that node, or it is one of `others`. Raise `UnknownHardware`."""
    if name not in others and not is_known_node(connection, name):
        raise UnknownHardware(f"no node {name[:200]!r} in this store; `rsup nodes list` lists them")
    return name


def is_serial(serial: str) -> bool:
    """Whether that names one board."""
    return serial.strip().lower() not in _NO_SERIAL and bool(serial.strip("0 "))


def _of_uuid(connection: Connection, selector: str) -> list[str]:
    """A device that was seen, or that somebody spoke about before it was ever seen."""
    known = connection.execute(select(devices.c.uuid).where(devices.c.uuid == selector)).scalar()
    judged = select(subjects.c.subject).where(subjects.c.kind == "device", subjects.c.subject == selector)
    return [selector] if known is not None or connection.execute(judged).scalar() is not None else []


def _of_serial(connection: Connection, selector: str) -> list[str]:
    if not is_serial(selector):
        return []
    seen = connection.execute(select(devices.c.uuid).where(devices.c.serial == selector).limit(MAX_BOARD_UUIDS)).scalars()
    sat = connection.execute(select(seats.c.uuid).where(seats.c.serial == selector).limit(MAX_BOARD_UUIDS)).scalars()
    return sorted({*seen, *sat})


def _of_place(connection: Connection, selector: str, at_us: int | None) -> list[str]:
    place = _PLACE.fullmatch(selector)
    if place is None:
        return []
    node, pci = place["node"], normal_pci(place["pci"])
    stays = connection.execute(select(seats).where(seats.c.node == node, seats.c.pci_bus_id == pci)).mappings().all()
    if at_us is not None:
        return sorted({row["uuid"] for row in stays if row["from_us"] <= at_us and (row["to_us"] or at_us + 1) > at_us})
    if stays:
        last = max(stays, key=lambda row: (row["to_us"] is None, row["from_us"]))
        return sorted({row["uuid"] for row in stays if row["to_us"] is None}) or [last["uuid"]]
    there = connection.execute(select(devices.c.uuid, devices.c.pci_bus_id).where(devices.c.node == node))
    return sorted(uuid for uuid, bus in there if normal_pci(bus) == pci)


def _of_index(connection: Connection, selector: str) -> list[str]:
    """`NODE:0`: the first of the boards that sit there now, by PCI bus id, as the driver's own tools count."""
    node, _, index = selector.rpartition(":")
    if not node or not index.isdecimal() or len(index) > 3:
        return []
    stays = select(seats.c.pci_bus_id, seats.c.uuid).where(seats.c.node == node, seats.c.to_us.is_(None))
    places = sorted({(row.pci_bus_id, row.uuid) for row in connection.execute(stays)})
    buses = sorted({bus for bus, _ in places})
    return [uuid for bus, uuid in places if int(index) < len(buses) and bus == buses[int(index)]]


def _of_prefix(connection: Connection, selector: str) -> list[str]:
    if len(selector.removeprefix("GPU-")) < MIN_PREFIX_CHARS:
        return []
    starts = [selector, f"GPU-{selector.lower()}"]
    query: Select[tuple[str]] = select(devices.c.uuid).where(or_(*(_begins(connection, start) for start in starts)))
    return [str(row[0]) for row in connection.execute(query.limit(MAX_BOARD_UUIDS))]


def _begins(connection: Connection, start: str) -> ColumnElement[bool]:
    """SQLite's LIKE ignores case and so its index; PostgreSQL orders text by the database's language."""
    if connection.dialect.name == "sqlite":
        return devices.c.uuid.between(start, start + "\U0010ffff")
    return devices.c.uuid.startswith(start, autoescape=True)


def _board(connection: Connection, uuid: str) -> FoundDevice:
    """The device with the UUIDs under which its board was seen at other times."""
    seen = devices.c
    times = select(seen.uuid, seen.serial, seen.first_us, seen.at_us)
    row = connection.execute(times.where(seen.uuid == uuid)).first()
    if row is None or not is_serial(row.serial):
        return FoundDevice(uuid, (uuid,), row.serial if row else "")
    others = connection.execute(times.where(seen.serial == row.serial, seen.uuid != uuid).limit(MAX_BOARD_UUIDS))
    apart = {other.uuid for other in others if other.at_us < row.first_us or row.at_us < other.first_us}
    return FoundDevice(uuid, tuple(sorted({uuid, *apart})), row.serial)
