"""Baselines of losses and gradient norms on the device: what `LargeValues` does, as a few kernels without a host read.

The rerun machine judges the same values again on the host, so the rule must be the same to the bit: all is computed in float64,
in which a float32 value, its tenfold and their comparison are exact. A ring holds the last accepted sizes of each context; the
threshold is its 90th percentile, times ten. What a step shows is learned only while the gate is open, that is when this step
and those before it were clean.
"""

import math
from collections.abc import Sequence

import torch

from rsup.worker.rerun.built_in import LARGE_FACTOR
from rsup.worker.rerun.large_values import FLOOR, QUANTILE, LargeValues

WINDOW = 100
"""Sizes in a baseline, and how many must be learned before it judges: `num_samples` of `LargeValues`."""
_NUM_TOP = WINDOW - math.ceil(QUANTILE * WINDOW) + 1
"""The smallest of so many largest is the percentile of a full ring."""


class DeviceBaselines:
    """For the values of a step, in their order; several may share a context (the losses of micro-batches do), and are learned
    in that order then. All kernels read and write fixed memory: a graph may hold them.
    """

    def __init__(self, contexts: Sequence[str], device: torch.device) -> None:
        num = len(contexts)
        self._num = num
        self._ring = torch.zeros(num * WINDOW + num, dtype=torch.float64, device=device)
        """A ring for each context, then a place for each value that is not learned: no two writes meet."""
        self._learned = torch.zeros(num, dtype=torch.int64, device=device)
        """Sizes ever learned, by context."""
        self._context = torch.zeros(num, dtype=torch.int64, device=device)
        """Of each value."""
        self._first = torch.zeros(num, dtype=torch.int64, device=device)
        """Of each value: where its ring begins."""
        self._unlearned = torch.arange(num, device=device) + num * WINDOW
        self._counted = torch.zeros(2 * num, num, dtype=torch.bool, device=device)
        """Rows of values: the earlier values of the same context. Rows of contexts: their values."""
        self._set_contexts(contexts)

    def load(self, large: LargeValues, contexts: Sequence[str]) -> None:
        """Take over what `large` has learned, in place. Outside of a graph; `contexts` as many as before."""
        assert len(contexts) == self._num
        self._set_contexts(contexts)
        known = large.state_dict()["contexts"]
        rings = torch.zeros(self._num, WINDOW, dtype=torch.float64)
        learned = torch.zeros(self._num, dtype=torch.int64)
        for number, context in enumerate(dict.fromkeys(contexts)):
            recent = known[context]["recent"][-WINDOW:] if context in known else []
            rings[number, : len(recent)] = torch.tensor(recent, dtype=torch.float64)
            learned[number] = len(recent)
        self._ring[: self._num * WINDOW].copy_(rings.flatten())
        self._learned.copy_(learned)

    def thresholds(self) -> torch.Tensor:
        """By value, the size beyond which it is large: [n], float64; infinite where too little is learned."""
        rings = self._ring[: self._num * WINDOW].view(self._num, WINDOW)
        typical = rings.topk(_NUM_TOP, dim=1, sorted=False).values.amin(dim=1)
        limits = typical.clamp_(min=FLOOR).mul_(LARGE_FACTOR)
        limits.masked_fill_(self._learned < WINDOW, math.inf)
        return limits[self._context]

    def learn(self, sizes: torch.Tensor, gate: torch.Tensor) -> None:
        """Learn the sizes ([n], float64; a negative one stands for NaN or Inf, and is not learned) where the gate ([]) is 0."""
        keep = (sizes >= 0) & (gate == 0)
        counts = (self._counted & keep).sum(dim=1)
        before, added = counts[: self._num], counts[self._num :]
        if self._num > WINDOW:  # of more than a ring holds, the last ones stay
            keep = keep & (added[self._context] - before <= WINDOW)
        places = (self._learned[self._context] + before).remainder_(WINDOW).add_(self._first)
        self._ring.index_copy_(0, torch.where(keep, places, self._unlearned), sizes)
        self._learned.add_(added)

    def _set_contexts(self, contexts: Sequence[str]) -> None:
        numbers = {context: number for number, context in enumerate(dict.fromkeys(contexts))}
        of_value = torch.tensor([numbers[context] for context in contexts], dtype=torch.int64)
        same = of_value.unsqueeze(0) == of_value.unsqueeze(1)
        members = torch.arange(self._num).unsqueeze(1) == of_value.unsqueeze(0)
        self._counted.copy_(torch.cat([same.tril(-1), members]))
        self._context.copy_(of_value)
        self._first.copy_(of_value * WINDOW)
