"""Where a run of the trainer goes on: from the newest checkpoint that is whole, durable or local, as all ranks agree."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from rsup.worker.checkpoint import check_whole
from rsup.worker.checkpoint_directory import CheckpointDirectory
from rsup.worker.loader_state import ResumableLoader, restore_loader, tensor_name
from rsup.worker.local_checkpoint import LocalCheckpointer
from rsup.worker.reference.micro_batches import MicroBatches
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.reference.rerun_states import layout
from rsup.worker.reference.state import Progress, Restorable


def find_newest(
    load_dir: Path,
    local: LocalCheckpointer | None,
    group: dist.ProcessGroup,
    warn: Callable[[str], None],
    job_key: str = "",
) -> Restorable | None:
    """The newest whole checkpoint of both kinds, the durable one where both are of one iteration. One that is damaged is
    passed over with a warning. `job_key`: only that job's. Collective."""
    directory = CheckpointDirectory(load_dir)
    listed: list[list[int]] = [directory.iterations() if dist.get_rank(group) == 0 else []]
    dist.broadcast_object_list(listed, src=dist.get_global_rank(group, 0), group=group)
    durable, kept = listed[0], local.saves() if local is not None else []
    while durable or kept:
        found: Restorable | None
        if kept and (not durable or kept[0][0].iteration > durable[0]):
            assert local is not None
            found = local.open(*kept.pop(0))
        else:
            found = check_whole(directory.folder(durable.pop(0)), group, warn)
            if found is not None and job_key not in ("", found.commit.job_key):
                continue
        if found is not None:
            return found
    return None


def place_loader(
    found: Restorable,
    loader: ResumableLoader,
    source: MicroBatches,
    progress: Progress,
    options: Options,
    ranks: Ranks,
) -> None:
    """Put the loader where `found` stands. Under another number of ranks or batch size that follows from the samples consumed.

    Raises `LoaderStateError` where `--require-loader-state` is given and there is none.
    """
    num_saved = found.progress.get("num_loader_states", 0)
    is_same = found.progress.get("layout") == layout(options)
    if is_same or (options.require_loader_state and not num_saved):
        name = tensor_name(ranks.rank)
        kept = {}
        if num_saved:
            kept[ranks.rank] = torch.zeros(found.sizes()[name], dtype=torch.uint8)
            found.load({name: kept[ranks.rank]})
        if restore_loader(loader, kept, ranks.rank, ranks.world_size, num_saved, options.require_loader_state):
            return
    source.seek(progress.iteration, progress.consumed_samples)
    loader.restart()
