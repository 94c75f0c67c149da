"""Which boards of this node SLURM may mean by which number, by its gres.conf and slurm.conf.

SLURM_JOB_GPUS and SLURM_STEP_GPUS have the place of a GPU in slurmd's own list (measured on 22.05), in older releases the
number N of its `/dev/nvidiaN`. They differ as soon as gres.conf leaves a board out, and slurmd sorts its list by rules of its
own. So a number stands here for every board that any of these readings gives it: one alone where they agree. Pure but for
`read_gres`.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsup.launcher.slurm.hostnames import node_names
from rsup.launcher.slurm.slurm_conf import conf_lines, include_beside

CONF_PLACES = (
    "/run/slurm/conf/slurm.conf",  # of a slurmd that has its files from slurmctld
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
)
MAX_TYPES = 3
UNSEEN = "/dev/nvidia"
"""With its N the name of a board that gres.conf has and the driver does not tell of."""
_WORD = re.compile(r'([A-Za-z0-9_]+)\s*=\s*("[^"]*"|[^\s"]+)')
_MINOR = re.compile(r"nvidia(\d+)$")


@dataclass(frozen=True, slots=True)
class Gres:
    """`files`: type and N of each `/dev/nvidiaN` that gres.conf names for this node, in its order; empty: slurmd finds them by
    itself. `count`: how many GPUs slurm.conf gives the node, None: unknown. `problem`: why nothing can be said."""

    files: tuple[tuple[str, int], ...] = ()
    count: int | None = None
    problem: str = ""


def read_gres(environ: Mapping[str, str], node: str, places: Sequence[str] = CONF_PLACES) -> Gres:
    """What the files of this node say. Never raises."""
    named = environ.get("SLURM_CONF")
    path = Path(named) if named else next((Path(name) for name in places if Path(name).exists()), None)
    if path is None:
        return Gres(problem="no slurm.conf was found; name it by SLURM_CONF")
    texts = []
    for one in (path, path.parent / "gres.conf"):
        try:
            texts.append("\n".join(conf_lines(one.read_text(errors="replace"), include_beside(one))))
        except FileNotFoundError:
            texts.append("")  # slurmd does without a gres.conf
        except OSError as error:
            return Gres(problem=f"cannot read {one}: {error.strerror}")
    return gres_of(texts[0], texts[1], node)


def gres_of(slurm_conf: str, gres_conf: str, node: str) -> Gres:
    """The same by the texts, includes and comments already out of them."""
    count = _count(slurm_conf, node)
    files: list[tuple[str, int]] = []
    for words in _lines(gres_conf):
        if "nodename" in words and node not in node_names(words["nodename"]):
            continue
        if words.get("autodetect", "off").lower() != "off":
            return Gres((), count)  # what slurmd finds is merged with what is written
        if words.get("name", "").lower() != "gpu":
            continue
        names = node_names(words.get("file", ""))  # File= is written as lists of nodes are
        minors = [_MINOR.search(name) for name in names]
        if "multiplefiles" in words or (names and not all(minors)):
            return Gres((), count, "gres.conf names GPUs otherwise than by /dev/nvidiaN")
        if not names:
            return Gres((), count)
        files += [(words.get("type", "").lower(), int(minor[1])) for minor in minors if minor]
    return Gres(tuple(files), count)


def numbers(devices: Sequence[Mapping[str, Any]], gres: Gres) -> dict[str, tuple[str, ...]] | str:
    """SLURM's numbers that each board may have, by UUID, or why that cannot be said. `devices`: those of this boot, `index`
    being their N."""
    if not devices or gres.count == 0:  # no job gets a number here
        return {}
    if gres.problem:
        return gres.problem
    if gres.files:
        return _by_files(devices, gres.files)
    minors = sorted({int(one["index"]) for one in devices})
    if gres.count is None:
        return "slurm.conf does not say how many GPUs this node has"
    if minors != list(range(gres.count)):
        return f"slurm.conf gives this node {gres.count} GPUs, and the driver has numbers {minors}"
    buses = [str(one.get("pci_bus_id") or "") for one in sorted(devices, key=lambda one: int(one["index"]))]
    if not all(buses) or buses != sorted(buses):
        return "the driver does not number the GPUs in the order of their PCI addresses; name them by File= in gres.conf"
    if len({one.get("model") for one in devices}) > 1:
        return "the GPUs are of several models, which slurmd sorts; name them by File= in gres.conf"
    return {one["uuid"]: (str(one["index"]),) for one in devices}


def _by_files(devices: Sequence[Mapping[str, Any]], files: Sequence[tuple[str, int]]) -> dict[str, tuple[str, ...]] | str:
    types = list(dict.fromkeys(kind for kind, _ in files))
    if len(types) > MAX_TYPES:
        return f"gres.conf has GPUs of {len(types)} types"
    orders = [[minor for _, minor in files], sorted(minor for _, minor in files)]
    for groups in itertools.permutations(types):
        orders += [[minor for kind in groups for one, minor in base if one == kind] for base in (files, sorted(files))]
    names: dict[int, list[str]] = {}
    for device in devices:
        names.setdefault(int(device["index"]), []).append(device["uuid"])
    found: dict[str, tuple[str, ...]] = {}
    for minor in orders[0]:  # a board that is left out is no job's; one that does not answer may be
        given = {minor, *(order.index(minor) for order in orders)}
        for uuid in names.get(minor, [f"{UNSEEN}{minor}"]):
            found[uuid] = tuple(map(str, sorted(given)))
    return found


def _lines(text: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        words = {key.lower(): value.strip('"') for key, value in _WORD.findall(line)}
        if words:
            yield words


def _count(slurm_conf: str, node: str) -> int | None:
    """GPUs by `NodeName=... Gres=gpu:TYPE:N`, those of all types together; None where the node is not named."""
    default, found = "", None
    for words in _lines(slurm_conf):
        if "nodename" not in words:
            continue
        if words["nodename"].lower() == "default":
            default = words.get("gres", default)
        elif node in node_names(words["nodename"]):
            found = words.get("gres", default)
    if found is None:
        return None
    total = 0
    for item in re.sub(r"\([^)]*\)", "", found).lower().split(","):
        name, *rest = item.split(":")
        if name == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    return total
