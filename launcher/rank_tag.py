"""The tag that every process of a rank carries, whatever it does to its environment, session, process group or parent.

It is the soft limit RLIMIT_LOCKS. The kernel has enforced nothing by it since Linux 2.4.25 (getrlimit(2)), but it is inherited
over fork and kept over exec, and one system call that never blocks reads it of any process of the same user, even of one
that is stuck in the kernel or already a zombie. Bits, from the top: 8 that say "rsup", 22 of the agent's pid, 32 of its mark.
So anybody can tell whose process it is, and whether that launcher still lives.

Where the limit cannot be set (a sandbox, a hard limit below it) there are no tags: the other ways of finding processes remain.
"""

from __future__ import annotations

import functools
import os
import resource
import zlib
from dataclasses import dataclass

RLIMIT_LOCKS = 10
"""Of asm-generic/resource.h, the same on every architecture; Python has no name for it."""
_MAGIC = 0x2D
_PID_BITS, _MARK_BITS = 22, 32


@dataclass(frozen=True)
class RankTag:
    """Whose rank a process belongs to."""

    agent_pid: int
    mark_sum: int

    @property
    def limit(self) -> int:
        """As a soft limit."""
        return (_MAGIC << _PID_BITS | self.agent_pid) << _MARK_BITS | self.mark_sum


def tag_for(agent_pid: int, mark: str) -> RankTag:
    """The tag of the ranks of that agent."""
    return RankTag(agent_pid & ((1 << _PID_BITS) - 1), zlib.crc32(os.fsencode(mark)))


def set_tag(tag: RankTag) -> None:
    """Tag this process and what it starts. Makes system calls only: for a child between fork and exec. Raise OSError or
    ValueError where that is impossible."""
    _, hard = resource.getrlimit(RLIMIT_LOCKS)
    resource.setrlimit(RLIMIT_LOCKS, (tag.limit, hard))


def read_tag(pid: int) -> RankTag | None:
    """The tag of a process, zombies included; None if it has none, is gone, or is another user's."""
    try:
        limit, _ = resource.prlimit(pid, RLIMIT_LOCKS)
    except (OSError, ValueError):
        return None
    if limit < 0 or limit >> (_PID_BITS + _MARK_BITS) != _MAGIC:
        return None
    return RankTag(limit >> _MARK_BITS & ((1 << _PID_BITS) - 1), limit & ((1 << _MARK_BITS) - 1))


@functools.cache
def is_supported() -> bool:
    """Whether tags can be set and read here."""
    before = resource.getrlimit(RLIMIT_LOCKS)
    tag = tag_for(os.getpid(), "")
    try:
        set_tag(tag)
        found = read_tag(os.getpid())
        resource.setrlimit(RLIMIT_LOCKS, before)
    except (OSError, ValueError):
        return False
    return found == tag
