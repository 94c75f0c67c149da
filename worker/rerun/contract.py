"""The words and data that the parts of the rerun machine share. No behaviour."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rsup.supervisor.wire import RsupError, UsageError

EXIT_ELSEWHERE = 16
EXIT_FAILED = 17


class RerunError(RsupError):
    """The training loop uses the rerun machine in a way that cannot work; the text says what to change."""


class RerunMode(StrEnum):
    """What the machine does with an iteration. `report_stats` is an alias of `report_determinism_stats`."""

    DISABLED = "disabled"
    """Replays nothing; a fatal rejection raises, another one warns."""
    VALIDATE_RESULTS = "validate_results"
    """A rejected iteration is replayed and attributed."""
    REPORT_DETERMINISM_STATS = "report_determinism_stats"
    """Every iteration runs twice, and the differences are counted."""
    AUDIT = "audit"
    """`validate_results`, and every N-th healthy iteration runs once more on the next device."""


RERUN_MODES = (*(mode.value for mode in RerunMode), "report_stats")


def rerun_mode(text: str) -> RerunMode:
    """The mode of that name. Raise `UsageError` for another."""
    try:
        return RerunMode.REPORT_DETERMINISM_STATS if text == "report_stats" else RerunMode(text)
    except ValueError:
        raise UsageError(f"unknown rerun mode {text!r}; use one of {', '.join(RERUN_MODES)}") from None


class RerunState(StrEnum):
    """Where an iteration is. The first six are the seed's."""

    NOT_RUNNING_YET = "not_running_yet"
    """Between iterations."""
    INITIAL_RUN = "initial_run"
    RERUNNING_IN_PLACE = "rerunning_in_place"
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    """Ended for a replay on another device; what a checkpoint of such a moment says."""
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    RERUNNING_AGAIN_FROM_CHECKPOINT = "rerunning_again_from_checkpoint"
    """The replay was on a device that had been tried: ended again."""
    RERUNNING_ROTATED = "rerunning_rotated"
    """Each rank computes the data of the one before it along the data-parallel axis."""
    RERUNNING_TO_CONFIRM = "rerunning_to_confirm"
    """Once more in place, before a device is accused of a fault that shows for some data only."""


class Rejection(StrEnum):
    """Names of tracker lines; those of the seed, and ours."""

    RERUN_DISABLED = "RERUN_DISABLED"
    INITIAL_RUN = "INITIAL_RUN"
    FIRST_RERUN_NOT_REPRODUCIBLE = "FIRST_RERUN_NOT_REPRODUCIBLE"
    FIRST_RERUN_REPRODUCIBLE = "FIRST_RERUN_REPRODUCIBLE"
    SECOND_RERUN_NOT_REPRODUCIBLE = "SECOND_RERUN_NOT_REPRODUCIBLE"
    SECOND_RERUN_REPRODUCIBLE = "SECOND_RERUN_REPRODUCIBLE"
    SAME_DEVICE_AGAIN = "SAME_DEVICE_AGAIN"
    NOT_REACHED = "NOT_REACHED"
    VERDICT = "VERDICT"


Compare = Callable[[float, float], float]
"""0 where two values are the same, more the less they are; see `values.difference`."""


class Exit(NamedTuple):
    """Answer of `should_checkpoint_and_exit`, in the seed's order."""

    should_checkpoint: bool
    should_exit: bool
    exit_code: int


@dataclass(frozen=True)
class Checked:
    """One value of one pass on one rank."""

    check: str
    """The message; from the second call of a pass on with its number, `message #2`."""
    value: float
    rejected: bool = False
    fatal: bool = True
    tolerance: float = 0.0
    compare: Compare | None = None


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank, and what must be alike for two devices to be comparable."""

    uuid: str
    node: str = ""
    model: str = ""
    vbios: str = ""
    driver: str = ""

    @property
    def likeness(self) -> tuple[str, str, str]:
        """Devices with equal ones can be expected to compute the same."""
        return self.model, self.vbios, self.driver


@dataclass(frozen=True)
class RankFinding:
    """What a rank found in its own replay in place; gathered over all ranks, so each has the same list."""

    rank: int
    device: RankDevice
    flagged: tuple[str, ...] = ()
    """Fatal checks of it that failed and came out the same again."""
    num_batches: tuple[int, ...] = ()
    """Batches taken in the iteration, by iterator."""


@dataclass(frozen=True)
class RotatedOutcome:
    """What became of rank `rank`'s data on another device, `ran_on` being the rank there; gathered over all ranks."""

    rank: int
    ran_on: int
    same: bool
    """Every flagged value of the data's own rank came out the same there (for a rank without: every value)."""
    rejected_there: bool
    """A fatal check rejects what came out there."""
    complete: bool = True
    """The pass there made the same checks."""
    values: dict[str, float] = field(default_factory=dict)
    """What came out there, of the flagged checks."""
    unmoved: bool = False
    """This rank computed another one's data and got its own values, all to the bit: what it computes did not change."""


@dataclass(frozen=True)
class Judgement:
    """What a replay elsewhere proves. `accused`: global ranks whose devices it points to."""

    verdict: str
    """One of `wire.VERDICTS`."""
    reason: str
    accused: tuple[int, ...] = ()
    data_dependent: bool = False
    """Then one more replay in place must reproduce before it counts."""
    suspect_of: int = 1
    another_placement_may_decide: bool = False
    """Of `undecided`: a replay on yet another device could."""


class Drawn(NamedTuple):
    """A batch whose source drew from the process's own generators while it made it. Playing it again sets them to `rng`: the
    states after the draw of those that it changed."""

    batch: Any
    rng: bytes


@dataclass(frozen=True)
class Payload:
    """A rank's iteration, to be computed elsewhere: batches by iterator (None: it has no such iterator), generators' states
    before the iteration. What a batch left in them when it was drawn is with the batch (`Drawn`)."""

    batches: list[list[Any] | None]
    rng: bytes


@dataclass(frozen=True)
class RerunConfig:
    """What the user chose; the seed's flags have the same names."""

    mode: RerunMode = RerunMode.VALIDATE_RESULTS
    error_injection_rate: int = 0
    """Inject an error about once in so many checks; 0: never."""
    error_injection_type: str = "transient_error"
    """`correct_result`, `transient_error`, `persistent_error`."""
    check_for_nan_in_loss_and_grad: bool = True
    check_for_spiky_loss: bool = False
    check_for_large_grads: bool = False
    result_rejected_tracker_filename: str | None = None
    on_transient: str = "continue"
    """`continue` with the replay's gradients, or `restart`: leave with 17 without a checkpoint."""
    on_application: str = "exit"
    """`exit` with 17, or `skip` the iteration on all ranks."""
    rotate: bool = True
    can_checkpoint: bool = True
    """The loop saves when `should_checkpoint_and_exit` asks for it; else a case for another device ends undecided."""
    audit_interval: int = 0
    loss_tolerance: float = 0.0
    grad_tolerance: float = 0.001
    stored_within_s: float = 10.0
    """How long a verdict may take to be stored before it is acted on without."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", rerun_mode(self.mode))  # its plain name will do


INJECTION_TYPES = ("correct_result", "transient_error", "persistent_error")
ON_TRANSIENT = ("continue", "restart")
ON_APPLICATION = ("exit", "skip")
