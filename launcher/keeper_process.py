"""The keeper: a companion process of one agent. Run as `python -m rsup.launcher.keeper_process FD AGENT_ID` by `keeper.Keeper`.

It serves the attempts' TCPStores, and waits for the agent's end. A goodbye: it just goes. Anything else, also a hand-over of
an agent that could not tell its supervisor how it ended: it kills what carries the agent's mark, waits until that is gone,
removes the agent's files, and delivers the rest of the agent's spool with an `AgentGone`. Signals for a job's processes
(SIGINT, SIGTERM, SIGHUP) are the agent's business: it ignores them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

import msgspec
from msgspec import Struct

from rsup.launcher.reaping import ProcessId, Survivor, open_process, reap_everything, send_signal
from rsup.launcher.store_host import StoreHost
from rsup.launcher.stray_ranks import end_strays, strays_text
from rsup.supervisor import places, wire

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
MAX_PACKET_BYTES = 128 * 1024
_INT_BYTES = 4
AGENT_PATIENCE_S = 2.0
REAP_WITHIN_S = 30.0
MAX_NAMED = 5
DELIVER_WITHIN_S = 300.0
"""As long as a launch by default waits for its supervisor when a decision is due. What is left then stays in the spool."""


class Begin(Struct, frozen=True, tag=True):
    """First message: whom to watch."""

    agent_pid: int
    agent_start_ticks: int
    mark: str
    spool_path: str
    log_path: str


class UseSupervisor(Struct, frozen=True, tag=True):
    """Where the last facts would go, and the keys of that link."""

    address: str
    key: tuple[bytes, bytes, bytes, bytes] | None = None


class UseMember(Struct, frozen=True, tag=True):
    """In whose name."""

    agent: wire.AgentInfo
    spec: wire.JobSpec
    epoch: int


class UseSessions(Struct, frozen=True, tag=True):
    """The sessions of the ranks now running."""

    sessions: list[int]


class UseFiles(Struct, frozen=True, tag=True):
    """Files to remove if the agent dies."""

    paths: list[str]


class HostAttempt(Struct, frozen=True, tag=True):
    """Serve a store; its listening descriptor comes with the packet."""

    attempt: int
    port: int


class DropAttempt(Struct, frozen=True, tag=True):
    """End a store."""

    attempt: int


class HandOver(Struct, frozen=True, tag=True):
    """The agent ends on its own word and tells why: its end may be news to the supervisor."""

    reason: str


class Goodbye(Struct, frozen=True, tag=True):
    """The agent ends in good order."""


ToKeeper = Begin | UseSupervisor | UseMember | UseSessions | UseFiles | HostAttempt | DropAttempt | HandOver | Goodbye
decode = msgspec.msgpack.Decoder(ToKeeper).decode
encode = msgspec.msgpack.Encoder().encode


class KeeperProcess:
    """State of the companion: what the agent has told it so far."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._begin = Begin(0, 0, "", "", "")
        self._supervisor = UseSupervisor("")
        self._member: UseMember | None = None
        self._sessions: list[int] = []
        self._paths: list[str] = []
        self._why_gone = "ended without a word"
        self._goodbye = False
        self._stores = StoreHost(self._say)

    def run(self) -> None:
        """Until the agent has gone, and what that takes."""
        self._end_strays()
        ended = self._wait_for_end()
        if self._goodbye or not self._begin.mark:
            return
        if not ended:
            self._end_agent()
        self._clean_up()

    def _end_strays(self) -> None:
        """What a launch left here before us that was killed with its keeper: done by us since the agent is in a hurry."""
        if strays := end_strays():
            named = strays_text(strays, MAX_NAMED)
            self._say(f"ended with SIGKILL what ranks of a dead launch had left running on this node: {named}")

    def _wait_for_end(self) -> bool:
        """Serve the agent until it goes; True if its process has ended, False if only the socket was closed."""
        agent_fd: int | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._link.fileno() in ready and not self._read():
                    return False
                if self._goodbye:
                    return True
                if agent_fd is None and self._begin.mark:
                    agent_fd = open_process(self._agent)
                    if agent_fd is None:  # it died before we had started; what it told us still waits
                        while self._read():
                            pass
                        return True
                    selector.register(agent_fd, selectors.EVENT_READ)
                elif agent_fd in ready:
                    while self._read():  # a goodbye may be waiting behind other messages
                        pass
                    return True

    @property
    def _agent(self) -> ProcessId:
        return ProcessId(self._begin.agent_pid, self._begin.agent_start_ticks)

    def _read(self) -> bool:
        """Take one packet; False at the end of the socket, or where there is none."""
        try:
            # not socket.recv_fds: it forgets its flags and would wait
            data, rights, _, _ = self._link.recvmsg(MAX_PACKET_BYTES, socket.CMSG_LEN(_INT_BYTES), socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not data:
            return False
        message = decode(data)
        if isinstance(message, Begin):
            self._begin = message
        elif isinstance(message, UseSupervisor):
            self._supervisor = message
        elif isinstance(message, UseMember):
            self._member = message
        elif isinstance(message, UseSessions):
            self._sessions = message.sessions
        elif isinstance(message, UseFiles):
            self._paths = message.paths
        elif isinstance(message, HostAttempt):
            self._stores.host(message.attempt, message.port, int.from_bytes(rights[0][2][:_INT_BYTES], sys.byteorder))
        elif isinstance(message, DropAttempt):
            self._stores.drop(message.attempt)
        elif isinstance(message, HandOver):
            self._why_gone = f"left: {message.reason}"
        else:
            self._goodbye = True
        return True

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._link.send(text.encode()[:MAX_PACKET_BYTES], socket.MSG_DONTWAIT)

    def _end_agent(self) -> None:
        """The agent closed the socket and said nothing: it is about to end. If it does not, it must: we speak for it."""
        agent_fd = open_process(self._agent)
        if agent_fd is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(agent_fd, selectors.EVENT_READ)
            if not selector.select(AGENT_PATIENCE_S):
                send_signal(agent_fd, signal.SIGKILL)
                selector.select(AGENT_PATIENCE_S)
        os.close(agent_fd)

    def _clean_up(self) -> None:
        survivors = reap_everything(self._begin.mark, self._sessions, time.monotonic() + REAP_WITHIN_S)
        for path in self._paths:
            _remove(path)
        delivered = True
        if self._member is not None and self._supervisor.address:
            delivered = deliver(self._begin.spool_path, self._supervisor, self._member, self._last_fact(survivors))
        if delivered:
            _remove(self._begin.log_path)
        else:  # spool and this line stay for whoever looks
            print(f"not delivered to {self._supervisor.address}: {self._begin.spool_path}", file=sys.stderr)

    def _last_fact(self, survivors: list[Survivor]) -> wire.Note | wire.AgentGone:
        """`AgentGone` only when that is true."""
        who = f"the launcher (pid {self._begin.agent_pid}) on {places.this_node()} {self._why_gone}"
        if survivors:
            stuck = ", ".join(map(str, survivors))
            return wire.Note(
                wire.now_us(), "error", f"{who}, and cannot be called dead: {stuck} cannot be killed; fence the node"
            )
        return wire.AgentGone(wire.now_us(), f"{who}; its keeper ended every process of its ranks")


def deliver(spool_path: str, supervisor: UseSupervisor, member: UseMember, last: wire.Note | wire.AgentGone) -> bool:
    """Deliver what the spool holds and then `last`, at most `DELIVER_WITHIN_S`. True once it is acknowledged,
    or refused: then nobody wants it."""
    from rsup.launcher.spool import Spool
    from rsup.launcher.supervisor_client import SupervisorClient

    key = places.LinkKey(*supervisor.key) if supervisor.key else None
    agent = msgspec.structs.replace(member.agent, gone=True)
    spool = Spool(Path(spool_path))
    spool.append(last)
    client = SupervisorClient(supervisor.address, agent, member.spec, spool, key)
    client.send_report(member.epoch, 0)
    give_up = time.monotonic() + DELIVER_WITHIN_S
    refused = False
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        while len(spool) and not refused and time.monotonic() < give_up:
            refused = any(isinstance(message, wire.Refusal) for message in client.poll())
            if len(spool) and not refused:
                selector.select(0.2)
    settled = refused or not len(spool)
    client.close()
    spool.close(remove=settled)
    return settled


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def main() -> None:
    """Entry of the process. Arguments: the descriptor of the socket to the agent, and the agent's id for people to see."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    warnings.simplefilter("ignore")  # what torch says at its import, each rank says as well
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a store holds a connection of each rank
    with socket.socket(fileno=int(sys.argv[1])) as link:
        KeeperProcess(link).run()
        sys.stderr.flush()
        os._exit(0)  # torch's threads and teardown are not worth waiting for


if __name__ == "__main__":
    main()
