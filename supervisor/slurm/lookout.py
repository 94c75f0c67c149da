"""Looks at SLURM for the drain keeper: what it shows now, or showed last, and what is wrong. Blocks; one thread only."""

import logging
from collections.abc import Callable, Collection, Mapping

from rsup.supervisor.slurm.drain_plan import View
from rsup.supervisor.slurm.guard import HOUR_US
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.said_once import SaidOnce
from rsup.supervisor.slurm.scheduler import NoScheduler, SchedulerError, Scontrol
from rsup.supervisor.slurm.scheduler_text import NodeSeen

STALE_AFTER_US = HOUR_US
"""So long the last answer stands in for SLURM's, for counting only."""


class Lookout:
    """`cluster`: its name, found in SLURM where it is not given. `trouble`: why it does not answer now, empty if it does."""

    def __init__(self, scontrol: Scontrol, cluster: str, said: SaidOnce, clock_us: Callable[[], int]) -> None:
        self.cluster = cluster
        self.trouble = ""
        self._scontrol, self._said, self._clock_us = scontrol, said, clock_us
        self._last = View()
        self._looked_us = 0

    def look(self, logs: Mapping[str, NodeLog], *, reservations_too: bool) -> View:
        """SLURM as it is now; where it does not answer, as it was."""
        try:
            nodes = self._scontrol.nodes()
            self.cluster = self.cluster or self._scontrol.cluster_name()
            needed = reservations_too or any(log.reserved for log in logs.values())
            reservations = frozenset(self._scontrol.reservations()) if needed else None
            lost = bool(self._looked_us) and _has_lost(logs, nodes, reservations)
            forgotten = lost and self._scontrol.started_us() > self._looked_us
        except SchedulerError as error:
            return self._as_it_was(error)
        if self.trouble:
            self._said.over("scheduler", "SLURM answers again")
        self.trouble, self._looked_us = "", self._clock_us()
        self._last = View(nodes, reservations, has_forgotten=forgotten)
        words = sorted({word for seen in nodes.values() for word in seen.unknown})
        if words:
            self._said.say("words", f"SLURM shows states or flags that this rsup does not know: {', '.join(words)[:200]}")
        return self._last

    def _as_it_was(self, error: SchedulerError) -> View:
        self.trouble = str(error)
        is_usual = isinstance(error, NoScheduler) and not self._last.nodes
        self._said.say(
            "scheduler", f"{error}; nodes are drained when it answers", logging.INFO if is_usual else logging.WARNING
        )
        if self._clock_us() - self._looked_us > STALE_AFTER_US:
            return View()
        return View(self._last.nodes, self._last.reservations, is_stale=True)


def _has_lost(logs: Mapping[str, NodeLog], nodes: Mapping[str, NodeSeen], reservations: Collection[str] | None) -> bool:
    """Whether something of ours is not there any more."""
    undone = any(log.drained and name in nodes and not nodes[name].is_drained for name, log in logs.items())
    return undone or (any(log.reserved for log in logs.values()) and not reservations)
