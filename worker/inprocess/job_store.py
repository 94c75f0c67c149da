"""NVRx's store, in the TCPStore of the attempt, which the launcher's keeper holds: it outlives every rank, rank 0 too.

NVRx polls it for the next fault. Here that costs one look per interval, and a fault that the supervisor has told of ends the
wait at once (`look_now`). Each thread has a connection of its own, since operations on a shared one wait for each other; one
whose thread has ended is the next one's, since torch asks a name server about each connection that is made.
"""

import collections
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.store import PrefixStore, StoreMixin
from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
from torch._C._distributed_c10d import Store, TCPStore

from rsup.worker.inprocess.monitor import outlive_signals

PREFIX = "rsup/inprocess"
TIMEOUT = timedelta(seconds=300)
LONGEST_SHORT_WAIT = timedelta(seconds=30)
FIRST_PAUSE_S = 0.001
HURRIED_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.1


class JobStore(Store, StoreMixin):  # type: ignore[misc]  # NVRx has no types
    """The attempt's store at `host`:`port`, under a prefix of ours. `joining`: this rank comes when the others have met.

    `rank_pid`: of the rank that it is made for; made in another process, it is that of NVRx's monitor.
    """

    def __init__(self, host: str, port: int, joining: bool = False, rank_pid: int = 0) -> None:
        super().__init__()
        self._address = (host, port)
        self._joining = joining
        self._threads = threading.local()
        if rank_pid not in (0, os.getpid()):
            outlive_signals(rank_pid)

    @property
    def _mine(self) -> Any:
        """The calling thread's connection."""
        lent: _Lent | None = getattr(self._threads, "lent", None)
        if lent is None:
            lent = self._threads.lent = _Lent(self._address)
        return lent.store

    def initial_barrier(self, *arguments: Any, **named: Any) -> None:
        """Wait for the first entry's ranks, unless they have met before."""
        if not self._joining:
            super().initial_barrier(*arguments, **named)

    # --------------------------------------------------------------------- torch.distributed.Store, which NVRx prefixes again

    def set(self, key: str, value: str | bytes) -> None:
        self._mine.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._mine.get(key)
        return value

    def add(self, key: str, amount: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch calls by place
        return int(self._mine.add(key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._mine.append(key, value)

    def compare_set(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch calls by place
        self, key: str, expected: str | bytes, desired: str | bytes
    ) -> bytes:
        value: bytes = self._mine.compare_set(key, _text(expected), _text(desired))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self._mine.multi_get(list(keys))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._mine.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        """Short waits look from time to time: torch would write a warning about each that ends in vain."""
        if timeout > LONGEST_SHORT_WAIT:
            self._mine.wait(list(keys), timeout)
            return
        is_for_fault = any(key.endswith(self.ANY_RANK_INTERRUPTED) for key in keys)
        end_s, pause_s = time.monotonic() + timeout.total_seconds(), FIRST_PAUSE_S
        while not self.check(keys):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or (is_for_fault and _hurries):
                time.sleep(max(0.0, min(left_s, HURRIED_PAUSE_S)))
                raise dist.DistStoreError(f"{', '.join(keys)}: not there after {timeout.total_seconds():g} s")
            if is_for_fault:
                _look_now.wait(left_s)
                _look_now.clear()
            else:
                time.sleep(min(left_s, pause_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        return bool(self._mine.delete_key(key))

    def of_iteration(self, iteration: int) -> PrefixStore:
        """What NVRx keeps of its `iteration` (entry - 1)."""
        return PrefixStore(iteration, self)


class _Lent:
    """A connection for one thread. When the thread ends, and with it what it alone holds, the next one gets the connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._free = _free_of(address)
        try:
            self.store: Any = self._free.pop()
        except IndexError:
            connection = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
            self.store = TorchPrefixStore(PREFIX, connection)

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            self._free.append(store)


_all_free: dict[tuple[int, str, int], collections.deque[Any]] = {}
"""Connections that no thread has, by process (what was forked must not use its parent's) and address."""


def _free_of(address: tuple[str, int]) -> collections.deque[Any]:
    return _all_free.setdefault((os.getpid(), *address), collections.deque())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_look_now = threading.Event()
_hurries = False


def look_now() -> None:
    """A fault has been recorded: whoever waits for one in this process need not wait for the end of the interval."""
    _look_now.set()


def hurry(on: bool) -> None:
    """Whether waits for a fault are short, since NVRx's monitor thread is about to be asked to end."""
    global _hurries
    _hurries = on
    _look_now.set()
