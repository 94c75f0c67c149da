"""`--ft-checkpoint-iteration-file`: the training writes the iteration of its newest checkpoint there, as Megatron-LM to its
`latest_checkpointed_iteration.txt`. For scripts that tell rsup nothing of their checkpoints.

It is read in a thread of its own, every few seconds and when an attempt ends: it mostly lies on a file system that may hang.
"""

import threading
from pathlib import Path

READ_EVERY_S = 2.0
MAX_BYTES = 64


class IterationFile:
    """What is there when it is made belongs to an earlier job and is no progress of this one. All methods but the thread's are
    for one thread, and return at once unless they are told how long they may wait."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._wanted = threading.Event()
        self._has_read = threading.Event()
        self._is_over = False
        self._latest: int | None = None
        self._told: int | None = None
        threading.Thread(target=self._run, name="rsup-iteration-file", daemon=True).start()
        self._has_read.wait(0.2)
        self._told = self._latest

    def newer(self, within_s: float = 0.0) -> int | None:
        """The iteration, if it has grown since the last call. `within_s`: read it first, and wait so long for that."""
        if within_s > 0:
            self._has_read.clear()
            self._wanted.set()
            self._has_read.wait(within_s)
        latest = self._latest
        if latest is None or (self._told is not None and latest <= self._told):
            return None
        self._told = latest
        return latest

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._is_over = True
        self._wanted.set()

    def _run(self) -> None:
        while not self._is_over:
            self._latest = read_iteration(self.path)
            self._has_read.set()
            self._wanted.wait(READ_EVERY_S)
            self._wanted.clear()


def read_iteration(path: Path) -> int | None:
    """The number in the file; None where there is none (yet), or another word such as Megatron-LM's `release`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
