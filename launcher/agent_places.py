"""Files of one agent in the runtime directory, and the removal of what dead agents left there."""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.heartbeat_board import remove_leftovers

_PREFIX = "a-"
_SPOOL_KEPT_S = 24 * 3600.0
"""A dead agent's spool may still be on its way (its keeper delivers it) or tell a person something."""


@dataclass(frozen=True)
class AgentPlaces:
    """Paths are named `a-PID-ID.*`, so that anybody can see whose they are."""

    runtime_dir: Path
    spool: Path
    rank_socket: Path
    stacks_dir: Path

    def remove(self) -> None:
        """Remove what is there."""
        for path in (self.spool, self.rank_socket):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.stacks_dir, ignore_errors=True)


def make_places(agent_id: str) -> AgentPlaces:
    """Paths of a new agent. Raise `PlaceError` if the runtime directory cannot be used."""
    runtime_dir = places.runtime_dir()
    _remove_dead(runtime_dir)
    stem = f"{_PREFIX}{os.getpid()}-{agent_id[:8]}"
    stacks_dir = runtime_dir / f"{stem}.stacks"
    stacks_dir.mkdir(mode=0o700, exist_ok=True)
    return AgentPlaces(runtime_dir, runtime_dir / f"{stem}.spool", runtime_dir / f"{stem}.ranks", stacks_dir)


def _remove_dead(runtime_dir: Path) -> None:
    remove_leftovers([Path("/dev/shm"), runtime_dir])
    for path in runtime_dir.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        with contextlib.suppress(OSError):
            if path.suffix == ".stacks":
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != ".spool" or time.time() - path.stat().st_mtime > _SPOOL_KEPT_S:
                path.unlink(missing_ok=True)
