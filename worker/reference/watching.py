"""The timers and the straggler detector of the reference trainer."""

from rsup.worker.observe.contract import Warn
from rsup.worker.observe.nvrx_straggler import load_kernel_scores
from rsup.worker.observe.straggler import StragglerDetector
from rsup.worker.observe.straggler_scores import SHARED_SECTIONS
from rsup.worker.observe.timers import Timers
from rsup.worker.reference.ranks import Ranks
from rsup.worker.rerun.contract import RankDevice

WATCHED = ("batch-generator", "forward-backward", "forward-compute", "backward-compute", "optimizer-inner-step")
"""Sections that the detector times. The last backward pass of a step waits for the other ranks' gradients."""
SHARED = SHARED_SECTIONS | {"backward-compute"}


def make_timers(
    ranks: Ranks, warn: Warn, *, level: int, option: str, has_barrier: bool, is_graphed: bool, mode: str | None = None
) -> Timers:
    """`mode`: None for Megatron-LM's, `sync`; but `event` where steps are graphs, and where no part of a step is timed."""
    if mode is None:
        mode = "event" if is_graphed or level == 0 else "sync"
    return Timers(
        level, option, device=ranks.device, group=ranks.control, barrier_with_level_1=has_barrier, mode=mode, warn=warn
    )


def make_straggler(
    ranks: Ranks, device: RankDevice, warn: Warn, *, enabled: bool, num_listed: int, is_graphed: bool
) -> StragglerDetector:
    """Off where not `enabled`, and to be switched on in the running job. Kernels are compared where NVRx's detector loads, but
    not those of graphs."""
    kernels = load_kernel_scores(ranks.device, device.node, warn) if enabled and not is_graphed else None
    return StragglerDetector(
        rank=ranks.rank,
        device=device,
        torch_device=ranks.device,
        group=ranks.control,
        warn=warn,
        enabled=enabled,
        sections=WATCHED,
        shared=SHARED,
        num_listed=num_listed,
        kernels=kernels,
    )
