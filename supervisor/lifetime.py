"""When an embedded supervisor ends: some time after its last job, and never while one lives. Pure; told what it sees.

A job keeps it alive even with no agent in sight: agents of other nodes may be cut off, and come back. Only a job whose agents
all ran on this host, are known dead by their processes, and have been silent for `ABANDONED_AFTER_S`, is nobody's any more
(agents and keepers killed together): it is to be ended, with its agents taken for gone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

ABANDONED_AFTER_S = 3600.0


@dataclass(frozen=True)
class AgentSeen:
    """What is known of an agent of a live job. `process_alive` None: cannot be known, since it is on another host."""

    agent_id: str
    silent_s: float
    process_alive: bool | None


class Lifetime:
    """Decides when to exit. `idle_exit_s` None: never. Times are monotonic seconds."""

    def __init__(self, idle_exit_s: float | None, now_s: float) -> None:
        self._idle_exit_s = idle_exit_s
        self._idle_since_s = now_s

    def is_over(self, now_s: float, num_live_jobs: int, num_agents: int) -> bool:
        """Whether to exit now. `num_agents`: agents connected, also those that only wait for their job's end."""
        if num_live_jobs or num_agents:
            self._idle_since_s = now_s
            return False
        return self._idle_exit_s is not None and now_s - self._idle_since_s >= self._idle_exit_s


def abandoned(agents: Iterable[AgentSeen]) -> list[str]:
    """Agents of one job to be taken for gone: all of them, or none."""
    seen = list(agents)
    gone = all(agent.process_alive is False and agent.silent_s >= ABANDONED_AFTER_S for agent in seen)
    return [agent.agent_id for agent in seen] if gone else []
