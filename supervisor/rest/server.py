"""Serves the application over HTTP on a thread of its own, so that the supervisor's loop never waits for a reader."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from rsup.supervisor.peer_identity import peer_uid
from rsup.supervisor.rest.context import LOOPBACK_HOSTS, PEER_UID
from rsup.supervisor.wire import RsupError

STOP_TIMEOUT_S = 10.0


class ListenError(RsupError):
    """The address cannot be listened at."""


class PeerProtocol(H11Protocol):
    """HTTP whose ASGI scope names, as the client of a UNIX socket, `PEER_UID` and the peer's uid."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        uid = peer_uid(connected) if connected is not None else None
        if uid is not None:
            self.client = (PEER_UID, uid)


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
            http=PeerProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # it would hold the tokens of `/?token=`
            server_header=False,
            proxy_headers=False,
            limit_concurrency=512,
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
