"""The devices of a node as a JSON file lists them: for hosts without NVML, for what NVML does not tell, and for tests.

The file is a list of records, or an object with a list called `devices`. Of a record only `uuid` is required; a record with a
`node` counts on that node alone. `health` is what NVML would say of the device (`device_health`); it is read again whenever the
file changes, all else once, when the launch starts. A key that is none of ours is refused, since a slip of the pen would say
nothing otherwise; a site's own keys begin with `_` or `x-`.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from rsup.supervisor.wire import Device, UsageError

FLAG = "--device-inventory"
MAX_FILE_BYTES = 16 << 20
MAX_NAME_CHARS = 200


class ListedHealth(Struct, frozen=True):
    """What a file says of a device's health, in NVML's terms. Counts are totals since the boot."""

    xid: list[int] = []
    """Xid events, oldest first; one that comes twice counts twice."""
    recovery_action: str = "none"
    """`none`, `reset`, `reboot`, `drain-p2p` or `drain-and-reset`."""
    ecc_uncorrected: int = 0
    remapped_rows: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    throttle: list[str] = []
    """Of `hw-thermal` and `hw-power-brake`: braked for minutes, under load."""
    link_errors: int = 0
    unreadable: list[str] = []
    """Queries that fail or hang."""


class ListedDevice(Struct, frozen=True):
    """A record of the file."""

    uuid: str
    serial: str = ""
    model: str = ""
    board: str = ""
    pci_bus_id: str = ""
    vbios: str = ""
    driver: str = ""
    node: str = ""
    health: ListedHealth | None = None

    @property
    def device(self) -> Device:
        return Device(self.uuid, self.model, self.serial, self.board, self.pci_bus_id, self.vbios, self.driver)


class _Listing(Struct, frozen=True):
    devices: list[ListedDevice]


def read_inventory_file(path: Path, node: str, named_by: str = FLAG) -> tuple[ListedDevice, ...]:
    """The records of `path` that count on `node`, in the file's order. Raise `UsageError` for a file that cannot be used.
    `named_by`: the flag by which somebody has named it; empty: it stands in its usual place."""
    try:
        return _read(path, node)
    except _Unusable as problem:
        raise UsageError(f"{named_by} {path}: {problem}".lstrip()) from None


class _Unusable(Exception):
    """Why a file cannot be used."""


def _read(path: Path, node: str) -> tuple[ListedDevice, ...]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _Unusable(f"cannot be read: {error.strerror}; check its path and permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise _Unusable(f"is longer than {MAX_FILE_BYTES >> 20} MiB; is that the right file?")
    records = _decode(data)
    for where, key, known in _unknown_keys(data):
        order = "the place in the list is the index; " if key == "index" else ""
        raise _Unusable(f"{where}unknown key {key[:60]!r}; {order}there are {', '.join(known)}; keys of your own begin with x-")
    seen: set[str] = set()
    for place, record in enumerate(records):
        for name in ("uuid", "serial", "model", "board", "pci_bus_id", "vbios", "driver", "node"):
            _check_text(place, name, getattr(record, name))
        if not record.uuid.strip():
            raise _Unusable(f"record {place} has an empty uuid; each device needs its own")
        if record.uuid in seen:
            raise _Unusable(f"{record.uuid} comes twice; each device is listed once")
        seen.add(record.uuid)
    return tuple(record for record in records if record.node in ("", node))


def _decode(data: bytes) -> list[ListedDevice]:
    is_object = data.lstrip()[:1] == b"{"
    try:
        if is_object:
            return msgspec.json.decode(data, type=_Listing).devices
        return msgspec.json.decode(data, type=list[ListedDevice])
    except msgspec.ValidationError as error:
        raise _Unusable(f'{error}; write [{{"uuid": "GPU-...", "serial": "..."}}, ...]') from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Unusable(f"is no JSON: {error}") from None


def _unknown_keys(data: bytes) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Where, the key, and what keys there are. `data` has been read as records before."""
    content = msgspec.json.decode(data)
    if isinstance(content, dict):
        yield from _foreign("", content, _Listing)
        content = content["devices"]
    for place, record in enumerate(content):
        yield from _foreign(f"record {place}: ", record, ListedDevice)
        yield from _foreign(f"record {place}: health: ", record.get("health") or {}, ListedHealth)


def _foreign(where: str, record: dict[str, object], kind: type[Struct]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    known = kind.__struct_fields__
    return ((where, key, known) for key in record if key not in known and not key.startswith(("_", "x-")))


def _check_text(place: int, name: str, text: str) -> None:
    if len(text) > MAX_NAME_CHARS or not (text.isprintable() and _is_utf8(text)):
        raise _Unusable(f"record {place}: {name} must be at most {MAX_NAME_CHARS} printable characters")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
