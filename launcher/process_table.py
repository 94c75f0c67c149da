"""Processes as /proc shows them: who they are, whether they live, and how to signal exactly the one that was meant."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXITING_FLAG = 0x4  # PF_EXITING of linux/sched.h: on its way out, the kernel is still freeing its memory


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

    @property
    def process(self) -> ProcessId:
        """Which process that is."""
        return ProcessId(self.pid, self.start_ticks)


def read_stat(pid: int) -> ProcessStat | None:
    """The process as it is now, zombies included; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split()
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


def is_blocked(process: ProcessId) -> bool:
    """Whether it is stuck in the kernel, and not on its way out."""
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


def arguments_of(pid: int) -> list[bytes]:
    """Its command line; empty if it is gone, a zombie, or has wiped it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def last_pid() -> int:
    """Pid of the process or thread that was created last."""
    with open("/proc/loadavg", "rb", buffering=0) as file:
        return int(file.read().split()[4])
