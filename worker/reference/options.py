"""The trainer's options: names and defaults are Megatron-LM's where it has them. One dataclass describes the command line, too
(`command_line`)."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rsup.worker.cuda_graph.graph_facts import GraphFacts, facts_of_environment
from rsup.worker.exit_policy import ExitPlan
from rsup.worker.faults import Fault, parse_any_fault
from rsup.worker.inprocess.settings import GRANULARITIES, InProcessSettings
from rsup.worker.local_checkpoint_plan import Replication
from rsup.worker.numeric_faults import NumericFault
from rsup.worker.phases import current_phase
from rsup.worker.reference.batch_sizes import BatchSizes
from rsup.worker.reference.loss_scale import ScaleRules
from rsup.worker.reference.observe_options import ObserveOptions
from rsup.worker.reference.optimizer_schedule import DECAY_STYLES
from rsup.worker.reference.option_kinds import flag, graph_impl, iterations, not_negative, probability, rate, signals, whole
from rsup.worker.rerun.contract import INJECTION_TYPES, ON_APPLICATION, ON_TRANSIENT, RERUN_MODES, RerunConfig, rerun_mode

RECOMPUTE_GRANULARITIES = ("full", "selective")
"""Megatron-LM's names: whole blocks, or the core of the attention."""


@dataclass(frozen=True)
class Options(ObserveOptions):
    """What one training run does. Sample and iteration counts are global, over all ranks."""

    train_iters: int = flag(60, "iterations to train, in all", whole, "--iterations")
    micro_batch_size: int = flag(4, "samples of one forward and backward pass of a rank", whole)
    global_batch_size: int = flag(0, "samples of one iteration; default: one micro-batch a rank", whole)
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "iterations begin with START samples and grow by INCREMENT, over SAMPLES in all, to --global-batch-size",
        whole,
        values=("START", "INCREMENT", "SAMPLES"),
    )
    seed: int = flag(1234, "seed of parameters, data order and dropout", not_negative)
    data_path: str | None = flag(None, "a text file, or a folder of .py and .txt files; default: Python's own sources", str)

    num_layers: int = flag(2, "transformer blocks", whole)
    hidden_size: int = flag(128, "width of the model", whole)
    num_attention_heads: int = flag(4, "attention heads", whole)
    seq_length: int = flag(128, "bytes of context", whole)
    attention_dropout: float = flag(0.1, "dropout on attention weights", probability)
    hidden_dropout: float = flag(0.1, "dropout on hidden states", probability)
    bf16: bool = flag(False, "compute in bfloat16 (parameters stay float32)")
    fp16: bool = flag(False, "compute in float16 with a loss scale (parameters stay float32)")
    loss_scale: float | None = flag(None, "a fixed loss scale, a power of 2; default, or 0: a dynamic one", rate)
    initial_loss_scale: float = flag(2.0**32, "first value of a dynamic loss scale", rate)
    min_loss_scale: float = flag(1.0, "lowest value of a dynamic loss scale", rate)
    loss_scale_window: int = flag(1000, "steps without an overflow that double a dynamic loss scale", whole)
    hysteresis: int = flag(2, "overflows until a dynamic loss scale is halved", whole)
    num_experts: int = flag(0, "experts of each block's feed-forward layer; 0: one layer, no router", not_negative)
    moe_router_topk: int = flag(2, "experts that each token goes to", whole)
    moe_ffn_hidden_size: int = flag(0, "width of an expert; default: four times --hidden-size", not_negative)
    moe_aux_loss_coeff: float = flag(0.0, "weight of the load balancing loss", rate)
    num_model_chunks: int = flag(1, "parts of the model that are run one after the other, each with data of its own", whole)
    recompute_granularity: str | None = flag(
        None, "compute again in the backward pass: whole blocks, or attention only", str, choices=RECOMPUTE_GRANULARITIES
    )
    activation_offload: bool = flag(False, "keep activations in host memory until the backward pass; without effect on a CPU")
    fine_grained_offloading_max_inflight_offloads: int | None = flag(
        None, "copies of activations to host memory that may be on their way; more wait", not_negative
    )

    cuda_graph_impl: str = flag(
        "none", "compute an iteration kernel by kernel (none), or replay it as a graph (full_iteration)", graph_impl
    )
    optimizer_cuda_graph: bool = flag(False, "replay the optimizer's step as a graph too")
    cuda_graph_warmup_steps: int = flag(3, "iterations before the one in which a graph is captured", not_negative)
    cuda_graph_use_single_mempool: bool = flag(True, "one memory pool for all graphs (default)")
    cuda_graph_fallback: str = flag(
        "raise", "where an iteration cannot be captured: fail, or go on without a graph", str, choices=("raise", "eager")
    )

    lr: float = flag(3e-3, "highest learning rate", rate)
    min_lr: float = flag(0.0, "lowest learning rate", rate)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", rate)
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", not_negative)
    lr_decay_samples: int | None = flag(None, "samples until --min-lr is reached; default: the whole run", whole)
    lr_decay_style: str = flag("linear", "shape of the decay", str, choices=DECAY_STYLES)
    lr_wsd_decay_samples: int | None = flag(None, "samples of the final decay, for --lr-decay-style WSD", whole)
    weight_decay: float = flag(0.01, "AdamW's weight decay, for matrices", rate)
    adam_beta1: float = flag(0.9, "AdamW's first beta", probability)
    adam_beta2: float = flag(0.999, "AdamW's second beta", probability)
    adam_eps: float = flag(1e-8, "AdamW's epsilon", rate)
    clip_grad: float = flag(1.0, "greatest norm of the gradient; 0: no limit", rate)

    num_workers: int = flag(0, "processes of a rank that read its data ahead", not_negative)
    dataloader_start_method: str | None = flag(
        None, "how these processes start; default: torch's", str, choices=("fork", "spawn", "forkserver")
    )
    eval_interval: int = flag(1000, "iterations between evaluations; 0: only at the end", not_negative)
    eval_iters: int = flag(10, "steps of an evaluation; 0: none", not_negative)
    log_interval: int = flag(10, "iterations between log lines; 0: only after the first iteration", not_negative)

    save: str | None = flag(None, "directory of checkpoints", str)
    load: str | None = flag(None, "directory to resume from; default: that of --save", str)
    save_interval: int | None = flag(None, "iterations between checkpoints", whole)
    async_save: bool = flag(True, "write checkpoints beside the training (default)")
    keep_checkpoints: int = flag(3, "checkpoints to keep, the newest", whole)
    non_persistent_save_interval: int | None = flag(None, "iterations between local checkpoints, which are not durable", whole)
    non_persistent_ckpt_type: str | None = flag(
        None, "where local checkpoints are: on local disk, or in shared memory", str, choices=("local", "in_memory")
    )
    non_persistent_local_ckpt_dir: str | None = flag(None, "directory of local checkpoints, on each node its own", str)
    non_persistent_local_ckpt_algo: str = flag(
        "fully_parallel",
        "what ranks have alike is divided among them, or kept by each",
        str,
        choices=("fully_parallel", "atomic"),
    )
    replication: bool = flag(False, "keep copies of each rank's local checkpoint on other nodes")
    replication_jump: int | None = flag(None, "ranks between those that keep the same part; default: the next node's", whole)
    replication_factor: int = flag(2, "ranks that have each part, its own included", whole)
    require_loader_state: bool = flag(
        False, "fail where the state of the data loader cannot be saved, or is not in the checkpoint"
    )
    offload_optimizer_during_evaluation: bool = flag(False, "keep the optimizer's state in host memory during evaluations")
    empty_unused_memory_level: int = flag(
        0,
        "empty the CUDA cache in each iteration: 1 after the backward pass, 2 after the optimizer too",
        int,
        choices=(0, 1, 2),
    )
    exit_on_missing_checkpoint: bool = flag(False, "fail when there is no whole checkpoint to resume from")

    exit_interval: int | None = flag(None, "save and leave at every multiple of this iteration", whole)
    exit_duration_in_mins: float | None = flag(None, "save and leave after so many minutes", rate)
    exit_signal_handler: bool = flag(False, "on an exit signal to any rank: save, then leave with 0")
    exit_signal: tuple[str, ...] = flag((), "signals of --exit-signal-handler, comma-separated; default: SIGTERM", signals)
    exit_signal_handler_for_training: bool = flag(
        False, "on SIGINT or SIGTERM: leave in order, without a save; --exit-signal-handler's signals save all the same"
    )
    exit_signal_handler_for_dataloader: bool = flag(
        False, "shield the loader's processes from SIGTERM, as the other two handlers do from theirs"
    )
    phase_transition_iterations: tuple[int, ...] = flag((), "save and leave at these iterations, comma-separated", iterations)

    enable_ft_package: bool = flag(False, "open the sections setup, step and checkpointing; needs --save")
    calc_ft_timeouts: bool = flag(False, "keep the calculated limits in ft_state.json beside the checkpoints")
    ft_num_warmup_iters: int = flag(5, "first steps that are outside the section `step`", not_negative)

    rerun_mode: str = flag("validate_results", "replay rejected iterations", str, choices=RERUN_MODES)
    rerun_audit_interval: int | None = flag(None, "iterations between audits, for --rerun-mode audit", whole)
    no_check_for_nan_in_loss_and_grad: bool = flag(False, "do not look for NaN and Inf in losses and gradients")
    check_for_spiky_loss: bool = flag(False, "warn of a loss that is unexpectedly large")
    check_for_large_grads: bool = flag(False, "warn of gradients that are unexpectedly large")
    error_injection_rate: int = flag(0, "pretend an error about once in so many checks; 0: never", not_negative)
    error_injection_type: str = flag("transient_error", "which error to pretend", str, choices=INJECTION_TYPES)
    result_rejected_tracker_filename: str | None = flag(
        None, "rejected results are written here, a file a rank; iterations rejected twice in it are skipped", str
    )
    on_transient: str = flag(
        "continue", "after an error that did not come again: go on, or start again", str, choices=ON_TRANSIENT
    )
    on_application: str = flag(
        "exit", "after an error of data or program: exit with 17, or skip the iteration", str, choices=ON_APPLICATION
    )
    iterations_to_skip: tuple[int, ...] = flag((), "iterations whose computation is left out, comma-separated", iterations)

    inprocess_restart: bool = flag(False, "after a fault enter the training again in the same process, under rsup launch")
    inprocess_max_iterations: int | None = flag(None, "entries into the training in one attempt; default: no limit", whole)
    inprocess_monitor_thread_interval: float = flag(1.0, "seconds between looks for faults by the rank itself", rate)
    inprocess_monitor_process_interval: float = flag(1.0, "the same by the process that watches the rank", rate)
    inprocess_progress_watchdog_interval: float = flag(1.0, "seconds between signs of progress of the main thread", rate)
    inprocess_heartbeat_interval: float = flag(30.0, "seconds between heartbeats of neighbouring ranks", rate)
    inprocess_heartbeat_timeout: float = flag(60.0, "a neighbour silent for so many seconds counts as lost", rate)
    inprocess_soft_timeout: float = flag(60.0, "seconds without progress after which a rank is interrupted", rate)
    inprocess_hard_timeout: float = flag(90.0, "seconds without progress after which its process is killed", rate)
    inprocess_barrier_timeout: float = flag(120.0, "seconds that ranks wait for each other in a restart", rate)
    inprocess_completion_timeout: float = flag(120.0, "the same at the end of the training", rate)
    inprocess_last_call_wait: float = flag(0.0, "seconds to wait for reports of further faults before a restart", rate)
    inprocess_termination_grace_time: float = flag(1.0, "seconds between SIGTERM and SIGKILL after the hard timeout", rate)
    inprocess_granularity: str = flag("node", "what a reserve replaces", str, choices=GRANULARITIES)
    inprocess_active_world_size: int | None = flag(None, "ranks that compute, the others are reserves; default: all", whole)
    inprocess_empty_cuda_cache: bool = flag(False, "empty the CUDA cache in a restart")

    device: str = flag("auto", "cpu, or cuda (one GPU a local rank), or auto", str, choices=("auto", "cpu", "cuda"))
    deterministic_mode: bool | None = flag(None, "bitwise repeatable results; default on the CPU")
    distributed_timeout_minutes: float = flag(10.0, "time limit of a collective", rate)
    fault: tuple[Fault | NumericFault, ...] = flag(
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
        """Forward and backward passes of an iteration; under a ramp, of one behind it."""
        return self.global_batch_size // self.samples_per_pass

    @property
    def batch_sizes(self) -> BatchSizes:
        """How many samples an iteration has."""
        if self.rampup_batch_size is None:
            return BatchSizes(self.global_batch_size)
        start, increment, samples = self.rampup_batch_size
        return BatchSizes(self.global_batch_size, (start, increment, samples))

    @property
    def scale_rules(self) -> ScaleRules | None:
        """Of the loss scale; None: there is none."""
        if not self.fp16:
            return None
        initial = self.loss_scale or self.initial_loss_scale
        return ScaleRules(initial, self.min_loss_scale, self.loss_scale_window, self.hysteresis, not self.loss_scale)

    @property
    def is_graphed(self) -> bool:
        """Iterations are run as a graph (on a CPU: the same way, without one)."""
        return self.cuda_graph_impl != "none"

    @property
    def graph_facts(self) -> GraphFacts:
        """What `cuda_graph.constraints` judges."""
        from rsup.worker.reference.dumping import dump_options  # it has to know the options, too

        names = [fact.name for fact in fields(GraphFacts)]
        known: dict[str, Any] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        known |= facts_of_environment(os.environ)
        at_default = {
            f"--{name.replace('_', '-')}" for name in names if name in known and known[name] == getattr(Options, name, None)
        }
        known["num_experts"] = self.num_experts or None
        known["moe_pad_expert_input_to_capacity"] = True  # experts compute at a fixed shape
        known["log_straggler"] = False  # the detector waits for nothing
        known["timing_log_level"] = self.timing_log_level if self.timing_mode == "sync" else 0
        return GraphFacts(
            **known,
            in_own_code=False,
            dump_options=dump_options(self),  # pyright: ignore[reportArgumentType]  # it is its own class
            dumps_run_eagerly=True,
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
