"""The timers and the straggler detector of the reference trainer."""

from rsup.worker.observe.contract import Warn
from rsup.worker.observe.nvrx_straggler import load_kernel_scores
from rsup.worker.observe.straggler import StragglerDetector
from rsup.worker.observe.straggler_scores import SHARED_SECTIONS
from rsup.worker.observe.timers import Timers
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.rerun.contract import RankDevice

WATCHED = ("batch-generator", "forward-backward", "forward-compute", "backward-compute", "optimizer-inner-step")
"""Sections that the detector times. The last backward pass of a step waits for the other ranks' gradients."""
SHARED = SHARED_SECTIONS | {"backward-compute"}


def make_timers(options: Options, ranks: Ranks, warn: Warn) -> Timers:
    """The timers of this rank. Unless the options say how they measure it is as Megatron-LM's do, `sync`; but `event` where
    steps are graphs, and where no part of a step is timed."""
    level, mode = options.timing_log_level, options.timing_mode
    if mode is None:
        mode = "event" if options.is_graphed or level == 0 else "sync"
    return Timers(
        level,
        options.timing_log_option,
        device=ranks.device,
        group=ranks.control,
        barrier_with_level_1=not options.no_barrier_with_level_1_timing,
        mode=mode,
        warn=warn,
    )


def make_straggler(options: Options, ranks: Ranks, device: RankDevice, warn: Warn) -> StragglerDetector:
    """The straggler detector of this rank; off unless the options ask for it, until somebody switches it on. Kernels are
    compared where NVRx's detector loads, but not those of graphs."""
    enabled = options.log_straggler and not options.disable_straggler_on_startup
    kernels = load_kernel_scores(ranks.device, device.node, warn) if enabled and not options.is_graphed else None
    return StragglerDetector(
        rank=ranks.rank,
        device=device,
        torch_device=ranks.device,
        group=ranks.control,
        warn=warn,
        enabled=enabled,
        sections=WATCHED,
        shared=SHARED,
        num_listed=options.straggler_minmax_count,
        kernels=kernels,
    )
