"""Ctrl-Z, and SLURM's `scontrol suspend`: SIGTSTP stops the ranks with the launcher, and what continues it continues them.

Ranks are sessions of their own, so the terminal's stop does not reach them; they would train on with nobody to watch them. The
launcher stops itself by the signal's default, which the kernel ignores where no shell could continue it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rsup.launcher.process_table import read_stat
from rsup.launcher.processes import RankProcess

SUSPENDS = signal.SIGTSTP


def suspend(ranks: Sequence[RankProcess]) -> None:
    """Stop them and this process; return when it was continued, and so are they. Ranks that somebody else had stopped stay
    so. Main thread only."""
    running = [rank for rank in ranks if (stat := read_stat(rank.pid)) is not None and stat.state not in "TtZ"]
    for rank in running:
        rank.signal_session(signal.SIGSTOP)
    handler = signal.signal(SUSPENDS, signal.SIG_DFL)
    try:
        signal.raise_signal(SUSPENDS)  # we go on from here
    finally:
        signal.signal(SUSPENDS, handler)
        for rank in running:
            rank.signal_session(signal.SIGCONT)
