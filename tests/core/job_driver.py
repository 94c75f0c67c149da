"""Drives the job machine or the loop by hand in tests: short ways to say what agents say."""

from dataclasses import dataclass, field
from typing import TypeVar

from rsup.supervisor import wire
from rsup.supervisor.actions import Action, Record
from rsup.supervisor.events import AgentHeard, AgentJoined, Event, FactArrived, Now, Tick
from rsup.supervisor.job_machine import decide
from rsup.supervisor.records import EventLogged, IncidentSaved, JobKey
from rsup.supervisor.rendezvous import new_job
from rsup.supervisor.states import JobState, Phase, decode, encode

START_US = 1_800_000_000_000_000
KEY = JobKey("local", "alice", "t1", 1)
Saved = TypeVar("Saved")


def spec(**fields: object) -> wire.JobSpec:
    """A job of alice, one node unless said otherwise."""
    values: dict[str, object] = {"job_id": "t1", "owner": "alice", "command": ["train.py"], "last_call_s": 5.0}
    return wire.JobSpec(**{**values, **fields})  # type: ignore[arg-type]


def info(name: str, **fields: object) -> wire.AgentInfo:
    values: dict[str, object] = {"num_ranks": 2, "boot_id": "boot"}
    return wire.AgentInfo(name, f"node-{name}", f"host-{name}", 1, **{**values, **fields})  # type: ignore[arg-type]


def hello(name: str, its_spec: wire.JobSpec, **fields: object) -> wire.Hello:
    speaks = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
    agent = fields.pop("agent", None) or info(name)
    return wire.Hello(speaks, wire.RELEASE, agent, its_spec, **fields)  # type: ignore[arg-type]


@dataclass
class Driver:
    """One job's machine under a clock that the test moves. Every state goes through its bytes."""

    spec: wire.JobSpec
    now_s: float = 100.0
    actions: list[Action] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state: JobState = new_job(KEY, self.spec, self.now())

    def now(self) -> Now:
        return Now(START_US + int(self.now_s * 1e6), self.now_s)

    def feed(self, event: Event) -> list[Action]:
        """Decide on one event; the new actions."""
        self.state, actions = decide(self.state, event, self.now())
        self.state = decode(encode(self.state))
        self.actions += actions
        return actions

    def join(self, name: str, **fields: object) -> list[Action]:
        return self.feed(AgentJoined(hello(name, self.spec, **fields)))

    def say(self, name: str, fact: wire.AnyFact) -> list[Action]:
        """An agent's next fact."""
        self.sequences[name] = self.sequences.get(name, 0) + 1
        return self.feed(FactArrived(name, self.sequences[name], fact))

    def wait(self, seconds: float) -> list[Action]:
        self.now_s += seconds
        return self.feed(Tick())

    def beat(self, name: str, iteration: int) -> list[Action]:
        agent = self.state.agents[name]
        ranks = range(agent.first_rank, agent.first_rank + agent.info.num_ranks)
        beats = [wire.RankBeat(rank, 1, iteration, 0.1, 0.1) for rank in ranks]
        return self.feed(AgentHeard(name, self.state.epoch, 0, beats))

    def exit(self, name: str, rank: int, exit_code: int, **fields: object) -> list[Action]:
        return self.say(name, wire.RankExited(self.now().us, self.state.attempt, rank, exit_code, **fields))  # type: ignore[arg-type]

    def gone(self, name: str) -> list[Action]:
        return self.say(name, wire.RanksGone(self.now().us, self.state.attempt))

    def start(self) -> None:
        """Bind the store and start the ranks of every member."""
        attempt, us = self.state.attempt, self.now().us
        first = self.state.active[0][0]
        self.say(first, wire.StoreBound(us, attempt, "host", 29500))
        for agent_id, agent in self.state.active:
            self.say(agent_id, wire.AttemptStarted(us, attempt, list(range(agent.info.num_ranks))))
        assert self.state.phase is Phase.RUNNING

    def run_nodes(self, *names: str) -> "Driver":
        """Join these agents and start an attempt on them."""
        for name in names:
            self.join(name)
        self.start()
        return self

    # ------------------------------------------------------------------------------------------------------ looking at it

    def commands(self, name: str) -> list[str]:
        """Kinds of the commands in an agent's outbox."""
        return [type(command).__name__ for command in self.state.agents[name].outbox]

    def last_command(self, name: str) -> wire.AnyCommand:
        return self.state.agents[name].outbox[-1]

    def events(self) -> list[EventLogged]:
        return [a.record for a in self.actions if isinstance(a, Record) and isinstance(a.record, EventLogged)]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events()]

    def records(self, kind: type[Saved]) -> list[Saved]:
        """Records of one kind, in order."""
        return [a.record for a in self.actions if isinstance(a, Record) and isinstance(a.record, kind)]

    def incidents(self) -> list[IncidentSaved]:
        """The newest record of each incident."""
        found = [a.record for a in self.actions if isinstance(a, Record) and isinstance(a.record, IncidentSaved)]
        return list({incident.incident: incident for incident in found}.values())
