"""REST of a supervisor that stands by: alive, not ready, and where the leader answers. Standard library only.

Every answer but `/healthz` is a problem document with status 503, `"standby": true` and the leader's address in `leader`, so
that whoever knows several supervisors tries the next. The same is said at the UNIX socket, to users of this host who know no
other address. No token is asked for and none is read: what is said here is said to everybody.
"""

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
from collections.abc import Callable

from rsup.supervisor.connection_room import Room
from rsup.supervisor.rest_thread import RestThread

MAX_HEAD_BYTES = 32 * 1024
MAX_BODY_BYTES = 1024 * 1024
_REQUEST = re.compile(rb"(\w+) (\S+) HTTP/1\.[01]\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)
_WORDS = {200: "OK", 400: "Bad Request", 503: "Service Unavailable"}

_log = logging.getLogger(__name__)


class StandbyPage:
    """Serves on a thread of its own until `stop`. `told`: a sentence about the standby, and the leader's REST address."""

    def __init__(self, endpoint: str, told: Callable[[], tuple[str, str]], local: socket.socket | None = None) -> None:
        """Raise `rest_thread.PageError` where the address cannot be bound. `local`: a listening UNIX socket, served too, and
        ours to close, but for that error."""
        self._bound = RestThread(endpoint, lambda _: lambda: None, local)
        self.address = self._bound.address
        self._told = told
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._open: dict[asyncio.Task[None], _Client] = {}
        self._thread = threading.Thread(target=self._run, name="rsup-standby-page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Free the addresses."""
        with contextlib.suppress(RuntimeError):  # it has ended by an error
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(timeout=5)
        self._bound.stop()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # it stands by all the same
            _log.error("REST is not available while this supervisor stands by: %s", error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        sockets = [self._bound.listening, *([self._bound.local] if self._bound.local is not None else [])]
        servers = []
        for one in sockets:
            one.setblocking(False)
            servers.append(await asyncio.start_server(self._answerer(Room()), sock=one, limit=MAX_HEAD_BYTES))
        await self._over.wait()
        for server in servers:
            server.close()
        for client in self._open.values():
            client.cut()
        await asyncio.gather(*self._open, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the turn after

    def _answerer(self, room: Room) -> "Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]":
        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            client = _Client(writer)
            if not room.enter(client):
                client.cut()
                return
            task = asyncio.get_running_loop().create_task(self._answer(reader, writer, room, client))
            self._open[task] = client
            task.add_done_callback(self._open.pop)

        return begin

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: Room, client: "_Client") -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if length := _LENGTH.search(head):
                await reader.readexactly(min(int(length[1]), MAX_BODY_BYTES))  # else closing resets what we say
            room.is_answered(client)
            writer.write(self._answer_to(head))
            await writer.drain()
        except (EOFError, OSError, asyncio.LimitOverrunError):
            pass  # a client that went away, or was no client, is no news
        finally:
            room.leave(client)
            writer.close()

    def _answer_to(self, head: bytes) -> bytes:
        request = _REQUEST.match(head)
        if request is None:
            return _written(400, "application/json", {"detail": "this is no request of HTTP/1.1"})
        has_body = request[1] != b"HEAD"
        if request[2].split(b"?")[0] == b"/healthz":
            return _written(200, "application/json", {"status": "ok"}, has_body)
        detail, leader = self._told()
        content = {"type": "about:blank", "title": _WORDS[503], "status": 503, "detail": detail}
        content |= {"standby": True, "leader": leader or None}
        return _written(503, "application/problem+json", content, has_body)


class _Client:
    """A connection, for `Room`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def cut(self) -> None:
        """End it at once."""
        self._writer.transport.abort()


def _written(status: int, kind: str, content: dict[str, object], has_body: bool = True) -> bytes:
    body = json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} {_WORDS[status]}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += ["Connection: close"]
    lines += ["Retry-After: 1"] if status == 503 else []
    return "\r\n".join([*lines, "", ""]).encode() + (body if has_body else b"")
