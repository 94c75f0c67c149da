"""Makes what a run is watched with from the trainer's options: writers, energy meter, end-to-end metrics, memory report."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import rsup.worker
from rsup.worker.agreement import rank_age_s
from rsup.worker.observe.contract import Writer
from rsup.worker.observe.end_to_end import EndToEnd
from rsup.worker.observe.end_to_end_facts import Listener, RunFacts
from rsup.worker.observe.energy import EnergyMeter
from rsup.worker.observe.flops import step_flops
from rsup.worker.observe.one_logger import OneLoggerOptions, connect
from rsup.worker.observe.reference_memory import reference_description
from rsup.worker.observe.training_log import TrainingLogOptions
from rsup.worker.observe.writers import WriterOptions, make_writers
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks, job_identity
from rsup.worker.reference.state import Progress
from rsup.worker.reference.stepper import LOAD_BALANCING_LOSS

LOSS = "lm loss"
Warn = Callable[[str], None]


def flops_of_sample(options: Options) -> float:
    """Floating-point operations that a sample costs, forward and backward."""
    return step_flops(reference_description(options), options.seq_length)(1)


def log_options(options: Options) -> TrainingLogOptions:
    """What the training log is to do."""
    return TrainingLogOptions(
        train_iters=options.train_iters,
        log_interval=options.log_interval,
        writer_interval=options.tensorboard_log_interval,
        log_throughput=options.log_throughput,
        log_energy=options.log_energy,
        log_loss_scale=options.log_loss_scale_to_tensorboard,
        log_world_size=options.log_world_size_to_tensorboard,
        log_memory=options.log_memory_to_tensorboard,
        log_timers=options.log_timers_to_tensorboard,
        timer_option=options.timing_log_option,
        log_validation_ppl=options.log_validation_ppl_to_tensorboard,
        flops_per_step=step_flops(reference_description(options), options.seq_length),
        tokens_per_sample=options.seq_length,
    )


def run_writers(options: Options, ranks: Ranks, done: Progress, warn: Warn) -> list[Writer]:
    """The writers, on rank 0; none on the others. `done`: where the run goes on."""
    if ranks.rank:
        return []
    wanted = WriterOptions(
        tensorboard_dir=_path(options.tensorboard_dir),
        tensorboard_queue_size=options.tensorboard_queue_size,
        wandb_project=options.wandb_project,
        wandb_exp_name=options.wandb_exp_name,
        wandb_entity=options.wandb_entity,
        wandb_save_dir=_path(options.wandb_save_dir),
        save_dir=options.save_dir,
        otel=options.otel,
        otel_endpoint=options.otel_endpoint,
        losses=(LOSS, LOAD_BALANCING_LOSS),
    )
    return make_writers(
        wanted,
        warn=warn,
        run_name=rsup.worker.job_key(),
        config=hyperparameters(options),
        resumed_at=done.iteration,
        resumed_samples=done.consumed_samples,
    )


HYPERPARAMETERS = (
    "train_iters",
    "micro_batch_size",
    "global_batch_size",
    "rampup_batch_size",
    "seed",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "bf16",
    "fp16",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_aux_loss_coeff",
    "num_model_chunks",
    "recompute_granularity",
    "activation_offload",
    "cuda_graph_impl",
    "optimizer_cuda_graph",
    "lr",
    "min_lr",
    "lr_warmup_init",
    "lr_warmup_samples",
    "lr_decay_samples",
    "lr_decay_style",
    "lr_wsd_decay_samples",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "eval_interval",
    "eval_iters",
    "deterministic_mode",
    "world_size",
)
"""What Weights & Biases shows of the options: no path, no address, nothing that says where and for whom a job runs."""


def hyperparameters(options: Options) -> dict[str, int | float | str | None]:
    """What the run's numbers depend on, for people who compare runs."""
    found = {name: getattr(options, name) for name in HYPERPARAMETERS}
    return {
        name: value if value is None or isinstance(value, int | float | str) else str(value) for name, value in found.items()
    }


def _path(text: str | None) -> Path | None:
    if not text:
        return None
    return Path(text if "://" in text else os.path.abspath(text))  # an address is named as it was given


def energy_meter(options: Options, device_uuid: str, warn: Warn) -> EnergyMeter | None:
    """This rank's; None without `--log-energy`."""
    return EnergyMeter(device_uuid, warn) if options.log_energy else None


def end_to_end(options: Options, ranks: Ranks, warn: Warn) -> EndToEnd:
    """Where the time of this run goes, from the start of its first process on. Collective."""
    started = torch.tensor([time.time() - rank_age_s()], dtype=torch.float64)
    dist.all_reduce(started, dist.ReduceOp.MIN, group=ranks.control)
    facts = RunFacts(
        world_size=ranks.world_size,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        seq_length=options.seq_length,
        train_iterations_target=options.train_iters,
        train_samples_target=options.batch_sizes.consumed_after(options.train_iters),
        data_parallel_size=ranks.world_size,
        run_name=rsup.worker.job_key(),
        evaluates=bool(options.eval_iters),
        saves=options.save is not None,
        saves_async=options.async_save,
    )
    listeners: list[Listener] = []
    if options.enable_one_logger and ranks.rank == 0:
        listeners = _one_logger(options, facts, float(started), warn)
    return EndToEnd(facts, app_started_s=float(started), listeners=listeners)


def _one_logger(options: Options, facts: RunFacts, app_started_s: float, warn: Warn) -> list[Listener]:
    job, attempt = job_identity()
    wanted = OneLoggerOptions(
        file=(options.save_dir or Path.cwd()) / f"one_logger-{job}-{attempt}.jsonl",
        application_name="rsup-reference",
        session_tag=job,
        log_interval=options.log_interval,
        flops_per_sample=round(flops_of_sample(options)),
    )
    logger = connect(wanted, facts, app_started_s, warn)
    return [] if logger is None else [logger]
