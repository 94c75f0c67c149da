"""Moves one rank's iteration to another rank: as bytes, over a gloo group, in the job's own processes.

Batches are anything a loader yields. Tensors, numbers, strings and containers of them are read back without running any code
(`weights_only`); a batch with other objects (NumPy arrays, data classes) is unpickled, which is no more than what the ranks
do with one another anyhow: the bytes come from a process of the same job, over its own process group, never from a file.
"""

import io
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from rsup.worker.rerun.contract import Drawn, Payload, RerunError
from rsup.worker.rerun.replica_axis import ReplicaAxis

_T = TypeVar("_T")


def gather(value: _T, group: dist.ProcessGroup | None) -> list[_T]:
    """A small object of every rank of the group, in the order of its ranks. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def pack(payload: Payload) -> bytes:
    """The payload as bytes. Raises `RerunError` when a batch cannot be pickled."""
    content = {"batches": pytree.tree_map_only(torch.Tensor, _own_storage, payload.batches), "rng": payload.rng}
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except Exception as error:
        raise RerunError(
            f"a batch cannot be moved to another rank ({type(error).__name__}: {error}): yield picklable ones"
        ) from error
    return file.getvalue()


def unpack(data: bytes, device: torch.device) -> Payload:
    """The payload that `pack` wrote; tensors that were on an accelerator come to `device`, the others to the CPU."""
    place = _placing_on(device)
    try:
        with torch.serialization.safe_globals([Drawn]):
            content = torch.load(io.BytesIO(data), map_location=place, weights_only=True)
    except pickle.UnpicklingError:
        content = torch.load(io.BytesIO(data), map_location=place, weights_only=False)
    return Payload(content["batches"], content["rng"])


def move(payload: Payload, axis: ReplicaAxis, shift: int, group: dist.ProcessGroup | None, device: torch.device) -> Payload:
    """Hand this rank's payload `shift` replicas on, and return the one that comes here. Collective over `group` (gloo).

    Payloads may be of any sizes, or empty. When one cannot be packed, or unpacked where it arrives, `RerunError` is raised
    on every rank, so that no rank waits for another.
    """
    data, fault = b"", ""
    try:
        data = pack(payload)
    except RerunError as error:
        fault = str(error)
    sizes = _agree((len(data), fault), group)
    arrived = _swap(data, sizes, axis, shift, group)
    try:
        received, fault = unpack(arrived, device), ""
    except Exception as error:
        received, fault = payload, f"a batch cannot be read on another rank ({type(error).__name__}: {error})"
    _agree((0, fault), group)
    return received


def _agree(size_and_fault: tuple[int, str], group: dist.ProcessGroup | None) -> dict[int, int]:
    """Sizes by global rank; raises on all ranks what went wrong on one."""
    gathered = gather(size_and_fault, group)
    for index, (_, fault) in enumerate(gathered):
        if fault:
            raise RerunError(f"rank {_global_rank(group, index)}: {fault}")
    return {_global_rank(group, index): size for index, (size, _) in enumerate(gathered)}


def _swap(data: bytes, sizes: dict[int, int], axis: ReplicaAxis, shift: int, group: dist.ProcessGroup | None) -> bytes:
    rank = dist.get_rank()
    target, source = axis.next_of(rank, shift), axis.next_of(rank, -shift)
    if target == rank:
        return data
    outgoing = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    incoming = torch.empty(sizes[source], dtype=torch.uint8)
    receiving = dist.irecv(incoming, source, group=group)  # first, so that no order of ranks can block
    sending = dist.isend(outgoing, target, group=group)
    assert receiving is not None and sending is not None
    receiving.wait()
    sending.wait()
    return incoming.numpy().tobytes()


def _global_rank(group: dist.ProcessGroup | None, index: int) -> int:
    return index if group is None else dist.get_global_rank(group, index)


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Without the rest of a larger storage that it is a view of: `torch.save` writes whole storages."""
    detached = tensor.detach()
    if detached.layout != torch.strided or detached.is_nested:
        return detached
    is_part = detached.untyped_storage().nbytes() > detached.numel() * detached.element_size()
    return detached.clone() if is_part else detached


def _placing_on(device: torch.device) -> Any:
    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" or device.type == "cpu" else storage.to(device=device)

    return place
