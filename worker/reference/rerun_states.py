"""What the rerun machine of each rank keeps in a checkpoint: baselines always, an open case with its data where there is one.

It is a tensor of bytes a rank in every checkpoint. Where the checkpoint of the completed iterations is durable already when
a case has to move to another device, that checkpoint stays as it is, and the state goes beside it, with a commit of its own:

    DIR/rerun/iter_0000020/     belongs to DIR/iter_0000020, whose commit it names; both are whole or do not count
"""

import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rsup.worker.checkpoint import (
    Checkpointer,
    WholeCheckpoint,
    claim_for_all,
    find_whole_checkpoint,
)
from rsup.worker.checkpoint_directory import COMMIT_FILE, CheckpointDirectory, CheckpointError
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.reference.state import Restorable
from rsup.worker.unreadable import why_unreadable

FOLDER = "rerun"
LAYOUT_OPTIONS = ("micro_batch_size", "global_batch_size", "seq_length")


def state_tensor(state: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """A rank's rerun state as bytes, under a name of its own."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {_name(rank): torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}


def layout(options: Options) -> dict[str, int]:
    """What must be as it was for a rank's data and values to be its own again."""
    found = {"world_size": options.world_size} | {name: getattr(options, name) for name in LAYOUT_OPTIONS}
    ramp = options.rampup_batch_size
    return found if ramp is None else found | dict(zip(("ramp_start", "ramp_increment", "ramp_samples"), ramp, strict=True))


def save_beside(
    checkpoint: Path, tensors: dict[str, torch.Tensor], job: tuple[str, int], options: Options, ranks: Ranks
) -> str:
    """Keep the ranks' states beside a durable checkpoint; return why that failed, empty if it did not. Collective."""
    directory = CheckpointDirectory(checkpoint.parent / FOLDER, keep=1)
    try:
        owner = claim_for_all(directory, *job, ranks.saving, on_purpose=True)  # its checkpoints are this job's
    except CheckpointError as error:
        return str(error)
    saver = Checkpointer(directory, owner, ranks.saving)
    iteration = int(checkpoint.name.rpartition("_")[2])
    saver.save(iteration, tensors, {"of": _commit_digest(checkpoint), "layout": layout(options)})
    result = saver.finish()
    assert result is not None
    return result.error


def load_state(found: Restorable, options: Options, ranks: Ranks, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """This rank's state that belongs to a checkpoint; None where there is none for this layout of ranks. Collective.

    A state that cannot be read, or an open case of another layout, is passed over with a warning: training goes on without it.
    """
    source, beside = found, None
    if isinstance(found, WholeCheckpoint):
        beside = find_whole_checkpoint(CheckpointDirectory(found.path.parent / FOLDER), ranks.saving, warn)
        if beside is not None and beside.progress.get("of") == _commit_digest(found.path):
            source = beside
    kept = source.progress.get("layout")
    if kept is None:
        return None
    if kept != layout(options):
        if source.progress.get("has_open_case", source is beside):
            warn("job sharding has changed: rerun state is ignored")
        return None
    mine, problem = None, ""
    try:
        mine = _read(source, ranks.rank)
    except (CheckpointError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        problem = why_unreadable(error)
    problems = [""] * ranks.world_size
    dist.all_gather_object(problems, problem, group=ranks.control)
    if any(problems):
        warn(f"the rerun state in {source.path} cannot be read and is ignored: {next(filter(None, problems))}")
        return None
    return mine


def _read(source: Restorable, rank: int) -> dict[str, Any] | None:
    size = source.sizes().get(_name(rank))
    if size is None:
        raise CheckpointError(f"it has none of rank {rank}")
    holder = {_name(rank): torch.zeros(size, dtype=torch.uint8)}
    source.load(holder)
    state: dict[str, Any] = torch.load(io.BytesIO(holder[_name(rank)].numpy().tobytes()), weights_only=True)
    return state


def _name(rank: int) -> str:
    return f"rerun.rank{rank}"


def _commit_digest(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / COMMIT_FILE).read_bytes()).hexdigest()
