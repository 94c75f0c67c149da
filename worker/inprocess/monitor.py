"""NVRx's monitor process: a daemon forked off each rank, which kills it after the hard timeout. What it lacks is added here.

It says that it is about to kill, and why: all that anybody else would see is a rank that dies of a signal. A signal that a
batch system sends to every process of a step must not end it: a rank without a monitor is taken for dead by the others.
"""

import mmap
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from rsup.supervisor import wire

OUTLIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are meant for ranks, and reach every process of a step."""


class HardLimit:
    """Lets the monitor processes that are forked from now on tell the agent before they kill this rank, by `tell`.

    `seconds`: what the limit is. A process has one at a time: a later one takes the place of an earlier one.
    """

    def __init__(self, tell: Callable[[wire.RankFault], None], seconds: float) -> None:
        self._tell = tell
        self._seconds = seconds
        self._shared = mmap.mmap(-1, 1)
        _speak_before_kills(self)

    def note(self, waits: bool) -> None:
        """Whether the training thread, which shows no progress, only waits for other ranks. Seen in the monitor process too."""
        self._shared[0] = int(waits)

    def begins_anew(self, interval_s: float, left_s: float, more_s: float = 0.0) -> None:
        """In NVRx's monitor thread: the training thread waits for other ranks, and the limit counts anew for it. The rank that
        is waited for is then the only one to be killed; its death frees this one. `interval_s`: of the signs of progress, of
        which an old one may still be under way; `left_s`: until the limit; `more_s`: how much longer than others'."""
        watchdog = getattr(threading.current_thread(), "progress_watchdog", None)
        if watchdog is not None:
            first_s = min(2 * interval_s, left_s / 2)
            for after_s in {first_s, first_s + more_s}:
                timer = threading.Timer(after_s, lambda: self._shared[0] and watchdog.reset())
                timer.daemon = True
                timer.start()

    def say(self) -> None:
        """In the monitor process: the rank is about to be killed."""
        waits = bool(self._shared[0])
        why = wire.WAITED_IN_VAIN if waits else wire.HUNG
        limit = f"no sign of progress for {self._seconds:g} s ({wire.HARD_LIMIT}, --inprocess-hard-timeout)"
        self._tell(wire.RankFault(0, "hard-timeout", f"{why}: {limit}", victim=waits))


_limit: HardLimit | None = None


def _speak_before_kills(limit: HardLimit) -> None:
    """NVRx calls `terminate_process` for the hard timeout only. Without it a kill is just not told of."""
    global _limit
    from nvidia_resiliency_ext.inprocess import monitor_process

    kill = getattr(monitor_process, "terminate_process", None)
    if _limit is None and callable(kill):

        def speak_and_kill(*arguments: Any, **named: Any) -> Any:
            if _limit is not None:
                _limit.say()
            return kill(*arguments, **named)

        monitor_process.terminate_process = speak_and_kill
    _limit = limit


def outlive_signals(rank_pid: int) -> None:
    """In the monitor process of the rank with that pid: end of a signal only where the rank has ended."""
    if threading.current_thread() is not threading.main_thread():
        return

    def end_after_rank(signum: int, frame: Any) -> None:
        if not _is_alive(rank_pid):
            os._exit(128 + signum)

    for signum in OUTLIVED:
        signal.signal(signum, end_after_rank)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in (b"Z", b"X", b"")
