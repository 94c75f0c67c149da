"""The table of options that a graph-captured step forbids, row by row: to which graph it applies, why, and what to do.

Sources: the seed's section 3.3 and Megatron-LM's own checks (`transformer_config.py`, `arguments.py`), and what Megatron-LM
does not check though it breaks a capture or, worse, freezes in a graph what should change. docs/cuda_graph.md shows it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rsup.worker.cuda_graph.contract import OnChange
from rsup.worker.cuda_graph.graph_facts import GraphFacts
from rsup.worker.cuda_graph.live_constraints import DDP_WARMUP_STEPS


@dataclass(frozen=True)
class Constraint:
    """One row of the table in docs/cuda_graph.md. `applies`: to which graph; `value`: shown behind the option; `or_else`:
    another remedy; `in_code`: one for whoever writes the training loop; `cause`: rows that share one, and `or_else`, are told
    in one line, with that as the reason."""

    option: str
    why: str
    remedy: str
    is_violated: Callable[[GraphFacts], bool]
    value: Callable[[GraphFacts], object] = lambda facts: ""
    applies: Callable[[GraphFacts], bool] = lambda facts: facts.captures_step
    or_else: str = ""
    in_code: str = ""
    cause: str = ""

    @property
    def remedies(self) -> str:
        """All of them, also those that take code."""
        return ", or ".join(filter(None, (self.remedy, self.or_else, self.in_code)))

    def shown(self, facts: GraphFacts) -> str:
        """The option with its value, and whether that is only a default."""
        default = " (the default)" if self.option in facts.at_default else ""
        return f"{self.option} {self.value(facts)}".strip() + default


def line_of(rules: Sequence[Constraint], facts: GraphFacts) -> str:
    """What an error says of one violated row, or of several of the same cause: one line."""
    names = " and ".join(rule.shown(facts) for rule in rules)
    verb, why = ("does", rules[0].why) if len(rules) == 1 else ("do", rules[0].cause)
    together = " and ".join(rule.remedy for rule in rules).replace(" and use ", " and ")
    remedies = (together, rules[0].or_else, rules[0].in_code if facts.in_own_code else "")
    return f"{names} {verb} not go with a CUDA graph: {why}; {', or '.join(filter(None, remedies))}"


def _optimizer(facts: GraphFacts) -> bool:
    return facts.optimizer_cuda_graph


def _anything(facts: GraphFacts) -> bool:
    return facts.captures


def _is_recomputed(facts: GraphFacts, *modules: str) -> bool:
    """Whether one of `modules` is computed again, with random numbers that nobody sets back inside of a graph."""
    if facts.recompute_rng_registered or facts.recompute_granularity is None:
        return False
    return facts.recompute_granularity == "full" or any(module in facts.recompute_modules for module in modules)


def _is_at_least(version: tuple[int, ...] | None, wanted: tuple[int, ...]) -> bool:
    return version is not None and version >= wanted


_OTHER_IMPLS = ("local", "transformer_engine")
_RANDOM = (
    "what is computed again in the backward pass has to draw the same random numbers, and setting a generator back is host code"
)
_SET_BACK = "register the generator with the graph and set it back by graphsafe_set_state (recompute_rng_registered)"
_RECOMPUTED = f"with --recompute-granularity {_RANDOM}"
_IN_FLIGHT = "copies to the host are on their way while the graph runs, and it has to say how many it lets run before it waits"
_SYNC = "it waits for the device, which no capture allows, and after the capture it would not run at all"

CONSTRAINTS: tuple[Constraint, ...] = (
    # --- what the seed's section 3.3 and Megatron-LM check
    Constraint(
        "--cpu-offloading",
        "layers that are offloaded by TransformerEngine can be captured only as part of a whole iteration",
        "use --cuda-graph-impl full_iteration, or leave --cpu-offloading out",
        lambda f: f.cpu_offloading and f.cuda_graph_impl in _OTHER_IMPLS,
        applies=_anything,
    ),
    Constraint(
        "--recompute-granularity full",
        "full recomputation crosses the borders of graphs of single layers",
        "use --cuda-graph-impl full_iteration, or --recompute-granularity selective",
        lambda f: f.recompute_granularity == "full" and f.cuda_graph_impl in _OTHER_IMPLS,
    ),
    Constraint(
        "--activation-offload",
        "fine-grained offloading works in a graph of a whole iteration or in TransformerEngine's graphs",
        "use --cuda-graph-impl full_iteration",
        lambda f: f.activation_offload and f.cuda_graph_impl == "local",
    ),
    Constraint(
        "--cuda-graph-impl",
        "rsup captures whole iterations",
        "use full_iteration or none",
        lambda f: f.cuda_graph_impl not in ("none", "full_iteration"),
        lambda f: f.cuda_graph_impl,
        _anything,
    ),
    Constraint(
        "--cuda-graph-modules",
        "with --cuda-graph-impl full_iteration a whole iteration is one graph: it never takes a choice of modules",
        "leave it out",
        lambda f: bool(f.cuda_graph_modules),
        lambda f: ",".join(f.cuda_graph_modules),
    ),
    Constraint(
        "--inference-cuda-graph-scope",
        "--cuda-graph-impl full_iteration has the same modules in its graph, so they never go into graphs of their own",
        "leave it out, or use none: evaluation has a FullIterationGraph of its own",
        lambda f: f.inference_cuda_graph_scope != "none",
        lambda f: f.inference_cuda_graph_scope,
    ),
    Constraint(
        "--cuda-graph-warmup-steps",
        "what is done at first use (communicators, autotuning, optimizer state) would be captured",
        "use 1 or more (3 is the default)",
        lambda f: f.cuda_graph_warmup_steps < 1,
        lambda f: f.cuda_graph_warmup_steps,
        _anything,
    ),
    Constraint(
        "--attention-dropout",
        f"with --recompute-granularity full, or core_attn among the recomputed modules, {_RANDOM}",
        "use --attention-dropout 0",
        lambda f: f.attention_dropout != 0 and _is_recomputed(f, "core_attn"),
        lambda f: f.attention_dropout,
        or_else="leave out --recompute-granularity",
        in_code=_SET_BACK,
        cause=_RECOMPUTED,
    ),
    Constraint(
        "--hidden-dropout",
        f"with --recompute-granularity full, or mlp or moe among the recomputed modules, {_RANDOM}",
        "use --hidden-dropout 0",
        lambda f: f.hidden_dropout != 0 and _is_recomputed(f, "mlp", "moe"),
        lambda f: f.hidden_dropout,
        or_else="leave out --recompute-granularity",
        in_code=_SET_BACK,
        cause=_RECOMPUTED,
    ),
    Constraint(
        "--moe-input-jitter-eps",
        f"with moe among the recomputed modules, {_RANDOM}",
        "leave out --moe-input-jitter-eps",
        lambda f: bool(f.moe_input_jitter_eps) and _is_recomputed(f, "moe"),
        lambda f: f.moe_input_jitter_eps,
        or_else="leave out --recompute-granularity",
        in_code=_SET_BACK,
        cause=_RECOMPUTED,
    ),
    Constraint(
        "--activation-offload without --fine-grained-offloading-max-inflight-offloads",
        _IN_FLIGHT,
        "give --fine-grained-offloading-max-inflight-offloads, 0 or more",
        lambda f: f.activation_offload and f.fine_grained_offloading_max_inflight_offloads is None,
    ),
    Constraint(
        "--fine-grained-offloading-max-inflight-offloads",
        _IN_FLIGHT,
        "give it 0 or more",
        lambda f: f.activation_offload and (f.fine_grained_offloading_max_inflight_offloads or 0) < 0,
        lambda f: f.fine_grained_offloading_max_inflight_offloads,
    ),
    Constraint(
        "--cross-entropy-fusion-impl te",
        "TransformerEngine's fused cross entropy can be captured from 2.7 on",
        "use TransformerEngine 2.7 or newer, or --cross-entropy-fusion-impl native",
        lambda f: f.cross_entropy_fusion_impl == "te" and not _is_at_least(f.transformer_engine_version, (2, 7)),
    ),
    Constraint(
        "--te-rng-tracker",
        "TransformerEngine would draw from a generator that is not registered with the graph: the same dropout in each replay",
        "switch its graph-safe RNG tracker on",
        lambda f: f.transformer_engine_version is not None and not f.te_rng_tracker,
        lambda f: "off",
    ),
    Constraint(
        "--hybrid-context-parallel",
        "groups and lengths differ from step to step",
        "use --cuda-graph-impl none, or context parallelism of a fixed size",
        lambda f: f.hybrid_context_parallel,
    ),
    Constraint(
        "--num-experts",
        "dropless routing gives experts another number of tokens in each step, and shapes in a graph are fixed",
        "use --moe-pad-expert-input-to-capacity, or --moe-expert-rank-capacity-factor with a SpeculativeStep that falls back",
        lambda f: (
            f.num_experts is not None
            and not f.moe_pad_expert_input_to_capacity
            and not (f.moe_expert_rank_capacity_factor is not None and f.speculative_step)
        ),
        lambda f: f.num_experts,
    ),
    # --- what Megatron-LM does not check
    Constraint(
        "--fp16",
        "a dynamic loss scale puts a new tensor in the place of the captured one, and skips steps by a decision of the host",
        "use --bf16, or a fixed --loss-scale",
        lambda f: f.fp16 and not f.loss_scale,
        lambda f: "without --loss-scale",
        _anything,
    ),
    Constraint(
        "validate_result",
        f"called inside of the step, {_SYNC}",
        "let DeviceChecks check inside of the graph, or validate the result after the step",
        lambda f: f.checks_on_host,
        lambda f: "in the step",
    ),
    Constraint(
        "--timing-log-level",
        "timers in the step wait for the device, which no capture allows, and after the capture they would not run at all",
        "use --timing-mode event, or --timing-log-level 0",
        lambda f: f.timing_log_level >= 1,
        lambda f: f.timing_log_level,
        _anything,
        in_code="time around the step",
    ),
    Constraint(
        "--log-straggler",
        f"it times parts of the step: {_SYNC}",
        "leave it out",
        lambda f: f.log_straggler,
        in_code="call steps that are to be timed with eager=True",
    ),
    Constraint(
        "dump hooks",
        "Python hooks copy to the host while a step is captured and do not run when it is replayed: nothing would be written",
        "leave the options out",
        lambda f: bool(f.dump_options) and not f.dumps_run_eagerly,
        lambda f: f"({', '.join(f.dump_options)})",
        in_code="call steps that dump with eager=True",
    ),
    Constraint(
        "--log-num-zeros-in-grad",
        "the optimizer's step reads the count from the device",
        "leave it out, or leave out --optimizer-cuda-graph",
        lambda f: f.log_num_zeros_in_grad,
        applies=_optimizer,
    ),
    Constraint(
        "--empty-unused-memory-level",
        "memory cannot be given back while a step is captured",
        "call empty_cache between steps",
        lambda f: f.empty_cache_in_step,
        lambda f: "in the step",
    ),
    Constraint(
        "host flags",
        "the step reads them on the host, so the graph keeps their value of the captured step for good",
        "put them into the inputs (another value is another graph), or into a device tensor that is filled before each step",
        lambda f: bool(f.host_flags_in_step),
        lambda f: f"({', '.join(f.host_flags_in_step)})",
    ),
    Constraint(
        "zero_grad(set_to_none=True)",
        "the graph writes gradients to the addresses of the captured step",
        "zero gradients in place: set_to_none=False, or GradientGroups.zero_()",
        lambda f: f.zero_grad_to_none,
    ),
    Constraint(
        "--rampup-batch-size",
        "the number of micro-batches changes, and a graph replays the one it was captured with",
        "leave it out",
        lambda f: f.rampup_batch_size is not None and f.on_change == OnChange.RAISE,
        in_code="set on_change to eager or recapture",
    ),
    Constraint(
        "--variable-seq-lengths",
        "shapes change, and a graph replays those it was captured with",
        "pad to one length, or set on_change to eager or recapture",
        lambda f: f.variable_seq_lengths and f.on_change == OnChange.RAISE,
    ),
    Constraint(
        "packed sequences",
        "their greatest length is read from the device",
        "give a fixed max_seqlen",
        lambda f: f.packed_max_length_on_host,
    ),
    Constraint(
        "--num-model-chunks",
        "chunks that share the static input of a micro-batch get one another's data",
        "keep inputs by chunk, as FullIterationGraph does",
        lambda f: f.num_model_chunks > 1 and not f.inputs_by_chunk,
        lambda f: f.num_model_chunks,
    ),
    Constraint(
        "DistributedDataParallel",
        "it waits for timing events of its first ten passes, which a capture among them cannot",
        f"use --cuda-graph-warmup-steps {DDP_WARMUP_STEPS} or more, or GradientGroups",
        lambda f: f.distributed_data_parallel and f.cuda_graph_warmup_steps < DDP_WARMUP_STEPS,
        lambda f: f"with --cuda-graph-warmup-steps {f.cuda_graph_warmup_steps}",
    ),
    Constraint(
        "torch.compile",
        "its modes reduce-overhead and max-autotune capture graphs of their own, and captures do not nest",
        "use mode default or max-autotune-no-cudagraphs",
        lambda f: f.torch_compile_mode in ("reduce-overhead", "max-autotune"),
        lambda f: f"mode {f.torch_compile_mode}",
    ),
    Constraint(
        "--optimizer",
        "its update cannot be gated on the device, so that a rejected step would change parameters",
        "use adam or adamw (fused, capturable), or give the optimizer a gated_step",
        lambda f: f.optimizer.lower() not in ("adam", "adamw") and not f.optimizer_is_gated,
        lambda f: f.optimizer,
        _optimizer,
    ),
    Constraint(
        "--optimizer-cpu-offload",
        "the optimizer computes on the CPU",
        "leave out --optimizer-cuda-graph",
        lambda f: f.optimizer_cpu_offload,
        applies=_optimizer,
    ),
    Constraint(
        "--weight-decay-incr-style",
        "fused Adam takes weight decay as a plain number, which the graph keeps for good",
        "use constant, or ScheduledWeightDecay",
        lambda f: f.weight_decay_incr_style != "constant" and not f.scheduled_weight_decay,
        lambda f: f.weight_decay_incr_style,
        _optimizer,
    ),
    Constraint(
        "offloading between steps",
        "parameters or optimizer state come back to other addresses than those in the graph",
        "move them with OptimizerOffload, or call lifecycle.destroy_graphs() before they move",
        lambda f: f.state_moves and not f.moves_invalidate_graphs,
        applies=_anything,
    ),
    Constraint(
        "--inprocess-restart",
        "a graph that lives on would be replayed with communicators and parameters that are gone",
        "register it: lifecycle.register(graph)",
        lambda f: f.inprocess_restart and not f.graphs_registered,
        applies=_anything,
    ),
    Constraint(
        "expandable_segments:True",
        "NCCL registers the buffers of a graph, and memory of expandable segments cannot be registered",
        "set NCCL_GRAPH_REGISTER=0, or leave expandable_segments out",
        lambda f: f.expandable_segments and f.nccl_graph_register,
        lambda f: f"in {f.allocator_variable}",
    ),
    Constraint(
        "TORCH_NCCL_BLOCKING_WAIT=1",
        "the host waits for each collective",
        "unset it",
        lambda f: f.nccl_blocking_wait,
    ),
)
