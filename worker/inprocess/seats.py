"""Who computes in the next entry. A dead rank's seat goes to the process that replaces it; where there are reserves, to one of
them, by NVRx's `Tree`."""

import os
from collections.abc import Callable
from datetime import timedelta

from nvidia_resiliency_ext.inprocess.rank_assignment import (
    Layer,
    LayerFlag,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    Tree,
)
from nvidia_resiliency_ext.inprocess.state import Mode, State

from rsup.worker.inprocess.job_store import JobStore
from rsup.worker.inprocess.peers import death_key
from rsup.worker.inprocess.settings import InProcessSettings


class SameSeats(RankAssignment):  # type: ignore[misc]  # NVRx has no types
    """Every rank keeps its number, and so does the process in a dead one's place.

    `joins_after`: the death that this process makes good, 0 for one that was there from the start. `within`: how long to wait
    for the others to say in which iteration that was. `met` is called when all ranks have left the last entry.
    """

    def __init__(self, store: JobStore, joins_after: int, within: timedelta, met: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._joins_after = joins_after
        self._within = within
        self._met = met

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        self._met()
        state: State = ctx.state
        assert state.rank is not None
        if state.rank in ctx.terminated_ranks:
            raise RankDiscarded(f"rank {state.rank} was taken for dead, and another process has its place")
        if self._joins_after:
            key = death_key(state.rank, self._joins_after)
            self._store.wait([key], self._within)
            state.iteration = int(self._store.get(key)) + 1
            self._joins_after = 0
        state.mode, state.active_rank, state.active_world_size = Mode.ACTIVE, state.rank, state.world_size
        return ctx


def make_seats(
    settings: InProcessSettings,
    world_size: int,
    local_world_size: int,
    store: JobStore,
    joins_after: int,
    met: Callable[[], None] = lambda: None,
) -> RankAssignment:
    """The assignment that `settings` ask for. `met`: see `SameSeats`."""
    if not settings.reserves(world_size):
        return SameSeats(store, joins_after, timedelta(seconds=settings.barrier_timeout), met)
    active = settings.active_world_size or world_size
    layers = [Layer(min_ranks=active, max_ranks=active, key_or_fn="job", flag=LayerFlag.RESERVE)]
    if settings.granularity == "node":
        node = os.environ.get("GROUP_RANK", "0")
        whole = {"min_ranks": local_world_size, "max_ranks": local_world_size}
        layers.append(Layer(key_or_fn=lambda state: f"node {node}", flag=LayerFlag.RESERVE, **whole))
    return Tree(layers)
