"""Processes that take dead ranks' places are waited for before the training function is entered.

A new process may import for longer than the soft limit. In the function the others would wait for it in a collective, which
shows no sign of progress and so looks like a hang; here the training thread waits in Python, and its signs of progress go on.
The supervisor bounds a restart (`rsup launch --inprocess-restart-within`).
"""

import time
from typing import Any

from rsup.worker.inprocess.job_store import JobStore

HERE = "rsup_here"
WITHIN_S = 600.0
"""Then the function is entered nevertheless, and its own limits hold."""
SHORTEST_PAUSE_S = 0.005
LOOKS_PER_S = 4000
"""Of all ranks together: one store answers them."""


def meet_newcomers(store: JobStore, state: Any, within_s: float = WITHIN_S) -> bool:
    """Say that this rank is here; wait until each one whose process died in the iteration before `state`'s has a new one that
    is. Whether all came. `state`: NVRx's, frozen."""
    if not state.iteration:
        return True
    now = store.of_iteration(state.iteration)
    now.set(f"{HERE}/{state.rank}", "")
    dead = store.of_iteration(state.iteration - 1).get_terminated_ranks() - {state.rank}
    keys = [f"{HERE}/{rank}" for rank in sorted(dead)]
    pause_s, end_s = max(SHORTEST_PAUSE_S, state.world_size / LOOKS_PER_S), time.monotonic() + within_s
    while keys and not now.check(keys):
        if time.monotonic() > end_s:
            return False
        time.sleep(pause_s)  # NVRx interrupts it when another fault ends this iteration
    return True
