"""Looks at SLURM for the drain keeper: what it shows now, or showed last, and what is wrong. Blocks; one thread only."""

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rsup.supervisor.slurm.drain_terms import View
from rsup.supervisor.slurm.guard import HOUR_US
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.said_once import SaidOnce
from rsup.supervisor.slurm.scheduler import SchedulerError, Scontrol
from rsup.supervisor.slurm.scheduler_text import NodeSeen

MAX_NAME_CHARS = 300
STALE_AFTER_US = HOUR_US
"""So long the last answer stands in for SLURM's, for counting only."""


class ClusterFile:
    """The name of the cluster that SLURM told last, for a start at which it does not answer: a snapshot that names no cluster
    would be believed in every one. And, by a file beside it, when SLURM answered last."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str:
        """Empty where nothing is kept."""
        try:
            return self._path.read_text().strip()[:MAX_NAME_CHARS]
        except (OSError, ValueError):
            return ""

    def write(self, name: str) -> None:
        """As far as the directory can be written."""
        with contextlib.suppress(OSError):
            self._path.write_text(f"{name}\n")

    def looked_us(self) -> int:
        """0: nobody knows."""
        try:
            return self._looked.stat().st_mtime_ns // 1000
        except OSError:
            return 0

    def look(self) -> None:
        """SLURM has answered now."""
        with contextlib.suppress(OSError):
            self._looked.touch()

    @property
    def _looked(self) -> Path:
        return self._path.with_name(f"{self._path.name}-looked")


class Lookout:
    """`cluster`: its name, found in SLURM where it is not given. `trouble`: why it does not answer now, empty if it does.
    `is_expected`: without it, a SLURM that has never answered is not worth a line in the log."""

    def __init__(
        self,
        scontrol: Scontrol,
        cluster: str,
        said: SaidOnce,
        clock_us: Callable[[], int],
        *,
        is_expected: bool = True,
        remembered: "ClusterFile | None" = None,
    ) -> None:
        self._file = remembered
        self._remembered = None if cluster else remembered
        """Where the name is kept; None once it is known, or was given."""
        self.cluster = self._remembered.read() if self._remembered is not None else cluster
        self.trouble = ""
        self._scontrol, self._said, self._clock_us = scontrol, said, clock_us
        self._last = View()
        self._looked_us = 0
        self._is_expected = is_expected

    def look(self, logs: Mapping[str, NodeLog], *, reservations_too: bool, noted_us: int = 0) -> View:
        """SLURM as it is now; where it does not answer, as it was. `noted_us`: of the newest note in `logs`, which was made
        after a look."""
        try:
            nodes = self._scontrol.nodes()
            self._learn_cluster()
            needed = reservations_too or any(log.reserved for log in logs.values())
            reservations = frozenset(self._scontrol.reservations()) if needed else None
            lost = _has_lost(logs, nodes, reservations)
            since_us = self._looked_us
            if not since_us:  # drains that SLURM ended with its state are gone all of them, those that people ended hardly
                lost = lost and not _has_kept(logs, nodes, reservations)
                since_us = max(noted_us, self._file.looked_us() if self._file is not None else 0)
            forgotten = lost and self._scontrol.started_us() > since_us
        except SchedulerError as error:
            return self._as_it_was(error)
        if self.trouble:
            self._said.over("scheduler", "SLURM answers again")
        self.trouble, self._looked_us = "", self._clock_us()
        if self._file is not None:
            self._file.look()
        self._last = View(nodes, reservations, has_forgotten=forgotten)
        words = sorted({word for seen in nodes.values() for word in seen.unknown})
        if words:
            self._said.say("words", f"SLURM shows states or flags that this rsup does not know: {', '.join(words)[:200]}")
        return self._last

    def _learn_cluster(self) -> None:
        if self._remembered is None and self.cluster:
            return
        found = self._scontrol.cluster_name()
        if found and self._remembered is not None:
            if found != self.cluster:
                self._remembered.write(found)
            self._remembered = None
        self.cluster = found or self.cluster

    def _as_it_was(self, error: SchedulerError) -> View:
        self.trouble = str(error)
        level = logging.WARNING if self._is_expected or self._looked_us else logging.DEBUG
        self._said.say("scheduler", f"{error}; nodes are drained when it answers", level)
        if self._clock_us() - self._looked_us > STALE_AFTER_US:
            return View()
        return View(self._last.nodes, self._last.reservations, is_stale=True)


def _has_lost(logs: Mapping[str, NodeLog], nodes: Mapping[str, NodeSeen], reservations: Collection[str] | None) -> bool:
    """Whether something of ours is not there any more."""
    undone = any(log.drained and name in nodes and not nodes[name].is_drained for name, log in logs.items())
    return undone or (any(log.reserved for log in logs.values()) and not reservations)


def _has_kept(logs: Mapping[str, NodeLog], nodes: Mapping[str, NodeSeen], reservations: Collection[str] | None) -> bool:
    """Whether something of ours is there still."""
    drained = any(
        log.drained and name in nodes and nodes[name].is_drained and nodes[name].is_ours for name, log in logs.items()
    )
    return drained or (any(log.reserved for log in logs.values()) and bool(reservations))
