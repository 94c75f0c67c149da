"""Files of one agent in the runtime directory, and the removal of what dead agents left there."""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.heartbeat_board import pid_namespace, remove_leftovers

_PREFIX = "a-"
_SPOOL_KEPT_S = 24 * 3600.0
"""A dead agent's spool may still be on its way (its keeper delivers it) or tell a person something."""


@dataclass(frozen=True)
class AgentPlaces:
    """Paths are named `a-PID.NAMESPACE-ID.*`, so that anybody can see whose they are: containers may have this directory in
    common, and have other pids."""

    runtime_dir: Path
    spool: Path
    rank_socket: Path
    stacks_dir: Path
    nvrx_dir: Path
    """Sockets for NVRx's clients."""
    logs: Path
    """A link to the temporary log directory: so that it is found when nobody has survived to remove it."""

    def remember_logs(self, folder: Path) -> None:
        """Name the temporary log directory, where there is one."""
        with contextlib.suppress(OSError):
            self.logs.symlink_to(folder)

    def remove(self, *, keep_spool: bool = False) -> None:
        """Remove what is there. `keep_spool`: somebody still delivers it."""
        for path in (self.rank_socket, self.logs) if keep_spool else (self.rank_socket, self.logs, self.spool):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.stacks_dir, ignore_errors=True)
        shutil.rmtree(self.nvrx_dir, ignore_errors=True)


def make_places(agent_id: str) -> AgentPlaces:
    """Paths of a new agent. Raise `PlaceError` if the runtime directory cannot be used."""
    runtime_dir = places.runtime_dir()
    _remove_dead(runtime_dir)
    stem = f"{_PREFIX}{os.getpid()}.{_namespace_mark()}-{agent_id[:8]}"
    stacks_dir = runtime_dir / f"{stem}.stacks"
    stacks_dir.mkdir(mode=0o700, exist_ok=True)
    spool, rank_socket, logs = (runtime_dir / f"{stem}.{suffix}" for suffix in ("spool", "ranks", "logs"))
    return AgentPlaces(runtime_dir, spool, rank_socket, stacks_dir, runtime_dir / f"{stem}.ft", logs)


def _namespace_mark() -> str:
    """Of our pid namespace; short, since paths of sockets are."""
    return f"{pid_namespace() & 0xFFFFFF:x}"


def _remove_dead(runtime_dir: Path) -> None:
    remove_leftovers([Path("/dev/shm"), runtime_dir])
    for path in runtime_dir.glob(f"{_PREFIX}*"):
        pid, _, mark = path.name.removeprefix(_PREFIX).partition("-")[0].partition(".")
        if not pid.isdigit() or mark not in ("", _namespace_mark()) or Path(f"/proc/{pid}").exists():
            continue
        with contextlib.suppress(OSError):
            if path.suffix in (".stacks", ".ft"):
                shutil.rmtree(path, ignore_errors=True)
                continue
            if path.is_symlink():  # .logs
                shutil.rmtree(path.readlink(), ignore_errors=True)
            if path.suffix != ".spool" or time.time() - path.stat().st_mtime > _SPOOL_KEPT_S:
                path.unlink(missing_ok=True)
