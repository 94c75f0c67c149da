"""`rsup launch` and the agent behind it. From Python: `rsup.launcher.main(args)`, in the place of torchrun's `main`.

    from rsup.launcher import main

    main(["--nproc-per-node", "8", "train.py", "--lr", "3e-4"])

Importing this imports neither torch nor the launcher.
"""

import os
from collections.abc import Sequence

__all__ = ["main", "parse_min_max_nnodes"]


def main(args: Sequence[str | os.PathLike[str] | float] | None = None) -> None:
    """Run one launch with these arguments (default: the process's) and return when the job has succeeded. Paths and numbers
    will do where a word is meant.

    May be called any number of times, from any thread, and in a daemonic `multiprocessing.Process`. What the ranks print
    goes through the caller's `sys.stdout` and `sys.stderr`. Called from the main thread, it passes signals on to the ranks
    until it returns. If the caller dies, the ranks die with it.

    Raise torch's `ChildFailedError` if a rank failed, its `SignalException` if the launch was told to stop by a signal,
    `ValueError` or `RuntimeError` for options that make no sense, `LaunchError` for any other end, and `SystemExit` where
    torchrun's parser does (2 for an unknown option, 0 for `--help`). Contract: torch 2.13, `torch.distributed.run.main`.
    """
    from rsup.launcher.python_api import run

    run(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Smallest and largest number of nodes of `N` or `MIN:MAX`. Raise RuntimeError for more parts, ValueError for words."""
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return int(parts[0]), int(parts[-1])
