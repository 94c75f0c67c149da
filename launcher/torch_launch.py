"""In the place of `python -m torch.distributed.launch`: `python -m rsup.launcher.torch_launch`, and `main` as a function.

The same as `rsup launch --pass-local-rank`: scripts get `--local-rank=N` as their first argument, unless `--use-env` is given.
"""

import os
import sys
from collections.abc import Sequence


def main(args: Sequence[str | os.PathLike[str] | float] | None = None) -> None:
    """As `rsup.launcher.main`, with `--local-rank`."""
    from rsup.launcher import main as launch

    launch(["--pass-local-rank", *(sys.argv[1:] if args is None else args)])


if __name__ == "__main__":
    from rsup.launcher.cli import main as rsup

    sys.exit(rsup(["launch", "--pass-local-rank", *sys.argv[1:]]))
