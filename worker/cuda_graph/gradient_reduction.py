"""One pass's reduction of gradient groups: in order, each as soon as it is complete, beside the backward pass.

On a GPU a group is measured on a stream of its own, so that the backward pass waits neither for norms nor for communication;
all of it joins the step's stream at the end, as a capture requires.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rsup.worker.deterministic import add_in_order
from rsup.worker.rerun.gradient_norms import local_norms


class SideStreams:
    """Where groups are measured before and after their reduction; without CUDA, where everything else is."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._before = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._after = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._in_use: list[torch.cuda.Stream] = []

    def before(self) -> contextlib.AbstractContextManager[object]:
        """For what goes before a reduction: it waits for what is queued now."""
        return self._beside(self._before)

    def after(self) -> contextlib.AbstractContextManager[object]:
        """For what goes after one, and has to wait for it."""
        return self._beside(self._after)

    def join(self) -> None:
        """The current stream waits for those used since the last time: a capture does not know the others."""
        for stream in self._in_use:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._in_use = []

    def _beside(self, stream: "torch.cuda.Stream | None") -> contextlib.AbstractContextManager[object]:
        if stream is None:
            return contextlib.nullcontext()
        if stream not in self._in_use:
            self._in_use.append(stream)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        return torch.cuda.stream(stream)


class Reduction:
    """Under way in one pass. `flats`: by group its memory, a tensor a dtype; `num_missing`: gradients that have yet to come, by
    group; `averages`: the backend can average (NCCL), else parts are divided and summed, as DDP does it; `in_rank_order`:
    gather all parts, and add them as `deterministic.rank_order_hook` does."""

    def __init__(
        self,
        flats: Sequence[Sequence[torch.Tensor]],
        num_missing: list[int],
        group: dist.ProcessGroup | None,
        averages: bool,
        streams: SideStreams,
        measures: bool,
        measures_reduced: bool,
        in_rank_order: bool,
    ) -> None:
        self.num_started = 0
        self.norms: list[torch.Tensor] = []
        """Of the groups started, before their reduction."""
        self.reduced_norms: list[torch.Tensor] = []
        self._flats = flats
        self._num_missing = num_missing
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._averages = averages
        self._streams = streams
        self._measures = measures
        self._measures_reduced = measures_reduced
        self._in_rank_order = in_rank_order
        self._ordered: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._works: list[Any] = []

    def gradient_came(self, number: int) -> bool:
        """Count a gradient of that group, and start what is complete; False where all of its gradients had come before."""
        self._num_missing[number] -= 1
        while self.num_started < len(self._flats) and not self._num_missing[self.num_started]:
            self.start_next()
        return self._num_missing[number] >= 0

    def start_next(self) -> None:
        """Measure the next group and begin its reduction, whatever is missing."""
        flats = self._flats[self.num_started]
        self.num_started += 1
        if not flats:
            return
        with self._streams.before():
            if self._measures:
                self.norms.append(local_norms(flats))
            works = [self._start_mean(flat) for flat in flats]
        self._works += works
        if (
            self._measures_reduced and self._averages and not self._in_rank_order
        ):  # NCCL: to wait holds up a stream, not the host
            with self._streams.after():
                self._measure_reduced(works, flats)

    def finish(self) -> None:
        """Start what is left, and wait on the current stream for all of it."""
        while self.num_started < len(self._flats):
            self.start_next()
        for work in self._works:
            work.wait()
        for flat, parts in self._ordered:
            add_in_order(flat, parts)
        if self._measures_reduced and not self.reduced_norms:
            self._measure_reduced([], [flat for flats in self._flats for flat in flats])
        self._streams.join()

    def _start_mean(self, flat: torch.Tensor) -> Any:
        if self._in_rank_order:
            parts = [torch.empty_like(flat) for _ in range(self._world_size)]
            self._ordered.append((flat, parts))
            return dist.all_gather(parts, flat, self._group, async_op=True)
        if self._averages:
            return dist.all_reduce(flat, dist.ReduceOp.AVG, self._group, async_op=True)
        flat.mul_(1.0 / self._world_size)
        return dist.all_reduce(flat, dist.ReduceOp.SUM, self._group, async_op=True)

    def _measure_reduced(self, works: Sequence[Any], flats: Sequence[torch.Tensor]) -> None:
        for work in works:
            work.wait()
        self.reduced_norms.append(local_norms(flats))
