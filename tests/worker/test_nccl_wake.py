"""Threads of NCCL that sleep in a `poll` are woken by our own calls; nobody else's are, and other servers bear it."""

import os
import select
import socket
import subprocess
import sys
import threading

import torch
import torch.distributed as dist

from rsup.worker.inprocess import nccl_wake
from rsup.worker.inprocess.nccl_wake import own_datagram_sockets, own_listening_sockets, wake_until

PATH_BYTES = 108


def served(name: str) -> socket.socket:
    """As NCCL binds it: an abstract address as long as it can be, NULs behind the name."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(b"\0" + name.encode().ljust(PATH_BYTES - 1, b"\0"))
    return server


def test_both_threads_are_woken_in_their_polls() -> None:
    woken = [threading.Event(), threading.Event()]
    with served(f"tmp/nccl-socket-0-{os.getpid():x}") as datagrams, socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            if select.select([datagrams], [], [], 60)[0]:
                assert len(datagrams.recv(64)) == 1
                woken[0].set()

        def accept() -> None:
            if select.select([listening], [], [], 60)[0]:
                listening.accept()[0].close()
                woken[1].set()

        threads = [threading.Thread(target=serve), threading.Thread(target=accept)]
        for thread in threads:
            thread.start()
        waker = wake_until(lambda: all(event.is_set() for event in woken))
        for thread in (*threads, waker):
            thread.join(50)
            assert not thread.is_alive()
        assert all(event.is_set() for event in woken)


def test_only_sockets_of_this_process_count() -> None:
    assert own_datagram_sockets() == []
    name = f"tmp/nccl-socket-1-{os.getpid():x}"
    with served(name), served(f"tmp/other-{os.getpid():x}"), socket.create_server(("127.0.0.1", 0)) as listening:
        assert own_datagram_sockets() == [b"\0" + name.encode().ljust(PATH_BYTES - 1, b"\0")]
        assert (int(socket.AF_INET), listening.getsockname()) in own_listening_sockets()
        asks = f"import runpy; m = runpy.run_path({nccl_wake.__file__!r}); "
        asks += "print(m['own_datagram_sockets'](), m['own_listening_sockets']())"
        other = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
        assert other.stdout == "[] []\n", "another process sees the same list of sockets, and holds none of them"


def test_without_nccl_nobody_is_called() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        waker = wake_until(lambda: False)
        waker.join(50)
        assert not waker.is_alive() and not select.select([listening], [], [], 0)[0]


def test_gloo_and_the_store_bear_connections_that_say_nothing() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        listening = own_listening_sockets()
        assert len(listening) >= 2
        for _ in range(20):
            for family, address in listening:
                nccl_wake._connect(family, address)
        number = torch.ones(1)
        dist.all_reduce(number, group=dist.new_group(backend="gloo"))
        assert float(number) == 1.0
    finally:
        dist.destroy_process_group()
