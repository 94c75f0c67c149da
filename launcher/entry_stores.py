"""A TCPStore for each entry of an attempt's ranks into their training function, served on demand by the keeper.

Ranks speak through the attempt's own store. `rsup/entry/over/N` says that entry N is over (0: that there will be a first one);
then the store of entry N+1 is wanted, whose port is in `rsup/entry/port/N+1`. It is always served one entry ahead, so that a
restart waits for nothing. The store of an entry that is over is dropped after a moment: a rank that is stuck in
`init_process_group`, waiting for one that has left, is in a wait that nothing else ends.
A job that never asks costs one connection that waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rsup.launcher.store_socket import bind_store_socket
from rsup.supervisor.wire import RsupError

LOOKS_AGAIN_AFTER = timedelta(hours=12)
"""torch counts a wait's milliseconds in 32 bits, 24 days at most, and a job may well go on for longer without a fault."""
ENDS_WITHIN_S = 1.0
DROP_AFTER_S = 0.5
"""Ranks that are not stuck have left an entry sooner; what still uses its store then would only complain."""


class EntryStores:
    """The stores of one attempt. `make_store(port, listening_fd)` serves one on a socket that is its own from then on.

    `host` is the address that the attempt's store is bound to, `attempt` that store; `connect()` gives another connection to
    it. `say` is called with one line where something fails.
    """

    def __init__(
        self,
        host: str,
        attempt: Any,
        connect: Callable[[], Any],
        make_store: Callable[[int, int], Any],
        say: Callable[[str], None],
    ) -> None:
        self._host = host
        self._attempt: Any = attempt
        self._connect = connect
        self._make_store = make_store
        self._say = say
        self._stores: dict[int, Any] = {}
        self._entry = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="entry stores", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The attempt is over: end the wait, and drop them all."""
        self._is_over = True
        with contextlib.suppress(Exception):  # the store has failed: so does the wait
            self._attempt.set(f"rsup/entry/over/{self._entry}", "")
        self._thread.join(ENDS_WITHIN_S)
        self._attempt = None
        self._stores.clear()

    def _run(self) -> None:
        try:
            attempt = self._connect()
            while not self._is_over:
                entry = self._entry
                self._wait_for(attempt, f"rsup/entry/over/{entry}")
                self._serve(attempt, entry + 1)
                self._serve(attempt, entry + 2)
                self._drop_soon(entry)
                self._entry += 1
        except Exception as error:  # outermost frame of the thread: mostly the attempt's store has gone, with its attempt
            if not self._is_over:
                first_line = (str(error).strip().splitlines() or [""])[0]
                self._say(f"no more stores for in-process restarts: {type(error).__name__}: {first_line}")

    def _wait_for(self, attempt: Any, key: str) -> None:
        began_s = time.monotonic()
        while True:
            try:
                attempt.wait([key], LOOKS_AGAIN_AFTER)
                return
            except Exception:  # torch's errors are of several types; one that comes early is no time-out
                if self._is_over or time.monotonic() - began_s < LOOKS_AGAIN_AFTER.total_seconds() / 2:
                    raise
                began_s = time.monotonic()

    def _drop_soon(self, entry: int) -> None:
        if entry in self._stores:
            timer = threading.Timer(DROP_AFTER_S, self._stores.pop, (entry, None))
            timer.daemon = True
            timer.start()

    def _serve(self, attempt: Any, entry: int) -> None:
        if entry in self._stores or self._is_over:
            return
        try:
            with bind_store_socket(self._host, 0) as listening:
                port = int(listening.getsockname()[1])
                self._stores[entry] = self._make_store(port, listening.detach())
        except RsupError as error:
            self._say(f"no store for entry {entry} into the training: {error}")
            return
        attempt.set(f"rsup/entry/port/{entry}", str(port))
