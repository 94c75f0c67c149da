"""Whether the kernel killed a rank for want of memory: the counters that it keeps of such kills, before and after.

Of this process's memory cgroup (v2 `memory.events`, v1 `memory.oom_control`), which ranks are in too, and of the whole machine.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from rsup.supervisor.wire import NOT_OURS

SENT_BY_OTHERS = (
    *(signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGPWR),
)
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 62
"""cgroup v1 writes a huge number for "no limit"."""


class MemoryKills:
    """Counts from when it was made, or last `reset`. Never raises; where nothing can be read nothing is said."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._cgroup_before = self._machine_before = 0
        self.reset()

    def reset(self) -> None:
        """Count from now on."""
        self._cgroup_before, self._machine_before = self._of_cgroup(), self._of_machine()

    def killer_of(self, signum: int) -> str:
        """Where a signal that ended a rank came from, if it was not sent by us; empty for one that a process brings upon
        itself (SIGSEGV)."""
        if signum not in SENT_BY_OTHERS:
            return ""
        return (self.explain() if signum == signal.SIGKILL else "") or NOT_OURS

    def explain(self) -> str:
        """Why a process of ours may just have got SIGKILL, one clause; empty if not for want of memory."""
        if self._of_cgroup() > self._cgroup_before:
            limit = self._limit_bytes()
            of = f" of {limit / 2**30:.1f} GiB" if limit else ""
            return f"killed by the kernel for want of memory (the limit{of} of this job's cgroup)"
        if self._of_machine() > self._machine_before:
            return "killed by the kernel for want of memory, it seems: it has killed a process of this machine for that"
        return ""

    def _of_cgroup(self) -> int:
        for folder in self._folders():
            for name in ("memory.events", "memory.oom_control"):
                if (count := _number_after(folder / name, "oom_kill")) is not None:
                    return count
        return 0

    def _of_machine(self) -> int:
        return _number_after(self._proc / "vmstat", "oom_kill") or 0

    def _limit_bytes(self) -> int:
        for folder in self._folders():
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):
                    limit = int((folder / name).read_text())
                    return limit if limit < _UNLIMITED_BYTES else 0
        return 0

    def _folders(self) -> list[Path]:
        """Where this process's memory cgroup may be: v1's own tree, then the one tree of v2."""
        try:
            lines = (self._proc / "self/cgroup").read_text().splitlines()
        except OSError:
            return []
        places = [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]
        of_v1 = [self._cgroups / "memory" / path.lstrip("/") for names, path in places if "memory" in names.split(",")]
        of_v2 = [root / path.lstrip("/") for names, path in places if not names for root in self._roots()]
        return of_v1 + of_v2

    def _roots(self) -> tuple[Path, ...]:
        return (self._cgroups, self._cgroups / "unified")


def _number_after(path: Path, word: str) -> int | None:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return next((int(fields[1]) for fields in lines if len(fields) == 2 and fields[0] == word), None)
    except (OSError, ValueError):
        return None
