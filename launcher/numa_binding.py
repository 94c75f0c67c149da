"""`--numa-binding`: the cores that each rank is bound to before it starts, so that its memory is taken near its GPU.

`node`: all cores of the GPU's NUMA node. `socket`: all of that node's socket. `exclusive`: the node's cores, divided among the
GPUs there (torchrun's rule: the first ones get one core more). `core-complex`: one group of cores with a common last cache,
the next one for each GPU of the node. Ranks without a GPU are spread over the nodes, neighbours together. Only cores that the
launcher itself may use are given; where that leaves none, or the machine does not tell, a rank is not bound and a line says so.
Reads sysfs, sets nothing.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor.wire import Device

SYSFS = Path("/sys")
MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True, slots=True)
class Bindings:
    """`cpus[i]` for local rank i; None: it is not bound. `line` says what was bound, `warning` what was not and why."""

    cpus: tuple[frozenset[int] | None, ...]
    line: str = ""
    warning: str = ""


def bind(
    mode: str,
    devices: Sequence[Device],
    listed: Sequence[Device],
    allowed: Collection[int],
    sysfs: Path = SYSFS,
    first_rank: int = 0,
) -> Bindings:
    """Bind local rank i near `devices[i]`. `listed`: all devices that CUDA shows, for they share the cores; `allowed`: the
    cores that this process may use. Never raises."""
    assert mode in MODES, mode
    cpus: list[frozenset[int] | None] = []
    where: list[str] = []
    faults: list[str] = []
    try:
        machine = _Machine(sysfs, frozenset(allowed))
    except (OSError, ValueError) as error:
        why = f"{sysfs}/devices/system/node cannot be read ({_why(error)})"
        return Bindings((None,) * len(devices), warning=f"--numa-binding {mode} has no effect: {why}")
    claims = _claims(machine, devices, listed)
    for local_rank in range(len(devices)):
        try:
            node, nth, of = claims(local_rank)
            found = machine.cores(mode, node, nth, of)
        except (OSError, ValueError, _Unknown) as error:
            cpus.append(None)
            where.append("")
            faults.append(f"rank {first_rank + local_rank}: {_why(error)}")
        else:
            cpus.append(found)
            where.append(f"NUMA node {node}")
    warning = ""
    if faults:
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        warning = f"--numa-binding {mode}: not bound are {faults[0]}{more}; they run on all cores that the launcher may use"
    return Bindings(tuple(cpus), _line(mode, cpus, where, first_rank), warning)


def cpu_list(text: str) -> frozenset[int]:
    """The cores of a sysfs list, `0-2,4` as {0, 1, 2, 4}. Raise `ValueError` if it is none."""
    found: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{part!r} is no list of cores")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def cpu_text(cpus: Iterable[int]) -> str:
    """The shortest list: `0-2,4`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class _Unknown(Exception):
    """Why a rank cannot be bound."""


class _Machine:
    """Nodes and cores as sysfs has them. Each method raises `OSError`, `ValueError` or `_Unknown` for what it cannot tell."""

    def __init__(self, sysfs: Path, allowed: frozenset[int]) -> None:
        self._sysfs, self._allowed = sysfs, allowed
        root = sysfs / "devices/system/node"
        numbers = cpu_list((root / "online").read_text())
        self.nodes = {n: cpu_list((root / f"node{n}/cpulist").read_text()) for n in sorted(numbers)}
        self.usable = [n for n, cpus in self.nodes.items() if cpus & allowed]

    def node_of(self, device: Device) -> int:
        """The NUMA node of a GPU by its PCI address."""
        address = _sysfs_address(device.pci_bus_id)
        if address is None:
            raise _Unknown(f"the PCI address of {device.uuid or 'its GPU'} is unknown")
        number = int((self._sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        if number < 0 and len(self.nodes) > 1:
            raise _Unknown(f"the machine does not say to which NUMA node {address} belongs")
        return max(number, 0)

    def cores(self, mode: str, node: int, nth: int, of: int) -> frozenset[int]:
        """The cores of the `nth` of `of` claims on the node."""
        if node not in self.nodes:
            raise _Unknown(f"there is no NUMA node {node}")
        cpus = self.nodes[node] & self._allowed
        if not cpus:
            raise _Unknown(f"none of the cores of NUMA node {node} may be used by the launcher")
        if mode == "socket":
            socket = self._socket(min(cpus))
            with_cores = [n for n in self.usable if self._socket(min(self.nodes[n] & self._allowed)) == socket]
            return frozenset().union(*(self.nodes[n] for n in with_cores)) & self._allowed
        if mode == "exclusive":
            return self._share(node, cpus, nth, of)
        if mode == "core-complex":
            groups = _grouped(cpus, self._cache)
            ordered = sorted(groups, key=lambda group: (-len(group), min(group)))
            return ordered[nth % len(ordered)]
        return cpus

    def _share(self, node: int, cpus: frozenset[int], nth: int, of: int) -> frozenset[int]:
        cores = sorted(_grouped(cpus, self._siblings), key=min)
        each, more = divmod(len(cores), of)
        if not each:
            raise _Unknown(f"NUMA node {node} has {len(cores)} cores for {of} ranks or GPUs, none for each alone")
        begin = nth * each + min(nth, more)
        return frozenset().union(*cores[begin : begin + each + (nth < more)])

    def _cpu(self, cpu: int) -> Path:
        return self._sysfs / f"devices/system/cpu/cpu{cpu}"

    def _socket(self, cpu: int) -> int:
        return int((self._cpu(cpu) / "topology/physical_package_id").read_text())

    def _siblings(self, cpu: int) -> frozenset[int]:
        return cpu_list((self._cpu(cpu) / "topology/thread_siblings_list").read_text())

    def _cache(self, cpu: int) -> frozenset[int]:
        """The cores that share this one's last cache; of caches that hold instructions only nothing is said."""
        levels: dict[int, frozenset[int]] = {}
        for entry in (self._cpu(cpu) / "cache").glob("index[0-9]*"):
            if (entry / "type").read_text().strip() in ("Unified", "Data"):
                levels[int((entry / "level").read_text())] = cpu_list((entry / "shared_cpu_list").read_text())
        if not levels:
            raise _Unknown(f"the machine does not say which caches core {cpu} has")
        return levels[max(levels)]


def _claims(machine: _Machine, devices: Sequence[Device], listed: Sequence[Device]) -> Callable[[int], tuple[int, int, int]]:
    """For a local rank: its NUMA node, the number of its claim on that node's cores, and how many claims there are.

    A claim is a listed GPU, or each of the ranks that share one. Without GPUs each rank is one.
    """
    if any(device.model == "CPU" for device in devices):
        return lambda local_rank: _spread(machine, len(devices), local_rank)
    owners: list[tuple[Device, int | None]] = []
    for device in dict.fromkeys((*listed, *devices)):
        users = [i for i, used in enumerate(devices) if used == device]
        owners += [(device, user) for user in users] or [(device, None)]

    def claim(local_rank: int) -> tuple[int, int, int]:
        node = machine.node_of(devices[local_rank])
        here = [owner for owner in owners if _node_or_none(machine, owner[0]) == node]
        return node, [user for _, user in here].index(local_rank), len(here)

    return claim


def _spread(machine: _Machine, num_ranks: int, local_rank: int) -> tuple[int, int, int]:
    nodes = machine.usable
    if not nodes:
        raise _Unknown("no core of any NUMA node may be used by the launcher")
    place = [rank * len(nodes) // num_ranks for rank in range(num_ranks)]
    mine = place[local_rank]
    return nodes[mine], place[:local_rank].count(mine), place.count(mine)


def _node_or_none(machine: _Machine, device: Device) -> int | None:
    try:
        return machine.node_of(device)
    except (OSError, ValueError, _Unknown):
        return None


def _grouped(cpus: frozenset[int], key: Callable[[int], Hashable]) -> list[frozenset[int]]:
    groups: dict[Hashable, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu), set()).add(cpu)
    return [frozenset(group) for group in groups.values()]


def _sysfs_address(pci_bus_id: str) -> str | None:
    """`0000:dc:00.0` for NVML's `00000000:DC:00.0`; None if it is no PCI address."""
    match = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])", pci_bus_id)
    return f"{int(match[1], 16):04x}:{match[2].lower()}" if match else None


def _line(mode: str, cpus: Sequence[frozenset[int] | None], where: Sequence[str], first_rank: int) -> str:
    """Neighbours with the same cores together: `ranks 0-3 to 0-31 (NUMA node 0)`."""
    parts: list[str] = []
    begin = 0
    for i in range(1, len(cpus) + 1):
        if i < len(cpus) and (cpus[i], where[i]) == (cpus[begin], where[begin]):
            continue
        bound = cpus[begin]
        if bound is not None:
            ranks = f"rank {first_rank + begin}" if i - begin == 1 else f"ranks {first_rank + begin}-{first_rank + i - 1}"
            parts.append(f"{ranks} to {cpu_text(bound)} ({where[begin]})")
        begin = i
    return f"bound to cores (--numa-binding {mode}): {', '.join(parts)}" if parts else ""


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
