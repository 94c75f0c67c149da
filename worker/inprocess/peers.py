"""Faults of other ranks, as the supervisor tells them: written into NVRx's records at once, so that nobody waits for a poll.

Every rank writes the same, as often as it hears it: each record is one that may be written twice. A dead rank's part of the
restart (its arrival at the barrier) is done for it, whoever it was that died: rank 0, or one with its monitor process.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta

from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord

from rsup.supervisor import wire
from rsup.worker.inprocess.job_store import JobStore, look_now
from rsup.worker.inprocess.settings import InProcessSettings

AT_ONCE = timedelta(0)


class Peers:
    """Listens to the session on a thread of its own. `iteration` is NVRx's (entry - 1) of this process, kept current by it."""

    def __init__(self, store: JobStore, world_size: int, settings: InProcessSettings, say: Callable[[str], None]) -> None:
        self.iteration = 0
        self._store = store
        self._world_size = world_size
        self._has_reserves = bool(settings.reserves(world_size))
        self._say = say
        self._told: queue.SimpleQueue[wire.PeersFailed] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rsup-peers", daemon=True).start()

    def hear(self, told: wire.PeersFailed) -> None:
        """Called by the session's thread; never waits."""
        self._told.put(told)

    def _run(self) -> None:
        while True:
            told = self._told.get()
            try:
                self._write(told)
            except Exception as error:  # outermost frame of the thread: NVRx's own monitors are still there
                self._say(f"could not pass on that ranks {told.failed} failed: {error}")

    def timed_out(self, rank: int) -> bool:
        """Whether NVRx's soft timeout has interrupted this iteration: that of `rank`, or of others and nothing else. A rank
        that others wait for may well show signs of progress itself."""
        records = self._store.of_iteration(self.iteration).get_interruption_records()
        only = {record.interruption for record in records} == {Interruption.SOFT_TIMEOUT}
        return only or InterruptionRecord(rank, Interruption.SOFT_TIMEOUT) in records

    def is_over(self) -> bool:
        """Whether a fault has been recorded in this iteration."""
        store = self._store.of_iteration(self.iteration)
        return bool(store.check([store.ANY_RANK_INTERRUPTED]))

    def record_exception(self, rank: int) -> None:
        """This process's own, before NVRx's monitor process hears of it."""
        self._store.of_iteration(self.iteration).record_interrupted([InterruptionRecord(rank, Interruption.EXCEPTION)])
        look_now()

    def _write(self, told: wire.PeersFailed) -> None:
        if told.gone and self._has_reserves:
            return  # ranks are renumbered when a reserve steps in: NVRx's own monitors keep that count
        for rank, death in zip(told.gone, told.deaths, strict=False):
            self._bury(rank, death)
        if not told.gone and told.entry == self.iteration + 1:
            self._store.of_iteration(self.iteration).record_interrupted()
        look_now()

    def _bury(self, rank: int, death: int) -> None:
        """Record the end of `rank`'s process number `death`, in the iteration that the first rank to hear of it finds."""
        key = death_key(rank, death)
        found = self._store.compare_set(key, "", str(self._iteration_of(rank, death)))
        store = self._store.of_iteration(int(found))
        if rank not in store.get_terminated_ranks():
            store.record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED)])
            store.record_terminated_ranks([rank])
        store.iteration_barrier(ranks=[rank], rendezvous_count=self._world_size, timeout=AT_ONCE)
        store.record_interrupted()

    def _iteration_of(self, rank: int, death: int) -> int:
        """Where a process belongs that died: where it has recorded its own end, else where it did not yet leave the barrier."""
        before = -1
        if death > 1 and self._store.check([death_key(rank, death - 1)]):
            before = int(self._store.get(death_key(rank, death - 1)))
        for iteration in (self.iteration - 1, self.iteration):
            if iteration > before and rank in self._store.of_iteration(iteration).get_terminated_ranks():
                return iteration
        now = self._store.of_iteration(self.iteration)
        has_arrived = now.is_rank_at_reentrant_barrier(rank=rank, group_name=now.ITERATION_BARRIER)
        return max(before + 1, self.iteration + int(has_arrived))


def death_key(rank: int, death: int) -> str:
    """Holds the iteration in which that process of the rank ended; its replacement joins the next one."""
    return f"death/{rank}/{death}"
