"""What is remembered of the ranks of one attempt: how they ended, and their in-process restarts. Part of `states`."""

from msgspec import Struct

from rsup.supervisor.records import IncidentSaved
from rsup.supervisor.wire import RejectedResult


class RankExit(Struct, frozen=True):
    """How a rank of the current attempt ended. `order` counts the exits of the attempt as they became known."""

    order: int
    exit_code: int
    at_us: int
    signal: int = 0
    by_us: str = ""
    iteration: int = 0
    section: str = ""
    error: str = ""
    log_tail: str = ""
    declared: int = 0
    declared_reason: str = ""
    rejected: list[RejectedResult] = []
    killer: str = ""


class OpenRestart(Struct, frozen=True, kw_only=True):
    """An in-process restart: ranks have left their training function, and not all of them have entered it again and got on."""

    since_us: int
    """When the first of its faults became known."""
    text: str
    """The fault that is behind it, as far as known."""
    kind: str
    """Of the failure that it becomes if it does not help, as in `IncidentSaved`."""
    incident: IncidentSaved
    entry: int
    """Which all ranks have to reach."""
    exit_code: int = 1
    error: str = ""
    weight: int = 0
    """As `failure.weight`: a lighter fault that becomes known later is the one behind it."""
    counted: int = 0
    """The last entry that a fault was counted for. One that ranks only left since they waited for another is not."""
    failed: list[int] = []
    exits: dict[int, RankExit] = {}
    """How processes of it ended, the last one of each rank."""
    replacing: list[int] = []
    """Ranks whose new process has not entered yet."""
    ending: list[int] = []
    """Ranks that hang and are to be killed: their death is awaited."""
    num_logged: int = 0
    told: bool = False
    """It has been said on the terminal what happened, and the fault behind it is still held to be the same."""
    deadline_s: float | None = None
    """Until when every rank has to have entered; None: all have."""
    latest_s: float = 0.0
    """Beyond that no further death moves the deadline."""
    entered_us: int = 0
    """When every rank had entered, 0: not yet."""
    seen: dict[int, int] = {}
    """Iteration that each rank's beats showed first since then."""
    stepped: list[int] = []
    resumed: int | None = None
    """From which iteration the ranks have gone on; None: they have not said."""


class InProcess(Struct, frozen=True, kw_only=True):
    """In-process restarts of the current attempt, and what their bounds have to remember."""

    entries: dict[int, int] = {}
    """The last entry into the training function that each living process has reported."""
    left: dict[int, int] = {}
    """The same of those that have ended with 0."""
    active: int = 0
    """How many ranks compute, 0: unknown. The others are reserves."""
    restartable: bool = False
    """Every rank of the attempt has reported an entry."""
    start_s: float = 0.0
    """How long it took the ranks of the attempt to enter first."""
    entered: int = 0
    """The highest entry that all ranks have reached."""
    deaths: dict[int, int] = {}
    """How many processes of each rank have died and were replaced, by a new one or a reserve."""
    num_retired: int = 0
    """Ranks of which a reserve has taken the place: their ends count as clean ones."""
    num_restarts: int = 0
    faults: list[str] = []
    """Signatures of the faults since the job last got further than ever, oldest first."""
    iteration: int = 0
    """Highest of the attempt at the last fault."""
    checkpoint: int = -1
    """Iteration of the newest durable checkpoint then."""
    fault_s: float = 0.0
    """When that was."""
    heard: list[int] = []
    """Ranks that have shown a sign of progress since stacks were last asked for."""
    open: OpenRestart | None = None
    given_up: str = ""
    """Why a restart of the processes follows all the same."""
    blamed: dict[int, RankExit] = {}
    """How processes ended whose restart was given up."""
