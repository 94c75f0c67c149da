"""Passing a signal on to ranks that go on training: SIGUSR1 of a scheduler, say.

It goes to processes that have a handler for it, as one at its default would only be killed by it: to the rank's own process,
or where that has none (a shell that runs the script) to the nearest of its descendants that have. Never further down: data
workers that were forked have their parent's handlers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from rsup.launcher.process_table import ProcessStat, all_processes, open_process, read_stat, send_signal


def pass_on(leaders: Collection[int], signum: int) -> list[int]:
    """Send it to the ranks with those leaders (pids). Return the leaders of the ranks that got it."""
    children: dict[int, list[ProcessStat]] | None = None
    told = []
    for leader in leaders:
        stat = read_stat(leader)
        takers = [stat] if stat is not None and catches(leader, signum) else []
        if not takers:
            children = _by_parent(all_processes()) if children is None else children
            takers = _nearest(leader, children, signum)
        if any([_send(taker, signum) for taker in takers]):
            told.append(leader)
    return told


def told_text(name: str, told: Collection[int], num_ranks: int) -> str:
    """The line about it. `told`: ranks that got it."""
    if not told:
        return f"{name} was not passed on: no rank has a handler for it; training goes on"
    if len(told) == num_ranks:
        return f"{name} passed on to {'the rank' if num_ranks == 1 else f'all {num_ranks} ranks'}; training goes on"
    ranks = ", ".join(map(str, sorted(told)))
    return f"{name} passed on to rank{'s'[: len(told) > 1]} {ranks}; the others have no handler for it; training goes on"


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def _nearest(leader: int, children: dict[int, list[ProcessStat]], signum: int) -> list[ProcessStat]:
    """The first generation below the leader in which somebody has a handler: those who have."""
    generation = children.get(leader, [])
    while generation:
        if takers := [stat for stat in generation if catches(stat.pid, signum)]:
            return takers
        generation = [child for stat in generation for child in children.get(stat.pid, ())]
    return []


def _by_parent(stats: Iterable[ProcessStat]) -> dict[int, list[ProcessStat]]:
    children: dict[int, list[ProcessStat]] = {}
    for stat in stats:
        children.setdefault(stat.parent, []).append(stat)
    return children


def _send(stat: ProcessStat, signum: int) -> bool:
    pidfd = open_process(stat.process)
    if pidfd is None:
        return False
    try:
        return send_signal(pidfd, signum)
    finally:
        os.close(pidfd)
