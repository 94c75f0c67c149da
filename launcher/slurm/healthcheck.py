"""`rsup slurm healthcheck`: one round of a node. Root, started by SLURM's HealthCheckProgram or the systemd timer.

Waits a random moment (SLURM starts it on all nodes at once), renews the inventory of GPUs, spools what is new in the kernel's
log and in what NVML says, fetches the signed snapshot if there is a newer one, and delivers the spool. It reports, it drains
nothing. One line says how it went; exit code 0, or 1 if something could not be done.
"""

import fcntl
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rsup.launcher.slurm.node_round import Round
from rsup.launcher.slurm.node_settings import NodeProblem, node_name, places_of, read_settings

LOOK_WITHIN_S = 15.0
SPEAK_WITHIN_S = 12.0
MAX_PROBLEMS, MAX_CHARS = 8, 500
"""Of the line that tells them."""
USAGE = """usage: rsup slurm healthcheck [--no-jitter] [--quiet]

  --no-jitter   do not wait a random moment first
  --quiet       say nothing unless something went wrong

One round of this node: inventory of GPUs, events, the snapshot for the gate, delivery of the spool.
Settings: /etc/rsup/node.toml."""


def main(words: Sequence[str]) -> int:
    """The verb."""
    if "-h" in words or "--help" in words:
        print(USAGE)
        return 0
    unknown = [word for word in words if word not in ("--no-jitter", "--quiet")]
    if unknown:
        print(f"rsup slurm healthcheck: unknown argument {unknown[0]!r}; see --help", file=sys.stderr)
        return 2
    problems, said = run_round(with_jitter="--no-jitter" not in words)
    if problems:
        print(f"rsup slurm healthcheck: {'; '.join([*short(problems), *said])}", file=sys.stderr)
    elif "--quiet" not in words:
        print(f"rsup slurm healthcheck: {'; '.join(said)}")
    return 1 if problems else 0


def short(problems: Sequence[str]) -> list[str]:
    """For one line, however much is wrong."""
    left = len(problems) - MAX_PROBLEMS
    shown = [one if len(one) <= MAX_CHARS else f"{one[:MAX_CHARS]}..." for one in problems[:MAX_PROBLEMS]]
    return [*shown, f"and {left} more problem{'s'[: left != 1]}"] if left > 0 else shown


def run_round(*, with_jitter: bool) -> tuple[list[str], list[str]]:
    """What could not be done, and what was. Never raises for what is wrong with the node, its files or the supervisor."""
    places = places_of(os.environ)
    settings = read_settings(places.settings)
    turn = Round(places, settings, node_name(os.environ, settings))
    if settings.problem:
        turn.problems.append(settings.problem)
    try:
        places.run.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = os.open(places.run / "healthcheck.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return [*turn.problems, f"cannot write {places.run}: {error.strerror}; this needs root"], []
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return turn.problems, ["another round is under way"]
    if with_jitter:
        time.sleep(random.uniform(0, settings.jitter_s))
    looking = f"looking at this node has not ended within {LOOK_WITHIN_S:g} s; look at its disks and its driver"
    speaking = f"no supervisor has answered within {SPEAK_WITHIN_S:g} s; look at the network and at name lookup"
    delivering = f"not all was delivered within {SPEAK_WITHIN_S:g} s; the rest follows in the next round"
    for work, within_s, otherwise in (
        (turn.look, LOOK_WITHIN_S, lambda: looking),
        (turn.speak, SPEAK_WITHIN_S, lambda: delivering if turn.is_heard else speaking),
    ):
        try:
            bounded(work, within_s, otherwise)
        except NodeProblem as problem:
            turn.problems.append(str(problem))
        except OSError as error:
            turn.problems.append(f"cannot write {error.filename}: {error.strerror}")
    os.close(lock)
    return list(dict.fromkeys(turn.problems)), turn.said


def bounded(work: Callable[[], None], within_s: float, otherwise: Callable[[], str]) -> None:
    """Do `work` in a thread, and leave it behind after that time: a name service that is gone holds a lookup for half a minute.
    Raise what it raised, and `NodeProblem` with what `otherwise` says after that time."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # handed to the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        raise NodeProblem(otherwise())
    if raised:
        raise raised[0]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a thread may be stuck in a lookup
