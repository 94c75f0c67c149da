"""`rsup slurm finish RESULT-FILE`: the last line of a batch script whose launch runs where SLURM cannot be told anything, as
in a container without scontrol and munge.

It does what the launch would have done (`requeue.settle`), by the result file that the launch has left, and exits with the
launch's true code, which srun may have changed."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rsup.launcher.result_file import read_result
from rsup.launcher.slurm.environment import SlurmPlace, read_place
from rsup.launcher.slurm.requeue import Outcome, settle
from rsup.supervisor.wire import RsupError, UsageError

USAGE = """usage: rsup slurm finish RESULT-FILE

Tells SLURM what follows from how a launch ended, and exits with its exit code. RESULT-FILE: as given to `rsup launch
--result-file`. Exit 16: the job is requeued without the suspect's node; 88: it is requeued; 93: nothing goes on with it."""
INSTEAD = "where scontrol works: scontrol requeue JOB (16, 88), scontrol update jobid=JOB requeue=0 (93)"
NOTHING_TOLD = "the launch has not ended by itself, and SLURM is told nothing"


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
        job = os.environ.get("SLURM_JOB_ID", "")
        why = f"SLURM_JOB_ID is {job[:40]!r}, which is no job's number" if job else "SLURM_JOB_ID is not set"
        raise UsageError(f"finish: this is no SLURM job ({why}); call it in the batch script")
    outcome = read_outcome(Path(words[0]), place)
    settle(outcome, place, lambda line: print(line, file=sys.stderr), instead=INSTEAD)
    return outcome.exit_code


def read_outcome(path: Path, place: SlurmPlace) -> Outcome:
    """What the result file of a launch in this start of this job says. Raise `NoResult`."""
    try:
        content = read_result(path)
        code = int(content["exit_code"])
        if not 0 <= code <= 255:
            raise ValueError("no exit code of a process")
        of = content.get("slurm") or {}
        job, restarts = of.get("job", place.job), of.get("restarts", place.num_restarts)
    except OSError as error:
        raise NoResult(f"{path}: {error.strerror or 'cannot be read'}; {NOTHING_TOLD}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NoResult(f"{path} is no result file of rsup launch, and SLURM is told nothing") from None
    if (job, restarts) != (place.job, place.num_restarts):
        whose = f"job {str(job)[:40]}" if job != place.job else f"an earlier start of job {job}"
        raise NoResult(f"{path} is of {whose}; {NOTHING_TOLD}")
    return Outcome(code, nodes_to_avoid(content))


def nodes_to_avoid(content: Mapping[str, object]) -> tuple[str, ...]:
    """The nodes that the result says the job must not run on again."""
    named = content.get("avoid_nodes")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
