"""Finding and ending everything that the ranks of an agent left behind. See `processes` for the theory."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rsup.launcher import rank_cgroup

EXITING_FLAG = 0x4  # PF_EXITING of linux/sched.h: on its way out, the kernel is still freeing its memory
BLOCKED_PATIENCE_S = 2.0
SCAN_PAUSE_S = 0.02
MAX_UNREAD_SCANS = 5
SUPERVISOR_MODULE = b"rsup.supervisor.main"


@dataclass(frozen=True)
class ProcessId:
    """One process: the pid with its start time in clock ticks since boot, so that a reused pid is another process."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class Survivor:
    """A process that could not be ended in time. `state` as in /proc (`D`: blocked in the kernel)."""

    pid: int
    start_ticks: int
    state: str
    command: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.command}, {self.state})"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What /proc/PID/stat says, as far as we look at it."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    flags: int
    start_ticks: int


def read_stat(pid: int) -> ProcessStat | None:
    """The process as it is now, zombies included; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20:
        return None
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[6]), int(fields[19]))


def all_processes() -> Iterator[ProcessStat]:
    """Every process that /proc shows, zombies included."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            yield stat


def open_process(process: ProcessId) -> int | None:
    """A pidfd of exactly that process; None if it is gone (or its pid is another's by now). The caller closes it."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    stat = read_stat(process.pid)
    if stat is None or stat.start_ticks != process.start_ticks:
        os.close(pidfd)
        return None
    return pidfd


def send_signal(pidfd: int, signal_number: int) -> bool:
    """Signal the process behind a pidfd; False if it has ended or is not ours to signal."""
    try:
        signal.pidfd_send_signal(pidfd, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def marked_processes(mark: str, sessions: Collection[int] = (), *, keep: Collection[int] = ()) -> list[ProcessId]:
    """All living processes of the ranks: with `RSUP_MARK=mark`, in one of `sessions`, orphans that came to us, and
    descendants of these. `keep`: pids of helpers that are never among them."""
    found = _Search(mark, sessions, keep).living()
    return [ProcessId(stat.pid, stat.start_ticks) for stat in found]


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
        self._search = (mark, sessions, keep)
        self._pidfds = pidfds
        self._alive: dict[ProcessId, int] = {}
        self._done: set[ProcessId] = set()

    def run(self, deadline: float) -> list[Survivor]:
        num_unread_scans = 0
        blocked_at = time.monotonic() + BLOCKED_PATIENCE_S
        while True:
            search = _Search(*self._search)
            num_new = sum(self._kill(stat) for stat in search.living())
            self._wait(min(SCAN_PAUSE_S, max(0.0, deadline - time.monotonic())))
            search.reap_orphans()
            if search.unread and not self._alive:
                time.sleep(SCAN_PAUSE_S)
            num_unread_scans = num_unread_scans + 1 if search.unread else 0
            if not num_new and not self._alive and (not search.unread or num_unread_scans > MAX_UNREAD_SCANS):
                return []
            now = time.monotonic()
            if now >= deadline or (now >= blocked_at and self._alive and all(map(_is_blocked, self._alive))):
                return [describe(process) for process in self._alive]

    def _kill(self, stat: ProcessStat) -> bool:
        """SIGKILL it; True if it was not known before."""
        process = ProcessId(stat.pid, stat.start_ticks)
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


class _Search:
    """One look through /proc. `unread`: processes blocked in the kernel whose environment was better left alone, since
    reading it can block as well."""

    def __init__(self, mark: str, sessions: Collection[int], keep: Collection[int]) -> None:
        self._needle = b"RSUP_MARK=" + os.fsencode(mark)
        self._in_cgroup = rank_cgroup.members(mark)
        self._sessions = frozenset(sessions)
        self._keep = frozenset(keep)
        self._me = os.getpid()
        self._my_group, self._my_session = os.getpgrp(), os.getsid(0)
        self._parents = (1, os.getppid(), self._me)
        self._stats = {stat.pid: stat for stat in all_processes()}
        self._found = {stat.pid for stat in self._stats.values() if stat.parent == self._me}
        self.unread: list[int] = []

    def living(self) -> list[ProcessStat]:
        """Processes to end, parents before their children."""
        roots = [stat for stat in self._stats.values() if self._is_root(stat)]
        found = self._with_descendants(roots)
        self._found.update(stat.pid for stat in found)
        return [stat for stat in found if not is_dead(stat)]

    def reap_orphans(self) -> None:
        """Wait for dead children of ours that are descendants of ranks, never for a leader: its status is not ours."""
        for pid in self._found - self._sessions:
            stat = read_stat(pid)
            if stat is not None and stat.state == "Z" and self._is_orphan(stat):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _is_root(self, stat: ProcessStat) -> bool:
        if self._is_near(stat):
            return False
        known = stat.session in self._sessions or stat.pid in self._in_cgroup
        found = known or self._is_orphan(stat) or self._is_marked(stat)
        return found and not _runs_supervisor(stat.pid)

    def _is_orphan(self, stat: ProcessStat) -> bool:
        """A child in another session than ours: a rank, or one that came to us. Our own helpers share our session, or are
        in `keep`."""
        return stat.parent == self._me and stat.session != self._my_session and not self._is_near(stat)

    def _is_near(self, stat: ProcessStat) -> bool:
        """Whether it is ourselves or belongs to us, so that it is never ended."""
        return stat.pid in self._parents or stat.pid in self._keep or stat.group == self._my_group

    def _is_marked(self, stat: ProcessStat) -> bool:
        if stat.state == "Z":
            return False
        if stat.state == "D":
            self.unread.append(stat.pid)
            return False
        try:
            environment = Path(f"/proc/{stat.pid}/environ").read_bytes()
        except OSError:
            return False  # gone, or another user's
        return b"\0" + self._needle + b"\0" in b"\0" + environment

    def _with_descendants(self, roots: Iterable[ProcessStat]) -> list[ProcessStat]:
        children: dict[int, list[ProcessStat]] = {}
        for stat in self._stats.values():
            children.setdefault(stat.parent, []).append(stat)
        found: dict[int, ProcessStat] = {}
        waiting = list(roots)
        while waiting:
            stat = waiting.pop()
            if stat.pid not in found and not self._is_near(stat) and not _runs_supervisor(stat.pid):
                found[stat.pid] = stat
                waiting.extend(children.get(stat.pid, ()))
        return list(found.values())


def is_dead(stat: ProcessStat) -> bool:
    """Whether all its threads have ended. A zombie may be a leader whose other threads still run."""
    if stat.state != "Z":
        return False
    try:
        pidfd = os.pidfd_open(stat.pid)
    except OSError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)


def _runs_supervisor(pid: int) -> bool:
    return SUPERVISOR_MODULE in _arguments(pid)[:6]


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_blocked(process: ProcessId) -> bool:
    stat = read_stat(process.pid)
    return stat is not None and stat.state == "D" and not stat.flags & EXITING_FLAG


def describe(process: ProcessId) -> Survivor:
    """What /proc says of it now."""
    stat = read_stat(process.pid)
    try:
        command = Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        command = "?"
    return Survivor(process.pid, process.start_ticks, stat.state if stat else "?", command)
