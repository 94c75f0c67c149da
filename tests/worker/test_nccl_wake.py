"""Threads of NCCL that sleep in a `poll` are woken by a datagram of our own; nobody else's are."""

import os
import select
import socket
import subprocess
import sys
import threading

from rsup.worker.inprocess import nccl_wake
from rsup.worker.inprocess.nccl_wake import own_sockets, wake_until

PATH_BYTES = 108


def served(name: str) -> socket.socket:
    """As NCCL binds it: an abstract address as long as it can be, NULs behind the name."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(b"\0" + name.encode().ljust(PATH_BYTES - 1, b"\0"))
    return server


def test_a_thread_in_its_poll_is_woken() -> None:
    woken = threading.Event()
    with served(f"tmp/nccl-socket-0-{os.getpid():x}") as server:

        def serve() -> None:
            if select.select([server], [], [], 60)[0]:
                assert len(server.recv(64)) == 1
                woken.set()

        thread = threading.Thread(target=serve)
        thread.start()
        waker = wake_until(woken.is_set)
        thread.join(50)
        assert woken.is_set()
        waker.join(50)
        assert not waker.is_alive()


def test_only_sockets_of_nccl_and_of_this_process_count() -> None:
    assert own_sockets() == []
    name = f"tmp/nccl-socket-1-{os.getpid():x}"
    with served(name), served(f"tmp/other-{os.getpid():x}"):
        assert own_sockets() == [b"\0" + name.encode().ljust(PATH_BYTES - 1, b"\0")]
    with served(name):
        asks = f"import runpy; print(runpy.run_path({nccl_wake.__file__!r})['own_sockets']())"
        other = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
        assert other.stdout == "[]\n", "another process sees the same list of sockets, and holds none of them"
    waker = wake_until(lambda: False)
    waker.join(50)
    assert not waker.is_alive(), "with nobody to wake it ends at once"
