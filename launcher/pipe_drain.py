"""Reads a pipe in a thread until the process at its other end has ended, whoever else may still hold it."""

import os
import select
import threading
from collections.abc import Callable

READ_BYTES = 64 * 1024


class PipeDrain:
    """Owns the read end. `take` is called in the thread with what was read, and once with `b""` at the end."""

    def __init__(self, reader: int, take: Callable[[bytes], None], name: str) -> None:
        os.set_blocking(reader, False)
        self._reader = reader
        self._take = take
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def finish(self) -> None:
        """The process has ended: take what is left without waiting for more, and close the pipe."""
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._reader)
        os.close(self._wake_fd)

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        ready.register(self._wake_fd, select.POLLIN)
        is_last = False
        while True:
            is_last = is_last or any(fd == self._wake_fd for fd, _ in ready.poll())
            try:
                data = os.read(self._reader, READ_BYTES)
            except BlockingIOError:
                if is_last:  # somebody else holds the pipe: a process that was forked off meanwhile
                    break
                continue
            if not data:
                break
            self._take(data)
        self._take(b"")
