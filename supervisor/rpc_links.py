"""The supervisor's sockets: one ROUTER for its own host (ipc), one for TCP with CURVE, one for each job's open TCP endpoint.

Only makes and binds them; `rpc_server` reads and writes. Every queue has a bound, and every frame. CURVE is a socket's
property, so an address has it or not: with a key known (`places.link_key`) every TCP endpoint has. An open endpoint exists
for one job, and only that job's messages may come through it (DESIGN.md section 12).
"""

import contextlib
import errno
import hmac
import ipaddress
import socket as sockets
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from rsup.supervisor import wire
from rsup.supervisor.places import LinkKey, split_endpoint, tcp_address
from rsup.supervisor.records import JobKey
from rsup.supervisor.wire import RsupError

RECEIVE_QUEUE_MESSAGES = 32
SEND_QUEUE_MESSAGES = 64
"""Of each agent, and those of thousands may wait while the loop is busy: 32 `Hello` each of 2,048 agents are 0.1 GB. What finds
no room waits with the agent, which keeps its facts until they are acknowledged."""
_BACKLOG = 1024
_ZMQ_ZERO_COPY_RECV = 10
"""In libzmq's `zmq.h`; pyzmq does not name it."""


class ListenError(RsupError):
    """An address could not be bound; the text says why and what to do."""

    exit_code = wire.EXIT_USAGE  # as for a --master-port in use


@dataclass(eq=False)
class Link:
    """One bound socket. `open`: without a key, for the jobs in `jobs` only."""

    socket: "zmq.Socket[bytes]"
    address: str
    open: bool = False
    jobs: Sequence[JobKey] = ()
    groups: Sequence[str] = ()
    """Rendezvous ids of `jobs`."""
    agents: set[str] = field(default_factory=set)
    """Agents that were welcomed to one of `jobs` through this link."""


def is_astray(link: Link, rdzv_id: str) -> bool:
    """Whether an agent of that SLURM step has come to the endpoint of another one: steps work out their ports, and two may have
    come to the same."""
    return bool(link.groups) and rdzv_id.startswith(wire.SLURM_GROUP) and rdzv_id not in link.groups


def keep_messages_small(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Copy each message into memory of its own. By default one keeps the 8 KiB alive that were read with it, for as long as it
    waits; with thousands of agents whose small messages wait that is more than a GB."""
    with contextlib.suppress(zmq.ZMQError):  # libzmq before 4.3 does not know it
        context.set(_ZMQ_ZERO_COPY_RECV, 0)


def make_router(context: "zmq.Context[zmq.Socket[bytes]]", key: LinkKey | None, *, ipv6: bool) -> "zmq.Socket[bytes]":
    """An unbound ROUTER with our bounds: it never blocks, says when a peer is unknown, and lets an agent's new connection
    replace its old one. `ipv6`: the address is one, or all addresses."""
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 200)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    router.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    router.setsockopt(zmq.BACKLOG, _BACKLOG)
    router.setsockopt(zmq.IPV6, int(ipv6))
    router.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
    if key is not None:
        router.curve_server = True
        router.curve_secretkey = key.server_secret
        router.curve_publickey = key.server_public
    return router


def bind(router: "zmq.Socket[bytes]", address: str, setting: str = "--rdzv-endpoint") -> str:
    """Bind; return the address with the port that was found where 0 was asked for. Raise `ListenError`, which names the
    `setting` to change."""
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        raise _listen_error(address, error, setting) from None
    return router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def bindable_address(endpoint: str) -> str:
    """ZeroMQ address to bind for `host:port`. A name that resolves to loopback here, as Debian's hosts file has it for the
    host's own name, is bound on all addresses: the other nodes resolve it to another one."""
    host, port = split_endpoint(endpoint)
    try:
        ipaddress.ip_address(host)
        return tcp_address(host, port)
    except ValueError:
        pass
    try:
        found = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"cannot listen on {endpoint}: {host} has no address here ({error.strerror})") from None
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_loopback and not host.startswith("localhost"):
        return f"tcp://*:{port}"
    return tcp_address(address, port)


def _listen_error(address: str, error: zmq.ZMQError, setting: str) -> ListenError:
    if not address.startswith("tcp://"):
        return ListenError(f"cannot listen on {address}: {error.strerror}; set XDG_RUNTIME_DIR to a local directory of yours")
    host, port = split_endpoint(address.removeprefix("tcp://"))
    if error.errno == errno.EADDRINUSE:
        return ListenError(f"port {port} of {host} is in use; choose another {setting}")
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        whose = "the first node" if setting == "--rdzv-endpoint" else "this host"
        return ListenError(f"{host} is no address of this host; give {setting} an address of {whose}")
    return ListenError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {setting}")


class KeyCheck:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27). The client key derived from our secret gets through, and with
    `admits_others` every other one: who knows our public key only must then say in the `Hello` who it is. The answer's user id
    (`HOLDER`, `OTHER`) comes with every message of that connection."""

    HOLDER, OTHER = b"holder", b"other"

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", key: LinkKey, *, admits_others: bool = False) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")
        self.num_refused = 0
        self._client_public = key.client_public
        self._admits_others = admits_others

    def answer_all(self) -> None:
        """Answer what is waiting."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            version, request = frames[0], frames[1]
            given = z85.encode(frames[6]) if len(frames) > 6 and frames[5] == b"CURVE" else b""
            holds_secret = hmac.compare_digest(given, self._client_public)
            welcome = holds_secret or (self._admits_others and bool(given))
            self.num_refused += not welcome
            code, text = (b"200", b"OK") if welcome else (b"400", b"wrong key")
            user = self.HOLDER if holds_secret else self.OTHER
            self.socket.send_multipart([version, request, code, text, user, b""], zmq.DONTWAIT)

    def close(self) -> None:
        self.socket.close()
