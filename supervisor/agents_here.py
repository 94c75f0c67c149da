"""What this host's processes say of a job's agents: whether they, or what their ranks left running, are still alive.

Nobody is called dead who may only be out of sight: processes of another pid namespace (a container has its host's name and
boot), processes whose environment we may not read (a daemon that runs as nobody's user), processes that `hidepid` hides.
"""

import contextlib
import os
import pwd
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.heartbeat_board import pid_namespace
from rsup.supervisor.lifetime import ABANDONED_AFTER_S, AgentSeen
from rsup.supervisor.wire import AgentInfo

REBOOTED = "its host has been started anew since"
ALL_GONE = "its launcher, its keeper and its ranks are gone from this host, and nobody has spoken for them"

_CAP_SYS_PTRACE = 1 << 19
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of include/linux/sched.h, in the `flags` of /proc/PID/stat (proc(5))."""


class ThisHost:
    """The host that this process runs on, in this boot."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.name = places.this_node()
        self._boot_id = places.boot_id()
        self._pid_namespace = pid_namespace()
        self._proc = proc

    def look(self, agent: AgentInfo, silent_s: float, owner: str = "") -> AgentSeen:
        """What can be seen of an agent that has been silent for so long (seconds), of a job of that user."""
        if agent.node != self.name or not agent.boot_id or not self._boot_id:
            return AgentSeen(agent.agent_id, silent_s, None)
        if agent.boot_id != self._boot_id:
            return AgentSeen(agent.agent_id, silent_s, process_alive=False, rebooted=True)
        if silent_s < ABANDONED_AFTER_S:  # then there is no need to look through all processes
            return AgentSeen(agent.agent_id, silent_s, process_alive=True)
        return AgentSeen(agent.agent_id, silent_s, self._is_alive(agent, owner))

    def _is_alive(self, agent: AgentInfo, owner: str) -> bool | None:
        if not self._pid_namespace or agent.pid_namespace != self._pid_namespace:
            return None  # the same pid is another process's there, or nobody's
        uid = _uid_of(owner)
        if hides_others(self._proc) and uid != os.geteuid():
            return None
        running = is_running(agent.pid, agent.start_ticks, self._proc)
        return running if running is not False else has_marked_process(agent.agent_id, uid, agent.start_ticks, self._proc)


def is_running(pid: int, start_ticks: int = 0, proc: Path = Path("/proc")) -> bool | None:
    """Whether that process exists, and is no mere entry that its parent has yet to take note of (zombie). None: it may not be
    looked at."""
    try:
        fields = _stat_fields(proc / str(pid))
    except PermissionError:
        return None
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and start_ticks in (0, int(fields[19]))


def has_marked_process(
    agent_id: str, owner_uid: int | None = None, since_ticks: int = 0, proc: Path = Path("/proc")
) -> bool | None:
    """Whether a process of that agent's ranks, descendants included, lives: they carry its id in their environment. None: none
    is seen, but one whose environment may not be read could be it: a process of `owner_uid` (None: of anybody) or of
    ours that is not older than the agent (`since_ticks`)."""
    needle = b"RSUP_MARK=" + os.fsencode(agent_id)
    answer: bool | None = False
    for path in proc.glob("[0-9]*"):
        if path.name in ("1", str(os.getpid())):  # older than any agent of its namespace; us
            continue
        try:
            if needle in (path / "environ").read_bytes().split(b"\0"):
                return True
        except PermissionError:
            if answer is False and _may_be_a_rank(path, owner_uid, since_ticks):
                answer = None
        except OSError:
            continue
    return answer


def hides_others(proc: Path = Path("/proc")) -> bool:
    """Whether processes of other users are kept from us (mount option `hidepid` of proc(5)), or that cannot be told."""
    try:
        if int(_status_value(proc / "self", "CapEff")[0], 16) & _CAP_SYS_PTRACE:
            return False
        mounts = (proc / "self/mountinfo").read_text(errors="replace").splitlines()
    except (OSError, ValueError, IndexError):
        return True
    for line in mounts:
        before, _, after = line.partition(" - ")
        if before.split()[4:5] == ["/proc"]:
            options = after.split()[2:3] or [""]
            return any(one.startswith("hidepid=") and one not in ("hidepid=0", "hidepid=off") for one in options[0].split(","))
    return True


def _may_be_a_rank(path: Path, owner_uid: int | None, since_ticks: int) -> bool:
    """Of a process whose environment may not be read. Agents' descendants are younger than they."""
    try:
        fields = _stat_fields(path)
        if fields[0] in ("Z", "X") or int(fields[6]) & _KERNEL_THREAD or int(fields[19]) < since_ticks:
            return False
        uids = _status_value(path, "Uid")  # real, effective, saved, of files
        return owner_uid is None or not uids or bool({str(owner_uid), str(os.geteuid())} & set(uids))
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def _stat_fields(path: Path) -> list[str]:
    """Fields of /proc/PID/stat from the third on."""
    return (path / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _status_value(path: Path, name: str) -> list[str]:
    """The words of a line of /proc/PID/status."""
    for line in (path / "status").read_text(errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1:]
    return []


_uids: dict[str, int] = {}
"""Of owners who were found: the directory of users may answer late or not at all, and the loop asks."""


def _uid_of(owner: str) -> int | None:
    """None for an owner who is no user of this host, as the name of a token. See `principals.owner_name`."""
    if owner in _uids:
        return _uids[owner]
    with contextlib.suppress(KeyError, ValueError):
        return _uids.setdefault(owner, pwd.getpwnam(owner).pw_uid)
    number = owner.removeprefix("uid-")
    return int(number) if number != owner and number.isdecimal() else None
