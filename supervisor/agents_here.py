"""What this host's processes say of a job's agents: whether they, or what their ranks left running, are still alive."""

import os
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.lifetime import ABANDONED_AFTER_S, AgentSeen
from rsup.supervisor.wire import AgentInfo

REBOOTED = "its host has been started anew since"
ALL_GONE = "its launcher, its keeper and its ranks are gone from this host, and nobody has spoken for them"


class ThisHost:
    """The host that this process runs on, in this boot."""

    def __init__(self) -> None:
        self.name = places.this_node()
        self._boot_id = places.boot_id()

    def look(self, agent: AgentInfo, silent_s: float) -> AgentSeen:
        """What can be seen of an agent that has been silent for so long (seconds)."""
        if agent.node != self.name or not agent.boot_id or not self._boot_id:
            return AgentSeen(agent.agent_id, silent_s, None)
        if agent.boot_id != self._boot_id:
            return AgentSeen(agent.agent_id, silent_s, process_alive=False, rebooted=True)
        heard = silent_s < ABANDONED_AFTER_S  # then there is no need to look through all processes
        alive = heard or is_running(agent.pid, agent.start_ticks) or has_marked_process(agent.agent_id)
        return AgentSeen(agent.agent_id, silent_s, alive)


def is_running(pid: int, start_ticks: int = 0) -> bool:
    """Whether that process exists, and is no mere entry that its parent has yet to take note of (zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and start_ticks in (0, int(fields[19]))


def has_marked_process(agent_id: str) -> bool:
    """Whether a process of that agent's ranks, descendants included, lives: they carry its id in their environment."""
    needle = b"RSUP_MARK=" + os.fsencode(agent_id)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (path / "environ").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False
