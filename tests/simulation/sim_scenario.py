"""From a seed to a world with a job in it and a plan of what goes wrong."""

from __future__ import annotations

import random
from random import Random

from rsup.launcher import process_events as ev
from rsup.supervisor.store import Store
from rsup.supervisor.wire import InProcessPolicy, JobSpec, Limits, PhaseSpec, RestartPolicy
from tests.simulation.sim_cases import KINDS, CaseFault
from tests.simulation.sim_training import Fault, Plan
from tests.simulation.sim_world import Chaos, World

MAX_S = 2000.0


class Scenario:
    """One job of 1-4 agents under a seed's chaos."""

    def __init__(self, seed: int, store: Store) -> None:
        self.random = rng = random.Random(seed * 7919 + 1)
        self.num_nodes = rng.choice([1, 1, 2, 2, 3, 4])
        self.num_spares = rng.choice([0, 0, 0, 1]) if self.num_nodes > 1 else 0
        self.ranks_per_node = rng.choice([1, 2])
        self.quiet = rng.random() < 0.1
        chaos = Chaos() if self.quiet else self._chaos()
        self.world = World(seed, store, chaos)
        self.world.plans["job"] = self.plan = self._plan()
        self._plan_restarts(random.Random(seed * 17 + 3))
        self._plan_phases(random.Random(seed * 41 + 11))
        self.spec = self._spec()
        self.num_spare_devices = self._plan_cases(random.Random(seed * 31 + 5))
        names = [f"a{i}" for i in range(self.num_nodes + self.num_spares)]
        rng.shuffle(names)
        for name in names:
            hint = int(name[1:]) if self.spec.max_nodes > 1 and rng.random() < 0.5 and int(name[1:]) < self.num_nodes else -1
            self.world.after(rng.uniform(0.0, 3.0), lambda name=name, hint=hint: self._join(name, hint))  # type: ignore[misc]
        for at_s, kind in ((6.0, "stragglers-on"), (9.0, "stragglers-off"), (12.0, "stragglers-on")):
            self.world.after(at_s, lambda kind=kind: self.world.ask("job", kind))  # type: ignore[misc]
        if not self.quiet:
            self._plan_disasters(names)

    def _join(self, name: str, hint: int) -> None:
        self.world.add_agent(name, self.spec, self.ranks_per_node, hint, self.num_spare_devices)

    def _chaos(self) -> Chaos:
        rng = self.random
        return Chaos(
            until_s=60.0,
            lost=rng.choice([0.0, 0.05, 0.2]),
            doubled=rng.choice([0.0, 0.05, 0.2]),
            delay_s=rng.choice([0.002, 0.05, 0.4]),
            crash_before_commit=rng.choice([0.0, 0.0, 0.02]),
            crash_after_commit=rng.choice([0.0, 0.0, 0.02]),
            start_failure=rng.choice([0.0, 0.0, 0.2]),
            calculated=rng.random() < 0.3,
        )

    def _plan(self) -> Plan:
        rng = self.random
        num_ranks = self.num_nodes * self.ranks_per_node
        plan = Plan(rng.randint(4, 40), rng.choice([2, 5, 100]), takes_requests=rng.random() < 0.7)
        plan.shows_iterations = rng.random() < 0.8
        if not self.quiet:
            for _ in range(rng.choice([0, 1, 1, 2, 4])):
                kind = rng.choice(["exit", "signal", "hang", "victim"])
                code = rng.choice([1, 3, 17]) if kind != "signal" else rng.choice([9, 11])
                fault = Fault(rng.randrange(num_ranks), rng.randint(1, 40), kind, code, repeat=rng.random() < 0.15)
                plan.faults.append(fault)
        return plan

    def _plan_cases(self, rng: Random) -> int:
        """Rejected results; return how many spare devices each node has."""
        num_ranks = self.num_nodes * self.ranks_per_node
        for _ in range(0 if self.quiet or self.plan.restartable else rng.choice([0, 0, 0, 1, 1, 2])):
            rank = rng.randrange(num_ranks)
            device = f"GPU-node-a{rank // self.ranks_per_node}-{rank % self.ranks_per_node}"
            iteration, dies = rng.randint(1, self.plan.num_iterations), rng.random() < 0.15
            self.plan.cases.append(CaseFault(rng.choice(KINDS), rank, iteration, device, dies))
        return rng.choice([0, 0, 1, 2])

    def _plan_restarts(self, rng: Random) -> None:
        """A script whose ranks can enter their training function again, in a third of the worlds."""
        self.in_process = InProcessPolicy(rng.choice([5.0, 20.0]), max_restarts=rng.choice([None, None, 2]))
        if rng.random() > 0.35:
            return
        self.plan.restartable = True
        num_ranks = self.num_nodes * self.ranks_per_node
        for _ in range(0 if self.quiet else rng.choice([1, 2, 4])):
            kind = rng.choice(["exception", "exception", "signal", "signal", "hang", "stuck"])
            self.plan.faults.append(Fault(rng.randrange(num_ranks), rng.randint(1, 40), kind, 9, repeat=rng.random() < 0.1))

    def _plan_phases(self, rng: Random) -> None:
        """Two to four phases in a quarter of the worlds; the training may end before the last one begins."""
        if rng.random() < 0.25:
            ends = sorted(rng.sample(range(1, 30), rng.choice([1, 1, 2, 3])))
            self.plan.phases = [*(PhaseSpec(end) for end in ends), PhaseSpec()]

    def _spec(self) -> JobSpec:
        rng = self.random
        mode = rng.choice(["count", "auto"])
        policy = RestartPolicy(
            mode=mode,
            max_restarts=rng.choice([0, 1, 3]) if mode == "count" else 0,
            backoff_first_s=rng.choice([0.0, 1.0]),
            on_hang=rng.choice(["auto", "restart"]),
        )
        fewest = self.num_nodes if rng.random() < 0.6 else 1
        return JobSpec(
            job_id="job",
            min_nodes=fewest,
            max_nodes=self.num_nodes,
            ranks_per_node=self.ranks_per_node,
            command=["train.py"],
            limits=Limits(sections={"step": 3.0}, enforce_calculated=True),
            policy=policy,
            in_process=self.in_process,
            phases=self.plan.phases,
            stop_grace_s=2.0,
            join_timeout_s=90.0,
            last_call_s=rng.choice([0.0, 3.0]),
            fence_timeout_s=rng.choice([None, 10.0]),
            supervisor_grace_s=rng.choice([20.0, 300.0]),
        )

    def _plan_disasters(self, names: list[str]) -> None:
        rng, world = self.random, self.world
        start_s = 2.0
        for _ in range(rng.choice([0, 1, 2])):
            world.after(rng.uniform(start_s, 50), lambda: world.kill_supervisor(self.random.uniform(0.1, 8.0)))
        for _ in range(rng.choice([0, 0, 1, 2])):
            name, direction = rng.choice(names), rng.choice(["both", "up", "down"])
            length_s = rng.choice([2.0, 10.0, 30.0])
            world.after(rng.uniform(start_s, 50), lambda n=name, d=direction, s=length_s: self._cut(n, d, s))  # type: ignore[misc]
        if rng.random() < 0.3:
            keeper = rng.random() < 0.6
            at_s = rng.uniform(start_s, 50)
            name = rng.choice(names)
            world.after(at_s, lambda: self._kill_agent(name, keeper))
            if rng.random() < 0.5:
                world.after(at_s + rng.uniform(0, 20), lambda: self._join(f"{name}-again", -1))
        if rng.random() < 0.2:
            world.after(rng.uniform(start_s, 40), lambda: self._fill_disk())
        if rng.random() < 0.15:
            world.after(rng.uniform(start_s, 40), lambda: world.ask("job", "stop"))
        if rng.random() < 0.15:
            world.after(rng.uniform(start_s, 40), lambda: world.ask("job", "checkpoint"))
        if rng.random() < 0.1:
            name = rng.choice(names)
            world.after(rng.uniform(start_s, 40), lambda: self._signal(name))

    def _cut(self, name: str, direction: str, length_s: float) -> None:
        self.world.cut[name] = (self.world.now_s + length_s, direction)

    def _kill_agent(self, name: str, keeper: bool) -> None:
        if name in self.world.agents:
            self.world.agents[name].kill(keeper)

    def _signal(self, name: str) -> None:
        if name in self.world.agents:
            self.world.agents[name].feed(ev.SignalArrived(15))

    def _fill_disk(self) -> None:
        self.world.store.full_until_s = self.world.now_s + self.random.uniform(1, 15)

    # --------------------------------------------------------------------------------------------------------------- run

    def _is_over(self) -> bool:
        world = self.world
        if world.now_s < world.chaos.until_s and not self.quiet:
            return False
        if len(world.agents) < self.num_nodes or world.loop is None:
            return False
        return all(agent.finished for agent in world.agents.values()) and not world.loop.jobs()

    def run(self) -> None:
        """Let it happen; raise `AssertionError` for what must not."""
        world = self.world
        world.after(70.0, self._fence_the_dead)
        over = world.run(world.now_s + MAX_S, self._is_over)
        phases = {str(key): (record.phase, record.reason) for key, record in world.watcher.saved.items()}
        waiting = [f"{a.agent_id}: {a.state.phase}" for a in world.agents.values() if not a.finished]
        assert over, f"not over after {MAX_S:.0f} s: {phases}, agents {waiting}, {world.loop and world.loop.jobs()}"
        world.watcher.check_end()
        if self.quiet:
            self._check_quiet()

    def _fence_the_dead(self) -> None:
        """The person on call knows which nodes are dead."""
        for agent in self.world.agents.values():
            if not agent.alive and not agent.gone:
                self.world.ask("job", "fence", agent.info.node)
        self.world.after(20.0, self._fence_the_dead)

    def _check_quiet(self) -> None:
        for record in self.world.watcher.saved.values():
            phases = sum(phase.until_iteration < self.plan.num_iterations for phase in self.plan.phases) or 1
            assert (record.exit_code, record.attempt) == (0, phases), f"{record.exit_code}: {record.reason}"
