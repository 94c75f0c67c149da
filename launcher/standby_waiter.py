"""One warm standby as the agent sees it: its process, its socket, and the hand-over of a rank's start."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rsup.launcher.processes import RankProcess, SpawnError, spawn_rank
from rsup.launcher.stacks import process_state
from rsup.launcher.standby_rules import Seat, standby_command

HAND_OVER_S = 1.0
END_WITHIN_S = 1.0


@dataclass
class Standby:
    """One waiting interpreter."""

    process: RankProcess
    link: socket.socket
    seat: Seat
    complaints: BinaryIO
    """What its imports print."""
    is_ready: bool = False
    problems: list[str] = field(default_factory=list)
    opened_gpu: str = ""

    def look(self) -> None:
        """Take its word that it is ready."""
        with contextlib.suppress(BlockingIOError, ValueError, OSError):
            data = self.link.recv(1 << 16)
            if data:
                message = json.loads(data[4:])
                self.problems, self.opened_gpu = message["problems"], message["opened_gpu"]
                self.is_ready = True

    @property
    def can_listen(self) -> bool:
        """Whether it is alive and runs."""
        return self.process.exit_status() is None and process_state(self.process.pid) not in ("", "T", "t", "Z", "D")

    def become(self, seat: Seat, report: Path, stdin: int | None, stdout_fd: int, stderr_fd: int) -> bool:
        """Let it be the rank; False if it does not take that, and has to be ended. `report`: see `StandbyPool`."""
        message = {"env": dict(seat.environment), "report": str(report)}
        try:
            _hand_over(self.link, message, stdin, stdout_fd, stderr_fd)
        except OSError:
            return False
        self.link.close()
        self.complaints.close()
        return True

    def last_line(self) -> str:
        """The end of what it printed."""
        self.complaints.seek(0)
        lines = self.complaints.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self, within_s: float = END_WITHIN_S) -> bool:
        """Kill and reap it; what it was doing helps nobody. False if it is stuck in the kernel: say it again later."""
        self.link.close()
        self.complaints.close()
        if self.process.exit_status() is None:
            self.process.signal_session(signal.SIGKILL)
            self.process.signal_leader(signal.SIGKILL)
        if self.process.exit_status() is None and not select.select([self.process], [], [], within_s)[0]:
            return False
        self.process.close()
        return True


def start_standby(preload: Sequence[str], local_rank: int, seat: Seat, *, is_module: bool) -> Standby:
    """Start one. Raise `SpawnError` if the interpreter cannot be run."""
    ours, theirs = socket.socketpair()
    complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed with the standby
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        process = spawn_rank(
            standby_command(preload, seat, theirs.fileno(), is_module=is_module),
            seat.environment,
            local_rank=local_rank,
            stdin=None,
            stdout_fd=nowhere,
            stderr_fd=complaints.fileno(),
            pass_fds=(theirs.fileno(),),
            cpus=seat.cpus,
        )
    except SpawnError:
        ours.close()
        complaints.close()
        raise
    finally:
        theirs.close()
        os.close(nowhere)
    ours.setblocking(False)
    return Standby(process, ours, seat, complaints)


def _hand_over(link: socket.socket, message: Mapping[str, object], stdin: int | None, stdout_fd: int, stderr_fd: int) -> None:
    """Send `go`. Raise OSError if the standby does not take it."""
    data = json.dumps(message).encode()
    nowhere = os.open(os.devnull, os.O_RDONLY) if stdin is None else -1
    deadline_s = time.monotonic() + HAND_OVER_S
    try:
        link.settimeout(HAND_OVER_S)
        head = struct.pack("!I", len(data))
        socket.send_fds(link, [head], [nowhere if stdin is None else stdin, stdout_fd, stderr_fd])
        link.settimeout(max(0.01, deadline_s - time.monotonic()))
        link.sendall(data)
    finally:
        if nowhere >= 0:
            os.close(nowhere)
