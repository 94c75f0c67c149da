"""Takes the steps of a plan in SLURM, and remembers those that it does not do, until it does or nobody wants them any more.

A step that fails holds up no other; a batch that fails is tried node by node. Only a SLURM that does not answer at all ends a
round, and what failed lately comes last in the next one. Blocks; one thread only.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rsup.supervisor.hardware.hostlist import fold
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_steps import take
from rsup.supervisor.slurm.drain_terms import Step
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.said_once import SaidOnce
from rsup.supervisor.slurm.scheduler import NoRight, NoScheduler, SchedulerError, Scontrol, SilentScheduler


class Failing(Struct, frozen=True):
    """A step for one node that SLURM does not do. `since_us`: of the first try."""

    kind: str
    node: str
    error: str
    since_us: int
    said: str
    """Under which it was logged."""


class StepTaker:
    """`failing`: by step and node. `num_failed`: tries, in all."""

    def __init__(self, scontrol: Scontrol, said: SaidOnce, clock_us: Callable[[], int]) -> None:
        self.failing: dict[tuple[str, str], Failing] = {}
        self.num_failed = 0
        self._scontrol, self._said, self._clock_us = scontrol, said, clock_us

    def take_all(
        self, steps: Sequence[Step], logs: Mapping[str, NodeLog], may_go_on: Callable[[], bool]
    ) -> Iterator[tuple[Step, list[DrainNoted]]]:
        """Each step that was done, with the notes about it."""
        wanted = {(step.kind, node) for step in steps for node in step.nodes}
        for key in self.failing.keys() - wanted:
            self._over(*key)
        # A release of one node must not wait for another's drain, and none for what is known to fail.
        todo = sorted(steps, key=lambda step: any((step.kind, node) in self.failing for node in step.nodes))
        while todo and may_go_on():
            step = todo.pop(0)
            try:
                notes = take(step, self._scontrol, logs, self._clock_us())
            except (SilentScheduler, NoScheduler) as error:
                self._failed(step, error)
                return
            except SchedulerError as error:
                if len(step.nodes) > 1 and not isinstance(error, NoRight):
                    todo[:0] = [replace(step, nodes=(node,)) for node in step.nodes]
                else:
                    self._failed(step, error)
                continue
            for node in step.nodes:
                self._over(step.kind, node)
            yield step, notes

    def trouble(self, nodes: Collection[str]) -> str:
        """What SLURM said of steps for these nodes, empty for nothing."""
        return next((one.error for one in self.failing.values() if one.node in nodes), "")

    def _failed(self, step: Step, error: SchedulerError) -> None:
        self.num_failed += 1
        about = f"{step.kind} {fold(step.nodes)} in SLURM"
        for node in step.nodes:
            since_us = self.failing[step.kind, node].since_us if (step.kind, node) in self.failing else self._clock_us()
            self.failing[step.kind, node] = Failing(step.kind, node, str(error), since_us, about)
        self._said.say(about, f"{about}: {error}; tried again")

    def _over(self, kind: str, node: str) -> None:
        failing = self.failing.pop((kind, node), None)
        if failing is not None:
            self._said.over(failing.said)
