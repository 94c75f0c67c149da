"""A cgroup for the ranks of one agent, where this user may make one: it holds even what escaped in every other way.

Only cgroup v2, only below the agent's own cgroup (whose limits go on to count), and not under SLURM, which keeps books of
its own about a job's cgroups. Named by the agent's mark, so that agent and keeper, who share a cgroup, find the same one.
Anything that does not work means that there is no cgroup: the other ways of finding processes remain.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path


def join_descriptor(mark: str) -> int | None:
    """Make the cgroup where it is missing. A descriptor: writing `0` to it moves the writer into the cgroup."""
    folder = _folder(mark)
    if folder is None:
        return None
    try:
        folder.mkdir(exist_ok=True)
        return os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None


def members(mark: str) -> set[int]:
    """Pids in the cgroup, and in those that were made below it."""
    folder = _folder(mark)
    found: set[int] = set()
    if folder is not None and folder.exists():
        for listing in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in listing.read_text().split())
    return found


def remove(mark: str) -> None:
    """Remove the cgroup and those below it; nothing must be alive in it."""
    folder = _folder(mark)
    if folder is None or not folder.exists():
        return
    for below in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            below.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _folder(mark: str) -> Path | None:
    own = _own_cgroup()
    return own / f"rsup-{mark}" if own is not None and mark and "/" not in mark else None


@functools.cache
def _own_cgroup() -> Path | None:
    """Directory of this process's cgroup v2, if it may be written to."""
    if "SLURM_JOB_ID" in os.environ:
        return None
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    for fields in mounts:
        if own is None or fields[fields.index("-") + 1] != "cgroup2":
            continue
        root, mount_point = fields[3], fields[4]
        if own != root and not own.startswith(root.rstrip("/") + "/"):
            continue  # the mount shows another part of the tree
        folder = Path(mount_point, os.path.relpath(own, root))
        return folder if os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK) else None
    return None
