"""For each option that a graph forbids: facts that violate it, how the refusal begins, and the remedy, which is tried."""

from typing import Any

from rsup.worker.cuda_graph.contract import OnChange

Case = tuple[str, dict[str, Any], str, dict[str, Any]]
"""Beginning of the message, facts, what the message says to do, and the facts changed by that."""
REGISTERED = {"recompute_rng_registered": True}

CASES: list[Case] = [
    (
        "--cpu-offloading does",
        {"cpu_offloading": True, "cuda_graph_impl": "local"},
        "use --cuda-graph-impl full_iteration",
        {"cuda_graph_impl": "full_iteration"},
    ),
    (
        "--recompute-granularity full does",
        {"recompute_granularity": "full", "cuda_graph_impl": "transformer_engine"},
        "use --cuda-graph-impl full_iteration",
        {"cuda_graph_impl": "full_iteration"},
    ),
    (
        "--activation-offload does",
        {"activation_offload": True, "fine_grained_offloading_max_inflight_offloads": 1, "cuda_graph_impl": "local"},
        "use --cuda-graph-impl full_iteration",
        {"cuda_graph_impl": "full_iteration"},
    ),
    ("--cuda-graph-impl local", {"cuda_graph_impl": "local"}, "use full_iteration or none", {"cuda_graph_impl": "none"}),
    ("--cuda-graph-modules attn,mlp", {"cuda_graph_modules": ("attn", "mlp")}, "leave it out", {"cuda_graph_modules": ()}),
    (
        "--inference-cuda-graph-scope block",
        {"inference_cuda_graph_scope": "block"},
        "or use none",
        {"inference_cuda_graph_scope": "none"},
    ),
    ("--cuda-graph-warmup-steps 0", {"cuda_graph_warmup_steps": 0}, "use 1 or more", {"cuda_graph_warmup_steps": 1}),
    (
        "--attention-dropout 0.1",
        {"attention_dropout": 0.1, "recompute_granularity": "selective"},
        "use --attention-dropout 0",
        {"attention_dropout": 0.0},
    ),
    ("--attention-dropout 0.1", {"attention_dropout": 0.1, "recompute_granularity": "full"}, "graphsafe_set_state", REGISTERED),
    (
        "--hidden-dropout 0.2",
        {"hidden_dropout": 0.2, "recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        "use --hidden-dropout 0",
        {"hidden_dropout": 0.0},
    ),
    (
        "--hidden-dropout 0.2",
        {"hidden_dropout": 0.2, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
        "graphsafe_set_state",
        REGISTERED,
    ),
    (
        "--hidden-dropout 0.2",
        {"hidden_dropout": 0.2, "recompute_granularity": "full"},
        "use --hidden-dropout 0",
        {"hidden_dropout": 0.0},
    ),
    (
        "--moe-input-jitter-eps 0.01",
        {"moe_input_jitter_eps": 0.01, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
        "leave out --moe-input-jitter-eps",
        {"moe_input_jitter_eps": None},
    ),
    (
        "--activation-offload without --fine-grained-offloading-max-inflight-offloads does",
        {"activation_offload": True},
        "give --fine-grained-offloading-max-inflight-offloads, 0 or more",
        {"fine_grained_offloading_max_inflight_offloads": 0},
    ),
    (
        "--fine-grained-offloading-max-inflight-offloads -1",
        {"activation_offload": True, "fine_grained_offloading_max_inflight_offloads": -1},
        "give it 0 or more",
        {"fine_grained_offloading_max_inflight_offloads": 3},
    ),
    (
        "--cross-entropy-fusion-impl te",
        {"cross_entropy_fusion_impl": "te", "transformer_engine_version": (2, 6)},
        "2.7 or newer",
        {"transformer_engine_version": (2, 7)},
    ),
    (
        "--te-rng-tracker off",
        {"transformer_engine_version": (2, 7), "te_rng_tracker": False},
        "switch its graph-safe RNG tracker on",
        {"te_rng_tracker": True},
    ),
    ("--hybrid-context-parallel", {"hybrid_context_parallel": True}, "use --cuda-graph-impl none", {"cuda_graph_impl": "none"}),
    ("--num-experts 8", {"num_experts": 8}, "--moe-pad-expert-input-to-capacity", {"moe_pad_expert_input_to_capacity": True}),
    (
        "--num-experts 8",
        {"num_experts": 8, "moe_expert_rank_capacity_factor": 1.5},
        "SpeculativeStep",
        {"speculative_step": True},
    ),
    ("--fp16 without --loss-scale", {"fp16": True}, "use --bf16, or a fixed --loss-scale", {"loss_scale": 1024.0}),
    ("validate_result in the step", {"checks_on_host": True}, "DeviceChecks", {"checks_on_host": False}),
    (
        "--timing-log-level 1",
        {"timing_log_level": 1},
        "use --timing-mode event, or --timing-log-level 0",
        {"timing_log_level": 0},
    ),
    (
        "--timing-log-level 2",
        {"timing_log_level": 2, "cuda_graph_impl": "none", "optimizer_cuda_graph": True},
        "use --timing-mode event, or --timing-log-level 0",
        {"timing_log_level": 0},
    ),
    ("--log-straggler", {"log_straggler": True}, "eager=True", {"log_straggler": False}),
    ("dump hooks (--save-grads)", {"dump_options": ("--save-grads",)}, "eager=True", {"dumps_run_eagerly": True}),
    (
        "--log-num-zeros-in-grad",
        {"log_num_zeros_in_grad": True, "optimizer_cuda_graph": True},
        "leave out --optimizer-cuda-graph",
        {"optimizer_cuda_graph": False},
    ),
    ("--empty-unused-memory-level in the step", {"empty_cache_in_step": True}, "between steps", {"empty_cache_in_step": False}),
    (
        "host flags (is_first_microbatch)",
        {"host_flags_in_step": ("is_first_microbatch",)},
        "put them into the inputs",
        {"host_flags_in_step": ()},
    ),
    ("zero_grad(set_to_none=True)", {"zero_grad_to_none": True}, "set_to_none=False", {"zero_grad_to_none": False}),
    (
        "--rampup-batch-size",
        {"rampup_batch_size": (16, 16, 1000)},
        "on_change to eager or recapture",
        {"on_change": OnChange.RECAPTURE},
    ),
    ("--variable-seq-lengths", {"variable_seq_lengths": True}, "pad to one length", {"on_change": OnChange.EAGER}),
    ("packed sequences", {"packed_max_length_on_host": True}, "fixed max_seqlen", {"packed_max_length_on_host": False}),
    (
        "--num-model-chunks 2",
        {"num_model_chunks": 2, "inputs_by_chunk": False},
        "keep inputs by chunk",
        {"inputs_by_chunk": True},
    ),
    (
        "DistributedDataParallel with --cuda-graph-warmup-steps 3",
        {"distributed_data_parallel": True},
        "use --cuda-graph-warmup-steps 11 or more, or GradientGroups",
        {"cuda_graph_warmup_steps": 11},
    ),
    (
        "torch.compile mode reduce-overhead",
        {"torch_compile_mode": "reduce-overhead"},
        "max-autotune-no-cudagraphs",
        {"torch_compile_mode": "max-autotune-no-cudagraphs"},
    ),
    ("--optimizer sgd", {"optimizer": "sgd", "optimizer_cuda_graph": True}, "use adam or adamw", {"optimizer_is_gated": True}),
    (
        "--optimizer-cpu-offload",
        {"optimizer_cpu_offload": True, "optimizer_cuda_graph": True},
        "leave out --optimizer-cuda-graph",
        {"optimizer_cuda_graph": False},
    ),
    (
        "--weight-decay-incr-style linear",
        {"weight_decay_incr_style": "linear", "optimizer_cuda_graph": True},
        "ScheduledWeightDecay",
        {"scheduled_weight_decay": True},
    ),
    (
        "offloading between steps",
        {"state_moves": True, "moves_invalidate_graphs": False},
        "OptimizerOffload",
        {"moves_invalidate_graphs": True},
    ),
    (
        "--inprocess-restart",
        {"inprocess_restart": True, "graphs_registered": False},
        "lifecycle.register(graph)",
        {"graphs_registered": True},
    ),
    (
        "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF does",
        {"expandable_segments": True},
        "set NCCL_GRAPH_REGISTER=0",
        {"nccl_graph_register": False},
    ),
    ("TORCH_NCCL_BLOCKING_WAIT=1", {"nccl_blocking_wait": True}, "unset it", {"nccl_blocking_wait": False}),
]
