"""What speaks about a device or node, as whoever saw it tells it; the hardware's history weighs it. Data only."""

from msgspec import Struct

from rsup.supervisor.records import JobKey

FOLLOWED_RANK = "followed-rank"
"""Code of a verdict that takes an earlier one of its case (`case_id`) back to a suspicion."""


class Evidence(Struct, frozen=True, kw_only=True):
    """One sighting. Fields as in `records.EvidenceSaved`; the history adds count, weight, effect and rule."""

    kind: str
    """`device` or `node`."""
    subject: str
    source: str
    code: str
    episode: str
    """Independent sightings have different ones: `boot:ID` for what a driver says, `job:KEY` for what a job's ranks found."""
    at_us: int
    text: str
    count: int = 1
    """Of a total that the source keeps since the episode began; else how many this sighting stands for."""
    is_total: bool = False
    """`count` replaces the count before instead of adding to it."""
    serial: str = ""
    node: str = ""
    job: JobKey | None = None
    attempt: int = 0
    rank: int | None = None
    iteration: int = 0
    case_id: str = ""
    principal: str = ""
    injected: bool = False
    is_held: bool = True
    """The job that tells it holds the device, as far as the supervisor knows; else it is recorded and moves no state."""
    share: float = 1.0
    """1 of n where it points to a group of n of which one member is at fault."""
