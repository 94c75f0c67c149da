"""Inputs of the core: what has happened. The loop makes them from messages, requests and the clock; they carry no policy."""

from msgspec import Struct

from rsup.supervisor.wire import AnyFact, AvoidedDevice, Hello, RankBeat


class Now(Struct, frozen=True):
    """The moment of a decision: wall clock for records, monotonic seconds of this supervisor for every duration."""

    us: int
    s: float


class DevicesKnown(Struct, frozen=True):
    """What the hardware's history says against an agent's devices, and (`node`) against its node: all of it, for the next
    attempt."""

    agent_id: str
    avoid: list[AvoidedDevice] = []
    node: AvoidedDevice | None = None


class AgentJoined(Struct, frozen=True):
    """An agent said `Hello`: for the first time, or again after a reconnect. `doubts`: lines about devices that it cannot
    have."""

    hello: Hello
    known: DevicesKnown | None = None
    doubts: list[str] = []


class FactArrived(Struct, frozen=True):
    """A fact of an agent. Only `acked_fact + 1` is applied; earlier ones are repeats, later ones come again."""

    agent_id: str
    sequence: int
    fact: AnyFact


class AgentHeard(Struct, frozen=True):
    """A report came in. `acked_command` is the last command that the agent has performed."""

    agent_id: str
    epoch: int
    acked_command: int
    beats: list[RankBeat] = []


class AgentSilent(Struct, frozen=True):
    """Nothing has been heard of an agent for `silent_s`. The loop says so again while it lasts."""

    agent_id: str
    silent_s: float


class StartedAgain(Struct, frozen=True):
    """The scheduler has started the job's script again, which it does once nothing of the start before is left."""

    reason: str


class AgentLeft(Struct, frozen=True):
    """An agent said `Bye`."""

    agent_id: str


class Tick(Struct, frozen=True):
    """Time has passed: deadlines of the phase may be due."""


class Recovered(Struct, frozen=True):
    """A supervisor process has taken the job over from the store. `instance` names the process."""

    instance: str


class StoreTrouble(Struct, frozen=True):
    """The job has begun in another store than the usual one. `text` says why, and where its story is kept."""

    text: str


class OperatorAsked(Struct, frozen=True):
    """A person or program asked for something. `kind`: `stop`, `checkpoint`, `fence`, or `stragglers-on`, `stragglers-off`.

    `node`, a node's name or an agent's id, says which lost one to fence; empty: every lost one. `dry_run`: only answer.
    """

    kind: str
    principal: str
    reason: str
    request_id: str
    node: str = ""
    dry_run: bool = False


Event = (
    AgentJoined
    | DevicesKnown
    | FactArrived
    | AgentHeard
    | AgentSilent
    | AgentLeft
    | StartedAgain
    | Tick
    | Recovered
    | StoreTrouble
    | OperatorAsked
)
