"""The trainer's options: names and defaults are Megatron-LM's where it has them. One dataclass describes the command line, too
(`command_line`)."""

import argparse
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rsup.worker.cuda_graph.graph_facts import GraphFacts, facts_of_environment
from rsup.worker.exit_policy import ExitPlan
from rsup.worker.faults import Fault, parse_any_fault
from rsup.worker.inprocess.settings import GRANULARITIES, InProcessSettings
from rsup.worker.local_checkpoint_plan import Replication
from rsup.worker.numeric_faults import NumericFault
from rsup.worker.phases import current_phase
from rsup.worker.reference.optimizer_schedule import DECAY_STYLES
from rsup.worker.rerun.contract import INJECTION_TYPES, ON_APPLICATION, ON_TRANSIENT, RERUN_MODES, RerunConfig, rerun_mode

RECOMPUTE_GRANULARITIES = ("full", "selective")
"""Megatron-LM's names: whole blocks, or the core of the attention."""


def _flag(default: Any, help: str, kind: Any = None, *aliases: str, choices: Sequence[Any] = ()) -> Any:
    return field(default=default, metadata={"help": help, "kind": kind, "aliases": aliases, "choices": choices})


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number, 0 or more")
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _iterations(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split(","))


def _signals(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_signal(part.strip()) for part in text.split(",")))


def _signal(text: str) -> str:
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise argparse.ArgumentTypeError(f"{text} is no signal that can be caught")
    return name


def _graph_impl(text: str) -> str:
    """Also those of Megatron-LM that rsup has not: `cuda_graph.constraints` says why, and what to use."""
    if text not in ("none", "full_iteration", "local", "transformer_engine"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither none nor full_iteration")
    return text


for _kind, _name in ((_whole, "count"), (_not_negative, "count"), (_rate, "number"), (_probability, "probability")):
    _kind.__name__ = _name  # argparse says "invalid count value: 'x'"
_iterations.__name__ = "list of iterations"
_signals.__name__ = "list of signals"


@dataclass(frozen=True)
class Options:
    """What one training run does. Sample and iteration counts are global, over all ranks."""

    train_iters: int = _flag(60, "iterations to train, in all", _whole, "--iterations")
    micro_batch_size: int = _flag(4, "samples of one forward and backward pass of a rank", _whole)
    global_batch_size: int = _flag(0, "samples of one iteration; default: one micro-batch a rank", _whole)
    seed: int = _flag(1234, "seed of parameters, data order and dropout", _not_negative)
    data_path: str | None = _flag(None, "a text file, or a folder of .py and .txt files; default: Python's own sources", str)

    num_layers: int = _flag(2, "transformer blocks", _whole)
    hidden_size: int = _flag(128, "width of the model", _whole)
    num_attention_heads: int = _flag(4, "attention heads", _whole)
    seq_length: int = _flag(128, "bytes of context", _whole)
    attention_dropout: float = _flag(0.1, "dropout on attention weights", _probability)
    hidden_dropout: float = _flag(0.1, "dropout on hidden states", _probability)
    bf16: bool = _flag(False, "compute in bfloat16 (parameters stay float32)")
    num_model_chunks: int = _flag(1, "parts of the model that are run one after the other, each with data of its own", _whole)
    recompute_granularity: str | None = _flag(
        None, "compute again in the backward pass: whole blocks, or attention only", str, choices=RECOMPUTE_GRANULARITIES
    )
    activation_offload: bool = _flag(False, "keep activations in host memory until the backward pass; without effect on a CPU")
    fine_grained_offloading_max_inflight_offloads: int | None = _flag(
        None, "copies of activations to host memory that may be on their way; more wait", _not_negative
    )

    cuda_graph_impl: str = _flag(
        "none", "compute an iteration kernel by kernel (none), or replay it as a graph (full_iteration)", _graph_impl
    )
    optimizer_cuda_graph: bool = _flag(False, "replay the optimizer's step as a graph too")
    cuda_graph_warmup_steps: int = _flag(3, "iterations before the one in which a graph is captured", _not_negative)
    cuda_graph_use_single_mempool: bool = _flag(True, "one memory pool for all graphs (default)")
    cuda_graph_fallback: str = _flag(
        "raise", "where an iteration cannot be captured: fail, or go on without a graph", str, choices=("raise", "eager")
    )

    lr: float = _flag(3e-3, "highest learning rate", _rate)
    min_lr: float = _flag(0.0, "lowest learning rate", _rate)
    lr_warmup_init: float = _flag(0.0, "learning rate at the start of the warm-up", _rate)
    lr_warmup_samples: int = _flag(0, "samples of linear warm-up", _not_negative)
    lr_decay_samples: int | None = _flag(None, "samples until --min-lr is reached; default: the whole run", _whole)
    lr_decay_style: str = _flag("linear", "shape of the decay", str, choices=DECAY_STYLES)
    lr_wsd_decay_samples: int | None = _flag(None, "samples of the final decay, for --lr-decay-style WSD", _whole)
    weight_decay: float = _flag(0.01, "AdamW's weight decay, for matrices", _rate)
    adam_beta1: float = _flag(0.9, "AdamW's first beta", _probability)
    adam_beta2: float = _flag(0.999, "AdamW's second beta", _probability)
    adam_eps: float = _flag(1e-8, "AdamW's epsilon", _rate)
    clip_grad: float = _flag(1.0, "greatest norm of the gradient; 0: no limit", _rate)

    num_workers: int = _flag(0, "processes of a rank that read its data ahead", _not_negative)
    dataloader_start_method: str | None = _flag(
        None, "how these processes start; default: torch's", str, choices=("fork", "spawn", "forkserver")
    )
    eval_interval: int = _flag(1000, "iterations between evaluations", _whole)
    eval_iters: int = _flag(10, "steps of an evaluation; 0: none", _not_negative)
    log_interval: int = _flag(10, "iterations between log lines", _whole)

    save: str | None = _flag(None, "directory of checkpoints", str)
    load: str | None = _flag(None, "directory to resume from; default: that of --save", str)
    save_interval: int | None = _flag(None, "iterations between checkpoints", _whole)
    async_save: bool = _flag(True, "write checkpoints beside the training (default)")
    keep_checkpoints: int = _flag(3, "checkpoints to keep, the newest", _whole)
    non_persistent_save_interval: int | None = _flag(
        None, "iterations between local checkpoints, which are not durable", _whole
    )
    non_persistent_ckpt_type: str | None = _flag(
        None, "where local checkpoints are: on local disk, or in shared memory", str, choices=("local", "in_memory")
    )
    non_persistent_local_ckpt_dir: str | None = _flag(None, "directory of local checkpoints, on each node its own", str)
    non_persistent_local_ckpt_algo: str = _flag(
        "fully_parallel",
        "what ranks have alike is divided among them, or kept by each",
        str,
        choices=("fully_parallel", "atomic"),
    )
    replication: bool = _flag(False, "keep copies of each rank's local checkpoint on other nodes")
    replication_jump: int | None = _flag(None, "ranks between those that keep the same part; default: the next node's", _whole)
    replication_factor: int = _flag(2, "ranks that have each part, its own included", _whole)
    require_loader_state: bool = _flag(
        False, "fail where the state of the data loader cannot be saved, or is not in the checkpoint"
    )
    offload_optimizer_during_evaluation: bool = _flag(False, "keep the optimizer's state in host memory during evaluations")
    empty_unused_memory_level: int = _flag(
        0,
        "empty the CUDA cache in each iteration: 1 after the backward pass, 2 after the optimizer too",
        int,
        choices=(0, 1, 2),
    )
    exit_on_missing_checkpoint: bool = _flag(False, "fail when there is no whole checkpoint to resume from")

    exit_interval: int | None = _flag(None, "save and leave at every multiple of this iteration", _whole)
    exit_duration_in_mins: float | None = _flag(None, "save and leave after so many minutes", _rate)
    exit_signal_handler: bool = _flag(False, "on an exit signal to any rank: save, then leave with 0")
    exit_signal: tuple[str, ...] = _flag((), "signals of --exit-signal-handler, comma-separated; default: SIGTERM", _signals)
    exit_signal_handler_for_training: bool = _flag(
        False, "on SIGINT or SIGTERM: leave in order, without a save; --exit-signal-handler's signals save all the same"
    )
    exit_signal_handler_for_dataloader: bool = _flag(
        False, "shield the loader's processes from SIGTERM, as the other two handlers do from theirs"
    )
    phase_transition_iterations: tuple[int, ...] = _flag((), "save and leave at these iterations, comma-separated", _iterations)

    enable_ft_package: bool = _flag(False, "open the sections setup, step and checkpointing; needs --save")
    calc_ft_timeouts: bool = _flag(False, "keep the calculated limits in ft_state.json beside the checkpoints")
    ft_num_warmup_iters: int = _flag(5, "first steps that are outside the section `step`", _not_negative)

    rerun_mode: str = _flag("validate_results", "replay rejected iterations", str, choices=RERUN_MODES)
    rerun_audit_interval: int | None = _flag(None, "iterations between audits, for --rerun-mode audit", _whole)
    no_check_for_nan_in_loss_and_grad: bool = _flag(False, "do not look for NaN and Inf in losses and gradients")
    check_for_spiky_loss: bool = _flag(False, "warn of a loss that is unexpectedly large")
    check_for_large_grads: bool = _flag(False, "warn of gradients that are unexpectedly large")
    error_injection_rate: int = _flag(0, "pretend an error about once in so many checks; 0: never", _not_negative)
    error_injection_type: str = _flag("transient_error", "which error to pretend", str, choices=INJECTION_TYPES)
    result_rejected_tracker_filename: str | None = _flag(
        None, "rejected results are written here, a file a rank; iterations rejected twice in it are skipped", str
    )
    on_transient: str = _flag(
        "continue", "after an error that did not come again: go on, or start again", str, choices=ON_TRANSIENT
    )
    on_application: str = _flag(
        "exit", "after an error of data or program: exit with 17, or skip the iteration", str, choices=ON_APPLICATION
    )
    iterations_to_skip: tuple[int, ...] = _flag((), "iterations whose computation is left out, comma-separated", _iterations)

    inprocess_restart: bool = _flag(False, "after a fault enter the training again in the same process, under rsup launch")
    inprocess_max_iterations: int | None = _flag(None, "entries into the training in one attempt; default: no limit", _whole)
    inprocess_monitor_thread_interval: float = _flag(1.0, "seconds between looks for faults by the rank itself", _rate)
    inprocess_monitor_process_interval: float = _flag(1.0, "the same by the process that watches the rank", _rate)
    inprocess_progress_watchdog_interval: float = _flag(1.0, "seconds between signs of progress of the main thread", _rate)
    inprocess_heartbeat_interval: float = _flag(30.0, "seconds between heartbeats of neighbouring ranks", _rate)
    inprocess_heartbeat_timeout: float = _flag(60.0, "a neighbour silent for so many seconds counts as lost", _rate)
    inprocess_soft_timeout: float = _flag(60.0, "seconds without progress after which a rank is interrupted", _rate)
    inprocess_hard_timeout: float = _flag(90.0, "seconds without progress after which its process is killed", _rate)
    inprocess_barrier_timeout: float = _flag(120.0, "seconds that ranks wait for each other in a restart", _rate)
    inprocess_completion_timeout: float = _flag(120.0, "the same at the end of the training", _rate)
    inprocess_last_call_wait: float = _flag(0.0, "seconds to wait for reports of further faults before a restart", _rate)
    inprocess_termination_grace_time: float = _flag(1.0, "seconds between SIGTERM and SIGKILL after the hard timeout", _rate)
    inprocess_granularity: str = _flag("node", "what a reserve replaces", str, choices=GRANULARITIES)
    inprocess_active_world_size: int | None = _flag(None, "ranks that compute, the others are reserves; default: all", _whole)
    inprocess_empty_cuda_cache: bool = _flag(False, "empty the CUDA cache in a restart")

    device: str = _flag("auto", "cpu, or cuda (one GPU a local rank), or auto", str, choices=("auto", "cpu", "cuda"))
    deterministic_mode: bool | None = _flag(None, "bitwise repeatable results; default on the CPU")
    distributed_timeout_minutes: float = _flag(10.0, "time limit of a collective", _rate)
    fault: tuple[Fault | NumericFault, ...] = _flag(
        (), "inject a fault: rank=R,iteration=I,kind=K[,repeat] and others; may be repeated", parse_any_fault
    )

    world_size: int = 1
    """From the environment, not an option."""

    @property
    def samples_per_pass(self) -> int:
        """Samples that all ranks together take in one forward and backward pass."""
        return self.micro_batch_size * self.world_size

    @property
    def num_microbatches(self) -> int:
        """Forward and backward passes of an iteration."""
        return self.global_batch_size // self.samples_per_pass

    @property
    def is_graphed(self) -> bool:
        """Iterations are run as a graph (on a CPU: the same way, without one)."""
        return self.cuda_graph_impl != "none"

    @property
    def graph_facts(self) -> GraphFacts:
        """What `cuda_graph.constraints` judges."""
        names = [fact.name for fact in fields(GraphFacts)]
        known: dict[str, Any] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        known |= facts_of_environment(os.environ)
        at_default = {
            f"--{name.replace('_', '-')}" for name in names if name in known and known[name] == getattr(Options, name, None)
        }
        return GraphFacts(
            **known,
            in_own_code=False,
            at_default=frozenset(at_default),
            state_moves=self.offload_optimizer_during_evaluation,
        )

    @property
    def load_dir(self) -> Path | None:
        """Where to resume from."""
        text = self.load or self.save
        return Path(os.path.abspath(text)) if text else None

    @property
    def save_dir(self) -> Path | None:
        """Where to save."""
        return Path(os.path.abspath(self.save)) if self.save else None

    @property
    def replicas(self) -> Replication | None:
        """Which copies of local checkpoints are kept."""
        return Replication(self.replication_factor, self.replication_jump) if self.replication else None

    @property
    def rerun_config(self) -> RerunConfig:
        """What the rerun machine is to do."""
        return RerunConfig(
            mode=rerun_mode(self.rerun_mode),
            error_injection_rate=self.error_injection_rate,
            error_injection_type=self.error_injection_type,
            check_for_nan_in_loss_and_grad=not self.no_check_for_nan_in_loss_and_grad,
            check_for_spiky_loss=self.check_for_spiky_loss,
            check_for_large_grads=self.check_for_large_grads,
            result_rejected_tracker_filename=self.result_rejected_tracker_filename,
            on_transient=self.on_transient,
            on_application=self.on_application,
            audit_interval=self.rerun_audit_interval or 0,
            can_checkpoint=self.save is not None,
        )

    @property
    def inprocess_settings(self) -> InProcessSettings:
        """How training is entered again after a fault."""
        names = [option.name for option in fields(InProcessSettings)]
        return InProcessSettings(**{name: getattr(self, f"inprocess_{name}") for name in names})

    @property
    def exit_signals(self) -> tuple[str, ...]:
        """Signals that end the training, with a save or without."""
        return tuple(dict.fromkeys((*self._saving_signals, *self.quiet_signals)))

    @property
    def _saving_signals(self) -> tuple[str, ...]:
        return (self.exit_signal or ("SIGTERM",)) if self.exit_signal_handler else ()

    @property
    def quiet_signals(self) -> tuple[str, ...]:
        """Those that end it without a save."""
        quiet = ("SIGINT", "SIGTERM") if self.exit_signal_handler_for_training else ()
        return tuple(name for name in quiet if name not in self._saving_signals)

    @property
    def worker_signals(self) -> tuple[str, ...]:
        """Signals that the loader's processes are shielded from."""
        return self.exit_signals or (("SIGTERM",) if self.exit_signal_handler_for_dataloader else ())

    def begins_phase_at(self, iteration: int) -> bool:
        """Whether a phase, with data of its own, begins after `iteration` iterations."""
        phase = current_phase()
        begins = (phase.iteration_offset,) if phase is not None else self.phase_transition_iterations
        return iteration in begins

    @property
    def exit_plan(self) -> ExitPlan:
        """When this run saves and leaves."""
        phase = current_phase()
        ends = (phase.until_iteration,) if phase is not None and phase.until_iteration else self.phase_transition_iterations
        return ExitPlan(
            self.train_iters,
            self.save is not None,
            self.save_interval,
            self.exit_interval,
            ends,
            self.non_persistent_save_interval,
        )
