"""Wakes threads of NCCL that an abort waits for.

Each communicator has two threads that serve its sockets, one TCP and one UNIX. They look at the abort flag only between two
`poll`s of 500 ms, and `ncclCommAbort` joins both: an abort takes up to half a second in which nothing happens. A connection,
opened and closed, and a datagram of one byte, which is no message of NCCL's, end their `poll`s.

NCCL's TCP socket cannot be told from others, so every listening socket of this process gets such connections, as from a port
scan; gloo's and TCPStore's take them (a test holds that). Nobody else's socket is touched.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME_BEGINS = "@tmp/nccl-socket-"
EVERY_S = 0.01
AT_MOST_S = 20.0
CONNECTED_WITHIN_S = 0.05


def wake_until(is_over: Callable[[], bool]) -> threading.Thread:
    """Wake this process's threads again and again until `is_over()`, in a thread of its own; call it once aborts have begun."""
    thread = threading.Thread(target=_wake, args=(is_over,), name="rsup-wake-nccl", daemon=True)
    thread.start()
    return thread


def _wake(is_over: Callable[[], bool]) -> None:
    datagrams = own_datagram_sockets()
    if not datagrams:  # no communicator of NCCL's is here
        return
    listening, pause = own_listening_sockets(), threading.Event()
    for _ in range(int(AT_MOST_S / EVERY_S)):
        if is_over():
            return
        for address in datagrams:
            _send(address)
        for family, address in listening:
            _connect(family, address)
        pause.wait(EVERY_S)


def _send(address: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        with contextlib.suppress(OSError):  # its thread has gone, or has yet to read what it has got
            sender.sendto(b"x", address)


def _connect(family: int, address: Any) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as caller:
        caller.settimeout(CONNECTED_WITHIN_S)
        with contextlib.suppress(OSError):
            caller.connect(address)


def own_datagram_sockets() -> list[bytes]:
    """Abstract addresses of NCCL's UNIX sockets that this process holds; none where Linux does not tell."""
    try:
        lines = Path("/proc/self/net/unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    inodes = {target.removeprefix("socket:[").removesuffix("]") for _, target in _own_sockets()}
    found = [fields for line in lines if len(fields := line.split(maxsplit=7)) == 8]
    # Linux shows each NUL of such an address, also those behind the name, as an @
    return [name.replace("@", "\0").encode() for *_, inode, name in found if inode in inodes and name.startswith(NAME_BEGINS)]


def own_listening_sockets() -> list[tuple[int, Any]]:
    """Family and address of this process's TCP sockets that take connections."""
    found = []
    for descriptor, _ in _own_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            is_tcp = one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append((int(one.family), one.getsockname()))
    return found


def _own_sockets() -> list[tuple[int, str]]:
    """Descriptor and `socket:[INODE]`."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that has just listed the folder is closed
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:["):
                found.append((int(entry), target))
    return found
