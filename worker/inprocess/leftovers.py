"""A process group that a script keeps over a restart is told of; where its connections hold up other ranks, the process ends.

Waiting cannot help then: a rank that waits in a gloo collective is freed only when the other end closes its sockets, and they
close when nothing refers to the group any more, or with the process.
"""

import time
from collections.abc import Callable
from typing import Any

from rsup.worker.inprocess.groups import KeptGroup
from rsup.worker.inprocess.job_store import JobStore

LONGEST_WAIT_S = 5.0
PART_OF_HARD_LIMIT = 4
LOOK_EVERY_S = 0.05
LEFT = "rsup_left"


class Leftovers:
    """Of one process. `say` is given a line for people, `end` why the process has to end, and does not return.

    `hard_limit_s`: after which NVRx kills a rank that waits in vain. The one that holds it up has to end long before.
    """

    def __init__(self, store: JobStore, say: Callable[[str], None], end: Callable[[str], object], hard_limit_s: float) -> None:
        self._store = store
        self._within_s = min(LONGEST_WAIT_S, hard_limit_s / PART_OF_HARD_LIMIT)
        self._say = say
        self._end = end
        self._said: set[str] = set()

    def left(self, state: Any) -> None:
        """This rank has left its training function. `state`: NVRx's, frozen."""
        store: Any = self._store.of_iteration(state.iteration)
        store.append(LEFT, f"{state.rank},")

    def kept(self, state: Any, groups: list[KeptGroup]) -> None:
        """`groups` of the entry that is over are still alive."""
        variables = {holder.partition(" (")[0]: holder for holder in sorted(group.holder() for group in groups)}
        keep = "keeps" if len(variables) == 1 else "keep"
        what = f"{' and '.join(variables.values())} {keep} a process group of the last entry into the training function"
        missing = self._missing(state) if any(group.has_sockets for group in groups) else []
        if missing:
            ranks = ", ".join(map(str, missing))
            self._end(
                f"{what}, and with it open connections in which rank {ranks} waits: this process ends, and another takes its"
                " place; let go of it in current_entry().at_restart(...)"
            )
        if what not in self._said:
            self._said.add(what)
            self._say(f"{what}, with its memory and connections: let go of it in current_entry().at_restart(...)")

    def _missing(self, state: Any) -> list[int]:
        """Ranks that have not left the entry, some time after this one."""
        store, end_s = self._store.of_iteration(state.iteration), time.monotonic() + self._within_s
        while True:
            gone = store.get_terminated_ranks() | {int(rank) for rank in store.get_packed(LEFT, ",") if rank}
            missing = sorted(set(range(state.world_size)) - gone)
            if not missing or time.monotonic() > end_s:
                return missing
            time.sleep(LOOK_EVERY_S)
