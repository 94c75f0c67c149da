"""What all ranks agree on after each iteration: exit signal, requests from outside, the time budget. One small all-reduce.

Each rank sees a signal or a request at a moment of its own. The maximum over all ranks is what counts, so all act after
the same iteration.
"""

import hashlib
import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

import rsup.worker
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.worker.exit_policy import Asked


class ExitSignal:
    """Notes that a signal came, and nothing else. Made on the main thread; `release` puts the handler before back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.received = False
        self._number = signal.Signals[name]
        self._before = signal.signal(self._number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def release(self) -> None:
        """Put the handler before back."""
        signal.signal(self._number, self._before)


class Agreement:
    """Asks all ranks, once after each iteration."""

    def __init__(self, group: dist.ProcessGroup, exit_signal: ExitSignal | None, duration_s: float | None) -> None:
        self._group = group
        self._exit_signal = exit_signal
        self._duration_s = duration_s
        self._taken: set[int] = set()
        self._open: set[int] = set()

    def ask(self, iteration: int) -> Asked:
        """What holds for any rank now. Collective."""
        request = rsup.worker.requested()
        number = _request_number(request.request_id) if request is not None else 0
        if request is not None and number in self._taken:  # seen late: the others have brought us to act on it before
            if number not in self._open:
                rsup.worker.request_done(request.request_id, iteration)
            request, number = None, 0
        mine = [
            self._exit_signal is not None and self._exit_signal.received,
            request is not None and request.leave,
            self._duration_s is not None and process_age_s() > self._duration_s,
            number,
        ]
        agreed = torch.tensor([int(value) for value in mine], dtype=torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        signalled, leave, over, number = agreed.tolist()
        if number:
            self._taken.add(number)
            self._open.add(number)
        name = self._exit_signal.name if self._exit_signal is not None and signalled else ""
        return Asked(signal=name, save=bool(number), leave=bool(leave), duration_over=bool(over))

    def close_requests(self, iteration: int) -> None:
        """What was asked for has been done, or could not be; say so to the agent."""
        request = rsup.worker.requested() if self._open else None
        if request is not None and _request_number(request.request_id) in self._open:
            rsup.worker.request_done(request.request_id, iteration)
        self._open.clear()


def _request_number(request_id: str) -> int:
    """A positive 62-bit number for a request id: ranks can take the maximum of numbers."""
    return (int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 2) | 1


def process_age_s() -> float:
    """Seconds since this process began, start-up included; a machine's sleep counts."""
    started_s = process_start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
