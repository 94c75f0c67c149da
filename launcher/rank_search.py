"""Which processes are the ranks': one look through /proc. See `processes` for the theory.

Evidence, each enough alone: the tag (`rank_tag`), `RSUP_MARK` in the environment, the session of a rank, the ranks' cgroup; and
whoever descends from one of these. That a process came to us as an orphan is no evidence where tags work: we may be PID 1 of a
container, or a shell that started something in the background may have replaced itself by us.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from rsup.launcher import rank_cgroup, rank_tag
from rsup.launcher.process_table import ProcessStat, all_processes, arguments_of, is_dead

KERNEL_THREAD_FLAG = 0x200000  # PF_KTHREAD of linux/sched.h
SUPERVISOR_MODULE = b"rsup.supervisor.main"


class RankSearch:
    """One look. `sessions`: of the ranks, by their leaders' pids. `keep`: pids of helpers, which with their descendants are
    never among the ranks' processes.

    `unread`: processes blocked in the kernel that may be the ranks' and whose environment was better left alone, since
    reading it can block as well. None where tags work.
    """

    def __init__(self, mark: str, sessions: Collection[int], keep: Collection[int]) -> None:
        self._needle = b"\0RSUP_MARK=" + os.fsencode(mark) + b"\0"
        self._mark_sum = rank_tag.tag_for(0, mark).mark_sum
        self._has_tags = rank_tag.is_supported()
        self._in_cgroup = rank_cgroup.members(mark)
        self._me = os.getpid()
        self._my_group, self._my_session = os.getpgrp(), os.getsid(0)
        self._stats = {stat.pid: stat for stat in all_processes()}
        self._children: dict[int, list[ProcessStat]] = {}
        for stat in self._stats.values():
            self._children.setdefault(stat.parent, []).append(stat)
        self._never = {1, os.getppid(), self._me}
        self._never |= self._below(self._stats[pid] for pid in keep if pid in self._stats).keys()
        self._sessions = frozenset(session for session in sessions if not self._is_anothers(session))
        self.unread: list[int] = []

    def living(self) -> list[ProcessStat]:
        """Processes to end, parents before their children."""
        roots = [stat for stat in self._stats.values() if self._is_root(stat)]
        return [stat for stat in self._below(roots).values() if not is_dead(stat)]

    def is_session_empty(self, session: int) -> bool:
        """Whether nobody is left in that rank's session, so that its number may become another's."""
        return session not in self._stats and all(stat.session != session for stat in self._stats.values())

    def _is_anothers(self, session: int) -> bool:
        """Whether the number is another's by now: its leader lives, is no child of ours, and has no tag of ours."""
        leader = self._stats.get(session)
        if leader is None or not self._has_tags or leader.parent == self._me:
            return False
        return not self._is_tagged(session)

    def _is_root(self, stat: ProcessStat) -> bool:
        if self._is_near(stat) or stat.flags & KERNEL_THREAD_FLAG:
            return False
        known = stat.session in self._sessions or stat.pid in self._in_cgroup or self._is_tagged(stat.pid)
        found = known or self._is_unexplained_orphan(stat) or self._is_marked(stat)
        return found and not _runs_supervisor(stat.pid) and not _runs_supervisor(stat.parent)

    def _is_near(self, stat: ProcessStat) -> bool:
        """Whether it is ourselves or belongs to us, so that it is never ended."""
        return stat.pid in self._never or stat.group == self._my_group

    def _is_tagged(self, pid: int) -> bool:
        tag = rank_tag.read_tag(pid) if self._has_tags else None
        return tag is not None and tag.mark_sum == self._mark_sum

    def _is_unexplained_orphan(self, stat: ProcessStat) -> bool:
        """A child of ours in another session than ours, where there are no tags to tell whose it was. (Helpers share our
        session, or are in `keep`.)"""
        return not self._has_tags and self._me != 1 and stat.parent == self._me and stat.session != self._my_session

    def _is_marked(self, stat: ProcessStat) -> bool:
        if stat.state == "Z":
            return False
        if stat.state == "D":
            if not self._has_tags:
                self.unread.append(stat.pid)
            return False
        try:
            with open(f"/proc/{stat.pid}/environ", "rb", buffering=0) as file:
                environment = file.readall()
        except OSError:
            return False  # gone, or another user's
        return self._needle in b"\0" + environment

    def _below(self, roots: Iterable[ProcessStat]) -> dict[int, ProcessStat]:
        """`roots` and their descendants, without what is near to us or a supervisor, and what descends from that."""
        found: dict[int, ProcessStat] = {}
        waiting = list(roots)
        while waiting:
            stat = waiting.pop()
            if stat.pid in found or self._is_near(stat) or _runs_supervisor(stat.pid):
                continue
            found[stat.pid] = stat
            waiting.extend(self._children.get(stat.pid, ()))
        return found


def _runs_supervisor(pid: int) -> bool:
    return SUPERVISOR_MODULE in arguments_of(pid)[:6]
