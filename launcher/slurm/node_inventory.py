"""Which GPU has which index in this boot: `/run/rsup/inventory.json`. Standard library only: the prolog reads it.

`index` of a device is the number N of its `/dev/nvidiaN`, which stays with the board until the driver is loaded again. What
SLURM_JOB_GPUS counts is not always that (`gres_order`): `boards` has the boards that each of SLURM's numbers may stand for.
Whatever one has stood for in this boot is kept: once it has stood for two boards, a job that got it may have either. `doubt`:
why SLURM's numbers say nothing here.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rsup.launcher.slurm.gate_decision import IndexMap
from rsup.launcher.slurm.node_settings import NodeProblem, read_trusted

SCHEMA = 1
MAX_INVENTORY_BYTES = 1 << 20


def read_boards(path: Path, boot: str) -> IndexMap:
    """What the indexes stand for, by the file of this boot. Never raises: what cannot be known is in `problem`."""
    content = read_content(path)
    if isinstance(content, str):
        return IndexMap(problem=content)
    if content.get("boot_id") != boot:
        return IndexMap(problem="the inventory is of another boot; rsup slurm healthcheck writes it anew")
    here = tuple(device["uuid"] for device in content["devices"])
    if content.get("doubt"):
        return IndexMap(problem=str(content["doubt"]), here=here)
    return IndexMap({index: tuple(uuids) for index, uuids in content["boards"].items()}, here=here)


def read_content(path: Path) -> dict[str, Any] | str:
    """The file's content, or why there is none."""
    try:
        content = json.loads(read_trusted(path, MAX_INVENTORY_BYTES))
        if content["schema"] != SCHEMA or not all(isinstance(uuids, list) for uuids in content["boards"].values()):
            return f"the inventory has schema {content['schema']!r}"
        if not all(isinstance(device["uuid"], str) for device in content["devices"]):
            return "the inventory has a device without a name"
    except FileNotFoundError:
        return "there is no inventory yet; rsup slurm healthcheck writes it"
    except (NodeProblem, OSError) as error:
        return f"the inventory cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the inventory cannot be read: {type(error).__name__}"
    assert isinstance(content, dict)
    return content


Numbering = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Sequence[str]] | str]
"""SLURM's numbers of the devices by UUID, or why they cannot be said."""


def merged(
    old: Mapping[str, Any] | None, boot: str, found: Sequence[Mapping[str, Any]], numbering: Numbering | None = None
) -> dict[str, Any]:
    """The inventory after a reading. `old`: the one before, of whatever boot. `found`: devices with `index` and `uuid`.
    `numbering`: None where SLURM counts as they do."""
    is_same_boot = old is not None and old.get("boot_id") == boot
    before: Mapping[str, Sequence[str]] = old["boards"] if old and is_same_boot else {}
    # A board without a name has one as soon as it answers.
    boards = {number: [uuid for uuid in uuids if not uuid.startswith("/")] for number, uuids in before.items()}
    devices = [dict(device) for device in found]
    seen = {device["uuid"] for device in found}
    if old and is_same_boot:
        devices += [{**device, "missing": True} for device in old["devices"] if device["uuid"] not in seen]
    numbers = numbering(devices) if numbering else {device["uuid"]: (str(device["index"]),) for device in found}
    doubt = numbers if isinstance(numbers, str) else ""
    for uuid, given in () if isinstance(numbers, str) else numbers.items():
        for number in given:
            known = boards.setdefault(number, [])
            if uuid not in known:
                known.append(uuid)
    return {"schema": SCHEMA, "boot_id": boot, "boards": boards, "devices": devices, "doubt": doubt}


def missing(inventory: Mapping[str, Any]) -> list[str]:
    """UUIDs of devices that were here in this boot and are not any more."""
    return [device["uuid"] for device in inventory["devices"] if device.get("missing")]


def sure_boards(boards: IndexMap, indexes: Iterable[str]) -> tuple[str, ...]:
    """The boards of those indexes that stand for one alone."""
    found = (boards.boards.get(index, ()) for index in indexes)
    return tuple(uuids[0] for uuids in found if len(uuids) == 1)
