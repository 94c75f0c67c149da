"""L2 norms of gradients, in float64, without waiting for the device. On the CPU they are Python floats: nobody waits there."""

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def local_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each: float64 [n], on the gradients' device (the first one's); of a DTensor's local part.

    NaN and Inf in a gradient come out as such; finite gradients never give Inf, and a corrupted 1e36 comes out as 1e36: squares
    are summed in float64. Float64 gradients beyond 1e154 give their largest magnitude instead: a lower bound, as huge. On the
    CPU float32 sums come first, 25 times as fast, and float64 ones only where these overflow.
    """
    parts = [local_part(gradient) for gradient in gradients]
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    device = parts[0].device
    if device.type != "cpu":
        norms = torch.stack([norm.to(device) for norm in _each_norm(parts, dtype=torch.float64)])
        return _bounded(norms, parts) if any(part.dtype == torch.float64 for part in parts) else norms
    return torch.tensor(host_norms(parts), dtype=torch.float64)


@torch.no_grad()
def host_norms(parts: Sequence[torch.Tensor]) -> list[float]:
    """The same for dense, real tensors on the CPU (`local_part`), at least one."""
    dtypes = {part.dtype for part in parts}
    narrow = dtypes - {torch.float32, torch.float64}  # their sums would be as narrow
    widened = [part.float() if part.dtype in narrow else part for part in parts] if narrow else parts
    norms = list(_each_norm(widened))
    quick: list[float] = torch.stack(norms if len(dtypes) == 1 else [norm.double() for norm in norms]).tolist()
    if math.inf in quick:
        for index in [index for index, norm in enumerate(quick) if norm == math.inf]:
            exact = torch.linalg.vector_norm(parts[index], dtype=torch.float64)
            quick[index] = float(_bounded(exact.reshape(1), parts[index : index + 1])[0])
    return quick


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """A dense, real tensor with the numbers of this rank. Of a sparse gradient: its entries, as they are."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if local.is_sparse:
        local = local._values()
    return torch.view_as_real(local) if local.is_complex() else local


def combined_on_host(norms: Sequence[float]) -> float:
    """The norm of what the parts make together. NaN where one is NaN."""
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


@torch.no_grad()
def combined(norms: torch.Tensor) -> torch.Tensor:
    """The norm of what the last dim's parts make together. Norms are finite float64, NaN or Inf; so is the result."""
    largest = norms.amax(dim=-1, keepdim=True)
    scale = torch.where(torch.isfinite(largest) & (largest > 0), largest, torch.ones_like(largest))
    together: torch.Tensor = torch.linalg.vector_norm(norms / scale, dim=-1)
    return together * scale.squeeze(-1)


def _bounded(norms: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    largest = torch.stack([norm.to(norms) for norm in _each_norm(parts, order=float("inf"))])
    return torch.where(torch.isinf(norms), largest, norms)


def _each_norm(
    parts: Sequence[torch.Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...] | list[torch.Tensor]:
    return torch._foreach_norm(list(parts), order, dtype)  # pyright: ignore[reportPrivateImportUsage]
