"""The listening socket of an attempt's TCPStore, bound before any rank starts."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path

from rsup.supervisor.wire import EXIT_USAGE, RsupError

BACKLOG = 4096
LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


class PortInUse(RsupError):
    """port N is in use by WHOM; choose another --master-port"""

    exit_code = EXIT_USAGE


def bind_store_socket(host: str, port: int) -> socket.socket:
    """A listening socket for a TCPStore. `port` 0: any free one. Bound to loopback if `host` is loopback, else to all
    addresses. Raise `PortInUse` (one line that names the holder), or `RsupError` for any other refusal."""
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} is in use by {port_holder(port)}; choose another --master-port") from None
        if error.errno == errno.EACCES:
            raise RsupError(f"port {port} may not be bound by this user; choose a --master-port above 1023") from None
        raise RsupError(f"cannot bind port {port} for the job's TCPStore: {error.strerror}") from None


def _listen(host: str, port: int) -> socket.socket:
    family, address = _family_and_address(host)
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # connections of the attempt before may linger in TIME_WAIT on the same port
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def _family_and_address(host: str) -> tuple[socket.AddressFamily, str]:
    with contextlib.suppress(ValueError):
        given = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        if given.is_loopback:
            return (socket.AF_INET6 if given.version == 6 else socket.AF_INET), str(given)
    return (socket.AF_INET6, "::") if _has_ipv6() else (socket.AF_INET, "0.0.0.0")


def _has_ipv6() -> bool:
    return socket.has_ipv6 and os.path.exists("/proc/net/if_inet6")


def port_holder(port: int) -> str:
    """Who listens on a TCP port of this host, as far as this user may know."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for fd_folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            held = any(os.readlink(fd_folder / fd) in inodes for fd in os.listdir(fd_folder))
        except OSError:
            continue
        if held:
            return f"process {fd_folder.parent.name} ({_command(fd_folder.parent)})"
    return "another process"


def _listening_inodes(port: int) -> list[str]:
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.append(fields[9])
    return inodes


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"
