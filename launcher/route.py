"""Where this agent's supervisor is to be found: named by the user, behind the endpoint where the job's nodes meet, or embedded.

One node lets its embedded supervisor listen at the endpoint: the one with `--node-rank 0`, else the first agent on the host
whose address it is. torchrun's first node listens on all its addresses whatever the endpoint says, so scripts name service
names and public addresses there: those are served by `--node-rank 0` too, on all its addresses, and a line says so.
"""

import os
import socket
from dataclasses import dataclass

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.store_socket import port_holder
from rsup.supervisor import places
from rsup.supervisor.wire import UsageError

DEFAULT_PORT = 29400
_CONNECT_WITHIN_S = 0.5
_GREETING_BYTES = 10
"""Of a ZeroMQ socket, sent to whoever connects: 0xFF, 8 bytes, 0x7F (ZMTP 3.1, RFC 37)."""


@dataclass(frozen=True)
class Route:
    """`address` empty: embedded; several supervisors, of which one leads, are separated by commas. `listen`: where an
    embedded one must answer other nodes of the job. `shared`: named by the user, so that an embedded one may stand in for it.
    `claim`: held while this agent is the one that listens. `note`: a line for people about the choice."""

    address: str = ""
    listen: str = ""
    shared: bool = False
    claim: socket.socket | None = None
    note: str = ""

    @property
    def is_embedded(self) -> bool:
        return not self.address


@dataclass(frozen=True)
class Whereabouts:
    """Whose address an endpoint's host is. `problem`: why it has none that we know of."""

    is_here: bool = False
    problem: str = ""


def choose_route(options: LaunchOptions) -> Route:
    """Where to find the supervisor. Raise `UsageError` for several nodes without a place to meet."""
    if options.supervisor:
        return Route(options.supervisor, shared=True)
    if options.max_nodes == 1 or (options.standalone and not options.rdzv_endpoint):
        return Route()
    if not options.rdzv_endpoint:
        raise UsageError(f"--nnodes {options.max_nodes} needs a place to meet: --rdzv-endpoint HOST:PORT, or --supervisor")
    host, port = places.split_endpoint(options.rdzv_endpoint, DEFAULT_PORT)
    if options.meeting_ports:
        return _route_of_step(options, host)
    address = places.tcp_address(host, port)
    endpoint = address.removeprefix("tcp://")
    found = find_host(host, port)
    listen, note = "", ""
    if options.node_rank == 0:
        listen = endpoint if found.is_here else _all_addresses(port)
        note = "" if found.is_here else _served_elsewhere(host, port, found)
    elif options.node_rank < 0 and found.is_here and _is_free(host, port):
        listen = endpoint
    elif found.problem:
        note = f"{_no_address(host, found)} It is tried until --join-timeout is over"
    claim = _claim(endpoint) if listen else None
    return Route(listen=listen, claim=claim, note=note) if claim else Route(address, note="" if listen else note)


def _route_of_step(options: LaunchOptions, host: str) -> Route:
    """In a SLURM step without an endpoint of the user's: the first node listens at the first free port of the step's, on all
    its addresses, since nodes may know it by several; the others try these ports in turn."""
    if options.node_rank != 0:
        return Route(",".join(places.tcp_address(host, port) for port in options.meeting_ports))
    for port in options.meeting_ports:
        listen = _all_addresses(port)
        if _is_free(*places.split_endpoint(listen)) and (claim := _claim(listen)):
            return Route(listen=listen, claim=claim)
    ports = " and ".join(map(str, options.meeting_ports))
    raise UsageError(
        f"ports {ports} of this node are in use; give --rdzv-endpoint HOST:PORT, or RSUP_PORT_RANGE=LOW-HIGH "
        "(the other nodes wait for this one, unless srun has --kill-on-bad-exit)"
    )


def find_host(host: str, port: int) -> Whereabouts:
    """Whether `host` is an address of this node. Asks the resolver, which may take its time."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return Whereabouts(problem=error.strerror or str(error))
    return Whereabouts(is_here=_binds(family, kind, protocol, (address[0], 0, *address[2:])))


def _is_free(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return False
    return _binds(family, kind, protocol, address)


def _binds(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def _all_addresses(port: int) -> str:
    return f"[::]:{port}" if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else f"0.0.0.0:{port}"


def _served_elsewhere(host: str, port: int, found: Whereabouts) -> str:
    why = _no_address(host, found) if found.problem else f"{host} is no address of this host"
    return (
        f"{why}: as --node-rank 0 it answers the other nodes on all its addresses, port {port}; "
        "if they cannot reach it there, give --rdzv-endpoint an address of this host"
    )


def _no_address(host: str, found: Whereabouts) -> str:
    return f"{host} has no address here ({found.problem}); is it spelled as on the other nodes?"


def _claim(endpoint: str) -> socket.socket | None:
    """The right of one agent of this host to have the supervisor listen there; None if another agent has it.

    A name in the kernel's abstract namespace: it is gone with the process, and as wide as the ports are.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0rsup-listens-{endpoint}"[:100])
    except OSError:
        claim.close()
        return None
    return claim


def reachable_host(options: LaunchOptions, route: Route) -> str:
    """This node's address for the job's other nodes (MASTER_ADDR if it is the first)."""
    if options.local_addr:
        return options.local_addr
    if options.max_nodes == 1:
        return "127.0.0.1"
    host = places.split_endpoint(route.listen)[0] if route.listen else ""
    if host not in ("", "::", "0.0.0.0"):
        return host
    first = next((address for address in route.address.split(",") if address.startswith("tcp://")), "")
    target = first.removeprefix("tcp://") or options.rdzv_endpoint
    if target:
        try:
            return _source_address(*places.split_endpoint(target, DEFAULT_PORT))
        except OSError:
            pass
    return socket.getfqdn()


def _source_address(host: str, port: int) -> str:
    """The address that this host would use to talk to that one; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def why_silent(host: str, port: int, *, in_step: bool = False) -> str:
    """Why no supervisor answers there, as far as one try to connect tells: a clause with what to do. Takes a second at
    most where the resolver is quick. `in_step`: the place is not the user's, but that of a SLURM step."""
    found = find_host(host, port)
    if found.problem:
        return _no_address(host, found)
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_WITHIN_S) as connection:
            greeting = _greeting(connection)
    except ConnectionRefusedError:
        if in_step:
            return "nothing listens there yet: the first node of this step has not come so far, or has ended (see its lines)"
        if found.is_here:
            return "it is an address of this host, where nothing listens; the first node is the one with --node-rank 0"
        return "nothing listens there yet; is the first node up, and this --rdzv-endpoint its address?"
    except OSError as error:
        why = error.strerror or "no answer"
        return f"no connection ({why}); is the first node up, and can this node reach that address and port?"
    holder = f": {port_holder(port)}" if found.is_here else ""
    if greeting and len(greeting) == _GREETING_BYTES and (greeting[0], greeting[-1]) == (0xFF, 0x7F):
        return (
            f"what listens there speaks ZeroMQ, but does not answer this node{holder}; have both the same port and --key-file?"
        )
    or_hung = "" if greeting is not None else ", or one that hangs"
    what = f"something accepts connections there, but is no rsup supervisor{or_hung}{holder}"
    return f"{what}; is the port right, and the first node no torchrun?"


def _greeting(connection: socket.socket) -> bytes | None:
    """What it says first; empty if it hangs up, None if it waits for us."""
    try:
        return connection.recv(_GREETING_BYTES)
    except TimeoutError:
        return None
    except OSError:
        return b""
