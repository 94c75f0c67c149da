"""A supervisor for tests of the agent alone: real ZeroMQ, real messages, decisions by hand.

The test drives it from its own thread: `wait_for(kind)` reads until such a fact has come, `order(...)` sends commands.
"""

import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from rsup.supervisor import wire

F = TypeVar("F", bound=wire.Fact)


class ScriptedSupervisor:
    """Serves one agent at `address`."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/sup"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an agent's keeper comes under its name
        self._socket.bind(self.address)
        self.hello: wire.Hello | None = None
        self.facts: list[wire.AnyFact] = []
        self.beats: list[wire.RankBeat] = []
        self.epoch = 0
        self.acked_command = 0
        self.said_bye = False
        self.answers = True
        self.refuse: wire.Refusal | None = None
        self._identity = b""
        self._acked = 0
        self._sequence = 0
        self._commands: list[wire.AnyCommand] = []

    def serve(self, until: Any, within_s: float = 60.0) -> None:
        """Answer the agent until `until()` is true; fail after `within_s`, and not before all that has come was taken."""
        deadline = time.monotonic() + within_s
        while not until():
            if self._socket.poll(20):
                self._take(self._socket.recv_multipart())
            elif time.monotonic() > deadline:
                raise AssertionError(f"not within {within_s} s; facts: {[type(fact).__name__ for fact in self.facts]}")

    def wait_for(self, kind: type[F], count: int = 1, within_s: float = 60.0) -> F:
        """The `count`-th fact of that kind."""
        self.serve(lambda: len(self.of(kind)) >= count, within_s)
        return self.of(kind)[count - 1]

    def of(self, kind: type[F]) -> list[F]:
        """Facts of that kind so far."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def order(self, *commands: wire.AnyCommand, epoch: int | None = None) -> None:
        """Send commands, numbered."""
        for command in commands:
            self._sequence += 1
            self._commands.append(msgspec.structs.replace(command, sequence=self._sequence))
        self._send_order(self.epoch if epoch is None else epoch)

    def start(self, attempt: int = 1, limits: wire.Limits | None = None, reason: str = "all nodes are here") -> list[int]:
        """Join if needed, host a store, start the attempt; return its pids."""
        self.serve(lambda: self.hello is not None)
        assert self.hello is not None
        agent = self.hello.agent
        self.epoch += 1
        self.order(wire.HostStore(0, "first node", attempt, self.hello.spec.master_port))
        bound = self.wait_for(wire.StoreBound, attempt)
        where = (bound.host, bound.port, "job", 1)
        numbers = (attempt, self.epoch, 0, agent.num_ranks, agent.num_ranks, 0, 1)
        self.order(wire.StartAttempt(0, reason, *numbers, *where, max_restarts=3, limits=limits or wire.Limits()))
        return self.wait_for(wire.AttemptStarted, attempt).pids

    def end(self, exit_code: int = 0, reason: str = "done", report: str = "") -> None:
        """End the job and wait for the agent's goodbye."""
        self.order(wire.EndJob(0, reason, wire.JobResult(exit_code, reason), report))
        self.serve(lambda: self.said_bye)

    def close(self) -> None:
        """Close the sockets."""
        self._socket.close()
        self._context.term()

    def _take(self, frames: list[bytes]) -> None:
        message = wire.decode_to_supervisor(frames[1])
        if not self.answers:
            return
        if isinstance(message, wire.Hello):
            self.hello, self._identity = message, frames[0]
            if self.refuse:
                self._socket.send_multipart([frames[0], wire.encode(self.refuse)])
                return
            info = wire.SupervisorInfo("scripted", 1, "host", False, "http://127.0.0.1:1", "memory")
            welcome = wire.Welcome((1, wire.WIRE_VERSION), wire.RELEASE, info, "job", 1, self.epoch, self._acked, True)
            self._socket.send_multipart([frames[0], wire.encode(welcome)])
        elif isinstance(message, wire.Report):
            for i, fact in enumerate(message.facts):
                if message.first_sequence + i == self._acked + 1:
                    self._acked += 1
                    self.facts.append(fact)
            self.beats = message.beats or self.beats
            self.acked_command = message.acked_command
            self._send_order(self.epoch)
        else:
            self.said_bye = True

    def _send_order(self, epoch: int) -> None:
        assert self.hello is not None
        self._commands = [command for command in self._commands if command.sequence > self.acked_command]
        agent_id = self.hello.agent.agent_id
        order = wire.Order(agent_id, epoch, self._acked, self._commands)
        self._socket.send_multipart([self._identity, wire.encode(order)])
