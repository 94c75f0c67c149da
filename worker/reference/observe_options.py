"""The trainer's options of what a run says about itself: log, writers, timers, dumps. All of them are options of
`options.Options`, too; names and defaults are Megatron-LM's where it has them."""

from dataclasses import dataclass

from rsup.worker.reference.option_kinds import flag, not_negative, patterns, whole

TIMING_LOG_OPTIONS = ("max", "minmax", "all")


@dataclass(frozen=True)
class ObserveOptions:
    """What is logged, where to, and what is written out beside it."""

    log_throughput: bool = flag(False, "log the throughput of each rank, in TFLOP/s")
    log_energy: bool = flag(False, "log energy and power of each GPU")
    log_num_zeros_in_grad: bool = flag(False, "log how many gradients are zero")
    log_params_norm: bool = flag(False, "log the norm of the parameters")
    log_loss_scale_to_tensorboard: bool = flag(True, "write the loss scale (default)")
    log_world_size_to_tensorboard: bool = flag(False, "write the number of ranks")
    log_memory_to_tensorboard: bool = flag(False, "write what the CUDA allocator holds")
    log_timers_to_tensorboard: bool = flag(False, "write the time of an iteration and of its parts")
    log_validation_ppl_to_tensorboard: bool = flag(False, "write the perplexity of evaluations")
    log_memory_interval: int | None = flag(None, "iterations between reports of memory; 0: none", not_negative)
    log_device_memory_used: bool = flag(False, "report what all programs on the GPU use, too")
    log_progress: bool = flag(False, "keep progress.txt beside the checkpoints: starts, saves, throughput")
    log_straggler: bool = flag(False, "report the slowest and the fastest ranks at each log line")
    straggler_minmax_count: int = flag(1, "slowest and fastest ranks that a report names; at most 16", whole)
    disable_straggler_on_startup: bool = flag(False, "report none until rsup stragglers JOB on")
    timing_log_level: int = flag(
        0, "what is timed: 0 whole phases, 1 parts of an iteration too, 2 also those of a micro-batch", int, choices=(0, 1, 2)
    )
    timing_log_option: str = flag(
        "minmax", "times over the ranks: the greatest, least and greatest, or all", str, choices=TIMING_LOG_OPTIONS
    )
    no_barrier_with_level_1_timing: bool = flag(False, "ranks do not meet where a timer of level 1 starts")
    timing_mode: str | None = flag(
        None,
        "timers wait for the device (sync), or mark its time line and wait for nothing (event); default: sync for parts of an"
        " iteration that is no graph",
        str,
        choices=("sync", "event"),
    )

    tensorboard_dir: str | None = flag(None, "directory of TensorBoard's files; default: none are written", str)
    tensorboard_log_interval: int = flag(1, "iterations between numbers that are written; 0: none", not_negative)
    tensorboard_queue_size: int = flag(1000, "steps that wait for TensorBoard's file at most, for a second", whole)
    wandb_project: str = flag("", "project at Weights & Biases; default: nothing goes there", str)
    wandb_exp_name: str = flag("", "name of this run there", str)
    wandb_save_dir: str = flag("", "directory of its files; default: wandb in that of --save", str)
    wandb_entity: str = flag("", "team or user there", str)
    otel: bool = flag(False, "give the numbers to OpenTelemetry, as its OTEL_ variables say")
    otel_endpoint: str = flag("", "where OpenTelemetry sends them by OTLP: http://HOST:4318; sets --otel", str)
    enable_one_logger: bool = flag(False, "give end-to-end metrics to the packages nv-one-logger, where they are installed")

    save_activations_interval: int | None = flag(None, "iterations between dumps of linear layers' input, output", not_negative)
    save_dgrads_interval: int | None = flag(None, "iterations between dumps of the gradients of these", not_negative)
    save_wgrads_interval: int | None = flag(None, "iterations between dumps of the parameters' gradients", not_negative)
    save_params_interval: int | None = flag(None, "iterations between dumps of the parameters", not_negative)
    save_tokens_per_expert_interval: int | None = flag(None, "iterations between counts of each expert's tokens", not_negative)
    save_grads: bool = flag(False, "--save-wgrads and --save-dgrads")
    save_wgrads: bool = flag(False, "dump the parameters' gradients at the iterations of --save-interval")
    save_dgrads: bool = flag(
        False, "dump the gradients of linear layers' inputs and outputs at the iterations of --save-interval"
    )
    save_params: bool = flag(False, "dump the parameters at the iterations of --save-interval")
    dump_micro_batches: str = flag(
        "last", "micro-batches whose activations and gradients of these are dumped", str, choices=("last", "all")
    )
    dump_modules: tuple[str, ...] = flag((), "modules to dump, patterns with *, comma-separated; default: linear", patterns)
