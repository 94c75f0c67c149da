"""REST of a supervisor that stands by: alive, not ready, and where the leader answers. Standard library only.

Every answer but `/healthz` is a problem document with status 503, `"standby": true` and the leader's address in `leader`, so
that whoever knows several supervisors tries the next. No token is asked for and none is read.
"""

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn

from rsup.supervisor.rest_thread import RestThread

REQUEST_TIMEOUT_S = 10.0


class StandbyPage:
    """Serves on a thread of its own until `stop`. `told`: a sentence about the standby, and the leader's REST address."""

    def __init__(self, endpoint: str, told: Callable[[], tuple[str, str]]) -> None:
        """Raise `rest_thread.PageError` where the address cannot be bound."""
        self._bound = RestThread(endpoint, lambda _: lambda: None)
        self.address = self._bound.address
        self._server = _Server(self._bound.listening, told)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="rsup-standby-page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Free the address."""
        self._server.shutdown()
        self._bound.stop()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, told: Callable[[], tuple[str, str]]) -> None:
        super().__init__(listening.getsockname()[:2], _Answer, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.told = told

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Answer(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def _answer(self) -> None:
        if self.path.split("?")[0] == "/healthz":
            self._send(200, "application/json", {"status": "ok"})
            return
        assert isinstance(self.server, _Server)
        detail, leader = self.server.told()
        content = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": detail}
        self._send(503, "application/problem+json", {**content, "standby": True, "leader": leader or None})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    def _send(self, status: int, kind: str, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests are not logged."""
