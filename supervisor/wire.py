"""Messages between ranks, agents and the supervisor, and the one exception root. Needs only msgspec.

Three links use this file:

* **agent -> supervisor** (`ToSupervisor`): `Hello` first and after every reconnect, then `Report`s. A report carries
  *facts*, numbered 1, 2, ... per agent without gaps; the supervisor applies each once, in order, and answers with the
  number of the last one it has committed. What is not acknowledged stays in the agent's spool and is sent again.
* **supervisor -> agent** (`ToAgent`): `Welcome` or `Refusal`, then `Order`s; `StandsBy` of one that does not decide. An order
  carries *commands*, numbered 1, 2, ... per agent; the agent performs each once and acknowledges in its reports.
  Unacknowledged commands are sent again.
* **rank <-> agent** (`RankToAgent`, `AgentToRank`): one SOCK_SEQPACKET packet a message, `RSUP_RANK_SOCKET`. The socket
  and the heartbeat board travel with the agent's release, so this link has no version range.

Every message to or from the supervisor names its `epoch`, which grows with each attempt and each change of decider: a
message of an older epoch is dropped and counted, an agent that hears a newer one kills its ranks.

Versions: each side sends the range of `WIRE_VERSION`s it speaks (its own and the two before); they talk when the ranges
overlap. New fields have defaults and unknown fields are ignored, so an addition needs no new version.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

RELEASE = "0.1.0"
WIRE_VERSION = 4
OLDEST_WIRE_VERSION = WIRE_VERSION - 2
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_TEXT_CHARS = 64 * 1024
MAX_RANK_MESSAGE_BYTES = 64 * 1024

EXIT_USAGE = 2
EXIT_RERUN_ELSEWHERE = 16
EXIT_VALIDATION_FAILED = 17
EXIT_NO_SUPERVISOR = 75
EXIT_REQUEUE = 88
EXIT_NO_REQUEUE = 93
SLURM_GROUP = "slurm-"
"""How the rendezvous id of a SLURM step begins: no other step has the same."""
GATE_REFUSES = "the gate refuses"
"""In the reason of an 88: the job is to run again, and not on that node."""
DECLARED_EXIT_CODES = (16, 17, 75, 88, 93)
"""Codes a rank's exit passes on only after it declared them with `RankDeclares`; undeclared they become 1."""
DECLARABLE_EXIT_CODES = (EXIT_USAGE, *DECLARED_EXIT_CODES)
"""`EXIT_USAGE` is passed on in any case; declared, it says that another attempt would meet the same."""


class RsupError(Exception):
    """An operating error: its text says what happened, to what, and what to do. `exit_code` is the command's."""

    exit_code = 1


class UsageError(RsupError):
    """Wrong usage or configuration."""

    exit_code = EXIT_USAGE


class MessageError(RsupError):
    """Bytes that are no message of this link: too long, truncated, or of an unknown kind."""


def now_us() -> int:
    """Wall-clock time as UTC microseconds since the epoch: the one time format of messages and store."""
    return time.time_ns() // 1000


# ---------------------------------------------------------------------------------------------------- what a job is


class Device(Struct, frozen=True):
    """A physical GPU, or the CPU stand-in of a rank without one (`uuid` then is `CPU-<boot id>-<local rank>`)."""

    uuid: str
    model: str = ""
    serial: str = ""
    board: str = ""
    pci_bus_id: str = ""
    vbios: str = ""
    driver: str = ""


class Limits(Struct, frozen=True):
    """Time limits in seconds; None means unlimited. `calculated` names those derived from observation.

    `sections` maps section name -> limit. A calculated limit counts for killing only if `enforce_calculated`.
    """

    sections: dict[str, float | None] = {}
    out_of_section_s: float | None = None
    initial_heartbeat_s: float | None = None
    heartbeat_s: float | None = None
    startup_s: float | None = None
    warmup_s: float | None = None
    num_warmup_iters: int = 5
    safety_factor: float = 5.0
    calculated: list[str] = []
    enforce_calculated: bool = False
    from_client: list[str] = []
    """Those that a client of NVRx's has set (`LimitsChange`), by the names of `RankOverdue.limit`."""


class LimitsChange(Struct, frozen=True):
    """Limits that a client of NVRx's has calculated or loaded, in seconds, None: unlimited. The same on all ranks."""

    sections: dict[str, float | None] | None = None
    """None: sections and `out_of_section_s` stay as they are. Names that are not among them keep their limit."""
    out_of_section_s: float | None = None
    sets_heartbeats: bool = False
    """False: the heartbeat limits stay as they are."""
    initial_heartbeat_s: float | None = None
    heartbeat_s: float | None = None

    def apply(self, limits: Limits) -> Limits:
        """`limits` with what has been set, which then counts as configured; the same object if nothing changes."""
        changed, new = limits, set(limits.from_client)
        if self.sections is not None:
            new |= {name for name, limit_s in self.sections.items() if limits.sections.get(name) != limit_s}
            new |= {"out-of-section"} if self.out_of_section_s != limits.out_of_section_s else set()
            changed = msgspec.structs.replace(
                changed,
                sections={**limits.sections, **self.sections},
                out_of_section_s=self.out_of_section_s,
                warmup_s=self.sections.get("warmup", limits.warmup_s),
                calculated=[name for name in limits.calculated if name not in (*self.sections, "out-of-section")],
            )
        if self.sets_heartbeats:
            new |= {"initial-heartbeat"} if self.initial_heartbeat_s != limits.initial_heartbeat_s else set()
            new |= {"heartbeat"} if self.heartbeat_s != limits.heartbeat_s else set()
            changed = msgspec.structs.replace(
                changed, initial_heartbeat_s=self.initial_heartbeat_s, heartbeat_s=self.heartbeat_s
            )
        return limits if changed == limits else msgspec.structs.replace(changed, from_client=sorted(new))


class RestartPolicy(Struct, frozen=True):
    """When a failed attempt is followed by another.

    `mode` is `count` (torchrun's: `max_restarts` for the whole job) or `auto` (`no_progress_limit` restarts without
    progress, refilled by each durable checkpoint; `max_restarts` then is ignored when 0). `identical_limit` equal failures
    before any progress end the job in either mode.
    """

    mode: str = "count"
    max_restarts: int = 0
    no_progress_limit: int = 3
    identical_limit: int = 3
    backoff_first_s: float = 0.0
    backoff_max_s: float = 60.0
    no_requeue_exit_code: int = EXIT_NO_REQUEUE
    """With which a job ends for want of progress, or of restarts in `auto` mode."""
    min_progress_iterations: int = 1
    """A durable checkpoint counts as progress if it is so much further than that before the last failure."""
    bounds_progress: bool = False
    """`no_progress_limit` holds in `count` mode, too."""
    on_hang: str = "auto"
    """`restart`, `report`, or `auto`: restart if the expired limit was configured or enforced, else report."""


class InProcessPolicy(Struct, frozen=True):
    """When ranks restart in their processes, and when that becomes a restart of the processes. Counts are per attempt; a fault
    that comes after the job got further than ever before counts from 1."""

    restart_within_s: float = 60.0
    """From the fault until every rank has entered again; a new process has, in addition, as long as the first ones took."""
    max_restarts: int | None = None
    """None: as many as there is reason for. 0: never."""
    identical_limit: int = 3
    """So many equal faults end the attempt. 0: any number does not."""
    no_progress_limit: int = 10
    """So many faults of any kind. 0: any number does not."""


class PhaseSpec(Struct, frozen=True):
    """A stretch of the training. Its arguments and environment stay with the agents: they may hold secrets."""

    until_iteration: int = 0
    """After how many iterations of the job it is over; 0: it is the last one."""
    name: str = ""
    digest: str = ""
    """Of its configuration: all nodes must have the same."""


class JobSpec(Struct, frozen=True):
    """What one `rsup launch` asks for. All agents of a job hand in the same, but for `node_rank`."""

    job_id: str = ""
    """Empty: the supervisor generates one; agents that name none are grouped by `rdzv_id`."""
    cluster: str = "local"
    owner: str = ""
    rdzv_id: str = "none"
    resume: bool = False
    min_nodes: int = 1
    max_nodes: int = 1
    ranks_per_node: int = 1
    role: str = "default"
    command: list[str] = []
    """Script and arguments with secrets redacted, for people to read; never executed by the supervisor."""
    limits: Limits = Limits()
    policy: RestartPolicy = RestartPolicy()
    in_process: InProcessPolicy = InProcessPolicy()
    stop_grace_s: float = 30.0
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    fence_timeout_s: float | None = None
    """An agent cut off this long kills its own ranks, and is then taken for dead. None: never."""
    supervisor_grace_s: float = 300.0
    master_port: int = 0
    """0: any free port of the first node."""
    listen: str = ""
    """`host:port` the supervisor must also listen on for this job's other nodes. Set by the first node only."""
    endpoint: str = ""
    """`host:port` where the user lets the nodes meet, as it was written: agents of two jobs of one host are told apart by its
    port."""
    preferred_id: str = ""
    """Without `job_id`: the id of the job unless a live one has it, then one is generated (SLURM's job number)."""
    phases: list[PhaseSpec] = []
    """Stretches of the training, each with a configuration of its own; empty: it has one."""
    scheduler_job: str = ""
    """The scheduler's job that this launch is part of; empty outside of one."""
    scheduler_start: int = 0
    """How often the scheduler has started that job again: it does once nothing of the start before is left."""


class AgentInfo(Struct, frozen=True):
    """Who an agent is: one `rsup launch` process on one node."""

    agent_id: str
    """Random, new for each process."""
    node: str
    host: str
    """Address at which other nodes of the job reach this one (becomes MASTER_ADDR when it is first)."""
    pid: int
    boot_id: str = ""
    node_rank: int = -1
    """As the user or SLURM gave it; -1 if nobody did."""
    num_ranks: int = 1
    devices: list[Device] = []
    """Those of its ranks, in local-rank order, then those that no rank uses."""
    gone: bool = False
    """The agent is dead and its keeper speaks, to deliver what was left and `AgentGone`: such a `Hello` continues a known
    agent or is refused, it never joins or starts a job."""
    role: str = ""
    """Of this node's ranks (`--role`); nodes of one job may have several."""
    start_ticks: int = 0
    """When the process started (`heartbeat_board.process_start_ticks`): a reused pid is not taken for it. 0: unknown."""
    versions: dict[str, str] = {}
    """What is installed on this node, of those names that must be alike on all: `python`, `torch`, `nccl`."""
    principal: str = ""
    """Whose agent it is, set by the supervisor that let it in; empty where nobody was asked."""
    pid_namespace: int = 0
    """In which `pid` and the processes of its ranks have their numbers (`heartbeat_board.pid_namespace`). 0: unknown."""
    gate_refusal: str = ""
    """Why no rank may be started there: the scheduler's gate knows something against the node. Empty: it knows nothing."""


class JobResult(Struct, frozen=True):
    """How a job ended; the launcher writes it to the result file and exits with `exit_code`."""

    exit_code: int
    reason: str
    rank: int | None = None
    """The first failing rank, where one failed."""
    attempts: int = 1
    node: str = ""


# ----------------------------------------------------------------------------------------------------------- rerun cases

VERDICTS = ("transient", "persistent", "application", "corrupted state", "undecided")
"""What a case can end with; DESIGN.md section 6 says what each means."""
FAULT_KINDS = ("exception", "soft-timeout", "finalize", "health-check", "hard-timeout")
"""How an entry into the training function may end early. `finalize`, `health-check`: this process is not fit to enter again;
`hard-timeout`: it is about to be killed, and its end will tell."""
LEAVE_KINDS = ("signal", "request", "duration", "deadline", "interval", "phase", "finished")
CASE_ACTIONS = ("continue", "skip", "restart", "elsewhere", "leave")
"""What the ranks do after a report: go on with the replay's gradients; leave the iteration out; end and start again from the
last checkpoint; end (16) and run the iteration on another device, or go on without the accused one; end (17)."""


class CaseFinding(Struct, frozen=True):
    """A check that failed on a rank, and what replays made of it. Values are `repr` of floats (NaN and Inf are usual), empty
    where there was no such replay."""

    rank: int
    device: str
    """UUID of the device that computed `initial` and `in_place`."""
    check: str
    """The message of `validate_result`, with its number in the pass where it was called several times."""
    fatal: bool
    initial: str
    in_place: str = ""
    elsewhere: str = ""
    elsewhere_rank: int = -1
    elsewhere_device: str = ""
    tolerance: float = 0.0
    node: str = ""


class CaseReport(Struct, frozen=True):
    """All that the ranks know of a case, told by one of them at its opening and again at each step of it: a later report of
    the same case replaces the earlier one, and nothing follows a verdict."""

    case_id: str
    """`JOB.RUN-aATTEMPT-iITERATION`, of the attempt in which the case was opened."""
    iteration: int
    fatal: bool
    """One of its checks was fatal; a case that is not stays in the process."""
    findings: list[CaseFinding]
    verdict: str = ""
    """One of `VERDICTS`, empty while the case is open."""
    reason: str = ""
    """One sentence: what the verdict follows from, or what the case waits for."""
    action: str = ""
    """One of `CASE_ACTIONS`, empty while the ranks are still replaying."""
    data_dependent: bool = False
    """A `persistent` one that shows for some data only."""
    accused: list[str] = []
    """UUIDs of the devices that the verdict, or an undecided case, points to."""
    suspect_of: int = 1
    """Size of the group of which one member is at fault; above 1 nobody is more than suspect."""
    tried: dict[int, list[str]] = {}
    """Devices on which a rank's iteration was computed and rejected, by rank: it is to run on none of them again."""
    checkpoint: str = ""
    """The folder with the iteration's data, parameters and random numbers (`worker.rerun.kept_step`), for
    `rsup devices test --replay`; empty: nothing is kept."""
    data_position: dict[str, int] = {}
    """Where the iteration's data is: `consumed_samples` and the like."""
    found_by: str = "check"
    """`check` or `audit`."""
    injected: bool = False
    """A fault injector was armed in the run."""


# ------------------------------------------------------------------------------------------------ metrics and stragglers

METRIC_KINDS = ("training", "validation", "timers", "memory", "straggler", "energy", "end_to_end")
MAX_METRIC_NAME_BYTES = 64
MAX_METRICS_A_KIND = 256
"""Series of one kind, of a job."""


MAX_BIN_COUNT = 2**31 - 1
"""Values in one `MetricBin`: more count no further, so that databases can add them up."""


class MetricBin(Struct, frozen=True, array_like=True):
    """What a series was over a stretch of iterations: of one, or of neighbours that were put together to save room.

    Of the finite values the mean, the lowest and the highest: NaN where there are none. `last`: the newest value, whatever it
    is, for what counts up. `iteration` is the stretch's last, 1-based and global; `at_us` and `consumed_samples` are of it.
    """

    first: int
    iteration: int
    at_us: int
    consumed_samples: int
    value: float
    low: float
    high: float
    last: float
    count: int = 1
    num_non_finite: int = 0
    """How many of the `count` values were NaN or infinite."""

    @classmethod
    def of(cls, iteration: int, at_us: int, consumed_samples: int, value: float) -> "MetricBin":
        """A single value."""
        if math.isfinite(value):
            return cls(iteration, iteration, at_us, consumed_samples, value, value, value, value)
        nothing = math.nan
        return cls(iteration, iteration, at_us, consumed_samples, nothing, nothing, nothing, value, 1, 1)

    def joined(self, later: "MetricBin") -> "MetricBin":
        """This stretch and the next one as one."""
        num, num_later = self.count - self.num_non_finite, later.count - later.num_non_finite
        one = self if num else later
        value, low, high = one.value, one.low, one.high
        if num and num_later:
            share = num_later / (num + num_later)
            value = self.value * (1 - share) + later.value * share
            low, high = min(self.low, later.low), max(self.high, later.high)
        return MetricBin(
            first=min(self.first, later.first),
            iteration=later.iteration,
            at_us=later.at_us,
            consumed_samples=later.consumed_samples,
            value=value,
            low=low,
            high=high,
            last=later.last,
            count=min(self.count + later.count, MAX_BIN_COUNT),
            num_non_finite=min(self.num_non_finite + later.num_non_finite, MAX_BIN_COUNT),
        )


def thinned(bins: Sequence[MetricBin], most: int) -> list[MetricBin]:
    """At most `most` bins, in which neighbours of `bins` (in order of their iterations) are put together.

    They come to lie on a grid of a power of two of iterations, so that all parts of a curve are equally fine, and thinning what
    has been thinned gives what thinning all at once would.
    """
    kept, width = list(bins), 1
    while len(kept) > max(1, most):
        width *= 2
        groups: list[MetricBin] = []
        for one in kept:
            if groups and groups[-1].iteration // width == one.iteration // width:
                groups[-1] = groups[-1].joined(one)
            else:
                groups.append(one)
        kept = groups
    return kept


STRAGGLER_CAUSES = ("", "thermal", "power", "clocks", "hardware", "host", "data", "work")
"""Why a rank is slow, as far as that shows: the device runs too hot, short of power, at low clocks, or slows itself down for
another reason of its own; the host, the data or the rank's share of the work; empty: nothing shows."""
DEVICE_CAUSES = ("thermal", "power", "clocks", "hardware")
"""Those that the device's own sensors named."""
SWITCHES = ("stragglers",)
"""What people may switch on and off in a running job."""
MAX_STRAGGLER_RANKS = 16
"""In each list of a report."""


class SectionScore(Struct, frozen=True, array_like=True):
    """How fast a rank was in a section over the interval of a report. Scores are from 0 (stands still) to 1 (as fast as any).

    `time_s`: per iteration. `relative`: the fastest rank's time / this one's. `individual`: this rank's own best time in the
    attempt / now.
    """

    section: str
    time_s: float
    relative: float
    individual: float


class DeviceSensors(Struct, frozen=True, array_like=True):
    """What NVML read off a device, None where it cannot be read."""

    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle_reasons: list[str] = []


class RankScore(Struct, frozen=True):
    """One rank in a report. `device`: the UUID of the one it computes on."""

    rank: int
    device: str
    node: str
    sections: list[SectionScore]
    sensors: DeviceSensors | None = None


class Straggler(Struct, frozen=True):
    """A rank that held the others up over an interval.

    `slowdown`: its time / the fastest rank's, in `section`. `individual`: as in `SectionScore`; `usual`: the median of all
    ranks' there, below 1 where the work has grown for all. `cause`: of `STRAGGLER_CAUSES`.
    `text`: a sentence for people, with rank, device, node and the cause's figures.
    """

    rank: int
    device: str
    node: str
    section: str
    slowdown: float
    individual: float
    cause: str = ""
    text: str = ""
    usual: float = 1.0


class StragglerReport(Struct, frozen=True):
    """How evenly the ranks ran from `first` to `iteration` (1-based, global, both included).

    `stragglers` are those that are too slow, the slowest first; empty: nobody is. `slowest` and `fastest` are listed in any
    case, at most `MAX_STRAGGLER_RANKS` each.
    """

    first: int
    iteration: int
    num_ranks: int
    slowest: list[RankScore] = []
    fastest: list[RankScore] = []
    stragglers: list[Straggler] = []


# --------------------------------------------------------------------------------------------------- agent: its facts


class Fact(Struct, frozen=True, tag=True):
    """Something that happened on a node. `at_us` is the node's wall clock."""

    at_us: int


class StoreBound(Fact, frozen=True):
    """Answer to `HostStore`: the attempt's TCPStore is bound and listening."""

    attempt: int
    host: str
    port: int


class StartFailed(Fact, frozen=True):
    """The attempt's store or ranks could not be started on this node. `exit_code` is what the job should exit with."""

    attempt: int
    message: str
    exit_code: int = 1


class AttemptStarted(Fact, frozen=True):
    """Every local rank has been spawned. `pids`: local pids in local-rank order."""

    attempt: int
    pids: list[int]
    devices: list[str] = []
    """UUIDs of the devices that they were given, in local-rank order: what each really uses only it can say (`DeviceUsed`)."""
    cpus: list[str] = []
    """The cores that each was bound to, like `0-7,16-23`; empty where none was."""


class RejectedResult(Struct, frozen=True):
    """A line of Megatron-LM's tracker file, of this attempt: what its rerun machine found on a rank."""

    rank: int
    status: str
    """In upper case, e.g. `FIRST_RERUN_REPRODUCIBLE`."""
    iteration: int
    device: str
    """UUID of the device behind `ordinal`."""
    ordinal: int
    message: str = ""
    result: str = ""


NOT_OURS = "rsup did not send that signal"
SOFT_LIMIT = "in-process restart's soft limit"
HARD_LIMIT = "in-process restart's hard limit"
"""In the `killer` of a rank that NVRx's monitor has killed for that; there too, why it had shown no sign of progress:"""
HUNG = "since it hung"
WAITED_IN_VAIN = "since it waited in vain for other ranks"


class RankExited(Fact, frozen=True):
    """A rank's process ended, by itself or by a signal.

    `exit_code` is its code, or 128 + `signal`. `by_us`: the agent had signalled it, for `by_us` reason; empty otherwise.
    `declared`: the exit code that the rank had declared through rsup.worker, 0 if none.
    """

    attempt: int
    rank: int
    exit_code: int
    signal: int = 0
    by_us: str = ""
    iteration: int = 0
    section: str = ""
    error: str = ""
    """One line: exception of the error file, else last line of stderr that says something."""
    traceback: str = ""
    log_tail: str = ""
    declared: int = 0
    declared_reason: str = ""
    saved: bool = False
    """The rank reported a durable save in this attempt after it was asked to stop."""
    rejected: list[RejectedResult] = []
    """What the tracker file of Megatron-LM's rerun machine has of this rank in this attempt, where it failed."""
    killer: str = ""
    """Where a signal came from that the agent did not send, as far as that is known: `NOT_OURS`, or more."""


class RanksGone(Fact, frozen=True):
    """No process of this attempt is left on this node, descendants included."""

    attempt: int


class RankOverdue(Fact, frozen=True):
    """A limit has expired in two samples of the board. `limit` is a section's name, or `out-of-section`, `heartbeat`,
    `initial-heartbeat`, `startup`, `warmup`. `iteration` and `main_beat_age_s` tell culprit from victim."""

    attempt: int
    rank: int
    limit: str
    age_s: float
    limit_s: float
    iteration: int = 0
    main_beat_age_s: float = 0.0
    calculated: bool = False
    beat_age_s: float = -1.0
    """Of the beat thread: old in a rank that is stopped or holds the GIL, fresh in one that merely waits. -1: never."""


class RankStack(Struct, frozen=True):
    """A rank's stacks. `source`: `py-spy`, `faulthandler`, or `none` with the reason in `text`. `process_state`: of
    /proc, e.g. `T` for stopped."""

    rank: int
    pid: int
    source: str
    text: str
    process_state: str = ""
    iteration: int = 0


class StacksTaken(Fact, frozen=True):
    """Answer to `TakeStacks`."""

    attempt: int
    stacks: list[RankStack]


class SectionSeen(Struct, frozen=True):
    """What a section took over this node's ranks in this attempt: the longest single time, and how often it closed."""

    longest_s: float
    times: int


class SectionsObserved(Fact, frozen=True):
    """Observed section times since the attempt began: the input of calculated limits (reliability.md section 2)."""

    attempt: int
    sections: dict[str, SectionSeen]
    out_of_section_s: float = 0.0
    num_train_steps: int = 0
    num_checkpoints: int = 0
    async_save: bool = False
    loaded_persistent: bool = False
    closing: bool = False


class CheckpointCommitted(Fact, frozen=True):
    """A checkpoint became durable: every rank's files synced and the directory renamed. Reported once, by its writer."""

    attempt: int
    iteration: int
    path: str
    duration_s: float = 0.0


class ResumedFrom(Fact, frozen=True):
    """The training of this attempt goes on from a checkpoint: `iteration` iterations are done. Reported by one rank.

    `durable`: not a non-persistent local one, which can be lost with a node.
    """

    attempt: int
    iteration: int
    path: str
    durable: bool = True


class EntryBegun(Fact, frozen=True):
    """Under in-process restart a rank has entered its training function, for the `entry`-th time in this attempt (first: 1).

    `joined`: a new process, in the place of one that died. `took_s`: from the fault it knows of to now; 0 where it knows none.
    """

    attempt: int
    rank: int
    entry: int
    joined: bool = False
    took_s: float = 0.0
    reserves: int = 0
    """Ranks beyond those that compute. With some, a dead rank's place is taken by one of them: nobody else replaces it."""


class RankFaulted(Fact, frozen=True):
    """A fault that ended a rank's entry into the training function, and not its process.

    `kind`: one of `FAULT_KINDS`. `signature`: equal for equal faults (type and message without numbers). `victim`: only the
    connection to another rank broke, or another rank's fault interrupted it.
    """

    attempt: int
    rank: int
    entry: int
    kind: str
    text: str
    traceback: str = ""
    signature: str = ""
    iteration: int = 0
    victim: bool = False


class SaveSeen(Fact, frozen=True):
    """What became of a save, other than durable (that is `CheckpointCommitted`). `stage`: `begun`, `local` (a non-persistent
    one is complete), `failed` (with the reason in `text`) or `stood` (only the time). `stall_s`: how long training stood still
    for it."""

    attempt: int
    iteration: int
    stage: str
    path: str = ""
    stall_s: float = 0.0
    text: str = ""


class RankLeaves(Fact, frozen=True):
    """The training loop leaves on purpose after `iteration`. `kind`: one of `LEAVE_KINDS`. Reported by rank 0, before it exits.

    `phase`: the phase that is over (0: the first) where `kind` is `phase`, `consumed_samples` its end in samples.
    """

    attempt: int
    iteration: int
    kind: str
    reason: str
    durable: bool
    consumed_samples: int = 0
    phase: int = 0


class LimitsLoaded(Fact, frozen=True):
    """Limits that an earlier run calculated, as kept with the checkpoint that was loaded."""

    attempt: int
    limits: Limits


class LimitsSet(Fact, frozen=True):
    """A rank's client of NVRx's has set limits, which this node goes by already: they are the job's from now on."""

    attempt: int
    rank: int
    change: LimitsChange


class WorkloadControl(Fact, frozen=True):
    """What a rank wants to follow once this attempt has failed. `action`: `continue`; `exclude`: its node takes no part in the
    next attempt; `shutdown`: there is none."""

    attempt: int
    rank: int
    action: str
    description: str = ""


class DeviceUsed(Fact, frozen=True):
    """The device that a rank really uses, as the rank itself found out."""

    attempt: int
    rank: int
    uuid: str


class CaseReported(Fact, frozen=True):
    """A rank's report of a rerun case. `RankCase` of the rank is answered with `CaseStored` once this is acknowledged."""

    attempt: int
    rank: int
    report: CaseReport


class MetricsReported(Fact, frozen=True):
    """Numbers of the training of one kind (`METRIC_KINDS`) since the last such fact of that rank, by the series' names. Only
    for a supervisor whose `Welcome` says that it takes them."""

    attempt: int
    rank: int
    kind: str
    series: dict[str, list[MetricBin]]
    entry: int = 0
    """Of that rank into its training function (`EntryBegun`), 0: without in-process restart. With a reserve another rank may
    tell a series from the next entry on."""


class StragglersReported(Fact, frozen=True):
    """A report on stragglers, told by one rank. For whom: as `MetricsReported`."""

    attempt: int
    rank: int
    report: StragglerReport


class HealthReading(Struct, frozen=True):
    """Something that was read off a device: `code` names it, for Xid events the number.

    `source`: `xid`, `ecc`, `remap`, `recovery-action`, `throttle`, `link`, `unreadable`, `test`. `count`: of `ecc`, `remap` and
    `link` the device's own total; of `xid` how many more since the last fact; else 1. `detail`: the raw line, at most 4 KiB.
    """

    device: str
    source: str
    code: str
    count: int = 1
    detail: str = ""


class HealthSeen(Fact, frozen=True):
    """What NVML and the kernel's log said of this node's devices since the last such fact: only what is new or has changed."""

    readings: list[HealthReading]
    boot_id: str = ""


class SignalReceived(Fact, frozen=True):
    """The launcher on this node was told to stop; it has passed the signal on to its ranks.
    `grace_s`: what they have from then on; 0: it does not say."""

    signal: int
    grace_s: float = 0.0


class RequestDone(Fact, frozen=True):
    """A `SaveCheckpoint` or `StopTraining` was taken up by this node's ranks, or could not be (`message` says why)."""

    request_id: str
    done: bool
    message: str = ""


class Note(Fact, frozen=True):
    """Something worth a line in the job's story: lost log bytes, a missing tool, a cut-off spell."""

    level: str
    text: str
    rank: int | None = None
    num_standbys: int | None = None
    """How many warm standbys wait on the node since then; None: the note is about something else."""
    standby_bytes: int = 0
    """Memory of all of them."""


class NodeLost(Fact, frozen=True):
    """The scheduler has given up a node of the job that does not answer (`Order.silent`): nothing of the job goes on there."""

    node: str
    reason: str


class AgentGone(Fact, frozen=True):
    """Sent in a dead agent's name by its keeper: agent and ranks are known dead, every process of the attempt is reaped."""

    reason: str


AnyFact = (
    StoreBound
    | StartFailed
    | AttemptStarted
    | RankExited
    | RanksGone
    | RankOverdue
    | StacksTaken
    | SectionsObserved
    | CheckpointCommitted
    | ResumedFrom
    | EntryBegun
    | RankFaulted
    | SaveSeen
    | RankLeaves
    | LimitsLoaded
    | LimitsSet
    | WorkloadControl
    | DeviceUsed
    | CaseReported
    | MetricsReported
    | StragglersReported
    | HealthSeen
    | SignalReceived
    | RequestDone
    | Note
    | NodeLost
    | AgentGone
)


class OpenSection(Struct, frozen=True, array_like=True):
    name: str
    age_s: float


class RankBeat(Struct, frozen=True, array_like=True):
    """Snapshot of one rank's slot of the board. Ages in seconds on the node's monotonic clock, -1: never."""

    rank: int
    pid: int
    iteration: int
    beat_age_s: float
    main_beat_age_s: float
    open_sections: list[OpenSection] = []
    phase: str = ""


class RunningAttempt(Struct, frozen=True):
    """What `StartAttempt` told an agent of the attempt that it runs: for a supervisor whose store does not know it."""

    first_rank: int
    group_rank: int
    world_size: int
    num_nodes: int


class Hello(Struct, frozen=True, tag=True):
    """First message of an agent, and again after every reconnect."""

    speaks: tuple[int, int]
    release: str
    agent: AgentInfo
    spec: JobSpec
    epoch: int = 0
    attempt: int = 0
    """The attempt whose ranks this agent is running, 0: none."""
    job_id: str = ""
    """The job that the last `Welcome` named, empty before the first: with `run` it finds a job that has ended since, or names
    one that the supervisor has forgotten."""
    run: int = 0
    credential: str = ""
    """Over TCP, who this agent is: `bearer TOKEN` (with a key only) or `munge CREDENTIAL`; empty where it has neither."""
    running: RunningAttempt | None = None
    """More about `attempt`."""


class Report(Struct, frozen=True, tag=True):
    """Facts `first_sequence`, `first_sequence + 1`, ...; without facts it is the agent's sign of life, sent every second."""

    agent_id: str
    epoch: int
    acked_command: int
    first_sequence: int = 0
    facts: list[AnyFact] = []
    beats: list[RankBeat] = []


class Bye(Struct, frozen=True, tag=True):
    """The agent has performed `EndJob` (or never got a job) and goes."""

    agent_id: str


ToSupervisor = Hello | Report | Bye


# ----------------------------------------------------------------------------------------------- supervisor: commands


class Command(Struct, frozen=True, tag=True):
    """Something an agent must do, once. `reason` is a sentence for the person on call."""

    sequence: int
    reason: str


class HostStore(Command, frozen=True):
    """Bind this attempt's TCPStore on this node (`port` 0: any); answer `StoreBound`."""

    attempt: int
    port: int = 0


class AvoidedDevice(Struct, frozen=True):
    """A device that is to be avoided. `device` is its UUID, `reason` a sentence for people.

    `rank` None: by every rank; suspects come last, `quarantined` ones stay out, where others suffice. Else only that global
    rank must not run there again, nor at `ordinal` (-1: any), since Megatron-LM tells devices apart by ordinal.
    """

    device: str
    reason: str
    quarantined: bool = False
    rank: int | None = None
    ordinal: int = -1


class PhaseStart(Struct, frozen=True):
    """The phase that an attempt is in: `number` (0: the first) of `count`, of `JobSpec.phases`.

    `iteration_offset` and `sample_offset`: what the job had done and consumed where the phase begins (-1: not known).
    `until_iteration`: where it ends, 0: with the training.
    """

    number: int
    count: int
    name: str = ""
    iteration_offset: int = 0
    sample_offset: int = -1
    until_iteration: int = 0


class StartAttempt(Command, frozen=True):
    """Start this node's ranks: global ranks `first_rank` .. `first_rank + num_ranks - 1`. `epoch` is the attempt's."""

    attempt: int
    epoch: int
    first_rank: int
    num_ranks: int
    world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    job_id: str
    run: int
    max_restarts: int
    limits: Limits = Limits()
    avoid: list[AvoidedDevice] = []
    """Devices of this node to be avoided."""
    first_role_rank: int = 0
    role_world_size: int = 0
    """This node's ranks among those of its role, and how many have it. 0: all ranks have one role."""
    restarts_spent: int = -1
    """Restarts that count, so far; -1: every attempt but the first was one."""
    phase: PhaseStart | None = None
    save_s: float = 0.0
    """How long the job's newest durable save took, 0: none did."""
    switches: dict[str, bool] = {}
    """As in `SetLimits`."""


class StopAttempt(Command, frozen=True):
    """End this node's ranks of the attempt: SIGTERM, SIGKILL after `grace_s` (at once if 0); answer `RanksGone`.
    `stacks_within_s`: before SIGTERM take stacks, at most so long, and tell them by `StacksTaken`; 0: do not."""

    attempt: int
    grace_s: float
    stacks_within_s: float = 0.0


class RestartInProcess(Command, frozen=True):
    """Ranks of the attempt leave their training function and enter it again, in their processes.

    `failed`: global ranks that had a fault, in that `entry` (0: whichever is theirs). `gone`: those of them whose process is
    dead, and `deaths` which process of the rank in this attempt that was (1: the first). `replace`: ranks of this node among
    `gone` for which the agent starts a new process that joins the attempt, after what the dead ones left behind is killed; it
    finds its number among `deaths` in `RSUP_JOIN`.
    """

    attempt: int
    failed: list[int]
    gone: list[int] = []
    replace: list[int] = []
    deaths: list[int] = []
    entry: int = 0


class EndRanks(Command, frozen=True):
    """Kill (SIGKILL) these global ranks of this node, whose processes are stuck. The others go on; deaths are reported."""

    attempt: int
    ranks: list[int]


class TakeStacks(Command, frozen=True):
    """Take the stacks of all local ranks within `within_s`, killing nothing; answer `StacksTaken`."""

    attempt: int
    within_s: float = 10.0


class SaveCheckpoint(Command, frozen=True):
    """Ask the ranks for a checkpoint at their next common iteration; answer `RequestDone`."""

    request_id: str


class StopTraining(Command, frozen=True):
    """Ask the ranks to save and leave; ranks that do not use rsup.worker get SIGTERM; answer `RequestDone`."""

    request_id: str
    grace_s: float


class SetLimits(Command, frozen=True):
    """What holds in the running attempt from now on; handed to the ranks too, which keep the limits with the checkpoint."""

    limits: Limits
    switches: dict[str, bool] = {}
    """What was switched on or off (`SWITCHES`) while the job ran; names that are not there are as the script has them."""


class Park(Command, frozen=True):
    """This node is a spare: wait, without ranks, for `StartAttempt` or `EndJob`."""


class EndJob(Command, frozen=True):
    """The job is over: write the result file, print the report lines, exit with the result's code."""

    result: JobResult
    report: str = ""
    """Text for the terminal: what failed, where, why; empty after success."""


AnyCommand = (
    HostStore
    | StartAttempt
    | StopAttempt
    | RestartInProcess
    | EndRanks
    | TakeStacks
    | SaveCheckpoint
    | StopTraining
    | SetLimits
    | Park
    | EndJob
)


class SupervisorInfo(Struct, frozen=True):
    """Where a supervisor is. `instance` is new for each process; `rest` is the page's address, empty when there is none."""

    instance: str
    pid: int
    host: str
    embedded: bool
    rest: str = ""
    store: str = ""
    """The database, for people to read (no password)."""
    store_id: str = ""
    """The store's own random id, empty if it has none: the same store may be named in several ways."""
    notice: str = ""
    """What is not as usual with this supervisor, for the launch's terminal: one sentence, empty where nothing is."""


class Welcome(Struct, frozen=True, tag=True):
    """Answer to `Hello`. `acked_fact`: the last fact of this agent that is committed (0 for a new agent)."""

    speaks: tuple[int, int]
    release: str
    supervisor: SupervisorInfo
    job_id: str
    run: int
    epoch: int
    acked_fact: int
    secret_identities: bool = False
    """The connection need not be named after the agent's id."""
    takes_metrics: bool = False
    """It knows `MetricsReported` and `StragglersReported`, which an older one would call unknown one by one."""


class Refusal(Struct, frozen=True, tag=True):
    """Answer to `Hello`: the agent prints `message` (one line) and exits with `exit_code`."""

    exit_code: int
    message: str
    elsewhere: bool = False
    """Another job's supervisor has answered by chance: the agent has other addresses to try."""


class StandsBy(Struct, frozen=True, tag=True):
    """Answer to `Hello` or `Report` of a supervisor that does not decide: another one leads, or it cannot tell whether it still
    does. The agent tries its other addresses, and asks again. An agent of a release without this message drops it, and goes on
    as if nothing had answered."""

    leader: str = ""
    """Where the leader answers other hosts, empty if unknown."""
    instance: str = ""
    """The leader's, as in `SupervisorInfo`."""
    message: str = ""
    """Why, for people."""


class Order(Struct, frozen=True, tag=True):
    """Commands `commands[i].sequence`, and the last fact of the agent that is committed."""

    agent_id: str
    epoch: int
    acked_fact: int
    commands: list[AnyCommand] = []
    notices: list[str] = []
    """Sentences for the launch's terminal, said once and not acknowledged: what the job's story has too."""
    silent: list[str] = []
    """Nodes of the job that do not answer, for the one agent that may ask the scheduler about them. An agent of a supervisor
    that sends none says no `NodeLost`."""


ToAgent = Welcome | Refusal | StandsBy | Order


# ------------------------------------------------------------------------------------------------------ rank <-> agent


class RankHello(Struct, frozen=True, tag=True):
    """First packet of a rank: who it is; `device_uuid` of the device in use, empty while unknown."""

    rank: int
    attempt: int
    pid: int
    device_uuid: str = ""
    takes_requests: bool = False
    """The training loop polls for checkpoint and stop requests."""


class RankCheckpoint(Struct, frozen=True, tag=True):
    """This rank committed a durable checkpoint."""

    iteration: int
    path: str
    duration_s: float = 0.0


class RankResumed(Struct, frozen=True, tag=True):
    """Training goes on from a checkpoint of `iteration`; `limits`: those kept with it, None where there were none.

    `durable`: as in `ResumedFrom`.
    """

    iteration: int
    path: str
    limits: Limits | None = None
    durable: bool = True


class RankDeclares(Struct, frozen=True, tag=True):
    """The exit code that this rank is about to use on purpose, and why."""

    exit_code: int
    reason: str


class RankRequestDone(Struct, frozen=True, tag=True):
    """The loop has taken up `request_id`; not `done`: it could not do what was asked, and `message` says why."""

    request_id: str
    iteration: int
    done: bool = True
    message: str = ""


class RankNote(Struct, frozen=True, tag=True):
    level: str
    text: str


class RankEntered(Struct, frozen=True, tag=True):
    """As `EntryBegun`."""

    entry: int
    joined: bool = False
    took_s: float = 0.0
    reserves: int = 0


class RankFault(Struct, frozen=True, tag=True):
    """As `RankFaulted`."""

    entry: int
    kind: str
    text: str
    traceback: str = ""
    signature: str = ""
    iteration: int = 0
    victim: bool = False


class RankSave(Struct, frozen=True, tag=True):
    """As `SaveSeen`."""

    iteration: int
    stage: str
    path: str = ""
    stall_s: float = 0.0
    text: str = ""


class RankLeaving(Struct, frozen=True, tag=True):
    """As `RankLeaves`."""

    iteration: int
    kind: str
    reason: str
    durable: bool
    consumed_samples: int = 0
    phase: int = 0


class RankCase(Struct, frozen=True, tag=True):
    """A report of a rerun case; answered with `CaseStored`."""

    report: CaseReport


class RankMetrics(Struct, frozen=True, tag=True):
    """As `MetricsReported`."""

    kind: str
    series: dict[str, list[MetricBin]]
    entry: int = 0


class RankStragglers(Struct, frozen=True, tag=True):
    """As `StragglersReported`."""

    report: StragglerReport


class RankSetsLimits(Struct, frozen=True, tag=True):
    """As `LimitsSet`. Like `RankControls` it comes through the node's NVRx server."""

    change: LimitsChange


class RankControls(Struct, frozen=True, tag=True):
    """As `WorkloadControl`."""

    action: str
    description: str = ""


RankToAgent = (
    RankHello
    | RankCheckpoint
    | RankResumed
    | RankDeclares
    | RankRequestDone
    | RankNote
    | RankEntered
    | RankFault
    | RankSave
    | RankLeaving
    | RankCase
    | RankMetrics
    | RankStragglers
    | RankSetsLimits
    | RankControls
)


class SaveNow(Struct, frozen=True, tag=True):
    """Save at the next iteration that all ranks agree on; `leave`: and then exit 0."""

    request_id: str
    leave: bool = False


class LimitsNow(Struct, frozen=True, tag=True):
    """The limits in force, for `ft_state.json` beside the checkpoint."""

    limits: Limits


class SwitchesNow(Struct, frozen=True, tag=True):
    """What people have switched on or off, by the names of `SWITCHES`: told at a rank's hello, and at each change."""

    switches: dict[str, bool]


class CaseStored(Struct, frozen=True, tag=True):
    """The rank's report of that case is kept durably: by the supervisor, or, where that does not answer in time, in the agent's
    spool. `verdict` is the stored report's."""

    case_id: str
    verdict: str = ""


class PeersFailed(Struct, frozen=True, tag=True):
    """Other ranks of the attempt have failed: leave the training function and enter it again. `failed`, `gone`, `deaths` and
    `entry` are those of `RestartInProcess`. Ranks without in-process restart ignore it."""

    failed: list[int]
    gone: list[int]
    reason: str
    deaths: list[int] = []
    entry: int = 0


AgentToRank = SaveNow | LimitsNow | SwitchesNow | CaseStored | PeersFailed


# ----------------------------------------------------------------------------------------------------------- encoding

_encoder = msgspec.msgpack.Encoder()
_to_supervisor = msgspec.msgpack.Decoder(ToSupervisor)
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_rank_to_agent = msgspec.msgpack.Decoder(RankToAgent)
_agent_to_rank = msgspec.msgpack.Decoder(AgentToRank)


def encode(message: Struct) -> bytes:
    """Bytes of any message of this file."""
    return _encoder.encode(message)


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes, limit_bytes: int) -> Any:
    if len(data) > limit_bytes:
        raise MessageError(f"message of {len(data)} bytes, more than the {limit_bytes} allowed")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a message of this link ({len(data)} bytes): {error}") from None


def decode_to_supervisor(data: bytes) -> ToSupervisor:
    """Raise `MessageError` for anything but a `ToSupervisor` message."""
    message: ToSupervisor = _decode(_to_supervisor, data, MAX_MESSAGE_BYTES)
    return message


def decode_to_agent(data: bytes) -> ToAgent:
    """Raise `MessageError` for anything but a `ToAgent` message."""
    message: ToAgent = _decode(_to_agent, data, MAX_MESSAGE_BYTES)
    return message


def decode_rank_to_agent(data: bytes) -> RankToAgent:
    """Raise `MessageError` for anything but a `RankToAgent` message."""
    message: RankToAgent = _decode(_rank_to_agent, data, MAX_RANK_MESSAGE_BYTES)
    return message


def decode_agent_to_rank(data: bytes) -> AgentToRank:
    """Raise `MessageError` for anything but an `AgentToRank` message."""
    message: AgentToRank = _decode(_agent_to_rank, data, MAX_RANK_MESSAGE_BYTES)
    return message


def common_version(theirs: tuple[int, int]) -> int | None:
    """The newest wire version that both sides speak, None if there is none."""
    newest = min(WIRE_VERSION, theirs[1])
    return newest if newest >= max(OLDEST_WIRE_VERSION, theirs[0]) else None


def clip(text: str, limit_chars: int = MAX_TEXT_CHARS) -> str:
    """`text`, or its end with a mark where it is longer than a message may carry."""
    return text if len(text) <= limit_chars else "[... cut ...]\n" + text[-limit_chars:]
