"""Lines to another process about how a launch goes: written by a thread of their own, so that the agent's loop never waits."""

import json
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_WAITING = 4096
"""Lines that nobody has read yet; later ones are dropped, but for the last."""


class ReportPipe:
    """Owns the descriptor. A reader that has gone, or does not read, costs lines and nothing else."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="rsup-report", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any], *, is_last: bool = False) -> None:
        """One JSON object a line."""
        if is_last or self._lines.qsize() < MAX_WAITING:
            self._lines.put(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def close(self, within_s: float) -> None:
        """End of the lines, for the reader to see; waits for it to take what is waiting. May be repeated."""
        self._lines.put(b"")
        self._thread.join(within_s)

    def _write_all(self) -> None:
        with suppress(OSError):  # nobody reads any more
            while line := self._lines.get():
                while line:
                    line = line[os.write(self._fd, line) :]
        with suppress(OSError):
            os.close(self._fd)
