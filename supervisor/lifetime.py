"""When an embedded supervisor ends: some time after its last job, and never while one lives. Pure; told what it sees.

A job keeps it alive even with no agent in sight: agents of other nodes may be cut off, and come back. Only a job whose agents
all ran on this host and are dead for sure is nobody's any more: it is to be ended, with its agents taken for gone. Dead for
sure is an agent of an earlier boot of this host, at once; and one of this boot when neither it nor any process of its ranks
exists and its keeper, which would speak for it, has had `ABANDONED_AFTER_S` to do so (agents and keepers killed together).
"""

from collections.abc import Iterable
from dataclasses import dataclass

ABANDONED_AFTER_S = 20.0


@dataclass(frozen=True)
class AgentSeen:
    """What is known of an agent of a live job. `process_alive`: of it or its ranks; None: cannot be known, since it is on
    another host or in another container, or processes there cannot be looked at. `rebooted`: its host, which is this one, has
    been started anew since."""

    agent_id: str
    silent_s: float
    process_alive: bool | None
    rebooted: bool = False

    @property
    def is_dead(self) -> bool:
        """Whether nothing of it can ever be heard again."""
        return self.rebooted or (self.process_alive is False and self.silent_s >= ABANDONED_AFTER_S)


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
    return [agent.agent_id for agent in seen] if all(agent.is_dead for agent in seen) else []
