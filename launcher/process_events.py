"""What the agent's process machine takes in and gives out: frozen data, no behaviour. What it remembers is in `process_state`.

Events are past facts, actions are imperatives that the shell (`agent`) performs once, in order; the result of an action is
the next event. `Moment` is the one idea of time: seconds of the node's monotonic clock for every deadline, and the wall clock
only for the `at_us` of facts.
"""

from msgspec import Struct

from rsup.supervisor import wire


class Moment(Struct, frozen=True):
    """Now: `mono_s` on the monotonic clock, `wall_us` UTC microseconds."""

    mono_s: float
    wall_us: int


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
    devices: tuple[str, ...] = ()
    cpus: tuple[str, ...] = ()
    """What each was given, as in `wire.AttemptStarted`."""


class SpawnFailure(Struct, frozen=True):
    """Answer to `SpawnRanks`: some or all could not be started; what did start has been killed."""

    attempt: int
    message: str
    exit_code: int = 1


class RankReplaced(Struct, frozen=True):
    """Answer to `ReplaceRank`: the pid of its new process."""

    attempt: int
    local_rank: int
    pid: int


class ReplaceFailure(Struct, frozen=True):
    """Answer to `ReplaceRank`: the new process could not be started; `message` is one line."""

    attempt: int
    local_rank: int
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
    rejected: tuple[wire.RejectedResult, ...] = ()
    killer: str = ""
    was_dying: bool = False
    """It was on its way out already when we signalled it: the kernel frees a process with GPU memory for a while."""


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
    num_standbys: int | None = None
    standby_bytes: int = 0


class HealthRead(Struct, frozen=True):
    """What is new of the devices' health."""

    readings: tuple[wire.HealthReading, ...]
    boot_id: str = ""


class SurvivorsNamed(Struct, frozen=True):
    """Answer to `NameSurvivors`: what lives, one text each."""

    attempt: int
    survivors: tuple[str, ...]


class NodeGivenUp(Struct, frozen=True):
    """The scheduler has given up a node of the job that does not answer; `why` is a clause."""

    node: str
    why: str


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
    | RankReplaced
    | ReplaceFailure
    | RankDied
    | AllReaped
    | Overdue
    | SectionsRead
    | StacksReady
    | SignalArrived
    | RankMessage
    | Noticed
    | HealthRead
    | SurvivorsNamed
    | NodeGivenUp
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


class ReplaceRank(Struct, frozen=True):
    """Kill what a dead rank left behind and start a new process in its place, which makes good its `death` (1: the first)."""

    attempt: int
    local_rank: int
    death: int
    reason: str


class TellPeers(Struct, frozen=True):
    """Tell every rank which others have failed: they enter their training function again."""

    message: wire.PeersFailed


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


class NameSurvivors(Struct, frozen=True):
    """Find out what of the attempt outlives its SIGKILL; answered by `SurvivorsNamed`."""

    attempt: int
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
    """Watch the board with these limits from now on, and hand them to the ranks, with what has been switched on or off."""

    limits: wire.Limits
    reason: str
    switches: dict[str, bool] = {}


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
    | ReplaceRank
    | TellPeers
    | SignalRanks
    | ReapAll
    | NameSurvivors
    | ObserveSections
    | CollectStacks
    | AskRanks
    | PushLimits
    | WriteResult
    | PrintReport
    | Exit
)
