"""The agent's side of the node's NVRx server: its listening sockets, and the process that serves them.

The sockets are there before the first rank and as long as the agent lives. The process is started by the first client that
connects: a job whose ranks never do costs nothing. It is not of the agent's session, is continued when somebody stops it, and
started again when it dies; clients that were connected to it then fail, as with a rank monitor of NVRx's that dies.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rsup.launcher import nvrx_server as server
from rsup.launcher.keeper import blocked_signals
from rsup.launcher.rank_environment import NVRX_LAUNCHER
from rsup.launcher.stacks import process_state
from rsup.supervisor import wire
from rsup.supervisor.places import MAX_SOCKET_PATH_BYTES

KILLED_WITHIN_S = 1.0
BACKLOG = 128
MAX_STARTS = 10
"""A server that dies that often cannot live here."""


class NvrxService:
    """Use from the agent's loop only. `note` is called with each line for the job's story."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        board: Path | None,
        selector: selectors.BaseSelector,
        note: Callable[[str], None],
    ) -> None:
        """Make the sockets in `folder`, which is made 0700. What cannot be made is noted, and ranks are not told of it."""
        self.folder = folder
        self._num_ranks = num_ranks
        self._board = board
        self._selector = selector
        self._note = note
        self._listeners: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._pidfd = -1
        self._unsent: list[server.ToServer] = []
        self._begun: server.BeginAttempt | None = None
        self._heard: list[server.FromRank] = []
        self._num_starts = 0
        self._was_stopped = False
        try:
            self._listen()
        except OSError as error:
            self._close_listeners()
            note(f"no sockets for NVRx's clients: {error.strerror or error}")

    @property
    def is_served(self) -> bool:
        """Whether ranks can be told of the sockets."""
        return bool(self._listeners)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the process, while there is one: it is no rank's."""
        return (self._process.pid,) if self._process else ()

    def begin(self, attempt: int, first_rank: int, limits: wire.Limits) -> None:
        """To be called before the ranks of an attempt are started."""
        self._begun = server.BeginAttempt(attempt, first_rank, limits)
        self._send(self._begun)

    def use_limits(self, limits: wire.Limits) -> None:
        """These limits hold from now on."""
        if self._begun is not None:
            self._begun = server.BeginAttempt(self._begun.attempt, self._begun.first_rank, limits)
        self._send(server.UseLimits(limits))

    def take_messages(self) -> list[server.FromRank]:
        """What ranks said since the last call. Also to be called when a rank has died: it may have said something before."""
        self._read()
        heard, self._heard = self._heard, []
        return heard

    def look_after(self) -> None:
        """Call it now and then: it sends what could not be sent, and continues a server that somebody stopped."""
        self._flush()
        if self._process is None:
            return
        is_stopped = process_state(self._process.pid) == "T"
        if is_stopped and self._was_stopped:  # twice in a row: not just for a moment
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)
            self._note(f"the node's NVRx server (pid {self._process.pid}) was stopped, and has been continued")
        self._was_stopped = is_stopped

    def close(self) -> None:
        """End the server and remove the sockets."""
        self._end_server()
        self._close_listeners()

    # ----------------------------------------------------------------------------------------------------- the sockets

    def _listen(self) -> None:
        names = [*map(str, range(self._num_ranks)), NVRX_LAUNCHER]
        longest = max(len(os.fsencode(self.folder / name)) for name in names)
        if longest > MAX_SOCKET_PATH_BYTES:
            raise OSError(f"{self.folder} is too long a path for sockets in it")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._listeners.append(listener)
            path = self.folder / name
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(BACKLOG)
        self._await_client()

    def _await_client(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._start_server)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------ the server

    def _start_server(self) -> None:
        if self._process is not None:  # two clients came in one turn
            return
        for listener in self._listeners:
            self._selector.unregister(listener)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno(), *(listener.fileno() for listener in self._listeners)]
        mark = "RSUP_MARK"
        self._num_starts += 1
        with theirs, blocked_signals():
            try:
                self._process = subprocess.Popen(
                    # -P: the user's directory must not replace modules of ours
                    [
                        *(sys.executable, "-P", "-m", server.__name__),
                        *(str(fds[0]), str(self._board or ""), ",".join(map(str, fds[1:]))),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name != mark},
                    pass_fds=fds,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._close_listeners()
                self._note(f"cannot start the server for NVRx's clients with {sys.executable}: {error.strerror}")
                return
        ours.setblocking(False)
        self._link = ours
        self._pidfd = os.pidfd_open(self._process.pid)
        self._selector.register(ours, selectors.EVENT_READ, self._read)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._died)
        self._unsent.clear()
        if self._begun is not None:
            self._send(self._begun)

    def _died(self) -> None:
        self._read()
        self._end_server()
        if self._num_starts >= MAX_STARTS:
            self._close_listeners()
            self._note("the node's NVRx server dies again and again: NVRx's clients are no longer served")
            return
        self._note("the node's NVRx server died: its clients lose their connection; the next one to connect starts another")
        self._await_client()

    def _end_server(self) -> None:
        if self._process is None:
            return
        self._selector.unregister(self._pidfd)
        if self._link is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._link)
            self._link.close()
        os.close(self._pidfd)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: the agent's loop must not be
            self._process.wait(KILLED_WITHIN_S)
        self._process, self._link, self._pidfd = None, None, -1

    def _read(self) -> None:
        while self._link is not None:
            try:
                data = self._link.recv(wire.MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._link)  # its death is told by the pidfd
                return
            self._heard.append(server.decode_from_rank(data))

    def _send(self, message: server.ToServer) -> None:
        if self._link is None:
            return
        begins = isinstance(message, server.BeginAttempt)
        self._unsent = [other for other in self._unsent if isinstance(other, server.BeginAttempt) and not begins]
        self._unsent.append(message)
        self._flush()

    def _flush(self) -> None:
        while self._unsent and self._link is not None:
            try:
                self._link.send(server.encode(self._unsent[0]), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            del self._unsent[0]
