"""What the agent's process machine remembers: frozen data, no behaviour. Times are of the node's monotonic clock."""

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
    last_call_s: float = 30.0
    node: str = ""
    min_nodes: int = 1
    max_nodes: int = 1
    signal_graces_s: dict[int, float] = {}
    """By signal number, where it is not `stop_grace_s`."""
    end_s: float | None = None
    """When the scheduler ends the job, in seconds since 1970."""
    deadline_margin_s: float = 5.0
    meeting: str = ""
    """Where the supervisor is, as the user wrote it; empty: embedded."""

    speaks_for_all: bool = True
    """This agent says what the job's other agents, whose output comes to the same terminal, would say as well."""

    gate_refusal: str = ""
    """Why no rank may be started here; empty: nothing is against it."""

    def grace_of(self, signum: int) -> float:
        """From that signal until the ranks are killed."""
        return self.signal_graces_s.get(signum, self.stop_grace_s)


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
    entered: bool = False
    """It, or the process before it, has said that it can enter its training function again."""
    settled: bool = False
    """The decider has said what follows from its end: it has a new process, or one in reserve has its work."""
    doomed: str = ""
    """Why NVRx's monitor is about to kill it: in-process restart's hard limit."""
    numbers: dict[str, tuple[float, int]] = {}
    """By kind of its numbers (empty: straggler reports): since when messages are counted, and how many there were."""

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def ended_well(self) -> bool:
        """Nothing is lost with it."""
        return self.exit_code == 0 or self.settled


class Stop(Struct, frozen=True):
    """How the attempt is being ended. `since`, `kill_at` and `killed_at` on the monotonic clock, None: not planned, not yet."""

    why: str
    signum: int
    kill_at: float | None
    killed_at: float | None = None
    since: float = 0.0


class HeldStop(Struct, frozen=True):
    """A stop that waits for stacks, at most `until`."""

    why: str
    grace_s: float
    until: float


class Request(Struct, frozen=True):
    """A save or leave request that the local ranks in `waiting` have not taken up. `failure`: why one could not do it."""

    request_id: str
    leave: bool
    waiting: frozenset[int]
    failure: str = ""


class Ending(Struct, frozen=True):
    """How the agent will end as soon as its ranks are gone."""

    result: wire.JobResult
    report: str = ""


class AgentState(Struct, frozen=True):
    """All that the machine remembers. Times on the monotonic clock, moved by every gap, but for `heard_at`."""

    settings: Settings
    phase: Phase
    contact_at: float
    """When the decider was last heard; before that, when we began to call it."""
    tick_at: float
    heard_at: float = 0.0
    """As `contact_at`, never moved: the supervisor's clock went on while we were suspended, and so the fence must."""
    joined: bool = False
    job_id: str = ""
    run: int = 0
    epoch: int = 0
    store: str = ""
    """The supervisor's store: another one knows nothing of the commands that we performed."""
    store_id: str = ""
    last_command: int = 0
    start: wire.StartAttempt | None = None
    """The order that the current or last attempt was started with."""
    ranks: tuple[Rank, ...] = ()
    exits: tuple[wire.RankExited, ...] = ()
    """How ranks of the current or last attempt ended, oldest first: for the report."""
    why_stopped: str = ""
    """Why the decider ended the current or last attempt."""
    limits: wire.Limits = NO_LIMITS
    switches: dict[str, bool] = {}
    """What people have switched on or off in the job."""
    takes_metrics: bool = False
    """The decider wants numbers of the training, and reports on stragglers."""
    stop: Stop | None = None
    held_stop: HeldStop | None = None
    stacks_asked: bool = False
    """Stacks of this attempt were taken before, or while, its ranks were ended."""
    stood_in: tuple[tuple[int, str], ...] = ()
    """Rank and innermost frame of its training thread, of the newest stacks of this attempt: for the report."""
    reap_at: float | None = None
    """All ranks have exited and the rest is being reaped, with SIGKILL from this time on. None: not so far."""
    said_stuck: bool = False
    """It has been said that something outlives its SIGKILL."""
    requests: tuple[Request, ...] = ()
    next_start: wire.StartAttempt | None = None
    """Waits until the ranks of the attempt before are gone."""
    ending: Ending | None = None
    told: bool = False
    """The decider has said how the job ended, or that it does not want us: it need not hear how we end."""
    signum: int = 0
    """The first signal that told us to stop."""
    asked_to_leave: bool = False
    """The decider asked the ranks of the current or last attempt to save and leave."""
    said_again: bool = False
    """A second one came while there were ranks: the next kills them."""
    failed_at: float | None = None
    """When a rank failed by itself; a decision has been due since then."""
    leave_at: float | None = None
    """After a signal, without ranks: when to go without the decider's word."""
    say_waiting_at: float | None = None
    """When to tell a person that the job waits for other nodes. None: not, or said."""
    said_silent: bool = False
    """It has been said that a decision is due and nothing is heard of the decider, since it was last heard."""
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
    def told_to_leave(self) -> bool:
        """Whether somebody wants the job to end, so that no restart waits for what ranks leave behind."""
        return bool(self.signum) or self.asked_to_leave

    @property
    def alive(self) -> tuple[int, ...]:
        """Local ranks whose process has not ended."""
        return tuple(i for i, rank in enumerate(self.ranks) if rank.alive)
