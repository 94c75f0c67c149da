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
from collections.abc import Sequence
from dataclasses import dataclass

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
MAX_JOB_ID_BYTES = 100
_JOB_VARIABLE = b"RSUP_JOB_ID="


@dataclass(frozen=True)
class Stray:
    """A process that was left over. `job_id`: of its launch, empty where it has wiped its environment."""

    process: Survivor
    launcher_pid: int
    job_id: str


def end_strays() -> list[Stray]:
    """SIGKILL what ranks of dead launchers left behind, and wait for its end, at most a second. Return what it was."""
    ended: list[Stray] = []
    own = rank_tag.read_tag(os.getpid())
    until_s = time.monotonic() + WITHIN_S
    for stat in all_processes():
        tag = rank_tag.read_tag(stat.pid)
        if tag is not None and tag != own and _is_stray(stat, tag):
            stray = Stray(describe(stat.process), tag.agent_pid, _job_of(stat))
            if _end(stat, until_s):
                ended.append(stray)
    return ended


def strays_text(strays: Sequence[Stray], max_named: int) -> str:
    """`launcher 7 of job j (dead): 9 (sleep, S), 10 (sh, S); launcher 8 (dead): 11 (sleep, S)`"""
    jobs = {stray.launcher_pid: f" of job {stray.job_id}" for stray in strays if stray.job_id}
    named: dict[int, list[str]] = {}
    for stray in strays[:max_named]:
        named.setdefault(stray.launcher_pid, []).append(str(stray.process))
    text = "; ".join(f"launcher {pid}{jobs.get(pid, '')} (dead): {', '.join(found)}" for pid, found in named.items())
    return text + (", ..." if strays[max_named:] else "")


def _job_of(stat: ProcessStat) -> str:
    if stat.state == "D":
        return ""  # reading its environment could block too
    try:
        with open(f"/proc/{stat.pid}/environ", "rb", buffering=0) as file:
            words = file.readall().split(b"\0")
    except OSError:
        return ""
    found = next((word for word in words if word.startswith(_JOB_VARIABLE)), b"").removeprefix(_JOB_VARIABLE)
    return found.decode(errors="replace") if len(found) <= MAX_JOB_ID_BYTES and found.isascii() else ""


def _is_stray(stat: ProcessStat, tag: rank_tag.RankTag) -> bool:
    if is_dead(stat) or not _is_launcher_dead(tag.agent_pid, stat):
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
