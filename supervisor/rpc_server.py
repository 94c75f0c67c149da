"""The supervisor's end of the links to its agents, and the way in for other threads' requests.

One thread owns the server and calls `receive` in its loop; `submit` alone may be called from any thread. Sending never
blocks: an agent that does not read has a bounded queue, then messages to it are dropped and counted (the loop sends
unacknowledged commands again). What cannot be read is counted and dropped, and logged once a minute: no bytes from the
network end this process.

A connection speaks for the agent whose `Hello` was let in (`agent_admission`) and for no other, and an agent's messages leave
by the connection that it came in by last. Its ZeroMQ identity is a secret of the agent's (of older releases, its id): who only
knows an agent's id cannot take its place. On an open link (no key) only the jobs that asked for it exist: a `Hello` there joins
that job or is refused.
"""

import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from rsup.supervisor import places, rpc_decoding, rpc_links, wire
from rsup.supervisor.agent_admission import Admission, Admitted, Known, Peer, Unsure, admit
from rsup.supervisor.peer_identity import uid_of_zmq_peer
from rsup.supervisor.places import LinkKey
from rsup.supervisor.records import JobKey
from rsup.supervisor.rpc_links import KeyCheck, Link
from rsup.supervisor.wire import Hello, MessageError, Refusal, RsupError, ToAgent, ToSupervisor, Welcome

MAX_MESSAGES_A_LINK = 8192
"""Read in one call; what is handed on of them is what says something new (`_is_superseded`)."""
MAX_BYTES_A_LINK = 64 * 1024 * 1024
"""The same: of messages of up to 16 MiB each, those that are kept."""
MAX_HELLO_BYTES = 1024 * 1024
"""Anybody may send one."""
MAX_ASKING = 4096
"""Agents that wait to hear who they are; others ask again."""
MAX_WAITING_REQUESTS = 256
_LOG_EVERY_S = 60.0
_UNREAD_LOGGED_AFTER_S = 10.0
_MAX_IDENTITY_BYTES = 128
_MAX_LET_IN = 20_000
_BEFORE_HELLO = "an agent spoke in another's name, or before its Hello"

_log = logging.getLogger(__name__)


class Busy(RsupError):
    """Too many requests are waiting for the supervisor's loop; try again in a moment."""


@dataclass(frozen=True)
class Received:
    """A message of an agent. `trusted`: it came over ipc or with the key."""

    agent_id: str
    message: ToSupervisor
    trusted: bool


@dataclass(frozen=True)
class Connection:
    """Where a message came from: `identity` is ZeroMQ's name of the peer on that link."""

    link: Link
    identity: bytes


@dataclass
class RpcCounters:
    """What went through, since the start."""

    received: int = 0
    sent: int = 0
    bad: int = 0
    dropped: int = 0
    """Messages to agents that were not there or did not read."""
    refused: int = 0
    superseded: int = 0
    """Messages of agents that had said more by the time they were read."""


class RpcServer:
    """ROUTER sockets, and the queue of requests. `key` None: TCP endpoints are open links. `admission` None: every agent is
    believed what it says of itself (the supervisor is played, or decides nothing)."""

    def __init__(self, key: LinkKey | None = None, admission: Admission | None = None, *, admits_others: bool = False) -> None:
        self.counters = RpcCounters()
        self.known_agent: Callable[[str], Known | None] = lambda agent_id: None
        """Asked of every agent that this server has not let in itself: what the store's jobs know of it."""
        self.has_read_all = True
        """Whether the last `receive` has left no message unread that had come, but for those of who says far too much."""
        self._admission = admission
        self._let_in: dict[str, Known] = {}
        self._asked: deque[tuple[Connection, Hello, Admitted | Refusal | Unsure]] = deque()
        self._asking: set[Connection] = set()
        self._askers: ThreadPoolExecutor | None = None
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.setsockopt(zmq.MAX_SOCKETS, 4096)
        rpc_links.keep_messages_small(self._context)
        self._key_check = KeyCheck(self._context, key, admits_others=admits_others) if key is not None else None
        self._links: dict[str, Link] = {}
        self._route: dict[str, Connection] = {}
        self._requests: deque[tuple[object, Future[object]]] = deque()
        self._closed = False
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        if self._key_check is not None:
            self._poller.register(self._key_check.socket, zmq.POLLIN)
        self._bad_logged_s = -_LOG_EVERY_S
        self._bad_logged = 0
        self._unread_since_s: float | None = None
        self._unread_logged_s = -_LOG_EVERY_S

    # ------------------------------------------------------------------------------------------------------ addresses

    def bind(self, address: str) -> str:
        """Answer at a ZeroMQ address (`ipc://...`, `tcp://...`) that all jobs may use; return it with its real port.

        TCP needs a key here. Raise `ListenError`.
        """
        if address.startswith("tcp:") and self._key is None:
            raise rpc_links.ListenError(f"listening on {address} for all jobs needs a key: --key-file or RSUP_KEY_FILE")
        return self._add(address, address, open_link=False, setting="--rpc")

    def listen(self, endpoint: str, setting: str = "--rdzv-endpoint") -> str:
        """Answer at `host:port` too, for other nodes of a job: with the key where there is one, else as an open link.

        May be repeated. Return the ZeroMQ address. Raise `ListenError`, e.g. `port 29400 of HOST is in use; choose ...`.
        """
        if endpoint in self._links:
            return self._links[endpoint].address
        return self._add(endpoint, rpc_links.bindable_address(endpoint), open_link=self._key is None, setting=setting)

    def set_jobs(self, endpoint: str, jobs: Sequence[JobKey], groups: Sequence[str] = ()) -> None:
        """Which jobs the endpoint of `listen` is for, oldest first, and their rendezvous ids."""
        if endpoint in self._links:
            self._links[endpoint].jobs, self._links[endpoint].groups = jobs, groups

    def unlisten(self, endpoint: str) -> None:
        """Stop answering at `endpoint`: its job has ended."""
        link = self._links.pop(endpoint, None)
        if link is None:
            return
        self._poller.unregister(link.socket)
        self._route = {agent: place for agent, place in self._route.items() if place.link is not link}
        link.socket.close()

    def tcp_address(self) -> str:
        """The first TCP address, empty if there is none."""
        return next((link.address for link in self._links.values() if link.address.startswith("tcp:")), "")

    def addresses(self) -> list[str]:
        """Every address that is answered."""
        return [link.address for link in self._links.values()]

    def _add(self, name: str, address: str, *, open_link: bool, setting: str) -> str:
        tcp = address.startswith("tcp:")
        ipv6 = address.startswith(("tcp://[", "tcp://*"))
        router = rpc_links.make_router(self._context, self._key if tcp else None, ipv6=ipv6)
        try:
            bound = rpc_links.bind(router, address, setting)
        except RsupError:
            router.close(linger=0)
            raise
        self._links[name] = Link(router, bound, open=open_link)
        self._poller.register(router, zmq.POLLIN)
        return bound

    # -------------------------------------------------------------------------------------------------------- sending

    def send(self, agent_id: str, message: ToAgent) -> None:
        """Send without waiting; drop and count it if the agent is not connected or does not read."""
        place = self._route.get(agent_id)
        if place is None:
            self.counters.dropped += 1
            return
        link = place.link
        if isinstance(message, Welcome) and link.open and any(key.job_id == message.job_id for key in link.jobs):
            link.agents.add(agent_id)
        self._send_to(place, message)

    def _send_to(self, place: Connection, message: ToAgent) -> None:
        try:
            place.link.socket.send_multipart([place.identity, wire.encode(message)], zmq.DONTWAIT)
            self.counters.sent += 1
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counters.dropped += 1

    # ------------------------------------------------------------------------------------------------------ receiving

    def receive(self, timeout_s: float) -> list[Received]:
        """Wait up to `timeout_s` for messages or requests; return the messages (a bounded number a call)."""
        self.has_read_all = False
        try:
            ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        except zmq.ZMQError as error:
            if error.errno == errno.EINTR:
                return []
            raise
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._key_check is not None and self._key_check.socket in ready:
            self._key_check.answer_all()
        received: list[Received] = []
        while self._asked:
            place, hello, answer = self._asked.popleft()
            if place not in self._asking:
                continue  # it has left meanwhile
            self._asking.discard(place)
            if (message := self._decide(place, hello, answer)) is not None:
                self.counters.received += 1
                received.append(message)
        self.has_read_all = True
        for link in list(self._links.values()):
            if link.socket in ready and not self._receive_from(link, received):
                self.has_read_all = False
        self._note_unread()
        return received

    def _note_unread(self) -> None:
        """What is left unread stops the clock by which agents are found dead: nobody should have to guess why none is."""
        now_s = time.monotonic()
        if self.has_read_all:
            self._unread_since_s = None
            return
        self._unread_since_s = now_s if self._unread_since_s is None else self._unread_since_s
        unread_s = now_s - self._unread_since_s
        if unread_s >= _UNREAD_LOGGED_AFTER_S and now_s - self._unread_logged_s >= _LOG_EVERY_S:
            self._unread_logged_s = now_s
            _log.warning("for %.0f s more has come from agents than could be read: no silent one is found meanwhile", unread_s)

    def _receive_from(self, link: Link, received: list[Received]) -> bool:
        """Whether all was read, or of every connection so much that who has more is to blame."""
        waiting: list[tuple[zmq.Frame, bytes, ToSupervisor]] = []
        newest: dict[bytes, int] = {}
        greeted: set[bytes] = set()
        num_read: Counter[bytes] = Counter()
        num_bytes = 0
        has_read_all = False
        for _ in range(MAX_MESSAGES_A_LINK):
            if num_bytes >= MAX_BYTES_A_LINK:
                break
            try:
                first = link.socket.recv(zmq.DONTWAIT, copy=False)
                frames = link.socket.recv_multipart(zmq.DONTWAIT) if first.more else []
            except zmq.Again:
                has_read_all = True
                break
            num_read[first.bytes[: _MAX_IDENTITY_BYTES + 1]] += 1
            try:
                identity, message = _read(first, frames)
                if isinstance(message, Hello):
                    greeted.add(identity)
                elif not (
                    identity in greeted
                    or self._route.get(message.agent_id) == Connection(link, identity)
                    or isinstance(message, wire.Bye)  # of one that was not let in: `_admit` knows
                ):
                    raise MessageError(_BEFORE_HELLO)  # not kept till then: it may be as large as messages may be
            except MessageError as error:
                self._count_bad(link, str(error))
                continue
            num_bytes += len(frames[0])
            before = newest.get(identity)
            if before is not None and _is_superseded(waiting[before][2], message):
                waiting[before] = (first, identity, message)
                self.counters.superseded += 1
            else:
                newest[identity] = len(waiting)
                waiting.append((first, identity, message))
        for first, identity, message in waiting:
            try:
                admitted = self._admit(Connection(link, identity), first, message)
            except MessageError as error:
                self._count_bad(link, str(error))
                continue
            if admitted is not None:
                self.counters.received += 1
                received.append(admitted)
        return has_read_all or self._is_flooded(link, num_read)

    def _is_flooded(self, link: Link, num_read: Counter[bytes]) -> bool:
        """Whether the rest that was not read is that of a few: ZeroMQ reads connections in turn, one message of each. Where so
        many came of one, all was read that others had in their queues. Who has no agent counts as one, with more patience:
        after a start of ours all agents are such. Something was read then of everybody who had said something."""
        if max(num_read.values(), default=0) > 2 * rpc_links.RECEIVE_QUEUE_MESSAGES:
            return True
        agents = {place.identity for place in self._route.values() if place.link is link}
        return sum(number for identity, number in num_read.items() if identity not in agents) > MAX_MESSAGES_A_LINK // 2

    def _admit(self, place: Connection, first: zmq.Frame, message: ToSupervisor) -> Received | None:
        """`message`, None if it was answered, ignored or put off here. Raise `MessageError` if it may not be said there."""
        link = place.link
        if isinstance(message, Hello):
            return self._hello(place, first, message)
        agent_id = message.agent_id
        if isinstance(message, wire.Bye) and self._route.get(agent_id) != place:
            self._asking.discard(place)
            return None
        if self._route.get(agent_id) != place:
            raise MessageError(_BEFORE_HELLO)
        if link.open and agent_id not in link.agents:
            raise MessageError("a report of an agent that is not of this link's job")
        if isinstance(message, wire.Bye):
            link.agents.discard(agent_id)
            del self._route[agent_id]
        return Received(agent_id, message, trusted=not link.open)

    def _hello(self, place: Connection, first: zmq.Frame, hello: Hello) -> Received | None:
        problem = rpc_decoding.version_problem(hello)
        if problem:
            self._refuse(place, Refusal(1, problem))
            return None
        if rpc_links.is_astray(place.link, hello.spec.rdzv_id):
            text = f"{place.link.address} is another job's; this agent is of {hello.spec.rdzv_id}"
            self._refuse(place, Refusal(wire.EXIT_USAGE, text, elsewhere=True))
            return None
        if self._admission is None:
            return self._decide(place, hello, Admitted(None))
        peer = self._peer(place.link, first)
        if not self._admission.must_wait(peer, hello):
            return self._decide(place, hello, self._admission.who(peer, hello))
        if place not in self._asking and len(self._asking) < MAX_ASKING:
            self._asking.add(place)
            self._askers = self._askers or ThreadPoolExecutor(2, thread_name_prefix="rsup-munge")
            self._askers.submit(self._ask, self._admission, place, peer, hello)
        return None

    def _ask(self, admission: Admission, place: Connection, peer: Peer, hello: Hello) -> None:
        """On a thread: `munged` and the directory of users may take their time."""
        answer: Admitted | Refusal | Unsure = Unsure("who it is could not be asked")
        try:
            answer = admission.who(peer, hello)
        finally:  # else it would never be asked again
            self._asked.append((place, hello, answer))
            self.wake()

    def _peer(self, link: Link, first: zmq.Frame) -> Peer:
        uid = uid_of_zmq_peer(_property(first, "Peer-Address")) if link.address.startswith("ipc:") else None
        if uid is not None or link.open:
            return Peer(uid, ports=self._ports())
        has_secret = _property(first, "User-Id") == KeyCheck.HOLDER.decode()
        return Peer(keyed=True, has_secret=has_secret, ports=self._ports())

    def _ports(self) -> list[int]:
        tcp = [link.address.removeprefix("tcp://") for link in self._links.values() if link.address.startswith("tcp:")]
        return [places.split_endpoint(endpoint)[1] for endpoint in tcp]

    def _decide(self, place: Connection, hello: Hello, answer: Admitted | Refusal | Unsure) -> Received | None:
        """What becomes of a `Hello` now that we know who has sent it."""
        agent_id, link = hello.agent.agent_id, place.link
        decided: Hello | Refusal | Unsure | None = self._let(place, hello, answer) if isinstance(answer, Admitted) else answer
        if isinstance(decided, Unsure):
            self._count_bad(link, decided.reason)
            return None
        if isinstance(decided, Refusal):
            if not hello.attempt and not hello.job_id:
                self._refuse(place, decided)
            else:  # its ranks train, or it waits to: whatever is wrong (munged, the directory of users) may pass
                self._count_bad(link, decided.message)
            return None
        if decided is None:
            return None
        self._route[agent_id] = place
        return Received(agent_id, decided, trusted=not link.open)

    def _let(self, place: Connection, hello: Hello, admitted: Admitted) -> Hello | Refusal | Unsure | None:
        agent_id, link_owner = hello.agent.agent_id, None
        if place.link.open:
            narrowed = self._narrow(place, hello)
            if narrowed is None:
                return None
            hello, link_owner = narrowed, narrowed.spec.owner
            elsewhere = self.known_agent(agent_id)
            if elsewhere is not None and elsewhere.job is not None and elsewhere.job not in place.link.jobs:
                return Refusal(1, f"agent {agent_id} is another job's: nobody may speak for it at {place.link.address}")
        if self._admission is None:
            return hello
        known = self._let_in.get(agent_id) or self.known_agent(agent_id)
        decided = admit(hello, admitted, known, link_owner)
        if isinstance(decided, Hello):
            if len(self._let_in) >= _MAX_LET_IN:
                self._let_in.clear()  # the jobs know their agents
            self._let_in[agent_id] = Known(decided.spec.owner, decided.agent.principal)
        return decided

    def _narrow(self, place: Connection, hello: Hello) -> Hello | None:
        """`hello` of an open link, held to the jobs of that link; None if it must not get in (now)."""
        link = place.link
        if not link.jobs:
            return None
        asked = hello.spec.job_id or hello.job_id
        key = next((key for key in reversed(link.jobs) if asked in ("", key.job_id)), None)
        if key is None:
            jobs = ", ".join(key.job_id for key in link.jobs)
            text = f"{link.address} has no key and is for job {jobs} only, not {asked}: set RSUP_KEY_FILE on all nodes"
            self._refuse(place, Refusal(wire.EXIT_USAGE, text))
            return None
        spec = msgspec.structs.replace(hello.spec, cluster=key.cluster, owner=key.owner, job_id=key.job_id, listen="")
        return msgspec.structs.replace(hello, spec=spec)

    def refuse(self, agent_id: str, exit_code: int, message: str) -> None:
        """Answer a `Hello` with a `Refusal`."""
        place = self._route.get(agent_id)
        if place is not None:
            self._refuse(place, Refusal(exit_code, message))

    def _refuse(self, place: Connection, refusal: Refusal) -> None:
        self.counters.refused += 1
        self._send_to(place, refusal)

    def _count_bad(self, link: Link, problem: str) -> None:
        self.counters.bad += 1
        now_s = time.monotonic()
        if now_s - self._bad_logged_s >= _LOG_EVERY_S:
            since = self.counters.bad - self._bad_logged
            _log.warning("dropped %d bad message(s), the last at %s: %s", since, link.address, wire.clip(problem, 500))
            self._bad_logged_s, self._bad_logged = now_s, self.counters.bad

    # ----------------------------------------------------------------------------------------------- other threads

    def submit(self, request: object) -> "Future[object]":
        """From any thread: hand `request` to the loop, which answers through the future. Raise `Busy` if too many wait."""
        future: Future[object] = Future()
        with self._lock:
            if self._closed or len(self._requests) >= MAX_WAITING_REQUESTS:
                raise Busy("the supervisor is busy or stopping; try again in a moment")
            self._requests.append((request, future))
            os.eventfd_write(self._wake_fd, 1)
        return future

    def take_requests(self) -> list[tuple[object, "Future[object]"]]:
        """What was submitted since the last call."""
        with self._lock:
            taken = list(self._requests)
            self._requests.clear()
        return taken

    def watch(self, fd: int, on: bool) -> None:
        """Let `receive` return early when `fd` is readable, or no longer so."""
        if on:
            self._poller.register(fd, zmq.POLLIN)
        else:
            self._poller.unregister(fd)

    def wake(self) -> None:
        """End the current `receive`; safe in a signal handler and from any thread."""
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close every socket, giving what was sent 0.2 s to get out; afterwards no address is bound. May be repeated.

        ZeroMQ leaves the files of ipc addresses behind; who closes still holds whatever lock made them its own.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = list(self._requests)
            self._requests.clear()
        for _, future in waiting:
            future.set_exception(Busy("the supervisor is stopping; try again in a moment"))
        for link in self._links.values():
            link.socket.close()
        if self._key_check is not None:
            self._key_check.close()
        if self._askers is not None:
            self._askers.shutdown(wait=True, cancel_futures=True)
        self._context.term()
        for link in self._links.values():
            if link.address.startswith("ipc://"):
                Path(link.address.removeprefix("ipc://")).unlink(missing_ok=True)
        os.close(self._wake_fd)


def _read(first: zmq.Frame, frames: list[bytes]) -> tuple[bytes, ToSupervisor]:
    """Who has sent a message, and what it is. Raise `MessageError` for none."""
    if len(frames) != 1:
        raise MessageError(f"a message of {1 + len(frames)} frames")
    identity, message = _identity(first.bytes), rpc_decoding.decode(frames[0])
    if isinstance(message, Hello) and len(frames[0]) > MAX_HELLO_BYTES:
        raise MessageError(f"a Hello of {len(frames[0])} bytes, more than the {MAX_HELLO_BYTES} allowed")
    return identity, message


def _is_superseded(before: ToSupervisor, message: ToSupervisor) -> bool:
    """Whether `before`, which waits unread, says nothing that the same connection's next message does not say too. Agents
    repeat their `Hello` and report each second, so a loop that was busy would have ever more to do than it can."""
    if isinstance(before, Hello) and isinstance(message, Hello):
        return before == message or msgspec.structs.replace(before, credential=message.credential) == message
    if isinstance(before, wire.Report) and isinstance(message, wire.Report):
        newer = before.epoch <= message.epoch and before.acked_command <= message.acked_command
        return newer and before.agent_id == message.agent_id and not before.facts and bool(message.beats or not before.beats)
    return False


def _identity(frame: bytes) -> bytes:
    if not frame or len(frame) > _MAX_IDENTITY_BYTES or frame[0] == 0:
        raise MessageError("a peer without an identity")
    return frame


def _property(frame: zmq.Frame, name: str) -> str:
    """A property of the connection that a message came by, empty where it has none of that name."""
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, ValueError, KeyError):
        return ""
