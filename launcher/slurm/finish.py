"""`rsup slurm finish RESULT-FILE`: the last line of a batch script whose launch runs where SLURM cannot be told anything, as
in a container without scontrol and munge.

It does what the launch would have done (`requeue.settle`), by the result file that the launch has left, and exits with the
launch's true code, which srun may have changed."""

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rsup.launcher.slurm.environment import read_place
from rsup.launcher.slurm.requeue import Outcome, settle
from rsup.supervisor.wire import RsupError, UsageError

USAGE = """usage: rsup slurm finish RESULT-FILE

Tells SLURM what follows from how a launch ended, and exits with its exit code. RESULT-FILE: as given to `rsup launch
--result-file`. Exit 16: the job is requeued without the suspect's node; 88: it is requeued; 93: nothing goes on with it."""
MAX_BYTES = 1 << 20


class NoResult(RsupError):
    """The launch has left no result that can be read."""


def main(words: Sequence[str]) -> int:
    """The subcommand. Raise `RsupError` for a file that cannot be used."""
    if len(words) != 1 or words[0] in ("-h", "--help"):
        if len(words) == 1:
            print(USAGE)
            return 0
        raise UsageError("finish: one argument, the result file of the launch; see rsup slurm finish --help")
    place = read_place(os.environ)
    if place is None:
        raise UsageError("finish: this is no SLURM job (SLURM_JOB_ID is not set); call it in the batch script")
    outcome = read_outcome(Path(words[0]))
    settle(outcome, place, lambda line: print(line, file=sys.stderr))
    return outcome.exit_code


def read_outcome(path: Path) -> Outcome:
    """What a result file says. Raise `NoResult`."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("a pipe, a device or a directory")
            content = json.loads(file.read(MAX_BYTES))
        code = int(content["exit_code"])
        if not 0 <= code <= 255:
            raise ValueError("no exit code of a process")
        return Outcome(code, nodes_to_avoid(content))
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise NoResult(f"{path}: {why}; the launch has not ended by itself, and SLURM is told nothing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NoResult(f"{path} is no result file of rsup launch, and SLURM is told nothing") from None


def nodes_to_avoid(content: Mapping[str, object]) -> tuple[str, ...]:
    """The nodes that the result says the job must not run on again."""
    named = content.get("avoid_nodes")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
