"""Simulated agents of many nodes, for benchmarks of one supervisor: real messages over real links with the key, no processes.

Run as `python -m tests.bench.fleet_agents ADDRESS KEY_FILE NUM_AGENTS NODES_PER_JOB SECONDS SEED`; prints one JSON object. Each
agent reports every second with the beats of its ranks, as `launcher.agent` does, and repeats facts that are not acknowledged.
Every `FAULT_EVERY_S` a rank of some job fails; the time until its job's other agents are told to stop is measured. One agent
falls silent when half of the time is over: the only one that may be called lost.
"""

import json
import random
import sys
import time
from pathlib import Path

import msgspec
import zmq

from rsup.supervisor import places, wire
from rsup.supervisor.daemon_files import allow_many_connections

RANKS = 8
REPORT_EVERY_S = 1.0
RESEND_S = 3.0
FAULT_EVERY_S = 3.0
WARM_UP_S = 20.0
GIVE_UP_S = 60.0


class SimAgent:
    """One node of a job."""

    def __init__(self, fleet: "Fleet", number: int) -> None:
        self.fleet = fleet
        self.job = number // fleet.nodes_per_job
        node = f"n{number}"
        devices = [wire.Device(f"GPU-{number}-{i}", "H", f"s{number}-{i}", pci_bus_id=f"{i}") for i in range(RANKS)]
        self.info = wire.AgentInfo(f"{fleet.seed}-agent-{number}", node, node, 1, "boot", num_ranks=RANKS, devices=devices)
        spec = {"job_id": f"fleet-{fleet.seed}-{self.job}", "owner": "bench", "ranks_per_node": RANKS, "stop_grace_s": 5.0}
        policy = wire.RestartPolicy(max_restarts=1_000_000, identical_limit=0)
        nodes = fleet.nodes_per_job
        self.spec = wire.JobSpec(**spec, min_nodes=nodes, max_nodes=nodes, policy=policy)  # type: ignore[arg-type]
        self.facts: list[wire.AnyFact] = []
        self.acked = self.sent = self.last_command = self.epoch = self.attempt = self.first_rank = self.iteration = 0
        self.welcomed = self.ended = self.has_failed = self.is_dead = False
        self.next_report_s = time.monotonic() + random.random()
        self.sent_s = 0.0
        self.exits_told = 0
        self.socket = fleet.connect(self.info.agent_id)

    def turn(self, now_s: float) -> None:
        """A report or hello where one is due."""
        if now_s < self.next_report_s or self.ended or self.is_dead:
            return
        self.next_report_s = now_s + REPORT_EVERY_S
        if not self.welcomed:
            speaks = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
            self.send(wire.Hello(speaks, wire.RELEASE, self.info, self.spec, self.epoch, self.attempt))
            return
        self.iteration += self.attempt > 0
        beats = [wire.RankBeat(self.first_rank + i, i + 1, self.iteration, 0.1, 0.1) for i in range(RANKS)]
        self.report(beats if self.attempt else [])

    def report(self, beats: list[wire.RankBeat]) -> None:
        now_s = time.monotonic()
        if now_s - self.sent_s > RESEND_S:
            self.sent = self.acked
        facts = self.facts[self.sent :]
        if facts:
            self.sent_s = now_s
        first = self.sent + 1 if facts else 0
        self.send(wire.Report(self.info.agent_id, self.epoch, self.last_command, first, facts, beats))
        self.sent = len(self.facts)

    def send(self, message: msgspec.Struct) -> None:
        try:
            self.socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            self.sent = self.acked

    def hear(self) -> None:
        """Everything that has come."""
        while True:
            try:
                message = wire.decode_to_agent(self.socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return
            if self.is_dead:
                continue
            if isinstance(message, wire.Welcome):
                self.welcomed, self.epoch, self.acked = True, max(self.epoch, message.epoch), message.acked_fact
                self.sent = self.acked
            elif isinstance(message, wire.Order):
                self.acked = max(self.acked, message.acked_fact)
                self.epoch = max(self.epoch, message.epoch)
                for command in message.commands:
                    if command.sequence == self.last_command + 1:
                        self.last_command = command.sequence
                        self.obey(command)
                if message.commands:
                    self.report([])
            else:
                self.fleet.refused.append(str(message))

    def obey(self, command: wire.AnyCommand) -> None:
        now_us = wire.now_us()
        if isinstance(command, wire.HostStore):
            self.facts.append(wire.StoreBound(now_us, command.attempt, "h", 29500))
        elif isinstance(command, wire.StartAttempt):
            self.attempt, self.epoch, self.first_rank = command.attempt, command.epoch, command.first_rank
            self.facts.append(wire.AttemptStarted(now_us, command.attempt, list(range(1, RANKS + 1))))
        elif isinstance(command, wire.StopAttempt):
            self.fleet.told_to_stop(self)
            for i in range(int(self.has_failed), RANKS):
                self.exit(self.first_rank + i, 143, "stopped")
            self.has_failed = False
            self.facts.append(wire.RanksGone(now_us, command.attempt))
            self.attempt = 0
        elif isinstance(command, wire.EndJob):
            self.ended = True

    def exit(self, rank: int, code: int, by_us: str = "") -> None:
        self.exits_told += 1
        self.facts.append(wire.RankExited(wire.now_us(), self.attempt, rank, code, by_us=by_us, iteration=self.iteration))

    def fail(self) -> None:
        """A rank of ours dies by itself."""
        self.has_failed = True
        self.exit(self.first_rank, 1)
        self.report([])


class Fleet:
    """All agents of this process."""

    def __init__(self, address: str, key: places.LinkKey, num_agents: int, nodes_per_job: int, seed: int) -> None:
        self.nodes_per_job, self.seed = nodes_per_job, seed
        self.refused: list[str] = []
        self._address, self._key = address, key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 2 * num_agents + 64)
        self._poller = zmq.Poller()
        self._failed_s: dict[int, float] = {}
        self.detections_s: list[float] = []
        self.agents = [SimAgent(self, number) for number in range(num_agents)]
        self._by_socket = {agent.socket: agent for agent in self.agents}

    def connect(self, identity: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.IDENTITY, identity.encode()), (zmq.LINGER, 0), (zmq.HANDSHAKE_IVL, 60_000)):
            socket.setsockopt(option, value)  # type: ignore[arg-type]
        key = self._key
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
            key.server_public,
            key.client_public,
            key.client_secret,
        )
        socket.connect(self._address)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def told_to_stop(self, agent: SimAgent) -> None:
        failed_s = self._failed_s.get(agent.job)
        if failed_s is not None:
            self.detections_s.append(time.monotonic() - failed_s)

    def turn(self) -> None:
        for socket, _ in self._poller.poll(20):
            self._by_socket[socket].hear()  # type: ignore[index]
        now_s = time.monotonic()
        for agent in self.agents:
            agent.turn(now_s)

    def fail_one(self) -> None:
        """A rank of a job that runs on all its nodes."""
        jobs: dict[int, list[SimAgent]] = {}
        for agent in self.agents:
            jobs.setdefault(agent.job, []).append(agent)
        whole = [job for job in jobs.values() if all(a.attempt and not a.has_failed and not a.is_dead for a in job)]
        if whole:
            victim = random.choice(random.choice(whole))
            self._failed_s[victim.job] = time.monotonic()
            victim.fail()

    def silence_one(self) -> str:
        """An agent speaks no more; its node."""
        self.agents[-1].is_dead = True
        return self.agents[-1].info.node

    @property
    def alive(self) -> list[SimAgent]:
        return [agent for agent in self.agents if not agent.is_dead]


def main() -> None:
    allow_many_connections()
    address, key_file, num_agents, nodes_per_job, seconds, seed = sys.argv[1:]
    key = places.link_key(places.read_key_file(Path(key_file)))
    fleet = Fleet(address, key, int(num_agents), int(nodes_per_job), int(seed))
    began_s = time.monotonic()
    ready_s, ready_at_s = -1.0, 0.0
    while ready_s < 0 and time.monotonic() - began_s < WARM_UP_S + 120:
        fleet.turn()
        if all(agent.attempt for agent in fleet.agents):
            ready_at_s = time.monotonic()
            ready_s = ready_at_s - began_s
    until_s = time.monotonic() + float(seconds)
    silent_at_s, silent_us, silent_node = until_s - float(seconds) / 2, 0, ""
    next_fault_s = time.monotonic() + 2
    while time.monotonic() < until_s:
        fleet.turn()
        if time.monotonic() >= next_fault_s:
            next_fault_s += FAULT_EVERY_S
            fleet.fail_one()
        if not silent_us and time.monotonic() >= silent_at_s:
            silent_node, silent_us = fleet.silence_one(), wire.now_us()
    give_up_s = time.monotonic() + GIVE_UP_S
    while any(agent.acked < len(agent.facts) for agent in fleet.alive) and time.monotonic() < give_up_s:
        fleet.turn()
    answer = {
        "ready_s": ready_s,
        "ready_at_s": ready_at_s,
        "detections_s": fleet.detections_s,
        "exits_told": sum(agent.exits_told for agent in fleet.agents),
        "facts_told": sum(len(agent.facts) for agent in fleet.agents),
        "unacknowledged": sum(len(agent.facts) - agent.acked for agent in fleet.alive),
        "silent_node": silent_node,
        "silent_us": silent_us,
        "refused": fleet.refused[:3],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
