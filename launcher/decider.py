"""Where this agent's supervisor is, and the link to it: shared, behind the rendezvous endpoint, or embedded.

A shared supervisor that does not answer a new launch within `FALLBACK_AFTER_S` is replaced by an embedded one, in a line;
with `--require-supervisor` the launch ends with 75. An embedded one is started again whenever it does not answer, and killed
first if it lives and is silent.
"""

import socket
import time
from dataclasses import dataclass, replace

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.launcher.supervisor_process import SILENT_S, EmbeddedSupervisor, StartError
from rsup.supervisor import places, wire
from rsup.supervisor.places import LinkKey
from rsup.supervisor.wire import RsupError, UsageError

FALLBACK_AFTER_S = 10.0
SAY_SILENCE_AFTER_S = 5.0


class NoSupervisor(RsupError):
    """The supervisor that this launch requires does not answer."""

    exit_code = wire.EXIT_NO_SUPERVISOR


@dataclass(frozen=True)
class Route:
    """`address` empty: embedded. `listen`: where an embedded one must answer other nodes of the job. `shared`: named by the
    user, so that an embedded one may stand in for it. `claim`: held while this agent is the one that listens."""

    address: str = ""
    listen: str = ""
    shared: bool = False
    claim: socket.socket | None = None

    @property
    def is_embedded(self) -> bool:
        return not self.address


def choose_route(options: LaunchOptions) -> Route:
    """Where to find the supervisor. Raise `UsageError` for several nodes without a place to meet."""
    if options.supervisor:
        return Route(options.supervisor, shared=True)
    if options.max_nodes == 1 or (options.standalone and not options.rdzv_endpoint):
        return Route()
    if not options.rdzv_endpoint:
        raise UsageError(f"--nnodes {options.max_nodes} needs a place to meet: --rdzv-endpoint HOST:PORT, or --supervisor")
    host, port = places.split_endpoint(options.rdzv_endpoint, 29400)
    address = places.tcp_address(host, port)
    endpoint = address.removeprefix("tcp://")
    may_be_first = options.node_rank == 0 if options.node_rank >= 0 else _can_bind(host, port)
    claim = _claim(endpoint) if may_be_first else None
    return Route(listen=endpoint, claim=claim) if claim else Route(address)


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
    if route.listen:
        return places.split_endpoint(route.listen)[0]
    target = route.address.removeprefix("tcp://") if route.address.startswith("tcp://") else options.rdzv_endpoint
    if target:
        host, port = places.split_endpoint(target, 29400)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            pass
    return socket.getfqdn()


def _can_bind(host: str, port: int) -> bool:
    """Whether `host` is an address of this node whose port is free: then the supervisor of the job belongs here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


class Decider:
    """The link of this agent to whoever decides. Single-threaded; nothing blocks. An embedded supervisor is started at once,
    the link is made by `connect`, so that the agent can look for its devices meanwhile."""

    client: SupervisorClient

    def __init__(self, options: LaunchOptions, route: Route) -> None:
        """Raise `RsupError` if keys or directories cannot be used."""
        self.route = route
        self._options = options
        self._tcp_key = self._find_key()
        self._since_s = time.monotonic()
        self._said_silence = False
        self._said_trouble = ""
        self._embedded = self._start_embedded()

    def connect(self, agent: wire.AgentInfo, spec: wire.JobSpec, spool: Spool) -> SupervisorClient:
        """Dial. Raise `UsageError` for an address that is none."""
        address = self._address()
        self.client = SupervisorClient(address, agent, spec, spool, self._key_for(address))
        return self.client

    @property
    def key(self) -> LinkKey | None:
        """The key of the link in use, None where it has none."""
        return self._key_for(self.client.address)

    def close(self) -> None:
        """Let another agent be the one that listens."""
        if self.route.claim:
            self.route.claim.close()

    def look_after(self) -> str:
        """Start or replace a supervisor that does not answer; call it ten times a second. Returns a line for people, or "".

        Raise `NoSupervisor` if one is required and has not answered.
        """
        if self.client.connected:
            if self._embedded:
                self._embedded.heard()
            return ""
        if self._embedded:
            return self._look_after_embedded(self._embedded)
        if not self.route.shared:
            return self._say_silence("is the first node up, and this --rdzv-endpoint its address?")
        if self.route.shared and self.client.supervisor is None and time.monotonic() - self._since_s >= FALLBACK_AFTER_S:
            return self._fall_back()
        return ""

    def _look_after_embedded(self, embedded: EmbeddedSupervisor) -> str:
        if pid := embedded.kill_silent():
            return f"rsup: the supervisor (pid {pid}) has said nothing for {SILENT_S:g} s: it was killed, and another goes on"
        try:
            address = embedded.ensure()
        except StartError as error:
            if self.client.supervisor is None:
                raise
            said, self._said_trouble = self._said_trouble, str(error)  # training goes on: it is tried again
            return f"rsup: {error}" if said != self._said_trouble else ""
        if address != self.client.address:
            self.client.use_address(address, self._key_for(address))
        return self._say_silence(f"see {self._options.state_dir / 'supervisor.log'}")

    def _say_silence(self, hint: str) -> str:
        """One line for a person who waits, once: nothing starts before a supervisor answers."""
        waited_s = time.monotonic() - self._since_s
        if self._said_silence or self.client.supervisor is not None or waited_s < SAY_SILENCE_AFTER_S:
            return ""
        self._said_silence = True
        return f"rsup: no supervisor answers at {self.client.address} yet; {hint}"

    def _fall_back(self) -> str:
        options = self._options
        shared = self.route.address
        if options.require_supervisor:
            raise NoSupervisor(f"the supervisor at {shared} did not answer within {FALLBACK_AFTER_S:g} s; is it running there?")
        if options.max_nodes > 1 and not options.rdzv_endpoint:
            raise NoSupervisor(
                f"the supervisor at {shared} did not answer within {FALLBACK_AFTER_S:g} s, and without --rdzv-endpoint "
                "the job's nodes have no other place to meet"
            )
        self.route = choose_route(replace(options, supervisor=""))
        self._since_s = time.monotonic()
        self._embedded = self._start_embedded()
        address = self._address()
        self.client.use_address(address, self._key_for(address))
        return (
            f"rsup: the supervisor at {shared} did not answer within {FALLBACK_AFTER_S:g} s; an embedded one takes its place "
            f"and keeps this job's records in {options.state_dir}: once the job has ended, hand them over there with "
            f"`rsup db merge {options.state_dir}` (see `rsup db merge --help`)"
        )

    def _start_embedded(self) -> EmbeddedSupervisor | None:
        if not self.route.is_embedded:
            return None
        key_file = self._options.key_file
        embedded = EmbeddedSupervisor(self._options.state_dir, ["--key-file", str(key_file.absolute())] if key_file else [])
        embedded.ensure()
        return embedded

    def _address(self) -> str:
        return self._embedded.ensure() if self._embedded else self.route.address

    def _key_for(self, address: str) -> LinkKey | None:
        return self._tcp_key if address.startswith("tcp:") else None

    def _find_key(self) -> LinkKey | None:
        secret = places.find_secret(self._options.state_dir, str(self._options.key_file) if self._options.key_file else None)
        if secret is None and self._options.require_key and self._options.max_nodes > 1:
            raise UsageError("--require-key: there is no key; name one with --key-file or RSUP_KEY_FILE on all nodes")
        return places.link_key(secret) if secret else None
