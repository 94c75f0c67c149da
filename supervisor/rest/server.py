"""Serves the application over HTTP on a thread of its own, so that the supervisor's loop never waits for a reader."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from rsup.supervisor.connection_room import Room
from rsup.supervisor.peer_identity import peer_uid
from rsup.supervisor.rest.context import LOOPBACK_HOSTS, PEER_UID
from rsup.supervisor.wire import RsupError

STOP_TIMEOUT_S = 10.0


class ListenError(RsupError):
    """The address cannot be listened at."""


_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"


class PeerProtocol(H11Protocol):
    """HTTP whose ASGI scope names, as the client of a UNIX socket, `PEER_UID` and the peer's uid. Connections have `room`,
    those of the UNIX socket `local_room`: what strangers do at the port costs this host's users nothing."""

    def __init__(self, *args: Any, room: Room, local_room: Room, **more: Any) -> None:
        super().__init__(*args, **more)
        self._room, self._local_room = room, local_room
        self._has_room = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        uid = peer_uid(connected) if connected is not None else None
        if uid is not None:
            self.client = (PEER_UID, uid)
            self._room = self._local_room
        self._has_room = self._room.enter(self)
        if not self._has_room:
            transport.write(_NO_ROOM)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._has_room = False
        self._room.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Something of a request has come."""
        super().handle_events()
        self._tell_room()

    def on_response_complete(self) -> None:
        """An answer has been sent."""
        super().on_response_complete()
        self._tell_room()

    def cut(self) -> None:
        """End the connection at once."""
        self._has_room = False
        self.transport.abort()

    def _tell_room(self) -> None:
        if not self._has_room:
            return
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._room.waits(self)
        else:
            self._room.is_answered(self)


class RestServer:
    """One listening socket, bound at once (port 0: any), served from `start` to `stop`."""

    def __init__(
        self, host: str, port: int, listening: socket.socket | None = None, local: socket.socket | None = None
    ) -> None:
        """`listening`: a socket that listens there already, taken over. `local`: a listening UNIX socket, served too; it stays
        its owner's."""
        self._socket = _listen(host, port) if listening is None else listening
        self._sockets = [self._socket, *([local] if local is not None else [])]
        self.port: int = self._socket.getsockname()[1]
        self.address = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self.allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS if host in LOOPBACK_HOSTS else ()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: FastAPI, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """Serve `app`. `on_failure` is called on the server's thread should it end with an error."""
        config = uvicorn.Config(
            app,
            http=partial(PeerProtocol, room=Room(), local_room=Room()),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # it would hold the tokens of `/?token=`
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=32 * 1024,
            timeout_graceful_shutdown=2,
        )
        self._server = server = uvicorn.Server(config)

        def serve() -> None:
            try:
                asyncio.run(server.serve(sockets=self._sockets))
            except BaseException as error:
                logging.getLogger("rsup.rest").error("the page's server ended: %s", error)
                if on_failure is not None:
                    on_failure(error)

        self._thread = threading.Thread(target=serve, name="rsup-rest", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End serving; open requests get two seconds. May be called twice, and before `start`."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's algorithm on
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise ListenError(f"cannot serve the page at {host}:{port}: {error.strerror}; choose another port") from None
    return bound
