"""torch's file timers (`TORCHELASTIC_ENABLE_FILE_TIMER=1`): a rank sets a deadline for itself, and is killed when it is over.

A rank writes a line of JSON into a named pipe for each deadline it sets or lifts: torch's `FileTimerClient`, and whoever
speaks its protocol. torchrun's server of the pipe ends itself with the rank that it kills; here the death of the rank is a
failure like any other. Read in the agent's tick; nothing here waits.
"""

import json
import os
import signal
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rsup.launcher.reaping import ProcessId, open_process, read_stat, send_signal
from rsup.supervisor.wire import UsageError

ENABLE_VARIABLE, PATH_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"
_READ_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4096
"""What a pipe takes in one piece; a longer line is no request."""


@dataclass(frozen=True)
class Expired:
    """A deadline that is over: of which process, in which scope, and the signal that it asked for (0: none)."""

    pid: int
    scope: str
    signum: int


class FileTimers:
    """The pipe and the deadlines that are set."""

    def __init__(self, path: Path) -> None:
        """Make the pipe. Raise `UsageError` if it cannot be made there."""
        self.path = path
        self._deadlines: dict[tuple[int, str], tuple[float, int]] = {}
        self._unread = b""
        try:
            if path.exists() and not stat.S_ISFIFO(path.stat().st_mode):
                raise FileExistsError(0, "it is there, and no named pipe")
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # read and write: no end of file between clients
        except OSError as error:
            why = f"cannot be used ({error.strerror}); name another path, or unset it"
            raise UsageError(f"{PATH_VARIABLE} {path}: {why}") from None

    def close(self) -> None:
        """Remove the pipe."""
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def expired(self, now_s: float) -> list[Expired]:
        """Deadlines that are over by the wall clock, each once: the first one of a process that names a signal. Those of
        processes that are gone are forgotten."""
        self._read()
        found: dict[int, Expired] = {}
        for (pid, scope), (at_s, signum) in sorted(self._deadlines.items(), key=lambda item: item[1][0]):
            if read_stat(pid) is None:
                del self._deadlines[pid, scope]
            elif at_s <= now_s and (pid not in found or not found[pid].signum):
                found[pid] = Expired(pid, scope, signum)
        self._deadlines = {key: value for key, value in self._deadlines.items() if key[0] not in found}
        return list(found.values())

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._fd, _READ_BYTES):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(self._unread) > _MAX_LINE_BYTES:
                    self._unread = b""

    def _take(self, line: bytes) -> None:
        with suppress(ValueError, KeyError, TypeError):  # not a request
            request = json.loads(line)
            key = int(request["pid"]), str(request["scope_id"])
            at_s, signum = float(request["expiration_time"]), int(request["signal"])
            if at_s < 0:
                self._deadlines.pop(key, None)
            else:
                self._deadlines[key] = at_s, signum if signum in signal.valid_signals() else 0


def open_timers(environ: Mapping[str, str], folder: Path) -> FileTimers | None:
    """The pipe where the launcher's environment asks for it: at `TORCHELASTIC_TIMER_FILE`, else in `folder`."""
    if environ.get(ENABLE_VARIABLE) != "1":
        return None
    return FileTimers(Path(environ.get(PATH_VARIABLE) or folder / "timers"))


def kill_in_sessions(expired: Expired, sessions: Collection[int]) -> int | None:
    """Signal the process if it belongs to one of the ranks' sessions; return which session, None if nothing was signalled."""
    found = read_stat(expired.pid)
    if not expired.signum or found is None or found.session not in sessions:
        return None
    pidfd = open_process(ProcessId(found.pid, found.start_ticks))
    if pidfd is None:
        return None
    try:
        return found.session if send_signal(pidfd, expired.signum) else None
    finally:
        os.close(pidfd)
