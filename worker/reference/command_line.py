"""From a command line to `Options`: the parser that the dataclass describes, and what cannot be together.

Imports no torch, so that wrong usage is answered at once: one line, exit code 2.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, NoReturn

from rsup.supervisor.wire import UsageError
from rsup.worker.cuda_graph.constraints import check_constraints
from rsup.worker.cuda_graph.contract import ConstraintError
from rsup.worker.exit_policy import may_save_at, problem_of_phases
from rsup.worker.faults import Fault, check_fault, parse_any_fault
from rsup.worker.inprocess.settings import InProcessSettings, check_settings
from rsup.worker.local_checkpoint_plan import check_replication
from rsup.worker.numeric_faults import NumericFault
from rsup.worker.phases import current_phase
from rsup.worker.reference.batch_sizes import problem_of_ramp
from rsup.worker.reference.dumping import check_dumps
from rsup.worker.reference.later_options import take_later_options
from rsup.worker.reference.loss_scale import problem_of_loss_scale
from rsup.worker.reference.observe_options import ObserveOptions
from rsup.worker.reference.options import Options

MAX_LISTED_RANKS = 16
LAUNCHER_PREFIX = "--ft-param-"


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all options. Its `error` raises `UsageError`."""
    parser = _OneLineParser(
        prog="python -m rsup.worker.reference.train",
        description="Trains a byte-level GPT under rsup launch, torchrun, or alone.",
        allow_abbrev=False,
    )
    inherited = {option.name for option in fields(ObserveOptions)}
    for option in sorted(fields(Options), key=lambda option: option.name in inherited):
        if option.metadata:
            _add_option(parser, option.name, option.default, option.metadata)
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any, metadata: Any) -> None:
    names = [f"--{name.replace('_', '-')}", *metadata["aliases"]]
    assert default is not MISSING
    if name == "fault":
        parser.add_argument(*names, action="append", type=_fault, metavar="FAULT", help=metadata["help"])
    elif words := metadata["values"]:
        parser.add_argument(*names, type=metadata["kind"], nargs=len(words), metavar=tuple(words), help=metadata["help"])
    elif metadata["kind"] is None:
        action = argparse.BooleanOptionalAction if default is not False else "store_true"
        parser.add_argument(*names, action=action, default=default, help=metadata["help"])
    else:
        choices = metadata["choices"] or None
        shown = None if default in (None, (), 0, "") else default
        text = metadata["help"] + (f" (default {shown})" if shown is not None else "")
        metavar = None if choices else name.rsplit("_", 1)[-1].upper()
        parser.add_argument(
            *names, type=metadata["kind"], default=default, choices=choices, help=text.replace("%", "%%"), metavar=metavar
        )


def _fault(text: str) -> Fault | NumericFault:
    try:
        return parse_any_fault(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--fault ")) from None


def parse_options(arguments: Sequence[str], world_size: int | None = None) -> Options:
    """The options of a command line. Raises `UsageError` with one line; `world_size` defaults to `WORLD_SIZE`, else 1."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.replace("_", "-").startswith(LAUNCHER_PREFIX):
            raise UsageError(f"{name} is an option of rsup launch: give it before the script")
    later, others = take_later_options(arguments)
    values = vars(make_parser().parse_args(others))
    values["fault"] = tuple(values["fault"] or ())
    values["rampup_batch_size"] = tuple(values["rampup_batch_size"] or ()) or None
    values["world_size"] = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    if not values["global_batch_size"]:
        values["global_batch_size"] = values["micro_batch_size"] * values["world_size"]
    options = Options(**values)
    if later is not None:
        _check_graph(options, later.facts)
        raise UsageError(later.refusal)
    _check(options)
    return options


def doubts(options: Options) -> list[str]:
    """Sentences about what can be done, but may not be what was meant."""
    found = []
    if options.is_graphed and options.train_iters <= options.cuda_graph_warmup_steps:
        found.append(
            f"no iteration is run as a graph: --cuda-graph-warmup-steps {options.cuda_graph_warmup_steps} come before the"
            f" first, and --train-iters is {options.train_iters}"
        )
    sizes, ramp = options.batch_sizes, options.rampup_batch_size
    if ramp is not None and (reached := sizes.consumed_after(options.train_iters - 1)) < ramp[2]:
        found.append(
            f"the batch size never reaches --global-batch-size {options.global_batch_size}: --rampup-batch-size takes {ramp[2]}"
            f" samples, and the last iteration, with {sizes.at(reached)}, begins after {reached}"
        )
    return found


def _check(options: Options) -> None:
    if options.global_batch_size % options.samples_per_pass:
        raise UsageError(
            f"--global-batch-size {options.global_batch_size} is not divisible by --micro-batch-size "
            f"{options.micro_batch_size} times {options.world_size} ranks"
        )
    passes = f"--micro-batch-size {options.micro_batch_size} times {options.world_size} ranks"
    ramp = options.rampup_batch_size
    if ramp and (problem := problem_of_ramp(ramp, options.global_batch_size, options.samples_per_pass, passes)):
        raise UsageError(problem)
    if options.hidden_size % options.num_attention_heads:
        raise UsageError(
            f"--hidden-size {options.hidden_size} is not divisible by --num-attention-heads {options.num_attention_heads}"
        )
    if options.min_lr > options.lr:
        raise UsageError(f"--min-lr {options.min_lr} is above --lr {options.lr}")
    if options.lr_decay_samples is not None and options.lr_decay_samples <= options.lr_warmup_samples:
        raise UsageError(f"--lr-decay-samples {options.lr_decay_samples} ends before --lr-warmup-samples is over")
    if (options.lr_decay_style == "WSD") != (options.lr_wsd_decay_samples is not None):
        raise UsageError("--lr-decay-style WSD and --lr-wsd-decay-samples go together")
    if options.save_interval is not None and options.save is None:
        raise UsageError("--save-interval needs --save")
    if options.exit_on_missing_checkpoint and options.load_dir is None:
        raise UsageError("--exit-on-missing-checkpoint needs --load or --save")
    if not options.distributed_timeout_minutes:
        raise UsageError("--distributed-timeout-minutes must be more than 0")
    _check_local_saves(options)
    _check_ways_out(options)
    _check_computation(options)
    if options.enable_ft_package and options.save is None:
        raise UsageError("--enable-ft-package needs --save")
    if options.calc_ft_timeouts and not options.enable_ft_package:
        raise UsageError("--calc-ft-timeouts needs --enable-ft-package")
    for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
        if getattr(options, name) and not options.wandb_project:
            raise UsageError(f"--{name.replace('_', '-')} needs --wandb-project")
    if (options.rerun_mode == "audit") != (options.rerun_audit_interval is not None):
        raise UsageError("--rerun-mode audit and --rerun-audit-interval go together")
    _check_in_process(options)
    local = options.non_persistent_save_interval
    for fault in options.fault:
        check_fault(
            fault,
            options.world_size,
            options.train_iters,
            lambda i: may_save_at(options.exit_plan, i) or (local is not None and i % local == 0),
        )


def _check_in_process(options: Options) -> None:
    if options.inprocess_restart:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        check_settings(options.inprocess_settings, options.world_size, local_world_size)
        return
    for name, default in vars(InProcessSettings()).items():
        if getattr(options, f"inprocess_{name}") != default:
            raise UsageError(f"--inprocess-{name.replace('_', '-')} needs --inprocess-restart")


def _check_computation(options: Options) -> None:
    names = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    scaling = {name: getattr(options, name) for name in names}
    given = {f"--{name.replace('_', '-')}": value for name, value in scaling.items() if value != getattr(Options, name)}
    initial, minimum = options.initial_loss_scale, options.min_loss_scale
    if problem := problem_of_loss_scale(options.fp16, options.bf16, options.loss_scale, given, initial, minimum):
        raise UsageError(problem)
    for name in ("num_model_chunks", "optimizer_cuda_graph", *(n for n in vars(options) if n.startswith("cuda_graph_"))):
        if not options.is_graphed and getattr(options, name) != getattr(Options, name):
            negated = "no-" if getattr(Options, name) is True else ""
            raise UsageError(f"--{negated}{name.replace('_', '-')} needs --cuda-graph-impl full_iteration")
    if options.num_layers % options.num_model_chunks:
        raise UsageError(f"--num-layers {options.num_layers} is not divisible by --num-model-chunks {options.num_model_chunks}")
    if options.fine_grained_offloading_max_inflight_offloads is not None and not options.activation_offload:
        raise UsageError("--fine-grained-offloading-max-inflight-offloads needs --activation-offload")
    check_dumps(options)
    if options.straggler_minmax_count > MAX_LISTED_RANKS:
        raise UsageError(f"--straggler-minmax-count {options.straggler_minmax_count} is more than {MAX_LISTED_RANKS}")
    _check_graph(options, {})
    if options.fp16 and options.is_graphed and options.no_check_for_nan_in_loss_and_grad:
        raise UsageError(
            "--fp16 with a CUDA graph does not go with --no-check-for-nan-in-loss-and-grad: the check on the device is what"
            " keeps an overflow from the parameters; leave it out"
        )


def _check_graph(options: Options, more_facts: dict[str, Any]) -> None:
    try:
        check_constraints(replace(options.graph_facts, **more_facts))
    except ConstraintError as error:
        raise UsageError(str(error)) from None


def _check_local_saves(options: Options) -> None:
    interval, kind = options.non_persistent_save_interval, options.non_persistent_ckpt_type
    if (interval is None) != (kind is None):
        raise UsageError("--non-persistent-save-interval and --non-persistent-ckpt-type go together")
    if (kind == "local") != (options.non_persistent_local_ckpt_dir is not None):
        raise UsageError("--non-persistent-ckpt-type local and --non-persistent-local-ckpt-dir go together")
    if options.replication_jump is not None and not options.replication:
        raise UsageError("--replication-jump needs --replication")
    if options.replication_factor != Options.replication_factor and not options.replication:
        raise UsageError("--replication-factor needs --replication")
    if options.non_persistent_local_ckpt_algo != Options.non_persistent_local_ckpt_algo and interval is None:
        raise UsageError("--non-persistent-local-ckpt-algo needs --non-persistent-save-interval")
    if options.replication and interval is None:
        raise UsageError("--replication needs --non-persistent-save-interval")
    if options.replicas is not None:
        check_replication(options.replicas, options.world_size)
    if interval is None:
        return
    if options.save is None:
        raise UsageError("--non-persistent-save-interval needs --save: a local checkpoint is lost with its node")
    if options.save_interval is not None and interval % options.save_interval == 0:
        raise UsageError(
            f"--non-persistent-save-interval {interval} is a multiple of --save-interval {options.save_interval}: each local "
            f"checkpoint would fall on a durable one"
        )


def _check_ways_out(options: Options) -> None:
    if options.exit_signal and not options.exit_signal_handler:
        raise UsageError("--exit-signal needs --exit-signal-handler")
    if options.exit_duration_in_mins == 0:
        raise UsageError("--exit-duration-in-mins must be more than 0")
    if options.dataloader_start_method and not options.num_workers:
        raise UsageError("--dataloader-start-method needs --num-workers")
    ends, phase = options.phase_transition_iterations, current_phase()
    if ends and phase is not None:
        raise UsageError("--phase-transition-iterations: the phases come from rsup launch --phases; leave it out")
    if (ends or phase is not None) and options.save is None:
        given = "--phase-transition-iterations" if ends else "rsup launch --phases"
        raise UsageError(f"{given} needs --save: the next phase goes on from a checkpoint")
    if problem := problem_of_phases(ends, options.train_iters):
        raise UsageError(f"--phase-transition-iterations: {problem}")
