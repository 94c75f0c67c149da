"""DDP's buckets in the host's memory, looked at once and then known: their parts are measured without asking DDP again.

Neighbours of one group are measured in one go, once a bucket has lain as it lies for a whole iteration: DDP arranges its
buckets anew after its first backward pass, and all passes of an iteration must add in one order, replays too. Before, and
where a bucket is not one piece of memory, each parameter's gradient is measured on its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import GradBucket

from rsup.worker.rerun.gradient_norms import host_norms, local_part


@dataclass(frozen=True)
class _Known:
    """A bucket. Its views keep its memory alive, so that no other one can have the same address meanwhile."""

    address: int
    places: tuple[int, ...]
    parts: list[torch.Tensor]
    run_places: tuple[int, ...]
    """The first parameter of each run of neighbours."""
    runs: list[torch.Tensor]


class HostBuckets:
    """Of one DDP module. `group_of`: the group of each parameter, by place; `places_of`: where a bucket's parameters are."""

    def __init__(self, group_of: Sequence[int], places_of: Callable[[GradBucket], tuple[int, ...]]) -> None:
        self._group_of = group_of
        self._places_of = places_of
        self._known: dict[int, _Known] = {}
        self._settled: frozenset[int] = frozenset()
        """Addresses of buckets that were there when the iteration began, and when the one before did."""
        self._last: frozenset[int] = frozenset()

    def begin_iteration(self) -> None:
        """The next pass is the first one of an iteration."""
        now = frozenset(known.address for known in self._known.values())
        self._settled, self._last = now & self._last, now

    def norms(self, bucket: GradBucket, buffer: torch.Tensor) -> tuple[tuple[int, ...], list[float]]:
        """Places and norms: of each parameter, or of each run of neighbours under the place of its first. `buffer`: the bucket,
        dense and on the CPU."""
        known = self._known.get(bucket.index())
        if known is not None and known.address != buffer.data_ptr():
            self._known.clear()  # all of them: they are arranged anew
            known = None
        if known is None:
            known = self._known[bucket.index()] = self._look(bucket, buffer)
        if known.address in self._settled:
            return known.run_places, host_norms(known.runs)
        return known.places, host_norms(known.parts)

    def _look(self, bucket: GradBucket, buffer: torch.Tensor) -> _Known:
        places, gradients = self._places_of(bucket), bucket.gradients()
        parts = [local_part(gradient) for gradient in gradients]
        run_places, runs = self._runs(places, gradients, buffer)
        return _Known(buffer.data_ptr(), places, parts, run_places, runs)

    def _runs(
        self, places: tuple[int, ...], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        starts: list[int] = []
        end, first, size = 0, list[int](), buffer.element_size()
        for place, gradient in zip(places, gradients, strict=True):
            if gradient.data_ptr() != buffer.data_ptr() + end * size or not gradient.is_contiguous():
                return places, [local_part(one) for one in gradients]
            if not first or self._group_of[first[-1]] != self._group_of[place]:
                starts.append(end)
                first.append(place)
            end += gradient.numel()
        ends = [*starts[1:], end]
        return tuple(first), [local_part(buffer[start:stop]) for start, stop in zip(starts, ends, strict=True)]
