"""What the agent's process machine takes in, gives out and remembers: frozen data, no behaviour.

Events are past facts, actions are imperatives that the shell (`agent`) performs once, in order; the result of an action is
the next event. `Moment` is the one idea of time: seconds of the node's monotonic clock for every deadline, and the wall clock
only for the `at_us` of facts.
"""

import enum

from msgspec import Struct

from rsup.supervisor import wire


class Phase(enum.StrEnum):
    """Where the agent stands."""

    IDLE = "idle"
    """Joining, or joined and without an attempt."""
    PARKED = "parked"
    """A spare."""
    HOSTING = "hosting"
    """Told to bind the store of an attempt whose ranks are not ordered yet."""
    RUNNING = "running"
    """Ranks are ordered. Their pids are 0 until `RanksSpawned`."""
    STOPPING = "stopping"
    """The attempt is being brought to an end: ranks were signalled, or all have exited and their descendants are reaped."""
    GONE = "gone"
    """No process of the attempt is left; the supervisor's decision is awaited."""
    ENDED = "ended"
    """`Exit` has been said."""


NO_LIMITS = wire.Limits()


class Moment(Struct, frozen=True):
    """Now: `mono_s` on the monotonic clock, `wall_us` UTC microseconds."""

    mono_s: float
    wall_us: int


class Gap(Struct, frozen=True):
    """A stretch in which this process did not run (SIGSTOP, suspended VM), on the monotonic clock."""

    start_ns: int
    end_ns: int


class Settings(Struct, frozen=True):
    """What the user chose. Seconds."""

    stop_grace_s: float = 30.0
    supervisor_grace_s: float = 300.0
    fence_timeout_s: float | None = None
    join_timeout_s: float = 600.0
    node: str = ""


# ------------------------------------------------------------------------------------------------------------- events


class OrderArrived(Struct, frozen=True):
    order: wire.Order


class Welcomed(Struct, frozen=True):
    welcome: wire.Welcome


class Refused(Struct, frozen=True):
    refusal: wire.Refusal


class StoreReady(Struct, frozen=True):
    """Answer to `BindStore`."""

    attempt: int
    host: str
    port: int


class StoreFailure(Struct, frozen=True):
    """Answer to `BindStore`: `message` is one line."""

    attempt: int
    message: str
    exit_code: int = 1


class RanksSpawned(Struct, frozen=True):
    """Answer to `SpawnRanks`: pids in local-rank order. No rank's `RankDied` comes before it."""

    attempt: int
    pids: tuple[int, ...]


class SpawnFailure(Struct, frozen=True):
    """Answer to `SpawnRanks`: some or all could not be started; what did start has been killed."""

    attempt: int
    message: str
    exit_code: int = 1


class RankDied(Struct, frozen=True):
    """A rank's own process ended. `exit_code` is 128 + `signal` for a signal; the rest is for the report."""

    attempt: int
    local_rank: int
    exit_code: int
    signal: int = 0
    iteration: int = 0
    section: str = ""
    error: str = ""
    traceback: str = ""
    log_tail: str = ""


class AllReaped(Struct, frozen=True):
    """Answer to `ReapAll`: nothing that carries the attempt's mark lives."""

    attempt: int


class Overdue(Struct, frozen=True):
    """Limits that expired in two samples of the board."""

    facts: tuple[wire.RankOverdue, ...]


class SectionsRead(Struct, frozen=True):
    """Observed section times: every 10 s, and in answer to `ObserveSections`."""

    fact: wire.SectionsObserved


class StacksReady(Struct, frozen=True):
    """Answer to `CollectStacks`."""

    attempt: int
    stacks: tuple[wire.RankStack, ...]


class SignalArrived(Struct, frozen=True):
    """The launcher got a signal. `stops`: it is one of those that end the job; others are only passed on."""

    signum: int
    stops: bool = True


class RankMessage(Struct, frozen=True):
    """A packet of a rank that has said who it is."""

    attempt: int
    local_rank: int
    message: wire.RankToAgent


class Noticed(Struct, frozen=True):
    """Something that the shell wants in the job's story."""

    level: str
    text: str
    rank: int | None = None


class Tick(Struct, frozen=True):
    """Ten times a second. Every deadline is looked at here and only here."""


Event = (
    OrderArrived
    | Welcomed
    | Refused
    | StoreReady
    | StoreFailure
    | RanksSpawned
    | SpawnFailure
    | RankDied
    | AllReaped
    | Overdue
    | SectionsRead
    | StacksReady
    | SignalArrived
    | RankMessage
    | Noticed
    | Tick
)


# ------------------------------------------------------------------------------------------------------------ actions


class AddFact(Struct, frozen=True):
    """Put the fact into the spool, to be reported."""

    fact: wire.AnyFact


class BindStore(Struct, frozen=True):
    attempt: int
    port: int
    reason: str


class SpawnRanks(Struct, frozen=True):
    command: wire.StartAttempt
    reason: str


class SignalRanks(Struct, frozen=True):
    """Signal those ranks. `whole_session`: and all of their session. `if_caught`: only those that have a handler for it."""

    local_ranks: tuple[int, ...]
    signum: int
    reason: str
    whole_session: bool = False
    if_caught: bool = False


class ReapAll(Struct, frozen=True):
    """End all that carries the attempt's mark: SIGTERM, SIGKILL after `grace_s`. Said again, it only shortens the grace."""

    attempt: int
    grace_s: float
    reason: str


class ObserveSections(Struct, frozen=True):
    """Read the board a last time for this attempt; answered by `SectionsRead` with `closing`."""

    attempt: int


class CollectStacks(Struct, frozen=True):
    """Take stacks off the loop; answered by `StacksReady` within `within_s`."""

    attempt: int
    within_s: float
    reason: str


class AskRanks(Struct, frozen=True):
    """Send `SaveNow` to those ranks."""

    local_ranks: tuple[int, ...]
    request_id: str
    leave: bool
    reason: str


class PushLimits(Struct, frozen=True):
    """Watch the board with these limits from now on, and hand them to the ranks."""

    limits: wire.Limits
    reason: str


class WriteResult(Struct, frozen=True):
    result: wire.JobResult


class PrintReport(Struct, frozen=True):
    """Text for people, on stderr."""

    text: str


class Exit(Struct, frozen=True):
    code: int
    reason: str


Action = (
    AddFact
    | BindStore
    | SpawnRanks
    | SignalRanks
    | ReapAll
    | ObserveSections
    | CollectStacks
    | AskRanks
    | PushLimits
    | WriteResult
    | PrintReport
    | Exit
)


# -------------------------------------------------------------------------------------------------------------- state


class Rank(Struct, frozen=True):
    """One local rank of the current attempt. `signalled`: why we signalled it or asked it to leave, empty if we did not."""

    rank: int
    pid: int = 0
    exit_code: int | None = None
    signalled: str = ""
    takes_requests: bool = False
    declared: int = 0
    declared_reason: str = ""
    saved: bool = False

    @property
    def alive(self) -> bool:
        return self.exit_code is None


class Stop(Struct, frozen=True):
    """How the attempt is being ended. `kill_at` and `killed_at` on the monotonic clock, None: not planned, not yet."""

    why: str
    signum: int
    kill_at: float | None
    killed_at: float | None = None
    said_stuck: bool = False


class Request(Struct, frozen=True):
    """A save or leave request that the local ranks in `waiting` have not taken up."""

    request_id: str
    leave: bool
    waiting: frozenset[int]


class Ending(Struct, frozen=True):
    """How the agent will end as soon as its ranks are gone."""

    result: wire.JobResult
    report: str = ""


class AgentState(Struct, frozen=True):
    """All that the machine remembers. Times on the monotonic clock, moved by every gap."""

    settings: Settings
    phase: Phase
    contact_at: float
    """When the decider was last heard; before that, when we began to call it."""
    tick_at: float
    joined: bool = False
    job_id: str = ""
    run: int = 0
    epoch: int = 0
    store: str = ""
    """The supervisor's store: another one knows nothing of the commands that we performed."""
    last_command: int = 0
    start: wire.StartAttempt | None = None
    """The order that the current or last attempt was started with."""
    ranks: tuple[Rank, ...] = ()
    exits: tuple[wire.RankExited, ...] = ()
    """How ranks of the current or last attempt ended, oldest first: for the report."""
    why_stopped: str = ""
    """Why the decider ended the current or last attempt."""
    limits: wire.Limits = NO_LIMITS
    stop: Stop | None = None
    reaping: bool = False
    requests: tuple[Request, ...] = ()
    next_start: wire.StartAttempt | None = None
    """Waits until the ranks of the attempt before are gone."""
    ending: Ending | None = None
    signum: int = 0
    """The first signal that told us to stop."""
    failed_at: float | None = None
    """When a rank failed by itself; a decision has been due since then."""
    leave_at: float | None = None
    """After a signal, without ranks: when to go without the decider's word."""
    gaps: tuple[Gap, ...] = ()
    num_dropped: int = 0
    """Orders of an older epoch."""
    num_unexpected: int = 0
    """Events that had no place in the phase they came in."""

    @property
    def attempt(self) -> int:
        """Number of the current or last attempt, 0 before the first."""
        return self.start.attempt if self.start else 0

    @property
    def alive(self) -> tuple[int, ...]:
        """Local ranks whose process has not ended."""
        return tuple(i for i, rank in enumerate(self.ranks) if rank.alive)
