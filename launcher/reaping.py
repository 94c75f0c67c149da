"""Ending everything that the ranks of an agent left behind. See `processes` for the theory."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection

from rsup.launcher import rank_cgroup
from rsup.launcher.orphans import reap_orphans
from rsup.launcher.process_table import (
    ProcessId,
    ProcessStat,
    Survivor,
    all_processes,
    describe,
    is_blocked,
    is_dead,
    open_process,
    read_stat,
    send_signal,
)
from rsup.launcher.pursuit import pursue
from rsup.launcher.rank_search import RankSearch

__all__ = [
    "ProcessId",
    "ProcessStat",
    "Survivor",
    "all_processes",
    "describe",
    "is_dead",
    "marked_processes",
    "open_process",
    "read_stat",
    "reap_everything",
    "send_signal",
]

BLOCKED_PATIENCE_S = 2.0
SCAN_PAUSE_S = 0.02
MAX_UNREAD_SCANS = 5


def marked_processes(mark: str, sessions: Collection[int] = (), *, keep: Collection[int] = ()) -> list[ProcessId]:
    """All living processes of the ranks: those with the mark, in whatever way they carry it, those in one of `sessions`, and
    the descendants of these. `keep`: pids of helpers, which with their descendants are never among them."""
    return [stat.process for stat in RankSearch(mark, sessions, keep).living()]


def reap_everything(mark: str, sessions: Collection[int], deadline: float, *, keep: Collection[int] = ()) -> list[Survivor]:
    """SIGKILL everything of the ranks until nothing is left, and reap what came to us. Blocks at most until `deadline`
    (time.monotonic() seconds); returns those still there. Usually takes a few milliseconds.

    A process blocked in the kernel (state D, and not exiting) is reported after 2 s rather than waited for.
    """
    with contextlib.ExitStack() as pidfds:
        survivors = _Reaping(mark, sessions, keep, pidfds).run(deadline)
    if not survivors:
        rank_cgroup.remove(mark)
    return survivors


class _Reaping:
    """One call of `reap_everything`: the processes that were signalled, by pidfd, until each has ended."""

    def __init__(self, mark: str, sessions: Collection[int], keep: Collection[int], pidfds: contextlib.ExitStack) -> None:
        self._mark, self._keep = mark, keep
        self._leaders = frozenset(sessions)
        self._sessions = set(sessions)
        self._pidfds = pidfds
        self._alive: dict[ProcessId, int] = {}
        self._done: set[ProcessId] = set()

    def run(self, deadline: float) -> list[Survivor]:
        num_unread_scans = 0
        blocked_at = time.monotonic() + BLOCKED_PATIENCE_S
        while True:
            search = RankSearch(self._mark, self._sessions, self._keep)
            num_new = sum(self._kill(stat) for stat in search.living())
            self._sessions -= {session for session in self._sessions if search.is_session_empty(session)}
            self._wait(min(SCAN_PAUSE_S, max(0.0, deadline - time.monotonic())))
            reap_orphans(self._mark, self._leaders, self._keep)
            if search.unread and not self._alive:
                time.sleep(SCAN_PAUSE_S)
            num_unread_scans = num_unread_scans + 1 if search.unread else 0
            if not num_new and not self._alive and (not search.unread or num_unread_scans > MAX_UNREAD_SCANS):
                if not pursue(self._mark, self._keep, deadline):
                    return []
                continue
            now = time.monotonic()
            if now >= deadline or (now >= blocked_at and self._alive and all(map(is_blocked, self._alive))):
                return [describe(process) for process in self._alive]

    def _kill(self, stat: ProcessStat) -> bool:
        """SIGKILL it; True if it was not known before."""
        process = stat.process
        if process in self._alive or process in self._done:
            return False
        pidfd = open_process(process)
        if pidfd is None:
            return False
        self._pidfds.callback(os.close, pidfd)
        send_signal(pidfd, signal.SIGKILL)
        self._alive[process] = pidfd
        return True

    def _wait(self, within_s: float) -> None:
        """Wait for the end of what was signalled. A pidfd tells the end of the last thread, which a zombie's `Z` does not."""
        give_up = time.monotonic() + within_s
        while self._alive:
            poll = select.poll()
            by_fd = {pidfd: process for process, pidfd in self._alive.items()}
            for pidfd in by_fd:
                poll.register(pidfd, select.POLLIN)
            ended = poll.poll(max(0.0, give_up - time.monotonic()) * 1000)
            for pidfd, _ in ended:
                self._done.add(by_fd[pidfd])
                del self._alive[by_fd[pidfd]]
            if not ended:
                return
