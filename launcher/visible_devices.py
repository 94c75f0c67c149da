"""What `CUDA_VISIBLE_DEVICES` leaves of a node's boards, read as CUDA reads it. Pure.

CUDA counts boards by `CUDA_DEVICE_ORDER`: by PCI address (`PCI_BUS_ID`, which is also NVML's order), else the fastest first,
which is the same where all boards are alike. The first entry says what the others are: indices, UUIDs (any unambiguous
beginning of `GPU-...`) or MIG names; the list ends at the first entry that names nothing or is of another kind, and names
nothing at all where one device comes twice.
Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rsup.supervisor.wire import Device


class Naming(StrEnum):
    """How the devices of a list are named."""

    INDEX = "index"
    UUID = "uuid"
    MIG = "mig"


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """One entry of the list. `word`: as the user wrote it; `index`: the board's place by PCI address, -1 for a MIG instance."""

    device: Device
    word: str
    index: int = -1


@dataclass(frozen=True, slots=True)
class VisibleList:
    """The devices that CUDA shows, by ordinal. Empty: none, or no CUDA here."""

    devices: tuple[VisibleDevice, ...] = ()
    naming: Naming = Naming.INDEX
    is_certain: bool = True
    """Whether it is known which board an index means: not with unlike boards counted fastest first."""
    was_set: bool = False


def naming_of(shown: str | None) -> Naming:
    """How a value of `CUDA_VISIBLE_DEVICES` names devices; by index where it is unset."""
    first = (shown or "").split(",")[0].strip()
    return Naming.MIG if first.startswith("MIG-") else Naming.UUID if first.startswith("GPU-") else Naming.INDEX


def index_of(word: str) -> int:
    """The index that an entry begins with, as strtoul reads it; -1 if there is none."""
    match = re.match(r"\+?(\d+)", word)
    return int(match[1]) if match else -1


def read_visible(
    shown: str | None,
    order: str | None,
    boards: Sequence[Device],
    find_mig: Callable[[str], Device | None] = lambda name: None,
) -> VisibleList:
    """The list for a value of `CUDA_VISIBLE_DEVICES` (None: unset) and of `CUDA_DEVICE_ORDER`. `boards` by PCI address."""
    naming = naming_of(shown)
    alike = len({board.model for board in boards}) < 2
    is_certain = naming is not Naming.INDEX or alike or (order or "").strip() == "PCI_BUS_ID"
    if shown is None:
        every = tuple(VisibleDevice(board, str(index), index) for index, board in enumerate(boards))
        return VisibleList(every, naming, is_certain)
    found: list[VisibleDevice] = []
    for word in (entry.strip() for entry in shown.split(",")):
        one = _find(word, naming, boards, find_mig)
        if one is None:
            break
        found.append(one)
    names = [(one.index, one.device.uuid) for one in found]
    return VisibleList(tuple(found) if len(set(names)) == len(names) else (), naming, is_certain, was_set=True)


def _find(
    word: str, naming: Naming, boards: Sequence[Device], find_mig: Callable[[str], Device | None]
) -> VisibleDevice | None:
    if naming is Naming.MIG:
        instance = find_mig(word) if word.startswith("MIG-") else None
        return VisibleDevice(instance, word) if instance else None
    if naming is Naming.INDEX:
        index = index_of(word)
        return VisibleDevice(boards[index], word, index) if 0 <= index < len(boards) else None
    matches = [i for i, board in enumerate(boards) if word.startswith("GPU-") and board.uuid.startswith(word)]
    return VisibleDevice(boards[matches[0]], word, matches[0]) if len(matches) == 1 else None
