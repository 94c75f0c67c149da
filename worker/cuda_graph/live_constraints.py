"""What only live objects show: a module, an optimizer and a step that a graph cannot hold.

Imports torch when it is called, so that `constraints`, which is asked before, stays light. Tensors that have moved since a
capture are found by the graphs themselves, before each replay.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rsup.worker.cuda_graph.contract import Batches, ConstraintError, ForwardBackward
from rsup.worker.cuda_graph.graph_facts import facts_of_environment

if TYPE_CHECKING:
    import torch

ALLOWED_HOOKS = ("torch.*", "rsup.worker.cuda_graph.*", "rsup.worker.rerun.*", "rsup.worker.activation_offload.*")
"""Patterns of `module.qualified name` of hooks that do the same in every step, on the device."""
DDP_WARMUP_STEPS = 11
"""torch's DDP times its first ten passes with events that it waits for (`Reducer::should_collect_runtime_stats`)."""


@dataclass(frozen=True)
class LiveConstraint:
    """One row of the second table in docs/cuda_graph.md."""

    option: str
    why: str
    remedy: str

    def error(self, where: str) -> ConstraintError:
        """The error: one line. `where`: the object at fault."""
        return ConstraintError(f"{where}: {self.option} does not go with a CUDA graph: {self.why}; {self.remedy}")


FSDP = LiveConstraint(
    "sharded parameters (FSDP)", "they are gathered into memory that moves", "use DDP or GradientGroups, or no graph"
)
SEVERAL_DEVICES = LiveConstraint(
    "parameters on several devices", "one stream of one device is captured", "move the module to one device"
)
UNUSED_PARAMETERS = LiveConstraint(
    "DDP(find_unused_parameters=True)", "which parameters were used is read from the device", "use False, or static_graph=True"
)
DDP_WARMUP = LiveConstraint(
    "DistributedDataParallel with too few warm-up steps",
    "it waits for timing events of its first ten passes",
    f"use cuda_graph_warmup_steps {DDP_WARMUP_STEPS} or more, or GradientGroups",
)
CUMULATIVE_NORM = LiveConstraint(
    "batch normalisation with momentum=None", "it reads its count of batches from the device", "give it a momentum"
)
HOOK = LiveConstraint(
    "a Python hook",
    "it runs while the step is captured and never again, so what it writes or counts stops",
    "remove it, call such steps with eager=True, or name it in allowed_hooks if it only launches kernels",
)
ANOMALY = LiveConstraint(
    "torch.autograd.set_detect_anomaly", "it reads every gradient from the device", "switch it off, or call with eager=True"
)
EXPANDABLE = LiveConstraint(
    "expandable_segments with NCCL's registration",
    "NCCL registers the buffers of a graph, and memory of expandable segments cannot be registered",
    "set NCCL_GRAPH_REGISTER=0, or leave expandable_segments out",
)
SCALER = LiveConstraint(
    "an enabled GradScaler",
    "its scale changes by a decision of the host, and its new scale lies at another address",
    "use bfloat16, or a fixed scale in the loss",
)
OPTIMIZER_KIND = LiveConstraint(
    "an optimizer that cannot be gated",
    "a rejected step would change parameters",
    "use Adam or AdamW with fused=True, or give it a gated_step",
)
NOT_CAPTURABLE = LiveConstraint(
    "capturable=False",
    "its step counter stays on the host, and every replay is the same step",
    "call prepare_optimizer_for_graph",
)
NOT_FUSED = LiveConstraint("an optimizer without fused=True", "only fused Adam looks at the gate", "make it with fused=True")
LR_NUMBER = LiveConstraint(
    "a learning rate that is a plain number or on another device",
    "the graph keeps the one of the captured step for good",
    "call prepare_optimizer_for_graph, and set it by set_lr or fill_",
)
STATE_AWAY = LiveConstraint(
    "optimizer state on another device than its parameter", "a graph cannot reach it", "restore_from_cpu() before the step"
)
HOST_READ = LiveConstraint(
    "a read of the device inside of the step",
    "the host would wait while the step is captured, and not look at all when it is replayed",
    "keep it on the device, or read the result after the step",
)
LIVE_CONSTRAINTS: tuple[LiveConstraint, ...] = (
    FSDP,
    SEVERAL_DEVICES,
    UNUSED_PARAMETERS,
    DDP_WARMUP,
    CUMULATIVE_NORM,
    HOOK,
    ANOMALY,
    EXPANDABLE,
    SCALER,
    OPTIMIZER_KIND,
    NOT_CAPTURABLE,
    NOT_FUSED,
    LR_NUMBER,
    STATE_AWAY,
    HOST_READ,
)


def check_module(
    module: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer | None" = None,
    *,
    scaler: Any = None,
    warmup_steps: int = 3,
    allowed_hooks: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Raise `ConstraintError` for the first thing of `module`, and of an `optimizer` to be captured, that a graph cannot hold.

    Call it once all hooks are registered and the `OptimizerGraph` is made (which prepares its optimizer), before the first
    step. `optimizer`: one that is captured. `allowed_hooks`: patterns beside `ALLOWED_HOOKS`. What matters on a device alone is
    not asked of a module on the CPU.
    """
    import torch

    on_device = any(parameter.device.type != "cpu" for parameter in module.parameters())
    _check_devices(module)
    _check_parts(module, on_device, warmup_steps)
    for where, hook in _hooks(module):
        name = _name(hook)
        if not any(fnmatchcase(name, pattern) for pattern in (*ALLOWED_HOOKS, *allowed_hooks)):
            raise HOOK.error(f"{where} ({name})")
    if torch.is_anomaly_enabled():
        raise ANOMALY.error("the process")
    facts = facts_of_environment(os.environ if environment is None else environment)
    if on_device and facts["nccl_graph_register"] and (facts["expandable_segments"] or _allocator_expands()):
        raise EXPANDABLE.error("the allocator")
    if scaler is not None and scaler.is_enabled():
        raise SCALER.error(type(scaler).__name__)
    if optimizer is not None and not hasattr(optimizer, "gated_step"):
        _check_optimizer(optimizer)


def check_step(forward_backward: ForwardBackward, batches: Batches, device: "torch.device | None" = None) -> Any:
    """Run the step once and return its result; raise `ConstraintError` that names the call which reads from the device.

    Works on a machine without CUDA too: tensors of `device` (default: the first one among `batches`) count as on a device. It
    is one eager pass: gradients, generators and buffers change as in any other.
    """
    from rsup.worker.cuda_graph.host_reads import first_device, run_without_host_reads

    return run_without_host_reads(forward_backward, batches, device or first_device(batches), HOST_READ.error)


def _check_devices(module: "torch.nn.Module") -> None:
    devices: dict[Any, str] = {}
    for name, parameter in module.named_parameters():
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        shown = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise SEVERAL_DEVICES.error(shown)


def _check_parts(module: "torch.nn.Module", on_device: bool, warmup_steps: int) -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.parallel import DistributedDataParallel

    for name, part in module.named_modules():
        where = name or type(part).__name__
        if isinstance(part, FSDPModule | FullyShardedDataParallel):
            raise FSDP.error(where)
        if isinstance(part, DistributedDataParallel):
            if part.find_unused_parameters and not part.static_graph:
                raise UNUSED_PARAMETERS.error(where)
            if on_device and warmup_steps < DDP_WARMUP_STEPS:
                raise DDP_WARMUP.error(f"{where}, {warmup_steps} warm-up steps")
        if isinstance(part, _NormBase) and part.momentum is None and part.track_running_stats:
            raise CUMULATIVE_NORM.error(where)


def _hooks(module: "torch.nn.Module") -> Iterator[tuple[str, Callable[..., Any]]]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for name, part in module.named_modules():
        for kind in kinds:
            for hook in getattr(part, kind).values():
                yield f"{kind.strip('_').removesuffix('s').replace('_', ' ')} of {name or type(part).__name__}", hook
    for name, parameter in module.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(parameter, kind, None) or {}).values():
                yield f"gradient hook of {name}", hook


def _name(hook: Callable[..., Any]) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    named: Any = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"


def _allocator_expands() -> bool:
    """Whether expandable segments were switched on while the process ran."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))


def _check_optimizer(optimizer: "torch.optim.Optimizer") -> None:
    import torch

    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise OPTIMIZER_KIND.error(kind)
    for number, group in enumerate(optimizer.param_groups):
        where = f"{kind}, parameter group {number}"
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        lr = group["lr"]
        if not isinstance(lr, torch.Tensor) or lr.device != device:
            raise LR_NUMBER.error(where)
        if device.type == "cpu":
            continue
        if not group.get("fused"):
            raise NOT_FUSED.error(where)
        if not group.get("capturable"):
            raise NOT_CAPTURABLE.error(where)
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.device != parameter.device:
                    raise STATE_AWAY.error(f"{where}, {key}")
