"""The node's NVRx server: `python -m rsup.launcher.nvrx_server FD BOARD LISTENERS`, started by `nvrx_service.NvrxService`.

A process of its own, so that a client gets its answer whatever the agent does: NVRx's clients wait for answers, and their
sends wait for a reader. It serves one listening socket a local rank (`FT_RANK_MONITOR_IPC_SOCKET`) and one for requests to the
launcher (`FT_LAUNCHER_IPC_SOCKET`, the last of LISTENERS), writes what ranks say to their slots of the board, and hands the
rest to the agent over the socket FD. It reads everything that comes, waits for nobody, and ends with the agent.
"""

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from rsup.launcher import nvrx_pickle as nvrx
from rsup.launcher.nvrx_connection import Connection
from rsup.launcher.nvrx_pickle import MAX_FRAME_BYTES, Refused
from rsup.launcher.nvrx_rank import LimitsInForce, NvrxRank
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import SLOT_WORDS, Board, BoardError, Slot

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
READ_BYTES = 64 * 1024
MAX_FOR_AGENT = 1024
MAX_NOTES = 20
MEMORY_BYTES = 1 << 30
"""Address space: what a hostile pickle asks for beyond that is refused, and nobody else's memory."""
_CREDENTIALS = struct.Struct("3i")
_ACTIONS = {
    nvrx.WorkloadAction.Continue: "continue",
    nvrx.WorkloadAction.ExcludeThisNode: "exclude",
    nvrx.WorkloadAction.ShutdownWorkload: "shutdown",
}


class BeginAttempt(Struct, frozen=True, tag=True):
    """Ranks of another attempt are about to be started."""

    attempt: int
    first_rank: int
    limits: wire.Limits


class UseLimits(Struct, frozen=True, tag=True):
    """The limits in force."""

    limits: wire.Limits


class FromRank(Struct, frozen=True):
    """To the agent: what a rank said."""

    attempt: int
    local_rank: int
    message: wire.RankToAgent


ToServer = BeginAttempt | UseLimits
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
encode = msgspec.msgpack.Encoder().encode


class NvrxServer:
    """The loop. `listeners` are in the order of local ranks, the launcher's last."""

    def __init__(self, link: socket.socket, board: Board | None, listeners: list[socket.socket]) -> None:
        self._link = link
        self._listeners = {listener.fileno(): (listener, i) for i, listener in enumerate(listeners)}
        self._num_ranks = len(listeners) - 1
        self._in_force = LimitsInForce()
        self._attempt, self._first_rank = 0, 0
        self._ranks = [
            NvrxRank(self._slot(board, i), self._in_force, lambda message, i=i: self._tell(i, message))  # type: ignore[misc]
            for i in range(self._num_ranks)
        ]
        self._connections: dict[int, Connection] = {}
        self._for_agent: deque[bytes] = deque()
        self._num_notes = 0
        self._is_full = False
        self._epoll = select.epoll()
        for sock in (link, *listeners):
            sock.setblocking(False)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Until the agent ends."""
        while self._hear_agent():
            for fd, event in self._epoll.poll():
                if fd in self._listeners:
                    self._accept(*self._listeners[fd])
                elif connection := self._connections.get(fd):
                    if event & select.EPOLLOUT:
                        self._send(connection, b"")
                    if event & ~select.EPOLLOUT:
                        self._receive(connection)

    def _slot(self, board: Board | None, local_rank: int) -> Slot:
        """The slot that stands for the clients of a rank; memory of our own where there is no board."""
        if board is not None:
            return board.slot(self._num_ranks + local_rank)
        return Slot(memoryview(bytearray(8 * 2 * SLOT_WORDS)).cast("Q"), 0)

    # ------------------------------------------------------------------------------------------------------- the agent

    def _hear_agent(self) -> bool:
        """Take what the agent has sent, always before clients are heard; False at its end."""
        while True:
            try:
                data = self._link.recv(wire.MAX_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not data:
                return False
            message = decode_to_server(data)
            self._in_force.limits = message.limits
            if isinstance(message, BeginAttempt):
                self._attempt, self._first_rank, self._num_notes = message.attempt, message.first_rank, 0
                for rank in self._ranks:
                    rank.begin(message.attempt)
        self._flush_to_agent()
        return True

    def _tell(self, local_rank: int, message: wire.RankToAgent) -> None:
        """Hand something to the agent; a stopped one gets it later."""
        data = encode(FromRank(self._attempt, local_rank, message))
        if len(data) > wire.MAX_RANK_MESSAGE_BYTES:
            raise Refused(f"{len(data)} bytes of limits, more than the {wire.MAX_RANK_MESSAGE_BYTES} allowed")
        if len(self._for_agent) >= MAX_FOR_AGENT:
            raise Refused("the launcher does not listen")
        self._for_agent.append(data)
        self._flush_to_agent()

    def _flush_to_agent(self) -> None:
        while self._for_agent:
            try:
                self._link.send(self._for_agent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                self._for_agent.clear()
                break
            self._for_agent.popleft()
        self._epoll.modify(self._link.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._for_agent else 0))

    # ------------------------------------------------------------------------------------------------------- clients

    def _accept(self, listener: socket.socket, local_rank: int) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: it waits in the backlog until one is
            self._is_full = True
            self._epoll.modify(listener.fileno(), 0)
            return
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (os.getuid(), 0):
            sock.close()
            return
        sock.setblocking(False)
        self._connections[sock.fileno()] = Connection(sock, local_rank, pid)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.received += data
        while (frame := connection.next_frame()) is not None:
            self._send(connection, self._answer(connection, frame))

    def _answer(self, connection: Connection, frame: bytes) -> bytes:
        """The answer to one frame. Whatever is wrong with it or with us, a client that waits for one gets it."""
        try:
            if not frame:
                raise Refused(f"a message of more than {MAX_FRAME_BYTES} bytes, or of none")
            message = nvrx.read_message(frame)
            if connection.local_rank == self._num_ranks:
                return self._control(message)
            return self._ranks[connection.local_rank].hear(connection.client, message)
        except Refused as refused:
            self._complain(connection, str(refused))
            return nvrx.error_reply(str(refused))
        except Exception as error:  # the outermost frame
            text = f"internal error of rsup: {type(error).__name__}: {error}"
            self._complain(connection, text)
            return nvrx.error_reply(text)

    def _control(self, message: object) -> bytes:
        """A request to the launcher. What is none of NVRx's is acknowledged all the same, as its launcher does."""
        rank, request = message if isinstance(message, tuple) and len(message) == 2 else (None, None)
        asked = request.get("action") if isinstance(request, nvrx.WorkloadControlRequest) else None
        action = _ACTIONS[asked] if isinstance(asked, nvrx.WorkloadAction) else ""
        if not action or not isinstance(request, nvrx.WorkloadControlRequest):
            self._tell(0, wire.RankNote("warning", f"a request to the launcher that is none of NVRx's: {str(message)[:200]!r}"))
            return nvrx.launcher_reply()
        description = request.get("description")
        local_rank = int(str(rank)) - self._first_rank if str(rank).isdecimal() else 0
        text = description[:1000] if isinstance(description, str) else ""
        self._tell(min(max(local_rank, 0), self._num_ranks - 1), wire.RankControls(action, _storable(text)))
        return nvrx.launcher_reply()

    def _complain(self, connection: Connection, text: str) -> None:
        """A line for the job's story, once a connection."""
        if connection.has_complained or self._num_notes >= MAX_NOTES:
            return
        connection.has_complained = True
        self._num_notes += 1
        who = f"process {connection.client.pid} sent what no client of NVRx's sends"
        with contextlib.suppress(Refused):
            local_rank = min(connection.local_rank, self._num_ranks - 1)
            self._tell(local_rank, wire.RankNote("warning", _storable(f"{who}: {text}"[:500])))

    def _send(self, connection: Connection, answer: bytes) -> None:
        waited = bool(connection.unsent) and not connection.is_deaf
        waits = connection.send(answer)
        if waits or waited:
            self._epoll.modify(connection.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def _drop(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        self._epoll.unregister(fd)
        del self._connections[fd]
        connection.sock.close()
        if connection.local_rank < self._num_ranks:
            self._ranks[connection.local_rank].left(connection.client)
        if self._is_full:
            self._is_full = False
            for listener_fd in self._listeners:
                self._epoll.modify(listener_fd, select.EPOLLIN)


def _storable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _open_board(path: str, complain: Callable[[str], object]) -> Board | None:
    try:
        return Board.open(Path(path)) if path else None
    except BoardError as error:
        complain(f"ranks that use NVRx's client are not watched: {error}")
        return None


def main() -> None:
    """Entry of the process."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    gc.freeze()
    link = socket.socket(fileno=int(sys.argv[1]))
    board = _open_board(sys.argv[2], lambda text: print(text, file=sys.stderr))
    listeners = [socket.socket(fileno=int(fd)) for fd in sys.argv[3].split(",")]
    NvrxServer(link, board, listeners).run()
    os._exit(0)


if __name__ == "__main__":
    main()
