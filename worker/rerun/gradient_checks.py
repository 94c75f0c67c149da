"""Norms of the gradients that this rank computed, read before they are mixed with those of other ranks.

After the reduction every rank holds the same NaN, and nobody can say whose it was. So the numbers are taken where gradients are
still local: in DDP's comm hook, in FSDP2's reduce-scatter, or, where only reduced ones exist, at the end of the pass; then
`names_a_rank` is False.

DDP arranges its buckets anew after its first backward pass, so a replay may see other buckets than the pass that it repeats.
Norms are therefore taken per parameter and put together in groups that never change; a message's "bucket" is such a group.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.echoes import name_of_reduction
from rsup.worker.rerun.gradient_hooks import BucketAverage, Hook, measure_reduce_scatter
from rsup.worker.rerun.gradient_norms import combined, combined_on_host, host_norms, local_norms, local_part
from rsup.worker.rerun.host_buckets import HostBuckets

GROUP_BYTES = 25 << 20
"""Gradients that share one check: as much as DDP's buckets hold."""


Norm = float | torch.Tensor
"""Of one group: a float where gradients are on the CPU, else `[]`, float64, on their device."""
_Norms = list[float] | torch.Tensor
"""Of several parameters: a tensor has the shape [n]."""


class _Source(Protocol):
    """Where the norms of one module come from."""

    accumulates: bool
    """A reduction's gradients hold those reduced before in the pass."""

    @property
    def names_a_rank(self) -> bool: ...

    def take(self) -> list[list[Norm]]:
        """By group: the scalars of the pass, one for each reduction in it."""
        ...

    def forget(self) -> None: ...


class GradientChecks:
    """The gradient norms of one pass, by group. All on the training thread (hooks: on autograd's); nothing here waits for
    the device.
    """

    def __init__(self, scaler: Any = None) -> None:
        """`scaler`: a `torch.amp.GradScaler` in use. Norms are then of the unscaled gradients, and NaN or Inf is an overflow:
        the scaler skips the step, and it is no case.
        """
        self._scaler = scaler
        self._sources: list[_Source] = []
        self._overflow: torch.Tensor | None = None

    @property
    def names_a_rank(self) -> bool:
        """Whether the norms of the last pass are of gradients before their reduction, so that they say whose fault it is."""
        return all(source.names_a_rank for source in self._sources)

    def attach(self, module: nn.Module, hook: Hook | None = None, state: object = None) -> None:
        """Read the gradients of `module` from the next pass on. May be called for several modules, once each.

        DDP: a comm hook of the user's is run inside ours: the given one, or the one that `register_comm_hook` is called with
        later; one that is registered already stays (then each parameter is measured on its own). Without one, DDP's own mean,
        bit for bit.
        FSDP2: its reduce-scatter, or the custom one set before. Other modules: the gradients at the end of the pass.
        Raises `RerunError` for a hook that has no place.
        """
        if isinstance(module, DistributedDataParallel):
            self._sources.append(_attach_ddp(module, hook, state))
        elif hook is not None:
            raise RerunError(f"{type(module).__name__} takes no comm hook: attach(module) without one")
        elif any(isinstance(part, FSDPModule) for part in module.modules()):
            self._sources.append(_FsdpSource(module))
        else:
            self._sources.append(_EndSource(list(module.parameters())))

    def begin(self, is_new: bool = True) -> None:
        """A pass begins: forget what one left that was broken off. `is_new`: it is the first one of an iteration."""
        self._overflow = None
        for source in self._sources:
            source.forget()
            if is_new and isinstance(source, _DdpSource):
                source.begin_iteration()

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """Message and norm (`[]`, float64, on the device) of every group of the pass just run, always in the same order.

        Call it after the last backward and before `scaler.unscale_` or the optimizer. A group that was reduced several times in
        the pass comes as often, with DDP under names of their own (see `echoes`). With a scaler, norms that are not finite are
        given as 0: see `take_overflow`.
        """
        return [(message, _as_tensor(norm)) for message, norm in self.take_numbers()]

    def take_numbers(self) -> list[tuple[str, Norm]]:
        """The same, norms on the CPU as Python floats: cheaper."""
        taken: list[tuple[str, Norm]] = []
        number = 0
        for source in self._sources:
            for norms in source.take():
                message = f"grad norm of bucket {number}"
                for reduction, norm in enumerate(norms, start=1):
                    taken.append((name_of_reduction(message, reduction if source.accumulates else 1), norm))
                number += 1
        return self._unscaled(taken) if self._scaler is not None and self._scaler.is_enabled() else taken

    def take_overflow(self) -> torch.Tensor | None:
        """Whether a norm of the last `take` was NaN or Inf under dynamic loss scaling: `[]`, bool, on the device; else None."""
        overflow, self._overflow = self._overflow, None
        return overflow

    @torch.no_grad()
    def _unscaled(self, taken: list[tuple[str, Norm]]) -> list[tuple[str, Norm]]:
        if not taken:
            return taken
        norms = torch.stack([_as_tensor(norm) for _, norm in taken])
        finite = torch.isfinite(norms)
        self._overflow = ~finite.all()
        scale = getattr(self._scaler, "_scale", None)  # `get_scale()` would wait for the device
        if scale is not None:
            norms = norms / scale.to(norms)
        values = torch.where(finite, norms, torch.zeros_like(norms)).unbind()
        return [(message, value) for (message, _), value in zip(taken, values, strict=True)]


class _ParameterNorms:
    """Norms of parameters by round (a round ends when one comes again), put together in fixed groups."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.index = {id(parameter): place for place, parameter in enumerate(parameters)}
        self.parameters = parameters
        self._groups = list(groups_of(parameters, GROUP_BYTES))
        self.group_of = [0] * len(parameters)
        for number, group in enumerate(self._groups):
            for place in group:
                self.group_of[place] = number
        self._is_wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._rounds: list[dict[tuple[int, ...], _Norms]] = []
        self._seen: set[int] = set()
        self._places: dict[tuple[int, ...], torch.Tensor] = {}

    def measure(self, places: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> None:
        """Take the norms of the gradients of the parameters at these places."""
        if not gradients[0].is_cpu:
            self.record(places, local_norms(gradients))
        else:
            self.record(places, host_norms([local_part(gradient) for gradient in gradients]))

    def record(self, places: tuple[int, ...], norms: _Norms) -> None:
        """Norms (float64) of the parameters at these places; of several of one group together under the place of one."""
        if not self._rounds or not self._seen.isdisjoint(places):
            self._rounds.append({})
            self._seen = set()
        self._rounds[-1][places] = norms
        self._seen.update(places)

    def take(self) -> list[list[Norm]]:
        """By group, a scalar for each round."""
        rounds = [self._by_group(norms) for norms in self._rounds]
        self.forget()
        return [list(scalars) for scalars in zip(*rounds, strict=True)]

    def forget(self) -> None:
        self._rounds = []
        self._seen = set()

    def _by_group(self, norms: dict[tuple[int, ...], _Norms]) -> Sequence[Norm]:
        on_host = {places: some for places, some in norms.items() if isinstance(some, list)}
        if len(on_host) == len(norms):
            known = {place: norm for places, some in on_host.items() for place, norm in zip(places, some, strict=True)}
            return [combined_on_host([known[place] for place in group if place in known]) for group in self._groups]
        return self._by_group_on_device({places: _as_tensor(some) for places, some in norms.items()})

    @torch.no_grad()
    def _by_group_on_device(self, norms: dict[tuple[int, ...], torch.Tensor]) -> Sequence[Norm]:
        device = next((norm.device for norm in norms.values() if not norm.is_cpu), torch.device("cpu"))
        every = torch.zeros(len(self.parameters) + 1, dtype=torch.float64, device=device)  # the last one: no parameter
        order = tuple(place for places in norms for place in places)
        every[self._on_device(order, device)] = torch.cat([norm.to(device) for norm in norms.values()])
        longest = max(len(group) for group in self._groups)
        table = tuple(place for group in self._groups for place in (*group, *[len(self.parameters)] * (longest - len(group))))
        parts = every[self._on_device(table, device)].view(len(self._groups), longest)
        together: torch.Tensor = combined(parts) if self._is_wide else torch.linalg.vector_norm(parts, dim=-1)
        return together.unbind()

    def _on_device(self, places: tuple[int, ...], device: torch.device) -> torch.Tensor:
        if places not in self._places:
            self._places[places] = torch.tensor(places, dtype=torch.int64, device=device)
        return self._places[places]


class _DdpSource:
    """The buckets of a DDP module."""

    names_a_rank = True
    accumulates = True

    def __init__(self, ddp: DistributedDataParallel, hook: Hook, state: object) -> None:
        self.norms = _ParameterNorms(list(ddp.module.parameters()))
        self._hook = hook
        self._state = state
        self._on_host = HostBuckets(self.norms.group_of, self._places)

    def on_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The comm hook."""
        buffer = bucket.buffer()
        if buffer.is_cpu and not buffer.is_sparse:
            self.norms.record(*self._on_host.norms(bucket, buffer))
        else:
            self.norms.measure(self._places(bucket), [buffer] if buffer.is_sparse else bucket.gradients())
        return self._hook(self._state, bucket)

    def begin_iteration(self) -> None:
        """The next pass is the first one of an iteration."""
        self._on_host.begin_iteration()

    def _places(self, bucket: GradBucket) -> tuple[int, ...]:
        return tuple(self.norms.index[id(parameter)] for parameter in bucket.parameters())

    def replace_hook(self, state: object, hook: Hook) -> None:
        """Stands for `ddp.register_comm_hook` from now on."""
        self._hook, self._state = hook, state

    def take(self) -> list[list[Norm]]:
        return self.norms.take()

    def forget(self) -> None:
        self.norms.forget()


class _DdpBesideHook:
    """A DDP module that has a comm hook already: torch takes only one, so each gradient is measured before DDP sees it."""

    names_a_rank = True
    accumulates = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._norms = _ParameterNorms(list(ddp.module.parameters()))
        for place, parameter in enumerate(self._norms.parameters):
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                register(functools.partial(self._on_gradient, place))

    def _on_gradient(self, place: int, parameter: torch.Tensor) -> None:
        if self._ddp.require_backward_grad_sync and parameter.grad is not None:
            self._norms.measure((place,), [parameter.grad])

    def take(self) -> list[list[Norm]]:
        return self._norms.take()

    def forget(self) -> None:
        self._norms.forget()


class _EndSource:
    """Gradients as they are at the end of the pass."""

    accumulates = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._norms = _ParameterNorms(parameters)

    @property
    def names_a_rank(self) -> bool:
        """Only where there is one rank: of several nobody knows whether they have been reduced."""
        return not dist.is_initialized() or dist.get_world_size() == 1

    def take(self) -> list[list[Norm]]:
        present = [(place, p.grad) for place, p in enumerate(self._norms.parameters) if p.grad is not None]
        if not present:
            return []
        grads = [grad for _, grad in present]
        if len({grad.is_cpu for grad in grads}) == 1:
            self._norms.measure(tuple(place for place, _ in present), grads)
        else:
            for place, grad in present:
                self._norms.measure((place,), [grad])
        return self._norms.take()

    def forget(self) -> None:
        self._norms.forget()


class _FsdpSource:
    """The unreduced inputs of FSDP2's reduce-scatters, a group each. Where it makes none (one shard, or replicated parameters
    only) the gradients at the end of the pass."""

    accumulates = False

    def __init__(self, module: nn.Module) -> None:
        self._groups: list[list[torch.Tensor]] = []
        self._at_end = _EndSource(list(module.parameters()))
        self.names_a_rank = True
        for part in module.modules():
            if isinstance(part, FSDPModule):
                first = len(self._groups)
                number = measure_reduce_scatter(part, functools.partial(self._measure, first))
                self._groups += [[] for _ in range(number)]

    def _measure(self, first: int, index: int, flat: torch.Tensor) -> None:
        self._groups[first + index].append(local_norms([flat])[0])

    def take(self) -> list[list[Norm]]:
        taken: list[list[torch.Tensor]] = [list(norms) for norms in self._groups]
        self.forget()
        if not any(taken):
            self.names_a_rank = self._at_end.names_a_rank
            return self._at_end.take()
        self.names_a_rank = True
        for norm in (norm for norms in taken for norm in norms):
            if norm.is_cuda:  # made on FSDP2's stream, read on this one
                norm.record_stream(torch.cuda.current_stream(norm.device))
        return [list[Norm](norms) for norms in taken]

    def forget(self) -> None:
        for norms in self._groups:
            norms.clear()


def _attach_ddp(ddp: DistributedDataParallel, hook: Hook | None, state: object) -> _Source:
    if ddp._comm_hooks:
        if hook is not None:
            raise RerunError("this DDP module has a comm hook already: register yours through attach, or before it, not both")
        return _DdpBesideHook(ddp)
    source = _DdpSource(ddp, hook or BucketAverage(ddp), state)
    ddp.register_comm_hook(None, source.on_bucket)
    ddp.register_comm_hook = source.replace_hook  # type: ignore[method-assign]
    return source


def groups_of(parameters: Sequence[nn.Parameter], group_bytes: int) -> Iterator[list[int]]:
    """Places of parameters by group, last parameters first, as their gradients come."""
    group: list[int] = []
    size_bytes = 0
    for place in reversed(range(len(parameters))):
        more = parameters[place].numel() * parameters[place].element_size()
        if group and size_bytes + more > group_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(place)
        size_bytes += more
    if group:
        yield group


def _as_tensor(norms: Norm | list[float]) -> torch.Tensor:
    return norms if isinstance(norms, torch.Tensor) else torch.tensor(norms, dtype=torch.float64)
