"""What the supervisor writes down: one frozen record a row, committed in one transaction with the state that it follows from.

Data only. `store.Store.commit` takes a list of these; the core makes most of them, the shell adds snapshots. Each record is
an upsert by its natural key, but for `EventLogged`, which only appends; committing the same record twice changes nothing.
Times are UTC microseconds. The owner of the columns is `tables`, of their meaning this file.
"""

from msgspec import Struct

from rsup.supervisor.wire import MetricBin

GIVEN_UP = "given up before anything ran"
"""How the reason of such an end begins."""


class JobKey(Struct, frozen=True, order=True):
    """Names one run of a job. `run` counts from 1 per (cluster, owner, id)."""

    cluster: str
    owner: str
    job_id: str
    run: int

    def __str__(self) -> str:
        return f"{self.job_id}.{self.run}" if self.run > 1 else self.job_id


class JobSaved(Struct, frozen=True, tag=True):
    """The job's row and the whole state of its machine. `state` is read back only by the core's `states.decode`."""

    job: JobKey
    state: bytes
    phase: str
    """`forming`, `starting`, `running`, `stopping`, `waiting`, `ended`: see `states.Phase`."""
    epoch: int
    attempt: int
    created_us: int
    updated_us: int
    ended_us: int | None = None
    exit_code: int | None = None
    reason: str = ""
    command: str = ""
    num_nodes: int = 0
    num_ranks: int = 0
    iteration: int = 0
    injected: bool = False


class EventLogged(Struct, frozen=True, tag=True):
    """One line of the job's story. `number` counts from 1 per job without gaps, so a replayed commit cannot double it."""

    job: JobKey
    number: int
    at_us: int
    """When it happened, by the clock of whoever saw it."""
    recorded_us: int
    kind: str
    """Name of the fact, command or decision: `RankExited`, `StartAttempt`, `JobEnded`, ..."""
    text: str
    """The sentence a person reads."""
    level: str = "info"
    """`info`, `warning`, `error`."""
    attempt: int = 0
    rank: int | None = None
    node: str = ""
    principal: str = ""
    """Who asked for it, where a person or a program did."""
    data: dict[str, object] = {}


class AttemptSaved(Struct, frozen=True, tag=True):
    job: JobKey
    attempt: int
    epoch: int
    started_us: int
    stopped_us: int | None = None
    first_step_us: int | None = None
    """When every rank had done its first iteration."""
    world_size: int = 0
    nodes: list[str] = []
    outcome: str = "running"
    """`running`, `succeeded`, `failed`, `hung`, `stopped`, `lost`."""
    reason: str = ""
    start_iteration: int = 0
    last_iteration: int = 0


class RankSaved(Struct, frozen=True, tag=True):
    """One rank of one attempt."""

    job: JobKey
    attempt: int
    rank: int
    node: str
    pid: int = 0
    device: str = ""
    exit_code: int | None = None
    signal: int = 0
    reason: str = ""


class IncidentSaved(Struct, frozen=True, tag=True):
    """Something that went wrong: who, what, where, how it was found. `incident` counts from 1 per job."""

    job: JobKey
    incident: int
    attempt: int
    at_us: int
    """When it happened; of a hang: when the rank last got on."""
    kind: str
    """`exit`, `signal`, `hang`, `suspected-hang`, `agent-lost`, `start-failed`."""
    rank: int | None = None
    """First mover or likely culprit."""
    node: str = ""
    device: str = ""
    iteration: int = 0
    exit_code: int | None = None
    signal: int = 0
    signal_name: str = ""
    section: str = ""
    found_by: str = ""
    """How it was noticed: `exit of the process`, `limit of section step (3 s)`, ..."""
    text: str = ""
    victims: list[int] = []
    detected_us: int | None = None
    recovered_us: int | None = None
    """When every rank of the next attempt had stepped."""
    lost_iterations: int | None = None
    stacks: list[dict[str, object]] = []
    """`{"ranks": [0, 2], "source": "py-spy", "text": "..."}`, equal stacks once."""


class SectionSaved(Struct, frozen=True, tag=True):
    """A section's limit in force and what was observed."""

    job: JobKey
    section: str
    limit_s: float | None
    calculated: bool
    longest_s: float
    times: int


class CheckpointSaved(Struct, frozen=True, tag=True):
    job: JobKey
    attempt: int
    iteration: int
    path: str
    at_us: int
    duration_s: float = 0.0


class ResumeSaved(Struct, frozen=True, tag=True):
    """An attempt went on from that checkpoint, `iteration` iterations of which are done: what it makes descends from it."""

    job: JobKey
    attempt: int
    iteration: int
    path: str
    at_us: int


class NodeSeen(Struct, frozen=True, tag=True):
    """A node that took part in a job."""

    node: str
    at_us: int
    job: JobKey
    role: str
    """`active`, `spare`, `lost`, `gone`."""
    devices: list[str] = []


class DeviceSeen(Struct, frozen=True, tag=True):
    """A device on a node, and (with `rank`) which rank of which attempt used it."""

    uuid: str
    at_us: int
    node: str
    model: str = ""
    serial: str = ""
    board: str = ""
    pci_bus_id: str = ""
    vbios: str = ""
    driver: str = ""
    job: JobKey | None = None
    attempt: int = 0
    rank: int | None = None


class BeatsSaved(Struct, frozen=True, tag=True):
    """The latest snapshot of a job's ranks; only the newest is kept. Each entry: rank, node, iteration, beat_age_s,
    main_beat_age_s, open_sections [[name, age_s]], phase, pid."""

    job: JobKey
    at_us: int
    ranks: list[dict[str, object]]


class CaseSaved(Struct, frozen=True, tag=True):
    """A rerun case as last reported; the fields of `wire.CaseReport`. Once it has a verdict only its closing fields change."""

    job: JobKey
    case_id: str
    attempt: int
    """In which it was opened."""
    iteration: int
    opened_us: int
    fatal: bool
    findings: list[dict[str, object]]
    """`wire.CaseFinding` as dicts."""
    closed_us: int | None = None
    verdict: str = ""
    reason: str = ""
    action: str = ""
    data_dependent: bool = False
    accused: list[str] = []
    suspect_of: int = 1
    tried: dict[str, list[str]] = {}
    """Devices by rank (JSON has text keys)."""
    checkpoint: str = ""
    data_position: dict[str, int] = {}
    found_by: str = "check"
    injected: bool = False
    placements: list[dict[str, object]] = []
    """Where the iteration was sent to run again: `{"at_us", "attempt", "rank", "from", "to", "how"}`."""
    note: str = ""
    """What the supervisor adds: why the verdict does not count, or is taken back."""


class MetricsSaved(Struct, frozen=True, tag=True):
    """Numbers of the training of one kind, as a rank of an attempt told them: they are added to the job's series, and take the
    place of what lies behind their first iteration there (`metric_rows`)."""

    job: JobKey
    attempt: int
    rank: int
    kind: str
    """One of `wire.METRIC_KINDS`."""
    series: dict[str, list[MetricBin]]
    entry: int = 0
    """As in `wire.MetricsReported`."""


class StragglerSaved(Struct, frozen=True, tag=True):
    """A rank that held the others up over several reports in a row: an episode. `episode` counts from 1 per job."""

    job: JobKey
    episode: int
    attempt: int
    rank: int
    device: str
    node: str
    section: str
    """In which it was slowest."""
    from_us: int
    seen_us: int
    """When it was last slow."""
    first: int
    iteration: int
    """From which iteration to which."""
    num_reports: int
    slowdown: float
    """The highest of its reports."""
    individual: float
    """The lowest: below 1 it had been faster itself."""
    to_us: int | None = None
    """When it was seen to be over; None: it goes on, or the attempt ended with it."""
    cause: str = ""
    """One of `wire.STRAGGLER_CAUSES`."""
    text: str = ""
    """The last report's sentence about it."""
    verdict: str = ""
    """Whether it speaks against the device, and why or why not."""
    usual: float = 1.0
    """The median of all ranks' individual scores when its own was as in `individual`: below 1 all had been faster."""


class EvidenceSaved(Struct, frozen=True, tag=True):
    """A fact about a device or node that stays: one row a fingerprint, with how often it was seen. The first sighting's text
    and job stay; `count`, `last_us` and `effect` are written over with absolute values, so a repeated commit changes nothing.
    """

    kind: str
    """`device` or `node`."""
    subject: str
    """UUID under which the board's record is kept (a board with the same serial under another UUID continues it), or the
    node's name."""
    fingerprint: str
    """What makes two sightings the same: subject, source, code, episode (boot, or job and attempt); hex."""
    source: str
    """`verdict`, `hang`, `rank-lost`, `straggler`, `xid`, `ecc`, `remap`, `recovery-action`, `throttle`, `link`, `unreadable`,
    `test`, `person`, `devices` (a node's: independent devices of it)."""
    code: str
    episode: str
    """Independent ones count apart in the score: a boot, or a job's run."""
    first_us: int
    last_us: int
    recorded_us: int
    count: int = 1
    weight: float = 0.0
    """What the policy in force gave one episode of it."""
    serial: str = ""
    node: str = ""
    """Where the device sat."""
    job: JobKey | None = None
    attempt: int = 0
    rank: int | None = None
    iteration: int = 0
    case_id: str = ""
    text: str = ""
    """One sentence, and (after a newline) the raw line, at most 4 KiB."""
    principal: str = ""
    injected: bool = False
    effect: str = "counted"
    """`counted`, or why it moves no state: `inert: injected`, `refused: the job does not hold the device`, ..."""
    rule: str = ""
    """`POLICY/RULE`: names of the policy in force and of its rule that applied."""
    share: float = 1.0
    """1 of n where it points to a group of n of which one member is at fault."""


class SubjectSaved(Struct, frozen=True, tag=True):
    """The state of a device or node now. One row each; devices without a row are `clear`."""

    kind: str
    subject: str
    state: str
    """`clear`, `watch`, `suspect`, `quarantined`, `in_repair`, `probation`, `retired`."""
    since_us: int
    reason: str
    """One line, at most 120 characters, no quotes, `=` or newline: SLURM shows it."""
    version: int
    """Grows with each transition: who changes a device names the version seen, so that two people do not undo one another."""
    score: float = 0.0
    expires_us: int | None = None
    """Of suspicion, probation and overrides only."""
    serial: str = ""
    rule: str = ""
    clean_us: int = 0
    """Probation: run time without evidence so far."""
    override: str = ""
    """`allow` or `deny` where a person's word stands above the evidence, with `override_*`."""
    override_actor: str = ""
    override_reason: str = ""
    override_until_us: int | None = None
    ticket: str = ""
    held_by_test: bool = False
    """A passed test is missing for the way back."""
    settled_us: int = 0
    """Evidence up to then has been dealt with: by a release, or by clean run time. It counts as a first time no more."""
    may_drain: str = ""
    """Why the node may be drained for it (a second independent episode, a failed test, somebody's word), empty: it may not."""


class TransitionSaved(Struct, frozen=True, tag=True):
    """One change of a subject's state; append only, numbered by `version` of `SubjectSaved`."""

    kind: str
    subject: str
    version: int
    at_us: int
    before: str
    after: str
    reason: str
    principal: str = ""
    verb: str = ""
    """`quarantine`, `release`, ..., or `evidence`, `expiry`, `clean` where nobody asked."""
    rule: str = ""
    fingerprint: str = ""
    """The evidence that tipped it."""
    job: JobKey | None = None


class SeatSaved(Struct, frozen=True, tag=True):
    """Where a device sits: one row a stay. A board that is seen elsewhere closes one stay and opens another."""

    uuid: str
    from_us: int
    node: str
    pci_bus_id: str
    """Normalised: lower case, domain of eight digits."""
    serial: str = ""
    board: str = ""
    to_us: int | None = None
    seen_us: int = 0
    boot_id: str = ""


class DrainNoted(Struct, frozen=True, tag=True):
    """One thing that was done, seen or asked for about a node's place in the scheduler; append only. `slurm.node_log` says what
    a node's notes add up to."""

    node: str
    at_us: int
    what: str
    """One of `slurm.node_log.NOTES`."""
    number: int = 0
    """Of `admitted`: of the refusal, as people read it (`Q-17`); of `weighted`: the node's own weight."""
    reason: str = ""
    principal: str = ""
    """Who asked, empty for the supervisor."""


Record = (
    JobSaved
    | EventLogged
    | AttemptSaved
    | RankSaved
    | IncidentSaved
    | SectionSaved
    | CheckpointSaved
    | ResumeSaved
    | NodeSeen
    | DeviceSeen
    | BeatsSaved
    | CaseSaved
    | MetricsSaved
    | StragglerSaved
    | EvidenceSaved
    | SubjectSaved
    | TransitionSaved
    | SeatSaved
    | DrainNoted
)
