"""The state of a job's machine: everything that the supervisor must remember to decide, and nothing else.

Frozen structs, kept as msgpack in the job's row and read back after a crash or by a newer release: every field that may be
added later has a default, unknown fields are ignored. Times in `_us` are wall clock, for records; times in `_s` are of the
monotonic clock of the supervisor that wrote them, and `rebased` moves them onto that of another.
"""

from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.rank_states import InProcess as InProcess
from rsup.supervisor.rank_states import OpenRestart as OpenRestart
from rsup.supervisor.rank_states import RankExit as RankExit
from rsup.supervisor.records import AttemptSaved, CaseSaved, IncidentSaved, JobKey, JobSaved
from rsup.supervisor.save_states import Saves as Saves
from rsup.supervisor.straggler_states import Stragglers as Stragglers
from rsup.supervisor.wire import (
    AgentInfo,
    AnyCommand,
    AvoidedDevice,
    EndJob,
    JobResult,
    JobSpec,
    Limits,
    RankLeaves,
    RankOverdue,
    RankStack,
    RsupError,
    SectionSeen,
)


class StateUnreadable(RsupError):
    """The bytes of a job's state are damaged or of an unknown form."""


class Phase(StrEnum):
    """Where a job is."""

    FORMING = "forming"
    """Agents join; no rank of this job may be alive when it leaves this phase."""
    STARTING = "starting"
    """The attempt's store is being bound and its ranks are being spawned."""
    RUNNING = "running"
    COLLECTING = "collecting"
    """A limit that kills has expired; stacks are being taken, nothing is killed yet."""
    STOPPING = "stopping"
    """The ranks of the attempt have been told to end, after a failure or because somebody asked."""
    WAITING = "waiting"
    """Back-off before the next attempt."""
    ENDED = "ended"
    """The result is known; agents may not all have heard it."""


LIVE_PHASES = (Phase.STARTING, Phase.RUNNING, Phase.COLLECTING, Phase.STOPPING)


class Role(StrEnum):
    """What an agent is to its job."""

    ACTIVE = "active"
    SPARE = "spare"
    LOST = "lost"
    """Not heard of (since `heard_us`); its ranks may be alive."""
    GONE = "gone"
    """Known dead, fenced, or left: no rank of it is alive."""


class AgentState(Struct, frozen=True, kw_only=True):
    """One agent of the job. The fields after `live_attempt` belong to the attempt it takes part in."""

    info: AgentInfo
    """Without its devices: those are records, nothing here is decided by them."""
    role: Role
    joined: int
    """Counts the agents of the job in the order of joining."""
    acked_fact: int = 0
    last_command: int = 0
    outbox: list[AnyCommand] = []
    """Commands that the agent has not acknowledged, oldest first."""
    devices: list[str] = []
    """UUIDs of its node's devices."""
    known: list[AvoidedDevice] = []
    """Of these, what the hardware's history says against them."""
    node_known: AvoidedDevice | None = None
    """The same of its node (`device` is its name)."""
    heard_us: int = 0
    """When a lost agent was last heard; else 0."""
    dead: bool = False
    """Gone for good: a late message in its name is that of a dead process."""
    left: bool = False
    """It went on its own word."""
    excluded: str = ""
    """Why it takes no part in the next attempt: a rank of its own asked for that, in this attempt."""
    leaving: int = 0
    """The signal that told its launcher to stop, 0: none did."""
    parked: bool = False
    number_commands: bool = False
    """Adopted from a supervisor that is gone: its next report tells where the numbers of commands go on."""
    previous_rank: int = -1
    """Group rank in the attempt before: ranks stay where they were."""
    live_attempt: int = 0
    """The attempt whose ranks may be alive on this node, 0: none is."""
    group_rank: int = -1
    first_rank: int = 0
    started: bool = False
    pids: list[int] = []
    exits: dict[int, RankExit] = {}
    devices_used: dict[int, str] = {}
    stacks: list[RankStack] | None = None
    num_standbys: int = 0
    """Warm standbys that wait on its node, as last told."""
    standby_bytes: int = 0
    stepped: bool = False
    first_iteration: int = 0
    """The lowest iteration that its ranks showed first in this attempt, 0: none yet."""
    took_ranks: str = ""
    """Why it is known dead, if it went with ranks whose end nobody saw: peers of those may well be the first to be heard."""

    @property
    def reachable(self) -> bool:
        """Whether the agent takes part and answers."""
        return self.role in (Role.ACTIVE, Role.SPARE)


class Failure(Struct, frozen=True, kw_only=True):
    """Why the current attempt is being ended. `kind` as in `IncidentSaved`."""

    kind: str
    at_us: int
    text: str
    exit_code: int = 1
    """The job's, if no restart follows and no failing rank gives a better one."""
    section: str = ""
    rank: int | None = None
    node: str = ""
    error: str = ""
    """What the rank said, where it did not end by itself: tells equal failures."""


class StopRequest(Struct, frozen=True, kw_only=True):
    """Somebody wants the job to end: no attempt follows. `exit_code` is the job's unless its ranks saved and left cleanly."""

    exit_code: int
    reason: str
    principal: str = ""
    request_id: str = ""
    saved: bool = False
    escalated: bool = False
    of_a_launcher: bool = False
    """A signal told a launcher to stop: a job that has enough nodes without it goes on."""
    grace_s: float = 0.0
    """What ranks have; 0: what they have after a failure."""
    cut_short: bool = False
    """It has been said that no rank can save, and they are ended soon."""


class Budget(Struct, frozen=True):
    """What `restart_policy` has to remember from failure to failure."""

    restarts: int = 0
    without_progress: int = 0
    """Restarts since the last durable checkpoint."""
    identical: int = 0
    signature: str = ""
    checkpoint: int = -1
    """Iteration of the newest durable checkpoint at the last failure, -1: none."""
    iteration: int = 0
    """Highest iteration at the last failure."""


class Observed(Struct, frozen=True):
    """Section times of the current attempt, the maximum over its nodes."""

    sections: dict[str, SectionSeen] = {}
    out_of_section_s: float = 0.0
    train_steps: int = 0
    checkpoints: int = 0
    calculated_at: int = -1
    """`checkpoints` when limits were last calculated."""
    async_save: bool = False
    loaded_persistent: bool = False
    told_unwatched: bool = False
    """Whether it was said that no rank opens a section."""


class Case(Struct, frozen=True, kw_only=True):
    """A rerun case that has no verdict yet, or whose verdict the end of its attempt has still to follow."""

    saved: CaseSaved
    """Its record as last written."""
    told_in: int
    """The attempt in which ranks last told of it."""
    sent_in: int = 0
    """The attempt that was started to decide it, 0: none was."""
    avoid: list[AvoidedDevice] = []
    """Where its ranks must not run again."""
    num_reruns: int = 0
    """Attempts of this launch that were started to decide it."""
    num_returns: int = 0
    """Of all its reruns those that came to a device that had been tried."""
    is_repeat: bool = False
    """Its verdict accuses a device that was to be left out already."""
    doubted: list[str] = []
    """Of the accused devices those that the fault only followed its rank to."""
    follows: str = ""
    """Why the job ends for that."""


class JobState(Struct, frozen=True, kw_only=True):
    """The whole machine of one run of a job."""

    key: JobKey
    spec: JobSpec
    created_us: int
    phase: Phase = Phase.FORMING
    epoch: int = 0
    attempt: int = 0
    adopted: bool = False
    """The current attempt was found running; how many ranks it has is known only as far as its agents have come back."""
    clock_s: float = 0.0
    """The monotonic time at which these bytes were made."""
    deadline_s: float | None = None
    """Of the phase: join timeout, stacks, stop, back-off."""
    last_call_s: float | None = None
    """Forming: when to start without further nodes."""
    blocked: bool = False
    """It has been said that a lost node holds the next attempt up."""
    agents: dict[str, AgentState] = {}
    num_joined: int = 0
    num_events: int = 0
    num_incidents: int = 0
    world_size: int = 0
    num_ended: int = 0
    num_ok: int = 0
    num_overdue_logged: int = 0
    store_bound: bool = False
    current: AttemptSaved | None = None
    """The row of the current attempt."""
    started_s: float = 0.0
    running_us: int | None = None
    """When every rank of the attempt had been spawned."""
    stepped: bool = False
    """The first step of the attempt has been seen in beats."""
    counts_iterations: bool = False
    """A rank of this job has shown an iteration."""
    iteration: int = 0
    """Highest of the job."""
    attempt_iteration: int = 0
    """Highest of the attempt."""
    checkpoint: int = -1
    """Iteration of the newest durable checkpoint, -1: none."""
    saves: Saves = Saves()
    failure: Failure | None = None
    stop: StopRequest | None = None
    overdue: dict[int, RankOverdue] = {}
    """Expired limits of the attempt, the first of each rank."""
    suspected: list[str] = []
    """Limits whose expiry has been reported without killing, in this attempt."""
    in_process: InProcess = InProcess()
    shut_down: str = ""
    """Why no attempt follows if this one fails: a rank asked for that."""
    incident: IncidentSaved | None = None
    """The failure that the job has not recovered from."""
    budget: Budget = Budget()
    free_restarts: int = 0
    """Attempts that followed another one at no cost."""
    limits: Limits = Limits()
    """In force: the configured ones and those calculated."""
    observed: Observed = Observed()
    switches: dict[str, bool] = {}
    """What people have switched on or off (`wire.SWITCHES`); it holds in later attempts, too."""
    stragglers: Stragglers = Stragglers()
    avoid: list[AvoidedDevice] = []
    """Devices to be avoided from the next attempt on; one with a rank is of an open case of Megatron-LM's rerun machine."""
    reruns: int = 0
    """Restarts of this launch for a rerun on another device."""
    cases: list[Case] = []
    """Rerun cases that wait for something, the one told of last at the end."""
    closed_cases: list[str] = []
    """Ids of the latest cases that have their verdict: it is final."""
    accusing: list[CaseSaved] = []
    """The latest cases that have proven single boards faulty."""
    case_restarts: int = 0
    """Free restarts from the last checkpoint that a case has asked for, since a newer one became durable."""
    case_checkpoint: int = -1
    """Iteration of the newest durable checkpoint at the last of these, -1: none."""
    requests: list[str] = []
    """Ids of the latest operator requests, against repeats."""
    result: JobResult | None = None
    run_before: JobResult | None = None
    """How the run before this one ended, for those of its agents that have not heard."""
    ended_us: int | None = None
    reason: str = ""
    left: RankLeaves | None = None
    """How the ranks of the current attempt leave on purpose, once they have said so."""
    resume_point: int = 0
    """Iterations that are done where the ranks go on next: of the newest checkpoint, or of the one that they found."""
    save_s: float = 0.0
    """How long the newest durable save took."""
    phase_number: int = 0
    """Of the attempt, in `spec.phases`."""
    phase_samples: dict[int, int] = {}
    """Samples consumed where a phase was left, by its iteration."""
    phase_hops: int = 0
    """Changes of phase in a row that brought the job no further."""

    @property
    def active(self) -> list[tuple[str, AgentState]]:
        """The agents of the current attempt that are not gone, by group rank."""
        members = [(k, a) for k, a in self.agents.items() if a.group_rank >= 0 and a.role is not Role.GONE]
        return sorted(members, key=lambda item: item[1].group_rank)

    @property
    def undelivered(self) -> bool:
        """Whether an agent has yet to hear of the end."""
        return any(isinstance(c, EndJob) for a in self.agents.values() for c in a.outbox)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JobState)


def encode(state: JobState) -> bytes:
    """The bytes kept in the job's row."""
    return _encoder.encode(state)


def decode(data: bytes) -> JobState:
    """The state from its bytes, also of a release with fewer or more fields. Raise `StateUnreadable`."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateUnreadable(f"cannot read the state of a job ({len(data)} bytes): {error}") from None


def rebased(state: JobState, now_s: float) -> JobState:
    """The state with its deadlines moved onto the clock of this process: the time nobody watched does not count."""
    shift_s = now_s - state.clock_s
    return replace(
        state,
        clock_s=now_s,
        started_s=state.started_s + shift_s,
        deadline_s=None if state.deadline_s is None else state.deadline_s + shift_s,
        last_call_s=None if state.last_call_s is None else state.last_call_s + shift_s,
        in_process=_shifted(state.in_process, shift_s),
    )


def _shifted(in_process: InProcess, shift_s: float) -> InProcess:
    restart = in_process.open
    if restart is not None:
        deadline_s = None if restart.deadline_s is None else restart.deadline_s + shift_s
        restart = replace(restart, deadline_s=deadline_s, latest_s=restart.latest_s + shift_s)
    return replace(in_process, fault_s=in_process.fault_s + shift_s, open=restart)


def job_record(state: JobState, now_us: int) -> JobSaved:
    """The job's row, with the state in it."""
    return JobSaved(
        job=state.key,
        state=encode(state),
        phase=state.phase.value,
        epoch=state.epoch,
        attempt=state.attempt,
        created_us=state.created_us,
        updated_us=now_us,
        ended_us=state.ended_us,
        exit_code=state.result.exit_code if state.result else None,
        reason=state.reason,
        command=" ".join(state.spec.command),
        num_nodes=len(state.current.nodes) if state.current else 0,
        num_ranks=state.world_size,
        iteration=state.iteration,
    )
