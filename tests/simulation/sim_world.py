"""One simulated cluster, decided by a seed: clock, network, the supervisor's host, agents, and what goes wrong.

The supervisor is the real `Loop` over a real store (in memory, or SQLite); agents are the real process machine. Until
`chaos.until_s` messages are lost, doubled, delayed and reordered, links are cut, processes die; then everything is well and
every job must end.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from rsup.supervisor import wire
from rsup.supervisor.loop import AgentMessage, Loop, OperatorReply, OperatorRequest
from rsup.supervisor.records import Record
from rsup.supervisor.store import Store, StoreError
from tests.simulation.invariants import Watcher
from tests.simulation.sim_agent import SimAgent
from tests.simulation.sim_training import Plan, Training

START_US = 1_800_000_000_000_000


@dataclass
class Chaos:
    """How bad it is. Probabilities are per message or per commit."""

    until_s: float = 60.0
    lost: float = 0.0
    doubled: float = 0.0
    delay_s: float = 0.002
    crash_before_commit: float = 0.0
    crash_after_commit: float = 0.0
    start_failure: float = 0.0
    calculated: bool = False


class SupervisorDied(BaseException):
    """SIGKILL of the supervisor, in the middle of what it does."""


class FragileStore:
    """The store as a process sees it that may die before or after a commit, and a disk that may be full."""

    def __init__(self, world: World, inner: Store) -> None:
        self.world, self.inner = world, inner
        self.full_until_s = 0.0

    def live_jobs(self) -> object:
        return self.inner.live_jobs()

    def last_run(self, cluster: str, owner: str, job_id: str) -> object:
        return self.inner.last_run(cluster, owner, job_id)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)  # what only reads

    def probe(self) -> None:
        if self.world.now_s < min(self.world.chaos.until_s, self.full_until_s):
            raise StoreError("no space left on the disk")

    def commit(self, records: list[Record]) -> None:
        self.probe()
        chaos = self.world.chaos
        bad = self.world.now_s < chaos.until_s
        if bad and self.world.random.random() < chaos.crash_before_commit:
            raise SupervisorDied
        self.inner.commit(records)
        self.world.watcher.committed(records)
        if bad and self.world.random.random() < chaos.crash_after_commit:
            raise SupervisorDied

    def close(self) -> None:
        self.inner.close()


class World:
    """Runs until nothing is left to do."""

    def __init__(self, seed: int, store: Store, chaos: Chaos) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.chaos = chaos
        chaos.until_s += self.now_s
        self.watcher = Watcher(self)
        self.store = FragileStore(self, store)
        self.agents: dict[str, SimAgent] = {}
        self.trainings: dict[tuple[str, int], Training] = {}
        self.plans: dict[str, Plan] = {}
        self.cut: dict[str, tuple[float, str]] = {}
        """Agent id -> until when its link is cut, and in which direction (`both`, `up`, `down`)."""
        self.replies: list[OperatorReply] = []
        self.loop: Loop | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._inbox: list[AgentMessage] = []
        self._after_welcome_s: dict[str, float] = {}
        self._pid = 100
        self._instances = 0
        self._job_ids = 0
        self._turn_at_s = 0.0
        self.start_supervisor()

    # ------------------------------------------------------------------------------------------------------------- clock

    def now_us(self) -> int:
        return START_US + int(self.now_s * 1e6)

    def monotonic_s(self) -> float:
        return self.now_s + 7777.0 * self._instances  # each process has a clock of its own

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, call))

    def run(self, until_s: float, done: Callable[[], bool]) -> bool:
        """Go on until `done`; False if it is not by `until_s`."""
        while self._heap and self.now_s < until_s:
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
            self.watcher.look()
            if done():
                return True
        return done()

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def training_of(self, job_id: str, run: int) -> Training:
        key = job_id, run
        if key not in self.trainings:
            self.trainings[key] = Training(self.plans[job_id])
        return self.trainings[key]

    # ----------------------------------------------------------------------------------------------------------- network

    @property
    def is_bad(self) -> bool:
        return self.now_s < self.chaos.until_s

    def _deliver(self, agent_id: str, direction: str, message: wire.msgspec.Struct, call: Callable[[bytes], None]) -> None:
        data = wire.encode(message)
        copies = 1
        if self.is_bad:
            copies -= self.random.random() < self.chaos.lost
            copies += self.random.random() < self.chaos.doubled
        for _ in range(copies):
            delay_s = self.random.expovariate(1 / self.chaos.delay_s) if self.is_bad else 0.001
            delay_s = max(delay_s, self._after_welcome_s.get(agent_id, 0.0) - self.now_s) if direction == "down" else delay_s
            if isinstance(message, wire.Welcome):  # nothing overtakes it: it opens a connection
                self._after_welcome_s[agent_id] = self.now_s + delay_s

            def arrive() -> None:
                until_s, which = self.cut.get(agent_id, (0.0, ""))
                if not (self.now_s < until_s and which in ("both", direction)):
                    call(data)

            self.after(delay_s, arrive)

    def to_supervisor(self, agent: SimAgent, message: wire.ToSupervisor) -> None:
        """An agent sends."""

        def arrive(data: bytes) -> None:
            if self.loop is not None:
                self._inbox.append(AgentMessage(agent.agent_id, wire.decode_to_supervisor(data)))
                self._wake(0.0)

        self._deliver(agent.agent_id, "up", message, arrive)

    def send(self, agent_id: str, message: wire.ToAgent) -> None:
        """The supervisor sends (it is the loop's transport)."""
        agent = self.agents[agent_id]
        self.watcher.sent(agent, message)
        instance = self._instances

        def arrive(data: bytes) -> None:
            if instance == self._instances:  # a connection ends with the process at its other end
                agent.receive(wire.decode_to_agent(data))

        self._deliver(agent_id, "down", message, arrive)

    # -------------------------------------------------------------------------------------------------------- supervisor

    def start_supervisor(self) -> None:
        """A new process over the same store."""
        self._instances += 1
        self._inbox.clear()
        info = wire.SupervisorInfo(f"instance-{self._instances}", self._instances, "host", True)
        self.loop = Loop(self.store, self, self, info, lambda endpoint: None, self._new_job_id)  # type: ignore[arg-type]
        self.loop.on_fault = _raise
        self._guarded(self.loop.recover)
        self._wake(0.0)

    def _new_job_id(self) -> str:
        self._job_ids += 1
        return f"generated-{self._job_ids}"

    def kill_supervisor(self, back_after_s: float) -> None:
        if self.loop is not None:
            self.loop = None
            self.after(back_after_s, self.start_supervisor)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except SupervisorDied:
            self.kill_supervisor(self.random.uniform(0.1, 5.0))

    def _wake(self, delay_s: float) -> None:
        at_s = self.now_s + delay_s
        if self._turn_at_s > self.now_s - 1e-9 and self._turn_at_s <= at_s:
            return
        self._turn_at_s = at_s
        self.after(delay_s, lambda: self._turn(at_s))

    def _turn(self, at_s: float) -> None:
        if at_s != self._turn_at_s:
            return
        self._turn_at_s = 0.0
        loop = self.loop
        if loop is None:
            return
        batch = list(self._inbox)
        self._inbox.clear()

        def work() -> None:
            loop.listened(has_read_all=True)
            if batch:
                loop.handle(batch)
            if loop.next_wakeup_s() <= 0.0:
                loop.tick()

        self._guarded(work)
        if self.loop is not None:
            self._wake(max(0.001, self.loop.next_wakeup_s()))

    def ask(self, job: str, kind: str, node: str = "") -> None:
        """An operator's request."""
        loop = self.loop
        if loop is not None:
            request_id = f"r{self._count}"
            request = OperatorRequest(job, kind, "alice", "because", self.replies.append, node, request_id)
            self._guarded(lambda: loop.handle([request]))

    # ------------------------------------------------------------------------------------------------------------ agents

    def add_agent(
        self, name: str, spec: wire.JobSpec, num_ranks: int, node_rank: int = -1, num_spare_devices: int = 0
    ) -> SimAgent:
        devices = [wire.Device(f"GPU-node-{name}-{i}", "H200") for i in range(num_ranks + num_spare_devices)]
        info = wire.AgentInfo(
            name, f"node-{name}", f"host-{name}", self.next_pid(), "boot", node_rank, num_ranks, devices=devices
        )
        self.agents[name] = agent = SimAgent(self, info, spec)
        return agent


def _raise(error: Exception, one: object) -> None:
    raise error
