"""What a job's machine remembers of slow ranks: frozen data, kept in the job's state."""

from msgspec import Struct

from rsup.supervisor.records import StragglerSaved

OPEN_AFTER = 3
"""Reports in a row that make an episode, and that end one."""


class Streak(Struct, frozen=True):
    """Reports in a row in which a rank was, or was no more, among the stragglers."""

    rank: int
    device: str
    num_slow: int = 0
    num_fine: int = 0
    since_us: int = 0
    first: int = 0
    """The first iteration of its first slow report."""


class Stragglers(Struct, frozen=True):
    """Slow ranks of a job. Times of an attempt are of the one in `attempt`."""

    attempt: int = 0
    num_reports: int = 0
    """Of that attempt."""
    first: int = 0
    iteration: int = 0
    """The iterations of the newest of these: a report that is told again counts once."""
    streaks: list[Streak] = []
    """Ranks that were slow lately."""
    open: list[StragglerSaved] = []
    """Episodes under way."""
    past: list[StragglerSaved] = []
    """The latest that are over, of all attempts, oldest first."""
    num_episodes: int = 0
    num_by_rank: dict[int, int] = {}
    """Episodes of each rank, at most `straggler_machine.MAX_EPISODES_A_RANK`."""
    num_untold: int = 0
    """Episodes beyond what is kept of a rank or a job: only counted."""
    accused: list[int] = []
    """Of the open episodes those that have become evidence."""
    cleared: dict[str, int] = {}
    """Devices that ran as fast as others under another rank: episodes up to that number do not speak against them."""
