"""Is what ranks hold in common still equal, bit for bit? Digests are computed on the device, and only they travel.

A digest is two 64-bit sums over the words of the bit pattern, each word times an odd weight of its column, and of its row: one
changed word changes both (an odd factor is invertible modulo 2^64), also in a NaN's payload or the sign of a zero.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rsup.worker.rerun.exchange import gather
from rsup.worker.rerun.replica_axis import ReplicaAxis

_COLUMNS = 4096
_WORD_BYTES = 8
NamedTensors = Mapping[str, torch.Tensor]


class Difference(NamedTuple):
    """A tensor that is not equal on all ranks that hold it, and the ranks that differ from the majority (all, without one)."""

    name: str
    ranks: tuple[int, ...]


def tensor_digests(named_tensors: NamedTensors | Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Digest every tensor: int64 [n, 2], on the tensors' device (the first one's), in the given order. No host sync.

    A DTensor counts with this rank's local part.
    """
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    digests = [_digest(tensor) for _, tensor in items]
    if not digests:
        return torch.zeros((0, 2), dtype=torch.int64)
    device = digests[0].device
    return torch.stack([digest.to(device, non_blocking=True) for digest in digests])


def not_finite(named_tensors: NamedTensors) -> list[str]:
    """Names of the floating-point tensors with a NaN or an infinity (of a DTensor: in this rank's part). One host read."""
    floating = [(name, _local(tensor)) for name, tensor in named_tensors.items() if tensor.is_floating_point()]
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in floating:
        by_device.setdefault(tensor.device, []).append((name, torch.isfinite(tensor).all()))
    bad = []
    for found in by_device.values():
        flags = torch.stack([flag for _, flag in found]).tolist()
        bad += [name for (name, _), flag in zip(found, flags, strict=True) if not flag]
    return bad


def sharded_names(named_tensors: NamedTensors, axis: ReplicaAxis) -> list[str]:
    """Names of tensors that have no replica along the axis: DTensors sharded, or not yet reduced, between replicas."""
    return [name for name, tensor in named_tensors.items() if isinstance(tensor, DTensor) and _is_split(tensor, axis)]


def differing(named_tensors: NamedTensors, axis: ReplicaAxis, group: dist.ProcessGroup | None) -> list[Difference]:
    """The tensors that differ along the axis, by name; the same list on all ranks. Collective over `group`.

    Tensors without a replica there (`sharded_names`) are left out. One that a rank lacks, or has in another shape or type,
    differs. Reads the digests once on the host.
    """
    sharded = set(sharded_names(named_tensors, axis))
    compared = {name: tensor for name, tensor in named_tensors.items() if name not in sharded}
    digests: list[list[int]] = tensor_digests(compared).tolist()
    mine = {
        name: (str(tensor.dtype), tuple(_local(tensor).shape), *digest)
        for (name, tensor), digest in zip(compared.items(), digests, strict=True)
    }
    held = dict(gather((dist.get_rank(), mine), group))
    found: dict[str, set[int]] = {}
    for member in axis.replicas[0]:
        column = axis.counterparts_of(member)
        for name in {name: None for rank in column for name in held[rank]}:
            ranks = _not_of_the_majority({rank: held[rank].get(name) for rank in column})
            if ranks:
                found.setdefault(name, set()).update(ranks)
    return [Difference(name, tuple(sorted(found[name]))) for name in sorted(found)]


def _not_of_the_majority(values: dict[int, object]) -> list[int]:
    counts = Counter(values.values()).most_common()
    if len(counts) == 1:
        return []
    most, number = counts[0]
    if number * 2 <= len(values):
        return list(values)
    return [rank for rank, value in values.items() if value != most]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    words = _words(_local(tensor))
    digest = torch.zeros(2, dtype=torch.int64, device=words.device)
    num_rows = words.numel() // _COLUMNS
    if num_rows:
        table = words[: num_rows * _COLUMNS].view(num_rows, _COLUMNS)
        digest[0] += (table.sum(dim=0) * _weights(_COLUMNS, words.device)).sum()
        digest[1] += (table.sum(dim=1) * _weights(num_rows, words.device)).sum()
    tail = words[num_rows * _COLUMNS :]
    if tail.numel():
        digest += (tail * _weights(tail.numel(), words.device)).sum() * (2 * num_rows + 3)
    return digest


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bit pattern as int64 words, the last one filled up with zeros."""
    detached = tensor.detach()
    if detached.layout != torch.strided:
        detached = detached.to_dense()
    octets = detached.contiguous().view(-1).view(torch.uint8)
    missing = -octets.numel() % _WORD_BYTES
    if missing or octets.storage_offset() % _WORD_BYTES:
        octets = torch.nn.functional.pad(octets, (0, missing)) if missing else octets.clone()
    return octets.view(torch.int64)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look random, the same everywhere (the mixing step of splitmix64)."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return mixed | 1


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_split(tensor: DTensor, axis: ReplicaAxis) -> bool:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return True
    own_replica = axis.replica_of(dist.get_rank())
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        line = tuple(slice(None) if other == dim else index for other, index in enumerate(coordinate))
        if any(axis.replica_of(rank) != own_replica for rank in mesh.mesh[line].tolist()):
            return True
    return False
