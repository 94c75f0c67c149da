"""The agent's side of the process that reads the devices' health (`health_process`): starts it once ranks run, hears its news.

Without GPUs and without an inventory file there is no such process, and it costs nothing.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rsup.launcher import health_process
from rsup.launcher.health_process import News, Watch
from rsup.launcher.keeper import blocked_signals
from rsup.supervisor.wire import Device, HealthReading

KILLED_WITHIN_S = 0.5
AGAIN_AFTER_S = 60.0
MAX_STARTS = 5
"""A process that dies that often cannot live here."""
MAX_PACKET_BYTES = 1 << 18

_news_decoder = msgspec.msgpack.Decoder(News)


class HealthWatch:
    """Use from the agent's loop only. `hear` is called with readings that are new, `note` with lines for the job's story."""

    def __init__(
        self,
        devices: Sequence[Device],
        has_gpus: bool,
        file: Path | None,
        selector: selectors.BaseSelector,
        hear: Callable[[list[HealthReading]], None],
        note: Callable[[str], None],
    ) -> None:
        self._watch = Watch(list(devices), str(file or ""), has_gpus)
        self._is_wanted = has_gpus or file is not None
        self._selector = selector
        self._hear, self._note = hear, note
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._start_at_s = 0.0
        self._num_starts = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the process, while there is one: it is no rank's."""
        return (self._process.pid,) if self._process else ()

    def look_after(self, *, is_running: bool) -> None:
        """Start the process if it is due. To be called now and then."""
        if self._is_wanted and self._process is None and is_running and time.monotonic() >= self._start_at_s:
            self._start()

    def close(self) -> None:
        """End the process; one that is stuck in the driver is left to the kernel."""
        self._is_wanted = False
        self._end()

    def _start(self) -> None:
        self._num_starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, blocked_signals():
            try:
                self._process = subprocess.Popen(
                    # -P: the user's directory must not replace modules of ours
                    [sys.executable, "-P", "-m", health_process.__name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name != "RSUP_MARK"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._is_wanted = False
                self._note(f"the devices' health is not watched: cannot start {sys.executable}: {error.strerror}")
                return
        ours.setblocking(False)
        self._link = ours
        self._selector.register(ours, selectors.EVENT_READ, self._read)
        with contextlib.suppress(OSError):
            ours.send(msgspec.msgpack.encode(self._watch), socket.MSG_NOSIGNAL)

    def _read(self) -> None:
        while self._link is not None:
            try:
                data = self._link.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._died()
                return
            news = _news_decoder.decode(data)
            if news.readings:
                self._hear(news.readings)
            if news.note:
                self._note(news.note)

    def _died(self) -> None:
        self._end()
        self._start_at_s = time.monotonic() + AGAIN_AFTER_S
        if self._num_starts >= MAX_STARTS:
            self._is_wanted = False
            self._note("the process that reads the devices' health dies again and again: it is not watched any more")

    def _end(self) -> None:
        if self._link is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._link)
            self._link.close()
            self._link = None
        if self._process is None:
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: the agent must not be
            self._process.wait(KILLED_WITHIN_S)
        self._process = None
