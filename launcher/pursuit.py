"""Killing what no look through /proc shows: a process that forks and ends, its child too, faster than anybody can look.

The kernel tells the last pid that it gave away. Whoever has one of the newest pids and carries the ranks' tag is killed at
once. A few tries are enough: each one caught has no further child.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

from rsup.launcher import rank_tag
from rsup.launcher.process_table import arguments_of, is_dead, last_pid, read_stat, send_signal
from rsup.launcher.rank_search import SUPERVISOR_MODULE

LOOK_S = 0.002
"""Looks this long for one that moves."""
QUIET_S = 0.01
"""Once one was seen, looks until none was for so long."""
NUM_PIDS = 8
MAX_ANCESTORS = 10


def pursue(mark: str, keep: Collection[int], deadline: float) -> bool:
    """Kill those processes; True if there were any, so that it is worth looking again. Ends by `deadline`
    (time.monotonic() seconds). `keep`: helpers, which with their descendants are left alone."""
    if not rank_tag.is_supported():
        return False
    mark_sum = rank_tag.tag_for(0, mark).mark_sum
    until_s = time.monotonic() + LOOK_S
    caught: set[int] = set()
    while (now_s := time.monotonic()) < min(until_s, deadline):
        newest = last_pid()
        for pid in range(newest, max(1, newest - NUM_PIDS), -1):
            tag = rank_tag.read_tag(pid) if pid not in caught else None
            if tag is not None and tag.mark_sum == mark_sum and _kill(pid, mark_sum, keep):
                caught.add(pid)
                until_s = now_s + QUIET_S
    return bool(caught)


def _kill(pid: int, mark_sum: int, keep: Collection[int]) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        tag = rank_tag.read_tag(pid)  # again, now that the pid cannot become another's unnoticed
        if tag is None or tag.mark_sum != mark_sum or _is_spared(pid, keep):
            return False
        return send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _is_spared(pid: int, keep: Collection[int]) -> bool:
    """A zombie (it needs no signal), a helper or its descendant, a supervisor."""
    stat = read_stat(pid)
    if stat is None or is_dead(stat) or SUPERVISOR_MODULE in arguments_of(pid)[:6]:
        return True
    for _ in range(MAX_ANCESTORS):
        if stat.pid in keep:
            return True
        parent = read_stat(stat.parent)
        if parent is None or parent.pid in (1, os.getpid()):
            return False
        stat = parent
    return False
