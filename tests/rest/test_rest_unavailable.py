"""A supervisor whose REST libraries are missing: who asks is refused at once, not left waiting for an answer."""

import socket
import time
from collections.abc import Callable

import pytest

from rsup.supervisor.rest_thread import RestThread


def test_who_connects_to_a_rest_that_cannot_start_is_refused() -> None:
    def serve(listening: socket.socket) -> Callable[[], None]:
        raise ImportError("No module named 'pydantic_core'")

    rest = RestThread("127.0.0.1:0", serve)
    port = rest._socket.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as early:
        while not rest.start_if_due():
            time.sleep(0.01)
        assert rest._thread is not None
        rest._thread.join(10)
        early.settimeout(10)
        with pytest.raises(OSError, match="reset"):
            early.recv(1)
            raise OSError("reset: closed in good order")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    rest.stop()
