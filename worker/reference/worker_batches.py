"""Samples of micro-batches, read ahead by the workers of a torch DataLoader. Whoever asks for them keeps the position: that of
what was handed out, never of what was read ahead."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from rsup.worker.data_workers import WorkerInit, starting
from rsup.worker.reference.data import Text

_NO_END = 1 << 60


class _Windows(Dataset[torch.Tensor]):
    """The samples of one micro-batch of a rank, by the first sample of the pass: [batch, sequence + 1], int64."""

    def __init__(self, text: Text, offset: int, count: int) -> None:
        self._text = text
        self._offset = offset
        self._count = count

    def __getitem__(self, first: int) -> torch.Tensor:
        return self._text.samples(first + self._offset, self._count)


class WorkerReader:
    """Reads for `MicroBatches`. `signals`: exit signals, which must not kill the workers. `start_method`: None is torch's
    default."""

    def __init__(self, num_workers: int, start_method: str | None, signals: Sequence[str]) -> None:
        self._num_workers = num_workers
        self._start_method = start_method
        self._signals = tuple(signals)
        self._running: Iterator[torch.Tensor] | None = None
        self._expected = -1

    def read(self, text: Text, offset: int, count: int, first: int, step: int) -> torch.Tensor:
        """`count` samples, from `first + offset` on: [count, sequence + 1], int64. `step` samples later are read meanwhile."""
        if self._running is None or self._expected != first:
            self._start(_Windows(text, offset, count), first, step)
        assert self._running is not None
        self._expected = first + step
        return next(self._running)

    def _start(self, windows: _Windows, first: int, step: int) -> None:
        """Let workers read from there on: processes of their own for each place the loop goes to, which is seldom."""
        self.close()
        loader: DataLoader[torch.Tensor] = DataLoader(
            windows,
            batch_size=None,
            sampler=range(first, _NO_END, step),
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
