"""The store that `init_process_group()` finds in the environment: a new one for each entry, so that no older key is met.

torch puts no prefix before its keys, and a process group's second life reads the addresses of its first. The keeper of the
job's first node serves the stores (`launcher/entry_stores.py`); what it is asked and says goes through the attempt's own store.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

WITHIN = timedelta(seconds=60)


@dataclass(frozen=True)
class AttemptStore:
    """Where the attempt's own store is, which outlives its entries. A connection is kept for each of the two methods: they are
    called by two threads, and the one that waits for a store must not hold up the news that nobody needs it."""

    host: str
    port: int
    _to_ask: "_Connection" = field(default_factory=lambda: _Connection(), compare=False)
    _to_tell: "_Connection" = field(default_factory=lambda: _Connection(), compare=False)

    def use_store_of(self, entry: int) -> None:
        """Let the environment name the store of `entry`. Raises torch's `DistStoreError` if no keeper answers in a minute."""
        with self._to_ask.open(self.host, self.port) as store:
            if entry == 1:
                store.set("rsup/entry/over/0", "")
            os.environ["MASTER_PORT"] = store.get(f"rsup/entry/port/{entry}").decode()

    def entry_over(self, entry: int) -> None:
        """`entry` has met a fault: whoever still waits in its store waits in vain, and is to be told so."""
        first = entry
        with self._to_tell.open(self.host, self.port) as store:
            while first > 1 and not store.check([f"rsup/entry/over/{first - 1}"]):
                first -= 1  # all ranks left that one before they began it; the keeper waits for one number after the other
            for number in range(first, entry + 1):
                store.set(f"rsup/entry/over/{number}", "")


class _Connection:
    """Made when it is first needed, and anew after an error; one thread at a time uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: Any = None

    @contextlib.contextmanager
    def open(self, host: str, port: int) -> Iterator[Any]:
        from torch._C._distributed_c10d import TCPStore

        with self._lock:
            store, self._store = self._store, None  # an error in the block, or an interruption, leaves none behind
            store = store or TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=WITHIN)
            yield store
            self._store = store


def attempt_store() -> AttemptStore:
    """The one that the launcher has put into the environment. Read it before the first `use_store_of`."""
    return AttemptStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
