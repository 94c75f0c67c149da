"""The clock of every duration that the loop judges: time in which it listened to its agents. Pure.

An agent whose report waits unread is not silent; it was this process that did not listen: too much to do, stopped, starved of
processor time, or waiting for its store. So the clock follows the machine's as long as all that has come was read at least
every `MAX_TURN_S`, and stands still otherwise. Silence, and the deadlines of a job's phases, are measured with it: whatever
keeps the loop away shortens nobody's time, and who does not answer is found once the loop keeps up again.
"""

MAX_TURN_S = 2.0
"""The longest time between two looks at the links that counts. Longer than a calm loop sleeps (1 s)."""


class Listening:
    """Seconds that never jump, from `now_s` on. Times given are the machine's monotonic seconds."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._counted_s = now_s
        self._told_s = now_s
        self._is_followed = False

    def look(self, now_s: float, *, has_read_all: bool) -> None:
        """The links were read just now. `has_read_all`: no message that had come was left."""
        if has_read_all:
            self._counted_s = max(self._counted_s + min(now_s - self._looked_s, MAX_TURN_S), self._told_s)
        self._looked_s, self._is_followed = now_s, True

    def now_s(self, now_s: float) -> float:
        """The time to judge by. Where nobody ever calls `look` (every message is handed in when it comes), the machine's."""
        passed_s = now_s - self._looked_s
        if self._is_followed:
            passed_s = min(passed_s, MAX_TURN_S)
        self._told_s = max(self._told_s, self._counted_s + passed_s)
        return self._told_s
