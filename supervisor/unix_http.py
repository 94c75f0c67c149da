"""HTTP to a supervisor over its UNIX socket, for `urllib`: there the kernel says who asks, and no token is needed."""

import socket
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import HTTPHandler, Request


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, timeout_s: Any) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket in place of the URL's host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class UnixHTTPHandler(HTTPHandler):
    """For `build_opener`: every http URL is asked for at that socket."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: Request) -> HTTPResponse:
        """Called by the opener."""
        return self.do_open(self._connection, req)

    def _connection(self, host: str, /, *, timeout: float = 15.0, **more: Any) -> _UnixConnection:
        return _UnixConnection(self._path, timeout)


def can_connect(path: Path) -> bool:
    """Whether somebody listens at that socket and lets us in."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
