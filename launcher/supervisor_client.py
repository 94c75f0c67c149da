"""An agent's end of the link to its supervisor: one ZeroMQ DEALER.

Its identity is a secret of this process: who knows the agent's id only cannot take over its connection. A supervisor of an
older release wants the id itself there: it gets it once a connection has said `Hello` in vain `_HELLOS_IN_VAIN` times.

Nothing here blocks: every send and receive returns at once, and what cannot be sent now stays in the spool. The owner polls
`fileno()` for reading and calls `poll` when it is readable and at least every 0.5 s; it calls `send_report` every second, and
at once after it put facts into the spool.

Delivery: facts go out once per connection, in order, within a window; what is not acknowledged for `RESEND_S`, or when a
supervisor has welcomed us anew, goes out again. The supervisor drops what it has. `Hello` is repeated until it is answered,
and again when nothing was heard for `SILENCE_S`: the supervisor answers every report.

Several supervisors may share one database, of which one leads: the client dials one address at a time. The next is tried when
the connection is lost, when nothing is heard for `NEXT_AFTER_S`, and at once when what answers only stands by; once all have
been tried in vain it stays for `STAY_S` where something answered, which may be about to lead.

A supervisor that was busy reads a `Hello` late, perhaps after its agent has gone on. Connections with an unanswered one stay
open until somebody welcomes us, so that whoever has not can be told `Bye` there.
"""

import logging
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from rsup.launcher.hello_credential import HelloCredentials
from rsup.launcher.spool import Spool
from rsup.supervisor import wire
from rsup.supervisor.places import LinkKey
from rsup.supervisor.wire import AgentInfo, JobSpec, MessageError, Order, RankBeat, Refusal, RsupError, ToAgent, Welcome

HELLO_EVERY_S = 0.5
HELLO_EVERY_MAX_S = 2.0
SILENCE_S = 3.0
RESEND_S = 2.0
MAX_REPORT_FACTS = 256
MAX_REPORT_BYTES = 1024 * 1024
MAX_FACTS_IN_FLIGHT = 1024
NEXT_AFTER_S = 1.5
STAY_S = 5.0
_MAX_MESSAGES_A_POLL = 256
_FAILED_HANDSHAKES_OF_A_WRONG_KEY = 3
_HELLOS_IN_VAIN = 5
_BYE_LINGER_S = 1.0
_BYE_WITHIN_S = 600.0
_QUEUE_MESSAGES = 64

_log = logging.getLogger(__name__)


class LinkRefused(RsupError):
    """The supervisor's end does not take our connection: the keys differ, or only one side has one."""


class SupervisorClient:
    """The link of one agent. `address`: of one supervisor, or of several, separated by commas. `clock` is monotonic, in
    seconds. Single-threaded; `close` when done."""

    def __init__(
        self,
        address: str,
        agent: AgentInfo,
        spec: JobSpec,
        spool: Spool,
        key: LinkKey | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        """The one that is dialled now."""
        self.agent = agent
        self.spec = spec
        self.spool = spool
        self.supervisor: wire.SupervisorInfo | None = None
        """Who welcomed us last."""
        self.last_heard_s: float | None = None
        """Time by `clock` at which the supervisor was last heard, None: never."""
        self.job_id = ""
        """The job, once a supervisor has named it. `run` counts its runs."""
        self.run = 0
        self.standby_note = ""
        """Why a supervisor that answered decides nothing, empty if none has said so since the last welcome."""
        self.num_bad_messages = 0
        self._key = key
        self._clock = clock
        self._epoch = 0
        self._attempt = 0
        self._running: wire.RunningAttempt | None = None
        self._acked_command = 0
        self._welcomed = False
        self._context = zmq.Context(io_threads=1)
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._notes: list[str] = []
        self.speaks_for_all = True
        """Whether it notes what all agents of its job would say on the same terminal."""
        self._welcomed_by = ""
        self._leave_s: float | None = None
        """When to dial the next supervisor, None: stay."""
        self._is_staying = False
        self._hello_at_s: float | None = None
        self._credentials = HelloCredentials(agent.agent_id, self._wake)
        self._secret_identity = secrets.token_hex(16)
        self._plain_identity = False
        self._stale_identity = False
        self._unanswered: dict[tuple[str, str], zmq.Socket[bytes]] = {}
        """By address and identity: connections left before their `Hello` was answered."""
        self._parting: list[zmq.Socket[bytes]] = []
        """Such ones as we have left for good, until `Bye` could be said; at `_part_by_s` that is given up."""
        self._part_by_s = 0.0
        self._use(address)

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do."""
        return self._epoll.fileno()

    @property
    def connected(self) -> bool:
        """A supervisor has welcomed us and answers."""
        return self._welcomed and self.last_heard_s is not None and self._clock() - self.last_heard_s < SILENCE_S

    def use_address(self, address: str, key: LinkKey | None = None) -> None:
        """Talk to the supervisor at `address` from now on. The same address: dial it anew."""
        self._disconnect()
        self._key = key
        self._use(address)

    def leave_for(self, address: str, key: LinkKey | None = None) -> None:
        """As `use_address`, for good: a supervisor that has not answered, and may yet do so, hears that we have gone."""
        self._part(_BYE_WITHIN_S)
        self._key = key
        self._use(address)

    @property
    def all_addresses(self) -> str:
        """Of every supervisor that may lead, the one in use first, separated by commas."""
        return ",".join(dict.fromkeys([self.address, *self._addresses]))

    def take_note(self) -> str:
        """A line for people about the supervisor in use, once; empty if there is none."""
        return self._notes.pop(0) if self._notes else ""

    def poll(self) -> list[ToAgent]:
        """Return what has come; send `Hello` where it is due. Raise `LinkRefused` if the keys do not fit at first contact."""
        self._clear_wake()
        self._read_monitor()
        messages = self._receive()
        now_s = self._clock()
        if self._parting:
            self._say_bye_to_parting()
        if self._welcomed and self.last_heard_s is not None and now_s - self.last_heard_s >= SILENCE_S:
            self._welcomed = False
            self._leave_s = now_s
        self._go_on_if_due(now_s)
        if self._stale_identity:
            self._stale_identity = self._plain_identity = False
            self._disconnect()
            self._connect(self.address)
        self._say_hello_if_due(now_s)
        if self._welcomed:
            self._send_facts(now_s)
        self._wake_if_readable()
        return messages

    def send_report(
        self,
        epoch: int,
        acked_command: int,
        beats: Sequence[RankBeat] = (),
        attempt: int | None = None,
        running: wire.RunningAttempt | None = None,
    ) -> None:
        """Send the sign of life with `beats`, and the facts that are due. `attempt`: whose ranks run here, 0 for none;
        `running`: more about it."""
        self._epoch = epoch
        self._acked_command = acked_command
        if attempt is not None:
            self._attempt, self._running = attempt, running
        now_s = self._clock()
        if not self._welcomed:
            self._say_hello_if_due(now_s)
        elif not self._send_facts(now_s, list(beats)):
            self._send(wire.Report(self.agent.agent_id, epoch, acked_command, beats=list(beats)))
        self._wake_if_readable()

    def send_bye(self) -> None:
        """Say that this agent goes. `close` gives it the time to get out."""
        self._send(wire.Bye(self.agent.agent_id))

    def close(self, linger_s: float = 0.2) -> None:
        """Close the link; wait at most `linger_s` for what is still going out. Whoever has never answered hears that we go."""
        self._credentials.close()
        if self.supervisor is None:
            self._part(within_s=0.0)
        else:
            self._disconnect(linger_ms=int(linger_s * 1000))
            while self._parting:
                self._parting.pop().close(linger=0)
        self._context.term()
        self._epoll.close()
        os.close(self._wake_fd)

    # -------------------------------------------------------------------------------------------- several supervisors

    def _use(self, addresses: str) -> None:
        self._addresses = list(dict.fromkeys(part.strip() for part in addresses.split(",") if part.strip()))
        self._hint = ""
        self._leader = ""
        self._tried: set[str] = set()
        self._refusing: set[str] = set()
        self._connect(self._addresses[0] if self._addresses else addresses)

    def _candidates(self) -> list[str]:
        hint = [self._hint] if self._hint and self._hint not in self._addresses else []
        return [address for address in (*self._addresses, *hint) if address not in self._refusing]

    def _go_on_if_due(self, now_s: float) -> None:
        """Dial the next supervisor where this one is not it."""
        candidates = self._candidates()
        if self._welcomed or self._leave_s is None or now_s < self._leave_s or not set(candidates) - {self.address}:
            return
        untried = [address for address in candidates if address not in self._tried and address != self.address]
        if not untried:
            self._tried.clear()
            untried = [address for address in candidates if address != self.address]
        after = candidates.index(self.address) if self.address in candidates else -1
        following = next((address for address in candidates[after + 1 :] if address in untried), untried[0])
        self._tried.add(self.address)
        self._set_aside()
        self._connect(following)

    def _goes_elsewhere(self, message: ToAgent) -> bool:
        """Another job's supervisor has answered: go on to the next address, where there is one."""
        if not (isinstance(message, Refusal) and message.elsewhere and len(self._candidates()) > 1):
            return False
        self._tried.add(self.address)
        self._leave_s = self._clock()
        return True

    def _take_standby(self, said: wire.StandsBy) -> None:
        """Go on at once where another may lead; where all have been tried, give this one time to take over."""
        now_s = self._clock()
        self.standby_note = said.message
        if said.instance != self._leader:
            self._leader = said.instance
            self._tried.clear()
        self._hint = said.leader if said.leader.startswith("tcp://") else ""
        self._tried.add(self.address)
        if self._welcomed:
            self._welcomed = False
            self._hello_at_s = now_s
        all_tried = all(address in self._tried for address in self._candidates())
        if not all_tried:
            self._leave_s = now_s
        elif not self._is_staying:
            self._is_staying = True
            self._leave_s = now_s + STAY_S

    # ------------------------------------------------------------------------------------------------------- socket

    def _connect(self, address: str) -> None:
        self.address = address
        self._welcomed = False
        self._hello_at_s = None
        self._hello_every_s = HELLO_EVERY_S
        self._num_hellos = 0
        self._heard_here = False
        self._sent = self.spool.acked
        self._ack_moved_s = self._clock()
        self._failed_handshakes = 0
        self._dialled_s = self._clock()
        self._leave_s = self._dialled_s + NEXT_AFTER_S
        self._is_staying = False
        if (before := self._unanswered.pop((address, self._identity), None)) is not None:
            before.close(linger=0)
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000 if address.startswith("tcp:") else 50)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        socket.setsockopt(zmq.IPV6, 1)
        if address.startswith("tcp:"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        if self._key is not None and address.startswith("tcp:"):
            socket.curve_serverkey = self._key.server_public
            socket.curve_publickey = self._key.client_public
            socket.curve_secretkey = self._key.client_secret
        self._socket = socket
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket()
        for fd in (socket.getsockopt(zmq.FD), self._monitor.getsockopt(zmq.FD)):
            assert isinstance(fd, int)
            self._epoll.register(fd, select.EPOLLIN)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise wire.UsageError(f"{address!r} is no address of a supervisor: {error.strerror}") from None

    @property
    def _identity(self) -> str:
        return self.agent.agent_id if self._plain_identity else self._secret_identity

    def _disconnect(self, linger_ms: int = 0) -> None:
        self._unwatch()
        self._socket.close(linger=linger_ms)

    def _set_aside(self) -> None:
        """Leave the connection; where a `Hello` may yet be read that nobody has answered, it stays open for a `Bye`."""
        if self.supervisor is not None or self.agent.gone or self._heard_here or not self._num_hellos:
            self._disconnect()
            return
        self._unwatch()
        self._unanswered[self.address, self._identity] = self._socket

    def _part(self, within_s: float) -> None:
        """Leave all connections for good; say `Bye` behind each `Hello` that nobody has answered."""
        self._set_aside()
        self._parting += self._unanswered.values()
        self._unanswered.clear()
        self._part_by_s = self._clock() + within_s
        self._say_bye_to_parting()

    def _say_bye_to_parting(self) -> None:
        """A connection that is lost just now may come again, and takes it then."""
        is_late = self._clock() >= self._part_by_s
        for socket in list(self._parting):
            try:
                socket.send(wire.encode(wire.Bye(self.agent.agent_id)), zmq.DONTWAIT)
            except zmq.Again:
                if not is_late:
                    continue
            self._parting.remove(socket)
            socket.close(linger=int(_BYE_LINGER_S * 1000))

    def _unwatch(self) -> None:
        for fd in (self._socket.getsockopt(zmq.FD), self._monitor.getsockopt(zmq.FD)):
            assert isinstance(fd, int)
            self._epoll.unregister(fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _wake(self) -> None:
        """From another thread: a credential is there."""
        os.eventfd_write(self._wake_fd, 1)

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _wake_if_readable(self) -> None:
        """ZeroMQ's descriptor signals once: what arrived while we were sending must be signalled by us."""
        readable = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        if readable:
            os.eventfd_write(self._wake_fd, 1)

    def _send(self, message: msgspec.Struct) -> bool:
        try:
            self._socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    # ------------------------------------------------------------------------------------------------------ receiving

    def _read_monitor(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return
            kind = event["event"]
            if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._failed_handshakes = 0
                self._hello_at_s = None
            elif kind == zmq.Event.DISCONNECTED:
                if self._welcomed or self._is_staying:
                    self._leave_s = self._clock()
                self._welcomed = False
            elif kind in (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_AUTH):
                self._refuse_key()
            elif kind == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and self._key is not None:
                self._failed_handshakes += 1
                if self._failed_handshakes >= _FAILED_HANDSHAKES_OF_A_WRONG_KEY:
                    self._refuse_key()

    def _refuse_key(self) -> None:
        """A supervisor that had welcomed us and now refuses is left to itself: training goes on, we keep dialling. One of
        several is left out from now on, in a line."""
        if self.address in self._refusing:
            return
        if len(self._candidates()) > 1:
            self._refusing.add(self.address)
            self._leave_s = self._clock()
            why = "does not take our key" if self._key is not None else "asks for a key and we have none"
            mend = (
                "give all supervisors the same --key-file"
                if self._key is not None
                else ("name a copy of their key.pub in RSUP_KEY_FILE, and a token in RSUP_TOKEN_FILE where MUNGE is not")
            )
            self._notes.append(f"the supervisor at {self.address} {why}, so it cannot take over: {mend}")
            return
        if self.supervisor is None:
            problem = "refuses our key" if self._key is not None else "asks for a key and we have none"
            raise LinkRefused(
                f"the supervisor at {self.address} {problem}; give both ends the same file with --key-file or RSUP_KEY_FILE, "
                "or name in RSUP_KEY_FILE a copy of a shared supervisor's key.pub"
            )
        if self._failed_handshakes <= _FAILED_HANDSHAKES_OF_A_WRONG_KEY:
            _log.warning("the supervisor at %s does not take our key any more", self.address)

    def _receive(self) -> list[ToAgent]:
        messages: list[ToAgent] = []
        for _ in range(_MAX_MESSAGES_A_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                message = wire.decode_to_agent(frames[0])
            except MessageError as error:
                self.num_bad_messages += 1
                if self.num_bad_messages & (self.num_bad_messages - 1) == 0:
                    _log.warning("%d bad messages of the supervisor, the last: %s", self.num_bad_messages, error)
                continue
            self._heard_here = True
            taken = self._take(message)
            if isinstance(taken, wire.StandsBy) or self._goes_elsewhere(taken):
                continue
            self.last_heard_s = self._clock()
            messages.append(taken)
        return messages

    def _take(self, message: ToAgent) -> ToAgent:
        if isinstance(message, Welcome):
            if wire.common_version(message.speaks) is None:
                return Refusal(1, f"the supervisor runs rsup {message.release}, this is {wire.RELEASE}: install one of the two")
            self._take_welcome(message)
        elif isinstance(message, Order):
            self._take_ack(message.acked_fact)
        elif isinstance(message, wire.StandsBy):
            self._take_standby(message)
        return message

    def _take_welcome(self, welcome: Welcome) -> None:
        known = self.supervisor is not None and self.supervisor.instance == welcome.supervisor.instance
        acked = welcome.acked_fact
        if acked > self.spool.last or (acked < self.spool.acked and not known):
            self.spool.rebase(acked)
        else:
            self.spool.acknowledge(acked)
        if self._welcomed_by not in ("", self.address) and not known and self.speaks_for_all:  # one may have several addresses
            self._notes.append(f"the supervisor at {self.address} goes on in place of the one at {self._welcomed_by}")
        self._welcomed_by = self.address
        self._stale_identity = self._plain_identity and welcome.secret_identities
        self.standby_note = ""
        self._tried.clear()
        self._leave_s = None
        self.supervisor = welcome.supervisor
        while self._unanswered:
            self._unanswered.popitem()[1].close(linger=0)
        self.job_id, self.run = welcome.job_id, welcome.run
        self._welcomed = True
        self._hello_every_s = HELLO_EVERY_S
        self._sent = self.spool.acked
        self._ack_moved_s = self._clock()

    def _take_ack(self, acked: int) -> None:
        before = self.spool.acked
        self.spool.acknowledge(acked)
        if self.spool.acked > before:
            self._ack_moved_s = self._clock()

    # -------------------------------------------------------------------------------------------------------- sending

    def _say_hello_if_due(self, now_s: float) -> None:
        if self._welcomed or (self._hello_at_s is not None and now_s - self._hello_at_s < self._hello_every_s):
            return
        if self._num_hellos >= _HELLOS_IN_VAIN and not self._heard_here and not self._plain_identity:
            self._set_aside()
            self._plain_identity = True
            self._connect(self.address)
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            return  # no connection: a credential for it would grow old
        credential = self._credentials.take(self.address, keyed=self._key is not None)
        if credential is None:
            return
        speaks = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
        told = (self.agent, self.spec, self._epoch, self._attempt, self.job_id, self.run, credential, self._running)
        if self._send(wire.Hello(speaks, wire.RELEASE, *told)):
            self._num_hellos += 1
            self._hello_at_s = now_s
            self._hello_every_s = min(self._hello_every_s * 1.1, HELLO_EVERY_MAX_S)

    def _send_facts(self, now_s: float, beats: list[RankBeat] | None = None) -> bool:
        """Send the facts that are due, the first report with `beats`; False if there was nothing to send."""
        self._sent = max(self._sent, self.spool.acked)
        if self._sent == self.spool.acked:
            self._ack_moved_s = now_s
        elif now_s - self._ack_moved_s >= RESEND_S:
            self._sent = self.spool.acked
            self._ack_moved_s = now_s
        sent_any = False
        while self._sent < self.spool.last and self._sent - self.spool.acked < MAX_FACTS_IN_FLIGHT:
            facts = self.spool.pending(self._sent, max_facts=MAX_REPORT_FACTS, max_bytes=MAX_REPORT_BYTES)
            first = facts[0][0]
            content = [fact for _, fact in facts]
            report = wire.Report(self.agent.agent_id, self._epoch, self._acked_command, first, content, beats or [])
            if not self._send(report):
                break
            beats = None
            sent_any = True
            self._sent = facts[-1][0]
        return sent_any
