"""Asks SLURM about nodes of the job that do not answer: one that SLURM has given up is dead for the job, which may go on
without it.

With `sbatch --no-kill` and `srun --no-kill` a job survives the loss of a node: SLURM takes the node out of the job's list.
That, or the state DOWN, is its word that nothing of the job goes on there. A launch may span several SLURM jobs (components of
a heterogeneous one, or a shared `--job-id`): that a node of another job is not in the list of ours says nothing. Asked in a
thread, since slurmctld may take its time."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from rsup.launcher.slurm import scontrol
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.launcher.slurm.hostnames import node_names

ASK_EVERY_S = 5.0


class NodeWatch:
    """`woken` is called from the thread when there are answers."""

    def __init__(self, place: SlurmPlace, woken: Callable[[], None]) -> None:
        self._place = place
        self._woken = woken
        self._answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._said: set[str] = set()
        self._thread: threading.Thread | None = None
        self._ask_at_s = 0.0

    def close(self) -> None:
        """Nobody is woken any more."""
        self._woken = _nobody

    def look(self, silent: Sequence[str]) -> None:
        """These nodes of the job do not answer. May be called often; asks seldom. A node that answers again may be lost
        again."""
        self._said &= set(silent)
        names = [name for name in silent if name not in self._said]
        now_s = time.monotonic()
        if not names or now_s < self._ask_at_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._ask_at_s = now_s + ASK_EVERY_S
        self._thread = threading.Thread(target=self._ask, args=(names,), name="rsup-nodes", daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[str, str]]:
        """Nodes that SLURM has given up since the last call, and why we say so."""
        found = []
        while not self._answers.empty():
            name, why = self._answers.get()
            if name not in self._said:
                self._said.add(name)
                found.append((name, why))
        return found

    def _ask(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                why = given_up(self._place, name)
            except scontrol.SlurmSilent:
                return  # asked again
            except scontrol.SlurmUnavailable:
                continue  # a node that it does not know, say
            if why:
                self._answers.put((name, why))
                self._woken()


def given_up(place: SlurmPlace, node: str) -> str:
    """Why nothing of the job goes on there, in SLURM's word; empty while SLURM does not say so. Raise `SlurmUnavailable`."""
    state = scontrol.show("node", node).get("State", "")
    if state.startswith("DOWN"):
        return f"SLURM says that it is {state}"
    if node not in place.job_nodes:
        return ""  # it never was in this job, so it cannot have been taken out
    held = scontrol.show_job(place.job).get("NodeList", "")
    names = [] if held == "(null)" else node_names(held)
    if names and node not in names:
        return f"SLURM has taken it out of job {place.job}, which holds {held}"
    return ""


def _nobody() -> None:
    return
