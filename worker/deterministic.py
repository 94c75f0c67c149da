"""Bitwise repeatable training: the same run, interrupted anywhere, ends with the same parameters.

Stock DDP breaks this in two ways. It changes its bucket layout after the first iteration of a process, and an all-reduce
adds the ranks' numbers in an order that depends on where in the bucket they lie; so with three or more ranks a resumed run
differs. `rank_order_hook` adds them in rank order, each element alike wherever it lies: the layout no longer matters.
"""

import hashlib
import os
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket


def make_deterministic() -> None:
    """Choose deterministic kernels, and one thread on the CPU. Call before the first CUDA call of the process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)


def rank_order_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP comm hook: the mean of the ranks' gradients, added in the order rank 0, 1, 2, ...

    Register with `ddp.register_comm_hook(group, rank_order_hook)`; None is the default group. Gathers every rank's bucket,
    so it needs world size times the bucket in memory, and moves about half as much again as a ring all-reduce per rank.
    """
    world_size = dist.get_world_size(group)
    local = bucket.buffer()
    parts = [torch.empty_like(local) for _ in range(world_size)]
    work = dist.all_gather(parts, local, group=group, async_op=True)

    def mean(_: object) -> torch.Tensor:
        add_in_order(local, parts)
        return local

    assert work is not None
    return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(mean))


def add_in_order(local: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Put the mean of all ranks' parts into `local`; the first of the parts is used up."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    total /= len(parts)
    local.copy_(total)


def parameter_digest(module: torch.nn.Module) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every parameter, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        tensor = parameter.detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
