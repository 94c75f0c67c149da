"""Bytes of activations that one rank holds at its worst moment. Pure; exact numbers, as fractions.

Two answers. `megatron_activation_bytes` is the theoretical report of Megatron-LM to the byte, with its simplifications: one
formula for full recompute and for none, a dense layer's width in place of the experts', no gate. `activation_bytes` counts the
tensors that autograd keeps (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", table 2,
carried on to gates, grouped queries, latent attention, experts, flash attention and full recompute), for bfloat16 computation.
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from rsup.supervisor.wire import UsageError
from rsup.worker.observe.model_description import ModelDescription
from rsup.worker.observe.parallel_layout import ParallelLayout

_HALF, _FLOAT, _INDEX = 2, 4, 8
"""Bytes of bfloat16, float32 and int64."""


class Recompute(StrEnum):
    """What is computed again in the backward pass, Megatron-LM's names: nothing, the core of the attention, whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class StepShape:
    """What one rank computes in a step. `num_microbatches`: None where it is at least the number of pipeline stages.

    `flash_attention`: scores are never in memory. `dropout`: there are masks to keep.
    """

    seq_length: int
    micro_batch_size: int = 1
    num_microbatches: int | None = None
    recompute: Recompute = Recompute.NONE
    flash_attention: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_length", "micro_batch_size", "num_microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it should be 1 or more")


# ------------------------------------------------------------------------------------------------ Megatron-LM's report


def megatron_activation_bytes(model: ModelDescription, layout: ParallelLayout, shape: StepShape) -> Fraction:
    """Bytes of the first pipeline stage, as Megatron-LM reports them."""
    tokens = shape.seq_length * shape.micro_batch_size
    hidden, stages = model.hidden_size, layout.pipeline
    if layout.sequence_parallel and shape.recompute is Recompute.SELECTIVE:
        per_layer = tokens * (18 * hidden + 4 * model.ffn_size)
        scaled = (per_layer * model.num_layers + _embedded(tokens, hidden, stages)) * _in_flight(layout, shape)
        if stages == 1:
            scaled += tokens * 4 * (hidden + model.vocab_size)
        return scaled / layout.tensor
    first = tokens * hidden * (10 + Fraction(24, layout.tensor)) * model.num_layers
    scaled = (first + _embedded(tokens, hidden, stages)) * _in_flight(layout, shape)
    if stages == 1:
        scaled += _HALF * tokens * (Fraction(model.vocab_size, layout.tensor) + hidden)
    return scaled * Fraction(105, 100)


def _embedded(tokens: int, hidden: int, stages: int) -> int:
    """Token ids, and the mask of the embedding's dropout, of all micro-batches in flight."""
    return (_INDEX * tokens + tokens * hidden) * stages


def _in_flight(layout: ParallelLayout, shape: StepShape) -> Fraction:
    """What the first stage holds, in parts of what all layers hold of one micro-batch."""
    stages = layout.pipeline
    if layout.virtual_pipeline:
        return 1 + Fraction(stages - 1, stages * layout.virtual_pipeline)
    if stages > 1 and shape.num_microbatches is not None:
        return min(Fraction(1), Fraction(shape.num_microbatches, stages))
    return Fraction(1)


# ----------------------------------------------------------------------------------------------------- what is kept


def activation_bytes(model: ModelDescription, layout: ParallelLayout, shape: StepShape) -> Fraction:
    """Bytes of the pipeline stage that holds most: the first, which has most micro-batches in flight, or the last, which has
    the logits. Includes what the backward pass of one layer needs beside them."""
    kinds = [(model.num_dense_layers, False), (model.num_moe_layers, True)]
    kept = sum((num * kept_by_layer(model, layout, shape, moe) for num, moe in kinds), Fraction(0))
    num_mtp = model.num_mtp_dense_layers, model.num_mtp_moe_layers
    mtp = num_mtp[0] * kept_by_layer(model, layout, shape, False) + num_mtp[1] * kept_by_layer(model, layout, shape, True)
    working = max(_working_bytes(model, layout, shape, moe) for num, moe in kinds if num)
    stages = layout.pipeline
    tokens = _tokens(layout, shape)
    embedded = tokens * (_INDEX + (Fraction(model.hidden_size, _spread(layout)) if shape.dropout else 0))
    head = _head_bytes(model, layout, tokens) * (1 + model.mtp_num_layers) + mtp
    if stages == 1:
        return kept + embedded + head + working
    num_in_flight = min(stages, shape.num_microbatches or stages)
    first = kept * _in_flight(layout, shape) + embedded * num_in_flight + working
    return max(first, kept / stages + head + working)


def kept_by_layer(model: ModelDescription, layout: ParallelLayout, shape: StepShape, moe: bool) -> Fraction:
    """Bytes that one layer keeps of one micro-batch until its backward pass. `moe`: a layer with experts."""
    if shape.recompute is Recompute.FULL:
        return _tokens(layout, shape) * _HALF * Fraction(model.hidden_size, _spread(layout))
    return _all_of_layer(model, layout, shape, moe)


def _all_of_layer(model: ModelDescription, layout: ParallelLayout, shape: StepShape, moe: bool) -> Fraction:
    """Bytes of one layer and micro-batch of which no whole layer is computed again."""
    hidden = Fraction(model.hidden_size, _spread(layout))
    norms = 2 * _HALF * hidden
    inputs = 2 * _HALF * hidden  # of the projections to queries, keys and values, and of the feed-forward part
    masks = 2 * hidden if shape.dropout else 0
    attention = _attention(model, layout.tensor) + _core(model, layout, shape)
    feed_forward = _experts(model, layout) if moe else _mlp(model, model.ffn_size, layout.tensor)
    return _tokens(layout, shape) * (norms + inputs + masks + attention + feed_forward)


def _attention(model: ModelDescription, tensor: int) -> Fraction:
    """Of one token: queries, keys, values, and what the output projection gets."""
    if not model.has_latent_attention:
        return Fraction(_HALF * (2 * model.query_size + 2 * model.key_size), tensor)
    query_head = model.qk_head_dim + model.qk_pos_emb_head_dim
    latents = 2 * model.q_lora_rank + 2 * model.kv_lora_rank + model.qk_pos_emb_head_dim  # before and after their norms
    heads = model.num_attention_heads * (2 * query_head + 2 * model.v_head_dim)
    return _HALF * (latents + Fraction(heads, tensor))


def _core(model: ModelDescription, layout: ParallelLayout, shape: StepShape) -> Fraction:
    """Of one token: what lies between queries and mixed values."""
    heads = Fraction(model.num_attention_heads, layout.tensor)
    if shape.recompute is Recompute.SELECTIVE:
        return Fraction(0)
    if shape.flash_attention:
        return _FLOAT * heads  # the logarithm of each row's sum
    length = shape.seq_length
    dropped = (1 + _HALF) * heads * length if shape.dropout else 0  # the mask, and what it leaves
    return _HALF * heads * length + dropped


def _mlp(model: ModelDescription, width: int, tensor: int) -> Fraction:
    """Of one token: what the activation function gets and gives."""
    return Fraction(_HALF * width * model.mlp_matrices, tensor)


def _experts(model: ModelDescription, layout: ParallelLayout) -> Fraction:
    """Of one token: router, experts that it goes through (tokens are taken to be spread evenly), shared expert."""
    size = layout.expert_tensor_size
    reach = Fraction(model.moe_router_topk * size, layout.tensor)  # tokens that a rank's experts get, for one of its own
    hidden = model.moe_latent_size or model.hidden_size
    routed = _HALF * (2 * hidden) + _mlp(model, model.expert_ffn_size, size)  # permuted, and before they are weighed
    router = Fraction(2 * _FLOAT * model.num_experts, _spread(layout))
    latent = Fraction(_HALF * 2 * model.moe_latent_size, _spread(layout))
    return reach * routed + router + latent + _mlp(model, model.moe_shared_expert_intermediate_size, layout.tensor)


def _head_bytes(model: ModelDescription, layout: ParallelLayout, tokens: Fraction) -> Fraction:
    """The last norm, the output layer's input, its logits in bfloat16, and their softmax in float32."""
    hidden = 2 * _HALF * Fraction(model.hidden_size, _spread(layout))
    return tokens * (hidden + Fraction((_HALF + _FLOAT) * model.vocab_size, layout.tensor))


def _working_bytes(model: ModelDescription, layout: ParallelLayout, shape: StepShape, moe: bool) -> Fraction:
    """What the backward pass of one layer needs beside what is kept: gradients of the widest part, and with full recompute
    the layer itself."""
    tokens = _tokens(layout, shape)
    widest = _experts(model, layout) if moe else _mlp(model, model.ffn_size, layout.tensor)
    gradients = tokens * (2 * _HALF * Fraction(model.hidden_size, _spread(layout)) + widest)
    if shape.recompute is not Recompute.FULL:
        return gradients
    return gradients + _all_of_layer(model, layout, shape, moe) - kept_by_layer(model, layout, shape, moe)


def _tokens(layout: ParallelLayout, shape: StepShape) -> Fraction:
    return Fraction(shape.seq_length * shape.micro_batch_size, layout.context)


def _spread(layout: ParallelLayout) -> int:
    """Among how many ranks the parts between tensor-parallel ones are spread."""
    return layout.tensor if layout.sequence_parallel else 1
