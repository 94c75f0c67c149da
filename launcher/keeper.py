"""The agent's side of its keeper: the companion process that holds the attempt's TCPStore and outlives the agent.

Each watches the other by pidfd. If the agent dies (or its socket closes without a goodbye) the keeper kills everything
that carries the agent's mark, waits until it is gone, removes the board and socket files, and delivers the agent's spool
and an `AgentGone` to the supervisor. If the keeper dies, the stores that it held are lost: ranks that still need theirs
will fail, which is then an ordinary rank failure; the agent starts another keeper and carries on.

The store's socket is bound and listening here, before any rank starts, and handed over; until the keeper has imported
torch (a second or two) connections wait in the backlog, so ranks start at once.
"""

from __future__ import annotations

import array
import contextlib
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from rsup.launcher import keeper_process as companion
from rsup.launcher.processes import start_hint
from rsup.launcher.store_socket import PortInUse, bind_store_socket
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.places import LinkKey
from rsup.supervisor.wire import RsupError

__all__ = ["Keeper", "PortInUse", "bind_store_socket"]

GOODBYE_WITHIN_S = 1.0
HAND_OVER_WITHIN_S = 1.0
DROP_WITHIN_S = 2.0


class KeeperStartError(RsupError):
    """The interpreter that runs this cannot be started again, so there is no keeper."""


class Keeper:
    """A running keeper. All methods are called from the agent's main thread and do not wait for the keeper, except `close`
    and `hand_over`. What a keeper that does not read (it is stopped, or slow) cannot take is kept, the newest of each kind, and
    sent by the next `flush`.

    Hold on to it: when the last reference goes without `close`, the socket does, and the keeper takes that for the agent's
    end.
    """

    def __init__(self, popen: subprocess.Popen[bytes], link: socket.socket, log_path: Path) -> None:
        self._popen = popen
        self._link = link
        self._log_path = log_path
        self._pidfd = os.pidfd_open(popen.pid)
        self._attempts: set[int] = set()
        self._dropped_s: float | None = None
        self._unsent: list[companion.ToKeeper] = []
        self.pid = popen.pid
        self.hosts_stores = importlib.util.find_spec("torch") is not None
        """False where torch is not installed for this interpreter: ranks then need TORCHELASTIC_USE_AGENT_STORE=False, and
        rank 0 binds the port itself."""

    @classmethod
    def start(
        cls,
        agent_pid: int,
        agent_id: str,
        mark: str,
        spool_path: Path,
        supervisor_address: str = "",
        *,
        remove: Sequence[Path] = (),
        key: LinkKey | None = None,
    ) -> Keeper:
        """Start the companion; `agent_id` only names it in a list of processes. `remove`: files and folders it deletes if
        the agent dies (board, rank socket). `key`: of the link to the supervisor, where it has one. Nothing is delivered
        until `set_member` has told in whose name.

        What it prints goes to a file beside the spool with the suffix `.keeper`, kept only if the keeper fails.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log_path = spool_path.with_suffix(".keeper")
        with theirs, open(log_path, "ab", opener=_private) as log, blocked_signals():
            try:
                popen = subprocess.Popen(
                    # -P: the user's directory must not replace modules of ours
                    [sys.executable, "-P", "-m", companion.__name__, str(theirs.fileno()), agent_id],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={name: value for name, value in os.environ.items() if (name, value) != ("RSUP_MARK", mark)},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # what kills the launcher's group leaves it alive
                )
            except OSError as error:
                ours.close()
                problem = f"cannot start the launcher's keeper with {sys.executable}: {error.strerror}"
                raise KeeperStartError(f"{problem}; {start_hint(error)}") from None
        keeper = cls(popen, ours, log_path)
        keeper._send(companion.Begin(agent_pid, process_start_ticks(agent_pid), mark, str(spool_path), str(log_path)))
        keeper.set_files(remove)
        keeper.set_supervisor(supervisor_address, key)
        return keeper

    def host_store(self, attempt: int, host: str, port: int = 0) -> int:
        """Bind the attempt's store and have the keeper serve it; return its port. Raises as `bind_store_socket`.

        With an exact port, the store of the attempt before must have been dropped; waits up to 2 s for its socket to go.
        Without torch (`hosts_stores`) it only finds a free port.
        """
        with self._bind(host, port) as listening:
            port = int(listening.getsockname()[1])
            if self.hosts_stores and not self._send(companion.HostAttempt(attempt, port), listening.fileno()):
                raise RsupError("the launcher's keeper process has died or does not listen; the attempt has no TCPStore")
        self._attempts.add(attempt)
        return port

    def drop_store(self, attempt: int) -> None:
        """End the attempt's store: call it when the attempt's ranks are gone everywhere. Unknown attempts are ignored."""
        if attempt in self._attempts:
            self._attempts.discard(attempt)
            self._dropped_s = time.monotonic()
            self._tell(companion.DropAttempt(attempt))

    def set_member(self, agent: wire.AgentInfo, spec: wire.JobSpec, epoch: int) -> None:
        """In whose name the last facts would be sent: call it after each `Welcome`, with its job id in `spec`."""
        self._tell(companion.UseMember(agent, msgspec.structs.replace(spec, command=[]), epoch))

    def set_supervisor(self, address: str, key: LinkKey | None = None) -> None:
        """Where the last facts would go from now on; an empty address: nowhere, they stay in the spool."""
        keys = None if key is None else (key.server_public, key.server_secret, key.client_public, key.client_secret)
        self._tell(companion.UseSupervisor(address, keys))

    def set_sessions(self, sessions: Collection[int]) -> None:
        """The sessions (leader pids) of the ranks now running: finds descendants that wiped their environment."""
        self._tell(companion.UseSessions(list(sessions)))

    def set_files(self, remove: Sequence[Path]) -> None:
        """Replace the list of files and folders to delete if the agent dies."""
        self._tell(companion.UseFiles([str(path) for path in remove]))

    def flush(self) -> None:
        """Send what could not be sent before: call it ten times a second."""
        while self._unsent and self._send(self._unsent[0]):
            del self._unsent[0]

    def fileno(self) -> int:
        """A pidfd: readable once the keeper has died."""
        return self._pidfd

    def notices_fileno(self) -> int:
        """Readable when `read_notices` has something (or the keeper has died)."""
        return self._link.fileno()

    def read_notices(self) -> list[str]:
        """What the keeper wants said, one line each (torch cannot be imported, a store failed). Does not block."""
        notices = []
        with contextlib.suppress(OSError):
            while data := self._link.recv(companion.MAX_PACKET_BYTES, socket.MSG_DONTWAIT):
                notices.append(data.decode(errors="replace"))
        return notices

    def close(self) -> None:
        """Say goodbye, and end the process within a second. The agent's files are then the agent's to remove. Also to be
        called on a keeper that died, before starting another. May be repeated."""
        if self._pidfd < 0:
            return
        self._send(companion.Goodbye())
        if not select.select([self._pidfd], [], [], GOODBYE_WITHIN_S)[0]:
            self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: the agent's loop must not be
            self._popen.wait(GOODBYE_WITHIN_S)
        self._link.close()
        os.close(self._pidfd)
        self._pidfd = -1
        with contextlib.suppress(OSError):
            if self._popen.returncode == 0 or not self._log_path.stat().st_size:
                self._log_path.unlink()

    def hand_over(self, reason: str) -> bool:
        """Leave everything to the keeper: as soon as this process has ended it delivers the spool, and why we went. False:
        it has died, or has taken nothing for a second. The socket stays open until then; nothing else may be called
        afterwards."""
        self._tell(companion.HandOver(reason))
        give_up_s = time.monotonic() + HAND_OVER_WITHIN_S
        while self._unsent and not select.select([self._pidfd], [], [], 0.01)[0] and time.monotonic() < give_up_s:
            self.flush()
        alive = not self._unsent
        self._link.detach()
        self._popen.returncode = 0  # it outlives us: nobody waits for it
        os.close(self._pidfd)
        self._pidfd = -1
        return alive

    def _bind(self, host: str, port: int) -> socket.socket:
        while True:
            try:
                return bind_store_socket(host, port)
            except PortInUse:
                if self._dropped_s is None or time.monotonic() > self._dropped_s + DROP_WITHIN_S:
                    raise
                time.sleep(0.01)

    def _tell(self, message: companion.ToKeeper) -> None:
        """Send a message that takes the place of earlier ones of its kind, now or when the keeper takes it."""
        if not isinstance(message, companion.DropAttempt):
            self._unsent = [other for other in self._unsent if type(other) is not type(message)]
        self._unsent.append(message)
        self.flush()

    def _send(self, message: companion.ToKeeper, descriptor: int | None = None) -> bool:
        """Hand a message over; False if the keeper has died, or its socket is full."""
        data = companion.encode(message)
        # not socket.send_fds: it forgets its flags and would wait for a keeper that does not read
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            self._link.sendmsg([data], rights, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            return False
        return True


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """What the keeper ignores is blocked from its first instruction on; what comes to us meanwhile comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, companion.IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
