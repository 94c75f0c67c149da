"""The loader: one rank's micro-batches, in order, from a position of its own."""

from collections.abc import Callable
from typing import Any

import torch

from rsup.worker.reference.batch_sizes import BatchSizes
from rsup.worker.reference.data import Text
from rsup.worker.reference.worker_batches import WorkerReader

Batch = dict[str, torch.Tensor]


class MicroBatches:
    """Endless iterator of `{"text": [batch, sequence + 1] int64, "weight": [batch] float32}`, on the CPU.

    A weight is how much the sample counts in the loss: 1, or NaN where `is_poisoned(iteration)` says that the data of this
    rank are bad. The position is the next sample of the whole job; `state_dict` holds it, and `seek` goes to another. `reader`:
    processes that read ahead; None: it is read when it is asked for.
    """

    def __init__(
        self,
        text: Text,
        rank: int,
        micro_batch_size: int,
        samples_per_pass: int,
        batch_sizes: BatchSizes,
        is_poisoned: Callable[[int], bool],
        reader: WorkerReader | None = None,
    ) -> None:
        self._text = text
        self._offset = rank * micro_batch_size
        self._micro_batch_size = micro_batch_size
        self._samples_per_pass = samples_per_pass
        self._batch_sizes = batch_sizes
        self._is_poisoned = is_poisoned
        self._reader = reader
        self._base = 0
        self.seek(0, 0)

    def seek(self, iteration: int, consumed_samples: int) -> None:
        """Go on after so many completed iterations and the samples they took."""
        self._iteration = iteration  # those completed when `_since` samples were consumed
        self._since = self._next = consumed_samples

    def count_from(self, base: int) -> None:
        """Sample `base` of the job is the first of the text: a phase has data of its own, from their beginning."""
        self._base = base

    def close(self) -> None:
        """End what reads ahead; it begins again with the next micro-batch."""
        if self._reader is not None:
            self._reader.close()

    def _read(self, first: int) -> torch.Tensor:
        if self._reader is None:
            return self._text.samples(first + self._offset, self._micro_batch_size)
        return self._reader.read(self._text, self._offset, self._micro_batch_size, first, self._samples_per_pass)

    def __iter__(self) -> "MicroBatches":
        return self

    def __next__(self) -> Batch:
        while self._next >= (end := self._since + self._batch_sizes.at(self._since)):
            self._iteration, self._since = self._iteration + 1, end
        text = self._read(self._next - self._base)
        weight = torch.ones(self._micro_batch_size)
        if self._next == self._since and self._is_poisoned(self._iteration + 1):
            weight[0] = float("nan")
        self._next += self._samples_per_pass
        return {"text": text, "weight": weight}

    def state_dict(self) -> dict[str, Any]:
        """Where it is: plain numbers."""
        return {"iteration": self._iteration, "since": self._since, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state_dict` was taken."""
        self._iteration, self._since, self._next = int(state["iteration"]), int(state["since"]), int(state["next"])
