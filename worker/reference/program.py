"""What a kept step says of the model it belongs to, so that whoever repeats it need not know the job's options."""

from dataclasses import fields
from typing import Any, cast

import msgspec

from rsup.worker.reference.loss_scale import LossScale
from rsup.worker.reference.options import Options
from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.kept_step import KeptStep

KIND = "rsup.worker.reference"
KEPT_OPTIONS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "bf16",
    "fp16",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_aux_loss_coeff",
    "micro_batch_size",
    "global_batch_size",
    "world_size",
    "no_check_for_nan_in_loss_and_grad",
    "check_for_spiky_loss",
    "check_for_large_grads",
)
"""What the step's numbers depend on."""


class _Program(msgspec.Struct):
    kind: str
    options: dict[str, int | float | bool]
    deterministic: bool
    loss_scale: float = 1.0
    is_loss_scale_fixed: bool = True


def program_of(options: Options, deterministic: bool) -> dict[str, Any]:
    """For `RerunStateMachine.program`."""
    return {
        "kind": KIND,
        "options": {name: getattr(options, name) for name in KEPT_OPTIONS},
        "deterministic": deterministic,
        "loss_scale": options.loss_scale or options.initial_loss_scale,
        "is_loss_scale_fixed": bool(options.loss_scale),
    }


def follow(program: dict[str, Any], global_batch_size: int, loss_scale: LossScale | None) -> None:
    """Note in `RerunStateMachine.program` what is another in each iteration."""
    cast(dict[str, Any], program["options"])["global_batch_size"] = global_batch_size
    if loss_scale is not None:
        program["loss_scale"] = loss_scale.value


def read_program(step: KeptStep) -> tuple[Options, bool]:
    """The options, and whether kernels were deterministic. Raise `RerunError` for a step of another program."""
    try:
        program = msgspec.convert(step.program, _Program)
    except msgspec.ValidationError:
        program = _Program("", {}, False)
    if program.kind != KIND:
        raise RerunError("the step is of another program than the reference trainer: give its command with --replay-command")
    known = {option.name: type(option.default) for option in fields(Options)}
    for name, value in program.options.items():
        if name not in KEPT_OPTIONS or type(value) is not known[name]:
            raise RerunError(f"the step was kept by another release: {name}={value!r} is no option that it reads")
    scale = {"loss_scale" if program.is_loss_scale_fixed else "initial_loss_scale": program.loss_scale}
    return Options(**program.options, **scale), program.deterministic  # type: ignore[arg-type]
