"""What all ranks know alike before the first iteration: what is left out, and which faults cannot strike. Collective."""

from collections.abc import Callable

import torch.distributed as dist

from rsup.worker.numeric_faults import NumericFault
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.rerun.skip_list import iterations_to_skip
from rsup.worker.rerun.tracker import read_trackers


def unarmed_faults(options: Options, ranks: Ranks, device_uuid: str) -> list[str]:
    """A line for each fault of a device that no rank computes on: it cannot strike now. `device_uuid`: this rank's."""
    devices: list[str] = [""] * ranks.world_size
    dist.all_gather_object(devices, device_uuid, group=ranks.control)
    return [
        f"no rank computes on {fault.device}: --fault {fault} is not armed now"
        for fault in options.fault
        if isinstance(fault, NumericFault) and fault.device and fault.device not in devices
    ]


def agreed_skips(options: Options, ranks: Ranks, warn: Callable[[str], None]) -> frozenset[int]:
    """Iterations that the command line, or what earlier runs rejected, leaves out. Rank 0 reads for all."""
    found: list[list[int]] = [list(options.iterations_to_skip)]
    tracker = options.result_rejected_tracker_filename
    if tracker and ranks.rank == 0:
        trackers = read_trackers(tracker)
        if trackers.complaint:
            warn(trackers.complaint)
        found[0] += iterations_to_skip(trackers.records)
    dist.broadcast_object_list(found, src=0, group=ranks.control)
    return frozenset(found[0])
