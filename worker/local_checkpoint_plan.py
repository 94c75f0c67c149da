"""Which rank keeps a copy of whose part, which saves are whole, and where each rank takes its part from. Pure.

All ranks compute this from the same gathered facts, and so come to the same answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rsup.supervisor.wire import UsageError


@dataclass(frozen=True)
class Replication:
    """How many ranks have each part (`factor`, its own included), and how far apart they are (`jump`; None: by nodes)."""

    factor: int = 2
    jump: int | None = None


@dataclass(frozen=True, order=True)
class SaveId:
    """Names one save. Ordered: a later one of the same iteration is the greater."""

    iteration: int
    attempt: int
    token: str


@dataclass(frozen=True)
class PartFile:
    """A file with the part of `rank` of one save, on `node`, whose ranks all can read it."""

    save_id: SaveId
    rank: int
    world_size: int
    node: str
    name: str


def check_replication(replication: Replication, world_size: int) -> None:
    """Raise `UsageError` where some rank would have to keep a copy of its own part, or there are too few ranks."""
    factor, jump = replication.factor, replication.jump
    if factor < 2 or factor > world_size:
        raise UsageError(f"--replication-factor {factor} needs that many ranks, and at least 2: there are {world_size}")
    if jump is not None and any(number * jump % world_size == 0 for number in range(1, factor)):
        raise UsageError(
            f"--replication-jump {jump} with --replication-factor {factor} leads back to the same rank of {world_size}; "
            f"use the number of ranks of a node"
        )


def keepers(nodes: Sequence[str], replication: Replication) -> list[tuple[int, ...]]:
    """For each rank, which others keep a copy of its part. `nodes[r]` is rank r's node.

    With a jump J: the ranks r + J, r + 2J, ... (modulo the number of ranks). Without: the ranks at the same place on the next
    nodes, fewer than asked for where there are too few nodes; on one node alone the next ranks.
    """
    world_size = len(nodes)
    jump = replication.jump
    names = list(dict.fromkeys(nodes))
    if jump is None and len(names) == 1:
        jump = 1
    if jump is not None:
        return [
            tuple((rank + number * jump) % world_size for number in range(1, replication.factor)) for rank in range(world_size)
        ]
    members = {name: [rank for rank in range(world_size) if nodes[rank] == name] for name in names}
    chosen = []
    for rank in range(world_size):
        place, own = members[nodes[rank]].index(rank), names.index(nodes[rank])
        others = [members[names[(own + number) % len(names)]] for number in range(1, min(replication.factor, len(names)))]
        chosen.append(tuple(other[place % len(other)] for other in others))
    return chosen


def what_replicas_are_worth(nodes: Sequence[str], chosen: Sequence[tuple[int, ...]]) -> str:
    """A warning where copies would go with the node that they are to outlive; empty where they would not."""
    if len(set(nodes)) == 1:
        return "all ranks are on one node: copies of local checkpoints only help against a damaged file"
    exposed = [rank for rank, others in enumerate(chosen) if all(nodes[other] == nodes[rank] for other in others)]
    if exposed:
        return f"copies of the local checkpoints of ranks {exposed} are on their own node; choose another --replication-jump"
    return ""


def whole_saves(files: Sequence[PartFile], world_size: int) -> list[SaveId]:
    """Saves of which every rank's part is somewhere, the newest first; only those made by as many ranks."""
    parts: dict[SaveId, set[int]] = {}
    for file in files:
        if file.world_size == world_size:
            parts.setdefault(file.save_id, set()).add(file.rank)
    return sorted((save_id for save_id, ranks in parts.items() if len(ranks) == world_size), reverse=True)


@dataclass(frozen=True)
class Reading:
    """Where a rank takes its part from: a file of its own node, or one that the rank `sender` reads and sends."""

    file: PartFile
    sender: int | None


def plan_readings(
    save_id: SaveId, files: Sequence[PartFile], bad: set[tuple[str, str]], nodes: Sequence[str]
) -> list[Reading | None]:
    """For each rank where its part comes from; None where no file is left. `bad`: (node, name) of files found damaged."""
    left = [file for file in files if file.save_id == save_id and (file.node, file.name) not in bad and file.node in nodes]
    readings: list[Reading | None] = []
    for rank, node in enumerate(nodes):
        mine = sorted((file for file in left if file.rank == rank), key=lambda file: (file.node != node, file.node, file.name))
        if not mine:
            readings.append(None)
            continue
        there = [other for other, other_node in enumerate(nodes) if other_node == mine[0].node]
        readings.append(Reading(mine[0], None if mine[0].node == node else there[rank % len(there)]))
    return readings


def split_shared(sizes_bytes: dict[str, int], world_size: int) -> dict[str, int]:
    """Which rank keeps which of the values that all ranks have alike, so that all keep about as much."""
    load = [0] * world_size
    owners = {}
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        owner = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[owner] += sizes_bytes[name]
        owners[name] = owner
    return owners
