"""REST beside the loop: its socket is bound at once, its libraries are imported when somebody connects, or a little later.

FastAPI and uvicorn take most of a second to import. An agent that waits for its `Welcome` must not wait for them too, and a
job of two seconds need not pay for them at all. Until the server is up, connections wait in the listening socket's queue.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable

from rsup.supervisor import places
from rsup.supervisor.wire import RsupError

START_AFTER_S = 5.0

_log = logging.getLogger(__name__)


class PageError(RsupError):
    """The address of REST and the page could not be bound."""


class RestThread:
    """Owns the socket of REST. `serve(socket) -> stop` imports and starts the server, on a thread of ours."""

    def __init__(
        self, endpoint: str, serve: Callable[[socket.socket], Callable[[], None]], local: socket.socket | None = None
    ) -> None:
        """`local`: a listening UNIX socket beside it, ours to close."""
        host, port = places.split_endpoint(endpoint)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host = host
        self.local = local
        self._serve = serve
        # asyncio turns off Nagle's algorithm only on sockets that say that they are TCP's; with it each answer on a connection
        # that is kept takes 40 ms more.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise PageError(f"cannot serve REST at {endpoint}: {error.strerror}; choose another --listen") from None
        port = self._socket.getsockname()[1]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        public = places.this_host() if host in ("0.0.0.0", "::", "*", "") else host
        self.public_address = f"http://[{public}]:{port}" if ":" in public else f"http://{public}:{port}"
        """The address for other hosts: one that stands for all of ours is nobody's there."""
        self._thread: threading.Thread | None = None
        self._stop_server: Callable[[], None] | None = None
        self._bound_s = time.monotonic()

    @property
    def listening(self) -> socket.socket:
        """The bound socket; ours to close."""
        return self._socket

    def filenos(self) -> list[int]:
        """The listening sockets: readable when somebody wants the page."""
        return [one.fileno() for one in self._sockets()]

    def _sockets(self) -> list[socket.socket]:
        return [self._socket, *([self.local] if self.local is not None else [])]

    def start_if_due(self) -> bool:
        """Start the server if somebody has connected, or some seconds after binding; return whether it is started."""
        if self._thread is None and (self._is_wanted() or time.monotonic() - self._bound_s >= START_AFTER_S):
            self._thread = threading.Thread(target=self._run, name="rsup-rest-start", daemon=True)
            self._thread.start()
        return self._thread is not None

    def stop(self) -> None:
        """Stop serving and close the socket."""
        if self._thread is not None:
            self._thread.join(timeout=10)
        if self._stop_server is not None:
            self._stop_server()
        for one in self._sockets():
            one.close()

    def _is_wanted(self) -> bool:
        return bool(select.select(self._sockets(), [], [], 0)[0])

    def _run(self) -> None:
        try:
            self._stop_server = self._serve(self._socket)
        except (RsupError, ImportError, OSError) as error:
            _log.error("REST and the page are not available: %s", error)
            for one in self._sockets():
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # who connects is refused, and reads the store, rather than waiting
