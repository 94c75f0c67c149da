"""Signals to the launcher, as bytes in a pipe: seen by the agent's loop, in order, wherever it was interrupted."""

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

from rsup.launcher.suspension import SUSPENDS
from rsup.launcher.terminal import ignore_background_stops

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that only go to the ranks; training goes on."""
ALSO_PASSED_ON = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    signal.SIGPWR,
    signal.SIGXCPU,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
"""The others that would kill this process, and its ranks with it, and that a person or a batch system may send. Left alone
where the program that we run in (`rsup.launcher.main`) has a use of its own for them. Not SIGINT: Ctrl-C wants an end."""
RESIZED = signal.SIGWINCH


class SignalInbox:
    """Catches signals until `close`. Main thread only.

    A SIGHUP that was ignored when we started (nohup) stays ignored. `stops`: those that end the job; SIGINT always does.
    """

    def __init__(self, stops: Iterable[signal.Signals]) -> None:
        self._stops = frozenset((*stops, signal.SIGINT))
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {}
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._background_before = ignore_background_stops()
        unused = [number for number in (*ALSO_PASSED_ON, SUSPENDS) if signal.getsignal(number) is signal.SIG_DFL]
        for signum in (*self._stops, *PASSED_ON, *unused, RESIZED):
            if signum in self._before or (signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN):
                continue
            with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP cannot be caught
                self._before[signum] = signal.signal(signum, _note_only)

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._read_fd

    def read(self) -> list[tuple[int, bool]]:
        """Signals since the last call: (number, whether it ends the job)."""
        try:
            numbers = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return []
        return [(number, number in self._stops) for number in numbers if number in self._before]

    def close(self) -> None:
        """Put back what was there before."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        signal.signal(signal.SIGTTOU, self._background_before or signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read_fd)
        os.close(self._write_fd)


def _note_only(signum: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has the number; nothing may happen here."""
