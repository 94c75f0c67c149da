"""The loader with processes: the same micro-batches, read ahead by the workers of a torch DataLoader.

The position is that of the micro-batches handed out, never of those read ahead.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from rsup.worker.data_workers import WorkerInit, starting
from rsup.worker.reference.data import Text
from rsup.worker.reference.micro_batches import MicroBatches

_NO_END = 1 << 60


class _Windows(Dataset[torch.Tensor]):
    """The samples of one micro-batch of a rank, by the first sample of the pass: [batch, sequence + 1], int64."""

    def __init__(self, text: Text, offset: int, count: int) -> None:
        self._text = text
        self._offset = offset
        self._count = count

    def __getitem__(self, first: int) -> torch.Tensor:
        return self._text.samples(first + self._offset, self._count)


class WorkerBatches(MicroBatches):
    """As `MicroBatches`. `signals`: exit signals, which must not kill the workers. `start_method`: None is torch's default."""

    def __init__(
        self,
        text: Text,
        rank: int,
        micro_batch_size: int,
        samples_per_pass: int,
        global_batch_size: int,
        is_poisoned: Callable[[int], bool],
        *,
        num_workers: int,
        start_method: str | None,
        signals: Sequence[str],
    ) -> None:
        self._windows = _Windows(text, rank * micro_batch_size, micro_batch_size)
        self._num_workers = num_workers
        self._start_method = start_method
        self._signals = tuple(signals)
        self._running: Iterator[torch.Tensor] | None = None
        self._expected = -1
        super().__init__(text, rank, micro_batch_size, samples_per_pass, global_batch_size, is_poisoned)

    def _read(self, first: int) -> torch.Tensor:
        if self._running is None or self._expected != first:
            self._start(first)
        assert self._running is not None
        self._expected = first + self._samples_per_pass
        return next(self._running)

    def _start(self, first: int) -> None:
        """Let workers read from there on: processes of their own for each place the loop goes to, which is seldom."""
        self.close()
        loader: DataLoader[torch.Tensor] = DataLoader(
            self._windows,
            batch_size=None,
            sampler=range(first, _NO_END, self._samples_per_pass),
            num_workers=self._num_workers,
            multiprocessing_context=self._start_method,
            worker_init_fn=WorkerInit(self._signals),
            generator=torch.Generator(),  # the workers' seed would else be drawn from the training's own random numbers
        )
        with starting(self._signals, self._start_method):
            self._running = iter(loader)

    def close(self) -> None:
        """End the workers; they start again when the next batch is asked for."""
        self._running = None  # the iterator ends its processes when it goes
        self._expected = -1
