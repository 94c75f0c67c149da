"""What is left of a launch all of whose own processes were killed: nobody but the next launch can end it.

The parent-death signal has killed its ranks, but not what they had started. Their tag names the launcher's pid. Only processes
of the same user and of the same pid namespace count, in which that pid means what it says, and never those with our own
tag: of a launch that we are a part of.
"""

from __future__ import annotations

import os
import select
import signal
import time

from rsup.launcher import rank_tag
from rsup.launcher.process_table import (
    ProcessStat,
    Survivor,
    all_processes,
    describe,
    is_dead,
    open_process,
    read_stat,
    send_signal,
)

WITHIN_S = 1.0


def end_strays() -> list[Survivor]:
    """SIGKILL what ranks of dead launchers left behind, and wait for its end, at most a second. Return what it was."""
    ended: list[Survivor] = []
    own = rank_tag.read_tag(os.getpid())
    until_s = time.monotonic() + WITHIN_S
    for stat in all_processes():
        if _is_stray(stat, own):
            said = describe(stat.process)
            if _end(stat, until_s):
                ended.append(said)
    return ended


def _is_stray(stat: ProcessStat, own: rank_tag.RankTag | None) -> bool:
    tag = rank_tag.read_tag(stat.pid)
    if tag is None or tag == own or is_dead(stat) or not _is_launcher_dead(tag.agent_pid, stat):
        return False
    try:
        ours = os.stat(f"/proc/{stat.pid}").st_uid == os.geteuid()
        return ours and os.readlink(f"/proc/{stat.pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _is_launcher_dead(pid: int, of: ProcessStat) -> bool:
    """Whether nobody has the launcher's pid, or a process that is younger than its rank's."""
    launcher = read_stat(pid)
    return launcher is None or is_dead(launcher) or launcher.start_ticks > of.start_ticks


def _end(stat: ProcessStat, until_s: float) -> bool:
    pidfd = open_process(stat.process)
    if pidfd is None:
        return False
    try:
        if not send_signal(pidfd, signal.SIGKILL):
            return False
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
    finally:
        os.close(pidfd)
    return True
