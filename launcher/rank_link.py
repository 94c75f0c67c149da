"""The agent's end of `RSUP_RANK_SOCKET`: one SOCK_SEQPACKET packet a message, from and to every local rank.

A rank introduces itself with `RankHello`; what comes before that is dropped. Nothing blocks: a rank that stops reading has a
short queue, in which newer limits and switches replace older ones. Only processes of this user (or root) are heard.
"""

import contextlib
import os
import select
import socket
import struct
from collections import deque
from pathlib import Path

from rsup.supervisor import wire
from rsup.supervisor.places import check_socket_path

MAX_PACKETS_A_READ = 64
MAX_CONNECTIONS = 1024
_MAX_QUEUED = 16
_CREDENTIALS = struct.Struct("3i")


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.hello: wire.RankHello | None = None
        self.queue: deque[wire.AgentToRank] = deque()


class RankLink:
    """The listening socket and its connections. Single-threaded; poll `fileno()` for reading, then call `read`."""

    def __init__(self, path: Path) -> None:
        """Listen at `path` (0600). Raise `PlaceError` if it is too long for a socket, OSError if it cannot be made."""
        self.path = check_socket_path(path)
        self.num_bad = 0
        """Packets that were no messages, and strangers turned away."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(before)
        self._listener.listen(128)
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}

    def fileno(self) -> int:
        """Readable when `read` has something to do."""
        return self._epoll.fileno()

    def read(self) -> list[tuple[wire.RankHello, wire.RankToAgent]]:
        """What came: (who, message). A rank's hello is among the messages, so that changes of it are seen."""
        messages: list[tuple[wire.RankHello, wire.RankToAgent]] = []
        for _ in range(2):  # a rank may have come, spoken and died meanwhile: whom the first look accepts, the second hears
            for fd, _ in self._epoll.poll(0, 256):
                if fd == self._listener.fileno():
                    self._accept()
                elif connection := self._connections.get(fd):
                    self._receive(connection, messages)
        return messages

    def send(self, rank: int, attempt: int, message: wire.AgentToRank) -> bool:
        """Queue `message` for that rank and send what can be sent now; False if the rank is not connected."""
        found = False
        for connection in list(self._connections.values()):
            hello = connection.hello
            if hello and (hello.rank, hello.attempt) == (rank, attempt):
                found = True
                if isinstance(message, (wire.LimitsNow, wire.SwitchesNow)):
                    connection.queue = deque(m for m in connection.queue if type(m) is not type(message))
                if len(connection.queue) < _MAX_QUEUED:
                    connection.queue.append(message)
                self._flush(connection)
        return found

    def broadcast(self, attempt: int, message: wire.AgentToRank) -> None:
        """Send to every rank of the attempt."""
        ranks = {c.hello.rank for c in self._connections.values() if c.hello and c.hello.attempt == attempt}
        for rank in ranks:
            self.send(rank, attempt, message)

    def flush(self) -> None:
        """Try again to send what ranks would not take; call it now and then."""
        for connection in list(self._connections.values()):
            if connection.queue:
                self._flush(connection)

    def close(self) -> None:
        """Close everything and remove the socket file."""
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._epoll.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody waits, or no descriptor is left: the rank stays in the backlog
                return
            _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid not in (os.getuid(), 0) or len(self._connections) >= MAX_CONNECTIONS:
                self.num_bad += 1
                sock.close()
                continue
            sock.setblocking(False)
            self._connections[sock.fileno()] = _Connection(sock)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _receive(self, connection: _Connection, messages: list[tuple[wire.RankHello, wire.RankToAgent]]) -> None:
        for _ in range(MAX_PACKETS_A_READ):
            try:
                data = connection.sock.recv(wire.MAX_RANK_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
            try:
                message = wire.decode_rank_to_agent(data)
            except wire.MessageError:
                self.num_bad += 1
                continue
            if isinstance(message, wire.RankHello):
                connection.hello = message
            if connection.hello is None:
                self.num_bad += 1
                continue
            messages.append((connection.hello, message))

    def _flush(self, connection: _Connection) -> None:
        while connection.queue:
            try:
                connection.sock.send(wire.encode(connection.queue[0]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                connection.queue.clear()  # its end is gone; `read` will see that
                return
            connection.queue.popleft()

    def _drop(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        self._connections.pop(fd, None)
        connection.sock.close()
