"""Which GPU has which index in this boot: `/run/rsup/inventory.json`. Standard library only: the prolog reads it.

An index here is the number N of `/dev/nvidiaN`, which is what SLURM's `File=` and SLURM_JOB_GPUS speak of. It stays with its
board until the driver is loaded again. Whatever an index has stood for in this boot is kept (`boards`): once it has stood for
two boards, a job that got the index may have either.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
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
    return IndexMap({index: tuple(uuids) for index, uuids in content["boards"].items()})


def read_content(path: Path) -> dict[str, Any] | str:
    """The file's content, or why there is none."""
    try:
        content = json.loads(read_trusted(path, MAX_INVENTORY_BYTES))
        if content["schema"] != SCHEMA or not all(isinstance(uuids, list) for uuids in content["boards"].values()):
            return f"the inventory has schema {content['schema']!r}"
    except FileNotFoundError:
        return "there is no inventory yet; rsup slurm healthcheck writes it"
    except (NodeProblem, OSError) as error:
        return f"the inventory cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the inventory cannot be read: {type(error).__name__}"
    assert isinstance(content, dict)
    return content


def merged(old: Mapping[str, Any] | None, boot: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inventory after a reading. `old`: the one before, of whatever boot. `found`: devices with `index` and `uuid`."""
    is_same_boot = old is not None and old.get("boot_id") == boot
    boards: dict[str, list[str]] = {k: list(v) for k, v in old["boards"].items()} if old and is_same_boot else {}
    for device in found:
        known = boards.setdefault(str(device["index"]), [])
        if device["uuid"] not in known:
            known.append(device["uuid"])
    devices = [dict(device) for device in found]
    seen = {device["uuid"] for device in found}
    if old and is_same_boot:
        devices += [{**device, "missing": True} for device in old["devices"] if device["uuid"] not in seen]
    return {"schema": SCHEMA, "boot_id": boot, "boards": boards, "devices": devices}


def missing(inventory: Mapping[str, Any]) -> list[str]:
    """UUIDs of devices that were here in this boot and are not any more."""
    return [device["uuid"] for device in inventory["devices"] if device.get("missing")]


def sure_boards(boards: IndexMap, indexes: Iterable[str]) -> tuple[str, ...]:
    """The boards of those indexes that stand for one alone."""
    found = (boards.boards.get(index, ()) for index in indexes)
    return tuple(uuids[0] for uuids in found if len(uuids) == 1)
