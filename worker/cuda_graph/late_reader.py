"""A small device buffer, read on the host without waiting for what was queued behind the copy.

A step that is launched later may run while the numbers of an earlier one are read: only the copy's own event is waited for.
"""

from dataclasses import dataclass
from typing import cast

import torch

from rsup.worker.cuda_graph.contract import StaleResultError


@dataclass(frozen=True)
class Ticket:
    """One copy that was queued: `number` counts all of a reader."""

    number: int


class LateReader:
    """Copies `source` to page-locked memory when asked, and hands the copies out later. One thread.

    `source`: [n], float32, anywhere; always the same memory. `num_slots`: copies that are kept; one more takes the place of the
    oldest. A thread that waits for a copy sleeps (the event blocks) instead of spinning: what is read late is not urgent.
    Without CUDA a copy is made at once.
    """

    def __init__(self, source: torch.Tensor, num_slots: int = 2) -> None:
        self._source = source
        on_gpu = source.is_cuda
        self._slots = [torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu) for _ in range(num_slots)]
        self._events = [torch.cuda.Event(blocking=True) for _ in range(num_slots)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._num_taken = 0

    def take(self) -> Ticket:
        """Queue a copy of the buffer on the current stream. Never waits: the copy that was in the slot before is queued earlier
        on the same stream."""
        slot = self._num_taken % len(self._slots)
        self._slots[slot].copy_(self._source, non_blocking=True)
        if self._events:
            self._events[slot].record()
        self._num_taken += 1
        return Ticket(self._num_taken - 1)

    def give_back(self, ticket: Ticket) -> None:
        """The newest copy is not wanted after all: its slot is free, and the others keep theirs."""
        assert ticket.number == self._num_taken - 1
        self._num_taken -= 1

    def read(self, ticket: Ticket) -> list[float]:
        """The numbers as they were when the ticket was taken. Waits for that copy only. Raises `StaleResultError` where a later
        copy has taken its slot: it never gives another step's numbers."""
        if self._num_taken - ticket.number > len(self._slots):
            text = f"copy {ticket.number} of the result buffer is gone, {self._num_taken} were taken"
            raise StaleResultError(f"{text}: read a step's numbers before {len(self._slots)} more are launched")
        slot = ticket.number % len(self._slots)
        if self._events:
            self._events[slot].synchronize()
        return cast(list[float], self._slots[slot].tolist())
