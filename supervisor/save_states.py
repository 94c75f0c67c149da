"""What is remembered of a job's saves. Part of `states`.

Local checkpoints may come every few seconds, so nothing here grows with their number: counters, and the newest of each kind.
"""

from msgspec import Struct

MAX_UNDER_WAY = 8
"""Saves that were begun and have not ended; an older one was given up by its ranks without a word."""
MAX_STALLS = 200
"""Attempts whose standing still is kept apart."""


class SaveNoted(Struct, frozen=True):
    """A save that is complete, or failed: `text` then says why."""

    attempt: int
    iteration: int
    at_us: int
    path: str = ""
    text: str = ""


class Saves(Struct, frozen=True, kw_only=True):
    """The saves of a job as far as its ranks tell of them."""

    under_way: dict[int, int] = {}
    """When each save that has not ended was begun, by its iteration; of `attempt` alone."""
    attempt: int = 0
    durable: SaveNoted | None = None
    local: SaveNoted | None = None
    """The newest non-persistent one that is complete. It may be gone with its node since."""
    failed: SaveNoted | None = None
    num_begun: int = 0
    num_durable: int = 0
    num_local: int = 0
    num_failed: int = 0
    stall_us: dict[int, int] = {}
    """How long training stood still for saves, by attempt; an attempt without an entry has not said."""
    logged_us: dict[str, int] = {}
    """When a line of the story was last written, by stage."""
    num_unlogged: dict[str, int] = {}
    """How many have had none since, by stage."""
