"""Dead descendants of ranks that came to us, the subreaper (or PID 1): somebody must take note of them, or they stay."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rsup.launcher import rank_tag
from rsup.launcher.process_table import ProcessId, ProcessStat, all_processes, is_dead, read_stat

UNCLAIMED_S = 60.0
"""What we started ourselves is waited for sooner. A zombie that stays was left by a shell that we took the place of."""


def reap_orphans(mark: str, leaders: Collection[int], keep: Collection[int]) -> None:
    """Reap those that are dead. Never a rank (`leaders`) or a helper (`keep`): who started it wants to know how it ended.
    As PID 1 all that came from another session: then orphans come to us from everybody."""
    for stat in _dead_children(leaders, keep):
        if _came_to_us(stat, rank_tag.tag_for(0, mark).mark_sum):
            _reap(stat)


class OrphanWatch:
    """As `reap_orphans`, again and again, and after a minute also what nobody else wants."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._unclaimed: dict[ProcessId, float] = {}

    def look(self, now_s: float, leaders: Collection[int], keep: Collection[int]) -> None:
        """Call it every second; cheap."""
        reap_orphans(self._mark, leaders, keep)
        dead = {stat.process: stat for stat in _dead_children(leaders, keep)}
        self._unclaimed = {process: self._unclaimed.get(process, now_s) for process in dead}
        for process, since_s in self._unclaimed.items():
            if now_s >= since_s + UNCLAIMED_S:
                _reap(dead[process])


def _dead_children(leaders: Collection[int], keep: Collection[int]) -> Iterator[ProcessStat]:
    for pid in _children():
        stat = read_stat(pid)
        if stat is not None and pid not in leaders and pid not in keep and is_dead(stat):
            yield stat


def _came_to_us(stat: ProcessStat, mark_sum: int) -> bool:
    if stat.session == os.getsid(0):
        return False
    tag = rank_tag.read_tag(stat.pid)
    return not rank_tag.is_supported() or os.getpid() == 1 or (tag is not None and tag.mark_sum == mark_sum)


def _reap(stat: ProcessStat) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(stat.pid, os.WNOHANG)


def _children() -> list[int]:
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread ended meanwhile
        lists = []
    if lists:
        return [int(pid) for text in lists for pid in text.split()]
    return [stat.pid for stat in all_processes() if stat.parent == os.getpid()]
