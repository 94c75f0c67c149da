"""Numbers of steps over all ranks: sums of losses and maxima of what only some ranks know, in two small collectives.

Ranks may have different losses, or none: who has a name that the others have not heard of says so in the first collective, and
only then names are exchanged. So no rank ever waits in a collective that another one does not enter.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

SumAndCount = tuple[float, float]
_NONE = -math.inf
"""Among maxima: this rank has none. Below every number: a logit may well be negative."""
_INFINITE = sys.float_info.max
"""Among maxima: infinite. NaN, which no maximum keeps, goes as infinity."""


class Reduced(NamedTuple):
    """One step over all ranks. `losses`: means, without those that no rank counted. `maxima`: None where no rank has one."""

    losses: dict[str, float]
    maxima: tuple[float | None, ...]


class StepReduction:
    """Reduces over `group` (None: all ranks, where there are any). All methods but `alone` are collective.

    Over gloo the numbers stay on the host; over another backend they go through the current GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self._group = group
        self.world_size = dist.get_world_size(group) if is_distributed else 1
        on_host = self.world_size == 1 or "gloo" in str(dist.get_backend(group))
        self._device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
        self._names: list[str] = []
        """Of the losses, alike on all ranks."""

    def steps(
        self,
        losses: Sequence[Mapping[str, SumAndCount]],
        maxima: Sequence[Sequence[float | None]],
        extra: SumAndCount = (0.0, 0.0),
    ) -> tuple[list[Reduced], SumAndCount]:
        """All steps over all ranks, and the sum of `extra`. `losses`, `maxima`: of this rank, one a step; on all ranks of
        equally many steps, and of as many maxima."""
        flat = [_sent(value) for row in maxima for value in row]
        if self.world_size == 1:
            return self.alone(losses, maxima), extra
        new = self._new(losses)
        flat, is_new = self._maxima(flat, bool(new))
        if is_new:
            self._exchange(new)
        table = torch.tensor([*self._table(losses), *extra], dtype=torch.float64, device=self._device)
        dist.all_reduce(table, group=self._group)
        *sums, extra_sum, extra_count = table.tolist()
        return self._parted(losses, sums, flat, maxima), (extra_sum, extra_count)

    def alone(self, losses: Sequence[Mapping[str, SumAndCount]], maxima: Sequence[Sequence[float | None]]) -> list[Reduced]:
        """All steps over this rank only. Not collective: no collective may follow where there are several ranks."""
        self._learn(losses)
        return self._parted(losses, self._table(losses), [_sent(value) for row in maxima for value in row], maxima)

    def barrier(self) -> None:
        """Meet the other ranks."""
        if self.world_size > 1:
            dist.barrier(group=self._group)

    # ------------------------------------------------------------------------------------------------------------ names

    def _new(self, losses: Sequence[Mapping[str, SumAndCount]]) -> list[str]:
        return list(dict.fromkeys(name for row in losses for name in row if name not in self._names))

    def _learn(self, losses: Sequence[Mapping[str, SumAndCount]]) -> None:
        self._names.extend(self._new(losses))

    def _exchange(self, new: list[str]) -> None:
        told: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(told, new, group=self._group)
        self._names.extend(dict.fromkeys(name for names in told for name in names if name not in self._names))

    # ---------------------------------------------------------------------------------------------------------- numbers

    def _maxima(self, flat: list[float], flag: bool) -> tuple[list[float], bool]:
        sent = torch.tensor([float(flag), *flat], dtype=torch.float64, device=self._device)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._group)
        is_set, *found = sent.tolist()
        return found, bool(is_set)

    def _table(self, losses: Sequence[Mapping[str, SumAndCount]]) -> list[float]:
        return [number for row in losses for name in self._names for number in row.get(name, (0.0, 0.0))]

    def _parted(
        self,
        losses: Sequence[Mapping[str, SumAndCount]],
        sums: Sequence[float],
        flat: Sequence[float],
        maxima: Sequence[Sequence[float | None]],
    ) -> list[Reduced]:
        found, sums_at, flat_at = [], iter(sums), iter(flat)
        for row in maxima:
            means = {}
            for name in self._names:
                total, count = next(sums_at), next(sums_at)
                if count:
                    means[name] = total / count
            found.append(Reduced(means, tuple(_received(next(flat_at)) for _ in row)))
        assert len(found) == len(losses)
        return found


def _sent(value: float | None) -> float:
    if value is None:
        return _NONE
    if math.isnan(value):
        return math.inf
    return _INFINITE if math.isinf(value) else value


def _received(value: float) -> float | None:
    if value == _NONE:
        return None
    if value == math.inf:
        return math.nan
    return math.inf if value == _INFINITE else value
