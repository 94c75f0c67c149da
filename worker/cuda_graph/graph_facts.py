"""What a run's options say of what a graph would capture. Known before torch is imported; `constraints` judges it.

Names are those of Megatron-LM's arguments where it has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rsup.worker.cuda_graph.contract import OnChange


@dataclass(frozen=True)
class GraphFacts:
    """What is known of a run from its options. The defaults are those of a run that a graph takes as it is."""

    in_own_code: bool = True
    """Whoever is refused writes the training loop; False: has the options of a program, and is told of no other remedy."""
    at_default: frozenset[str] = frozenset()
    """Options that nobody gave, such as `--attention-dropout`: a refusal that names one says so."""

    cuda_graph_impl: str = "full_iteration"
    optimizer_cuda_graph: bool = False
    cuda_graph_modules: tuple[str, ...] = ()
    inference_cuda_graph_scope: str = "none"
    cuda_graph_warmup_steps: int = 3
    on_change: str = OnChange.RAISE

    recompute_granularity: str | None = None
    """`full` or `selective`."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_rng_registered: bool = False
    """Recomputed regions draw from a generator that is registered with the graph and set back by `graphsafe_set_state`."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    moe_input_jitter_eps: float | None = None
    cpu_offloading: bool = False
    """TransformerEngine's, by layers."""
    activation_offload: bool = False
    """Fine-grained: `--activation-offload`, Megatron-LM's `--fine-grained-activation-offloading`."""
    fine_grained_offloading_max_inflight_offloads: int | None = None

    fp16: bool = False
    loss_scale: float | None = None
    """Fixed; None: a dynamic one, where there is one."""
    checks_on_host: bool = False
    """`validate_result` and the like, or `.item()` on a loss, are called inside of the step."""
    timing_log_level: int = 0
    """Of timers inside of the step that wait for the device."""
    log_straggler: bool = False
    dump_options: tuple[str, ...] = ()
    """Options in use whose Python hooks write out activations, gradients or counts from inside of the step."""
    dumps_run_eagerly: bool = False
    """Steps that dump are called with `eager=True`."""
    log_num_zeros_in_grad: bool = False
    empty_cache_in_step: bool = False
    host_flags_in_step: tuple[str, ...] = ()
    """Host values that the step reads and that change from step to step, such as "first micro-batch"."""
    zero_grad_to_none: bool = False

    rampup_batch_size: tuple[int, ...] | None = None
    variable_seq_lengths: bool = False
    packed_max_length_on_host: bool = False
    """Packed sequences whose greatest length is read from the device."""
    num_model_chunks: int = 1
    inputs_by_chunk: bool = True
    """Static inputs are kept apart for each model chunk, as `FullIterationGraph` does."""
    hybrid_context_parallel: bool = False
    num_experts: int | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_expert_rank_capacity_factor: float | None = None
    speculative_step: bool = False
    """The step is called through `SpeculativeStep`."""

    distributed_data_parallel: bool = False
    """torch's DDP on NCCL communicates inside of the step."""
    transformer_engine_version: tuple[int, ...] | None = None
    te_rng_tracker: bool = True
    cross_entropy_fusion_impl: str = "native"
    torch_compile_mode: str | None = None

    optimizer: str = "adam"
    optimizer_is_gated: bool = False
    """It has `gated_step` (see `OptimizerGraph`)."""
    optimizer_cpu_offload: bool = False
    weight_decay_incr_style: str = "constant"
    scheduled_weight_decay: bool = False
    """The schedule goes through `ScheduledWeightDecay`."""
    state_moves: bool = False
    """Parameters or optimizer state go to the host and back between steps."""
    moves_invalidate_graphs: bool = True
    inprocess_restart: bool = False
    graphs_registered: bool = True
    """With `lifecycle.register`, as our own graphs are."""

    expandable_segments: bool = False
    allocator_variable: str = "PYTORCH_CUDA_ALLOC_CONF"
    """Where that is set: there are two names."""
    nccl_graph_register: bool = True
    nccl_blocking_wait: bool = False

    @property
    def captures_step(self) -> bool:
        """Forward and backward are captured."""
        return self.cuda_graph_impl != "none"

    @property
    def captures(self) -> bool:
        """Anything is captured."""
        return self.captures_step or self.optimizer_cuda_graph


def facts_of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The facts that stand in environment variables: `GraphFacts(..., **facts_of_environment(os.environ))`."""
    variable = "PYTORCH_ALLOC_CONF" if environment.get("PYTORCH_ALLOC_CONF") else "PYTORCH_CUDA_ALLOC_CONF"
    settings: dict[str, str] = {}
    for part in environment.get(variable, "").split(","):
        name, _, value = part.partition(":")
        settings[name.strip()] = value
    return {
        "expandable_segments": settings.get("expandable_segments", "").strip().lower() == "true",
        "allocator_variable": variable,
        "nccl_graph_register": environment.get("NCCL_GRAPH_REGISTER", "1").strip() != "0",
        "nccl_blocking_wait": environment.get("TORCH_NCCL_BLOCKING_WAIT", "0").strip().lower() in ("1", "true", "yes", "y"),
    }
