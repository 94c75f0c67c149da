"""Floating-point operations of a training step, for throughput figures. Pure.

Counts the matrix products of the model, forward and twice as many backward, a multiply and an add each; of attention only the
causal half. What is computed again for want of memory does not count (this is *model* FLOPs). Source: Megatron-LM's
`num_floating_point_operations`.
"""

from collections.abc import Callable

from rsup.worker.observe.model_description import ModelDescription

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_AND_ADD = 2
_FACTOR = _FORWARD_AND_BACKWARD * _MULTIPLY_AND_ADD


def training_flops(model: ModelDescription, num_tokens: int, sum_of_squares: int) -> int:
    """FLOPs of all ranks together for `num_tokens` tokens. `sum_of_squares`: of the lengths of their sequences, over which
    attention goes; real lengths where several are packed into one."""
    return num_tokens * _per_token(model) + sum_of_squares * _per_square(model)


def step_flops(model: ModelDescription, seq_length: int) -> Callable[[int], int]:
    """What one iteration costs, as a function of its number of samples, each `seq_length` long: what the training log takes
    as `flops_per_step`. Right also while the batch size grows."""
    per_sample = training_flops(model, seq_length, seq_length**2)
    return lambda num_samples: num_samples * per_sample


def tflops_per_device(flops: float, elapsed_s: float, world_size: int) -> float:
    """Throughput in TFLOP/s of each device; NaN where no time has passed."""
    return flops / (elapsed_s * world_size * 1e12) if elapsed_s > 0 else float("nan")


def _per_token(model: ModelDescription) -> int:
    """FLOPs of a token in everything whose cost does not depend on the others."""
    hidden = model.hidden_size
    num_dense = model.num_dense_layers + model.num_mtp_dense_layers
    num_moe = model.num_moe_layers + model.num_mtp_moe_layers
    products = hidden * model.ffn_size * model.mlp_matrices * num_dense + _experts(model) * num_moe
    products += _projections(model) * (num_dense + num_moe)
    products += model.mtp_num_layers * (3 * hidden + 2 * hidden**2)
    products += hidden * model.vocab_size * (model.mtp_num_layers + 1)
    return _FACTOR * products


def _experts(model: ModelDescription) -> int:
    routed_hidden = model.moe_latent_size or model.hidden_size
    routed = routed_hidden * model.expert_ffn_size * model.moe_router_topk * model.mlp_matrices
    shared = model.hidden_size * model.moe_shared_expert_intermediate_size * model.mlp_matrices
    return routed + shared + 2 * model.hidden_size * model.moe_latent_size


def _projections(model: ModelDescription) -> int:
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.has_latent_attention:
        return hidden * (model.query_size + 2 * model.key_size) + model.query_size * hidden
    query_head = model.qk_head_dim + model.qk_pos_emb_head_dim
    query = model.q_lora_rank * (hidden + heads * query_head + 1) if model.q_lora_rank else hidden * heads * query_head
    latent = model.kv_lora_rank * (hidden + heads * (model.qk_head_dim + model.v_head_dim) + 1)
    return query + latent + hidden * model.qk_pos_emb_head_dim + heads * model.v_head_dim * hidden


def _per_square(model: ModelDescription) -> int:
    """FLOPs of attention's core for each pair of tokens, half of which see each other."""
    heads = model.num_attention_heads
    if model.has_latent_attention:
        widths = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim)
    else:
        widths = 2 * model.query_size
    return _FACTOR // 2 * widths * (model.num_layers + model.mtp_num_layers)
