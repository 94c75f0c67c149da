"""A job whose ranks can enter their training function again, driven by hand in tests."""

from dataclasses import dataclass

from rsup.supervisor import wire
from rsup.supervisor.records import EventLogged
from rsup.supervisor.states import Phase
from tests.core.job_driver import Driver, info, spec

POLICY = wire.RestartPolicy(max_restarts=2)
LIMITS = wire.Limits(sections={"step": 3.0})


@dataclass
class InProcessDriver(Driver):
    """A job whose ranks report entries."""

    def enter(self, rank: int, entry: int, **fields: object) -> None:
        fact = wire.EntryBegun(self.now().us, self.state.attempt, rank, entry, **fields)  # type: ignore[arg-type]
        self.say(self.owner(rank), fact)

    def fault(self, rank: int, entry: int, text: str = "ValueError: a bug", **fields: object) -> None:
        values: dict[str, object] = {"kind": "exception", "text": text, "signature": text, **fields}
        fact = wire.RankFaulted(self.now().us, self.state.attempt, rank, entry, **values)  # type: ignore[arg-type]
        self.say(self.owner(rank), fact)

    def die(self, rank: int, **fields: object) -> None:
        values: dict[str, object] = {"exit_code": 137, "signal": 9, **fields}
        self.exit(self.owner(rank), rank, **values)  # type: ignore[arg-type]

    def owner(self, rank: int) -> str:
        """The agent of a rank; it names none that an attempt has not."""
        return next(
            agent_id
            for agent_id, agent in self.state.agents.items()
            if agent.group_rank >= 0 and agent.first_rank <= rank < agent.first_rank + agent.info.num_ranks
        )

    def enter_all(self, entry: int, *ranks: int, **fields: object) -> None:
        for rank in ranks or range(self.state.world_size):
            self.enter(rank, entry, **fields)

    def restarts(self, name: str) -> list[wire.RestartInProcess]:
        return [one for one in self.state.agents[name].outbox if isinstance(one, wire.RestartInProcess)]

    def last(self, kind: str) -> EventLogged:
        return [event for event in self.events() if event.kind == kind][-1]

    def beat_all(self, iteration: int) -> None:
        for agent_id, _ in self.state.active:
            self.beat(agent_id, iteration)

    def recover(self, entry: int, iteration: int) -> None:
        """Every rank enters and gets past that iteration."""
        self.enter_all(entry)
        self.beat_all(iteration - 1)
        self.beat_all(iteration)
        assert self.state.in_process.open is None

    def is_in(self, phase: Phase) -> bool:
        return self.state.phase is phase

    @property
    def waiting(self) -> bool:
        """For ranks to enter."""
        restart = self.state.in_process.open
        return restart is not None and not restart.entered_us


def two_nodes(num_ranks: int = 2, **fields: object) -> InProcessDriver:
    """Nodes `a` and `b`, every rank in its first entry."""
    values: dict[str, object] = {"min_nodes": 2, "max_nodes": 2, "ranks_per_node": num_ranks, "policy": POLICY, **fields}
    driver = InProcessDriver(spec(limits=LIMITS, **values))
    for name in ("a", "b"):
        driver.join(name, agent=info(name, num_ranks=num_ranks))
    driver.start()
    driver.now_s += 8.0  # so long it took to enter
    driver.enter_all(1)
    assert driver.state.in_process.restartable
    return driver


def one_node(num_ranks: int = 3, reserves: int = 0, **fields: object) -> InProcessDriver:
    driver = InProcessDriver(spec(limits=LIMITS, policy=POLICY, ranks_per_node=num_ranks, **fields))
    driver.join("a", agent=info("a", num_ranks=num_ranks))
    driver.start()
    driver.now_s += 8.0
    driver.enter_all(1, *range(num_ranks - reserves), reserves=reserves)
    assert driver.state.in_process.restartable
    return driver
