"""The trainer's options of dumps, and of experts: what they ask for together, and what cannot be. No torch at import."""

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import rsup.worker
from rsup.supervisor.wire import UsageError
from rsup.worker.observe.contract import Warn
from rsup.worker.observe.dump_plan import (
    ACTIVATIONS,
    DGRADS,
    LABELS,
    NO_DUMPS,
    PARAMS,
    WGRADS,
    DumpPlan,
    Dumps,
    MicroBatchChoice,
    ModelPosition,
)

if TYPE_CHECKING:
    from torch import nn

    from rsup.worker.reference.options import Options
    from rsup.worker.reference.ranks import Ranks

_SWITCHES = {"save_grads": (WGRADS, DGRADS), "save_wgrads": (WGRADS,), "save_dgrads": (DGRADS,), "save_params": (PARAMS,)}
"""Options without an interval of their own, and what they dump."""


def dump_options(options: "Options") -> tuple[str, ...]:
    """The options in use that dump something, as they are given."""
    switches = [name for name in _SWITCHES if getattr(options, name)]
    intervals = [f"save_{label}_interval" for label in LABELS if _own_interval(options, label)]
    return tuple(f"--{name.replace('_', '-')}" for name in (*switches, *intervals))


def dump_intervals(options: "Options") -> dict[str, int]:
    """Iterations between dumps, by label. An interval of its own counts more than a switch's."""
    found: dict[str, int] = {}
    for name, labels in _SWITCHES.items():
        if getattr(options, name) and options.save_interval is not None:
            found |= dict.fromkeys(labels, options.save_interval)
    for label in LABELS:
        if (interval := _own_interval(options, label)) is not None:
            found[label] = interval
    return found


def check_dumps(options: "Options") -> None:
    """Raise `UsageError` for options of dumps and experts that cannot be together."""
    _check_experts(options)
    given = dump_options(options)
    if given and options.save is None:
        raise UsageError(f"{given[0]} needs --save: dumps lie beside the checkpoints")
    for name, labels in _SWITCHES.items():
        missing = [label for label in labels if _own_interval(options, label) is None]
        if getattr(options, name) and options.save_interval is None and missing:
            remedy = " and ".join(f"--save-{label}-interval" for label in missing)
            raise UsageError(f"--{name.replace('_', '-')} needs --save-interval, or give {remedy}")
    has_modules = dump_intervals(options).keys() & {ACTIVATIONS, DGRADS}
    for name in ("dump_modules", "dump_micro_batches"):
        if getattr(options, name) != getattr(type(options), name) and not has_modules:
            raise UsageError(f"--{name.replace('_', '-')} needs --save-activations-interval or --save-dgrads-interval")
    if options.save_tokens_per_expert_interval is not None and not options.num_experts:
        raise UsageError("--save-tokens-per-expert-interval needs --num-experts")


def make_dumps(options: "Options", ranks: "Ranks", module: "nn.Module", warn: Warn) -> Dumps:
    """What dumps tensors of this rank; data parallel ranks hold the same, so rank 0 writes all but tokens per expert.

    `warn`: of rank 0; the others say for themselves what they cannot write.
    """
    intervals = dump_intervals(options)
    if not intervals or options.save_dir is None:
        for problem in DumpPlan(Path(), intervals).problems() if ranks.rank == 0 else ():  # intervals of 0
            warn(problem)
        return NO_DUMPS
    from rsup.worker.observe.dump_hooks import is_linear
    from rsup.worker.observe.tensor_dump import TensorDumps

    if ranks.rank:  # that an interval is 0 is said by rank 0
        intervals = {label: interval for label, interval in intervals.items() if interval}
    patterns = options.dump_modules
    plan = DumpPlan(
        options.save_dir,
        intervals,
        MicroBatchChoice(options.dump_micro_batches),
        ModelPosition(is_writer=ranks.rank == 0),
        ranks.rank,
        num_writers_of_node=1,
    )

    def is_chosen(name: str, chosen: "nn.Module") -> bool:
        if patterns:
            return any(fnmatchcase(name, pattern) for pattern in patterns)
        return is_linear(name, chosen)

    return TensorDumps(plan, [module], is_watched=is_chosen, warn=warn if ranks.rank == 0 else _warn_of(ranks.rank))


def _warn_of(rank: int) -> Warn:
    def warn(text: str) -> None:
        print(f"warning: rank {rank}: {text}", file=sys.stderr, flush=True)
        rsup.worker.note("warning", f"rank {rank}: {text}")

    return warn


def _own_interval(options: "Options", label: str) -> int | None:
    interval: int | None = getattr(options, f"save_{label}_interval")
    return interval


def _check_experts(options: "Options") -> None:
    if not options.num_experts:
        for name in ("moe_router_topk", "moe_ffn_hidden_size", "moe_aux_loss_coeff"):
            if getattr(options, name) != getattr(type(options), name):
                raise UsageError(f"--{name.replace('_', '-')} needs --num-experts")
    elif options.moe_router_topk > options.num_experts:
        raise UsageError(f"--moe-router-topk {options.moe_router_topk} is more than --num-experts {options.num_experts}")
