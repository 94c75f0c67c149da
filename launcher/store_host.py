"""TCPStores in the keeper: served from listening sockets that the agent has bound. Imports torch, late and in a thread.

Works with torch 2.11 to 2.13, with the libuv and the plain backend (`USE_LIBUV=0`): both take over a listening descriptor.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rsup.launcher.entry_stores import EntryStores

IMPORT_NICENESS = 5  # ranks import torch at the same moment, and they are what the user waits for
OWN_CONNECTION_TIMEOUT = timedelta(seconds=30)


class StoreHost:
    """Serves one store per attempt. `say` is called from its thread with one line where something fails."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[int, int]] = {}
        """Port and listening descriptor of the stores still to be made, by attempt."""
        self._requests: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._stores: dict[int, Any] = {}
        self._entries: dict[int, EntryStores] = {}
        self._torch_error = ""
        self._thread: threading.Thread | None = None

    def host(self, attempt: int, port: int, listening_fd: int) -> None:
        """Serve the attempt's store from `listening_fd`, which is ours from now on, as soon as torch is there."""
        with self._lock:
            self._waiting[attempt] = (port, listening_fd)
        self._request(attempt, wanted=True)

    def drop(self, attempt: int) -> None:
        """End the attempt's store and free its port; at once if torch was still being imported."""
        with self._lock:
            _, listening_fd = self._waiting.pop(attempt, (0, -1))
        if listening_fd >= 0:
            os.close(listening_fd)
        else:
            self._request(attempt, wanted=False)

    def _request(self, attempt: int, wanted: bool) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stores", daemon=True)
            self._thread.start()
        self._requests.put((attempt, wanted))

    def _run(self) -> None:
        while True:
            attempt, wanted = self._requests.get()
            if wanted:
                self._serve(attempt)
            else:
                if entries := self._entries.pop(attempt, None):
                    entries.close()
                self._stores.pop(attempt, None)

    def _serve(self, attempt: int) -> None:
        make_store = self._import_torch()
        with self._lock:
            port, listening_fd = self._waiting.pop(attempt, (0, -1))
        if listening_fd < 0:
            return  # dropped meanwhile
        if make_store is None:
            os.close(listening_fd)  # who connects is refused rather than left waiting
            return
        address = _bound_address(listening_fd)

        def make(port: int, listening_fd: int) -> Any:
            # the server's own client: the socket listens on loopback, or on all addresses
            return make_store(
                _own_address(address),
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening_fd,
                timeout=OWN_CONNECTION_TIMEOUT,
                use_libuv=os.environ.get("USE_LIBUV", "1") != "0",
            )

        def connect() -> Any:
            return make_store(_own_address(address), port, is_master=False, wait_for_workers=False)

        try:
            self._stores[attempt] = make(port, listening_fd)
        except (RuntimeError, ValueError, TypeError) as error:
            self._say(f"the TCPStore of attempt {attempt} on port {port} failed: {_first_line(error)}")
            return
        self._entries[attempt] = EntryStores(address, self._stores[attempt], connect, make, self._say)

    def _import_torch(self) -> Callable[..., Any] | None:
        if self._torch_error:
            return None
        found: list[Callable[..., Any]] = []
        importing = threading.Thread(target=self._import_slowly, args=(found,), name="import torch", daemon=True)
        importing.start()
        importing.join()
        if not found:
            self._say(f"no TCPStore for the ranks, torch cannot be imported: {self._torch_error}")
            return None
        return found[0]

    def _import_slowly(self, found: list[Callable[..., Any]]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), IMPORT_NICENESS)
        gc.disable()  # it finds nothing in an import, and takes a quarter of its time
        try:
            found.append(importlib.import_module("torch.distributed").TCPStore)
        except Exception as error:  # whatever an installation throws at its import
            self._torch_error = f"{type(error).__name__}: {_first_line(error)}"
        finally:
            gc.enable()


def _bound_address(listening_fd: int) -> str:
    with socket.socket(fileno=os.dup(listening_fd)) as listening:
        return str(listening.getsockname()[0])


def _own_address(bound: str) -> str:
    return {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(bound, bound)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
