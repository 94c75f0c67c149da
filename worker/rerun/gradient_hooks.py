"""What stands in the place of DDP's and FSDP2's own communication, and gives the same numbers bit for bit."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class BucketAverage:
    """DDP's own reduction as a comm hook: each bucket divided by the number of ranks, then summed over them.

    DDP multiplies by 1/n where it copies a gradient into its bucket, and divides by n where the gradient lies there already
    (with `gradient_as_bucket_view`, when gradients are kept or accumulated). For n not a power of two these round differently,
    so in that mode each parameter's gradient is looked at before it is accumulated.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        assert ddp.process_group is not None
        self._group = ddp.process_group
        self._world_size = dist.get_world_size(self._group)
        self._storage_before: dict[int, int] = {}
        self._must_look = ddp.gradient_as_bucket_view and self._world_size & (self._world_size - 1) != 0
        if self._must_look:
            for parameter in ddp.module.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(self._look(parameter))

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of the bucket."""
        buffer = bucket.buffer()
        if self._world_size == 1:  # it is its own mean
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        if buffer.is_sparse:
            buffer.div_(self._world_size)
        elif self._must_look:
            self._divide_each(bucket)
        else:
            buffer.mul_(1.0 / self._world_size)
        work = self._group.allreduce([buffer])  # as `dist.all_reduce(async_op=True)`, at a third of its cost
        return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(_first))

    def _divide_each(self, bucket: GradBucket) -> None:
        storage = bucket.buffer().untyped_storage().data_ptr()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._storage_before.get(id(parameter)) == storage:
                gradient.div_(self._world_size)
            else:
                gradient.mul_(1.0 / self._world_size)

    def _look(self, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        key = id(parameter)

        def before_accumulation(_: torch.Tensor) -> None:
            kept = parameter.grad
            self._storage_before[key] = 0 if kept is None else kept.untyped_storage().data_ptr()

        return before_accumulation


class MeasuringReduceScatter:
    """An FSDP2 reduce-scatter that hands its unreduced input to `measure` first. `inner` is the one in use before."""

    def __init__(self, inner: Any, measure: Callable[[torch.Tensor], None]) -> None:
        self.inner = inner
        self._measure = measure

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As `inner` does."""
        return cast(torch.Tensor, self.inner.allocate(size, dtype=dtype, device=device))

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Measure, then reduce and scatter. On the stream that FSDP2 has chosen for it."""
        self._measure(input_tensor)
        return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)


def parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of parameters that it communicates together; torch 2.11 has one a module, later ones several."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        one = getattr(state, "_fsdp_param_group", None)
        groups = [] if one is None else [one]
    return list(groups)


def measure_reduce_scatter(module: FSDPModule, measure: Callable[[int, torch.Tensor], None]) -> int:
    """Have `measure(index of the group, unreduced gradients)` called before each reduction; return the number of groups.

    A reduction of the user's own, set before, is kept. With several groups a module torch's `set_custom_reduce_scatter` refuses
    (one for all would be ambiguous); each then gets its own here.
    """
    groups = parameter_groups(module)
    for index, group in enumerate(groups):
        comm: Any = MeasuringReduceScatter(group._reduce_scatter_comm, functools.partial(measure, index))
        if len(groups) == 1:
            module.set_custom_reduce_scatter(comm)
        else:
            group._reduce_scatter_comm = comm
    return len(groups)


def _first(future: torch.futures.Future[Any]) -> torch.Tensor:
    return cast(torch.Tensor, future.value()[0])
