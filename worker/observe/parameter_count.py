"""How many parameters a described model has, and how many of them the most loaded rank holds. Pure.

The counts are exact for the models that a `ModelDescription` can describe; where it says nothing of biases, positions and norms
on queries and keys they are those of Megatron-LM's theoretical report, and the shares of ranks are so in any case (its
`theoretical_memory_usage.py`). Shares may be fractions where a layout does not divide the model evenly.
"""

from dataclasses import dataclass
from fractions import Fraction

from rsup.worker.observe.model_description import ModelDescription
from rsup.worker.observe.parallel_layout import ParallelLayout


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of the parts of a layer. `*_split`: a tensor-parallel rank holds a part of them; `*_whole`: each holds all."""

    attention_split: int
    attention_whole: int
    mlp_split: int
    mlp_whole: int
    shared_split: int
    shared_whole: int
    routed: int
    """All experts."""
    routed_active: int
    """Those that one token goes through."""
    router: int
    """Router, its bias, the shared expert's gate and the projections to a latent size."""
    norms: int

    @property
    def dense_layer(self) -> int:
        """A layer without experts."""
        return self.attention_split + self.attention_whole + self.mlp_split + self.mlp_whole + self.norms

    @property
    def moe_layer(self) -> int:
        """A layer with experts."""
        return self._beside_experts + self.routed

    @property
    def active_moe_layer(self) -> int:
        """What one token goes through of it."""
        return self._beside_experts + self.routed_active

    @property
    def _beside_experts(self) -> int:
        attention = self.attention_split + self.attention_whole
        return attention + self.shared_split + self.shared_whole + self.router + self.norms


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model. `total` has the embedding twice where it is untied; `active`: what one token goes through."""

    block: int
    mtp: int
    embedding: int
    positions: int
    total: int
    active: int


@dataclass(frozen=True)
class RankShare:
    """Parameters that one rank holds. Experts are apart: other ranks hold the same ones."""

    split: Fraction
    whole: Fraction
    experts: Fraction

    @property
    def total(self) -> Fraction:
        """All of them."""
        return self.split + self.whole + self.experts


def layer_counts(model: ModelDescription) -> LayerCounts:
    """Parameters by part of a layer."""
    hidden, routed_hidden = model.hidden_size, model.moe_latent_size or model.hidden_size
    split, whole = _attention(model)
    expert = model.mlp_matrices * routed_hidden * model.expert_ffn_size
    shared = model.moe_shared_expert_intermediate_size
    mlp_split, mlp_whole = _mlp(model, model.ffn_size)
    shared_split, shared_whole = _mlp(model, shared) if shared else (0, 0)
    if model.mlp_bias:
        expert += model.expert_ffn_size * (model.mlp_matrices - 1) + routed_hidden
    router = hidden * model.num_experts + (model.num_experts if model.moe_router_bias else 0)
    router += hidden if shared and model.moe_shared_expert_gate else 0
    return LayerCounts(
        split,
        whole,
        mlp_split,
        mlp_whole,
        shared_split,
        shared_whole,
        expert * model.num_experts,
        expert * model.moe_router_topk,
        router + 2 * hidden * model.moe_latent_size,
        model.norms_per_layer * hidden * model.norm_size,
    )


def _attention(model: ModelDescription) -> tuple[int, int]:
    if model.has_latent_attention:
        return _latent_attention(model), model.qk_norm_size
    hidden, query, key = model.hidden_size, model.query_size, model.key_size
    split = hidden * (query + 2 * key) + query * hidden + (query + 2 * key if model.qkv_bias else 0)
    return split, (hidden if model.projection_bias else 0) + model.qk_norm_size


def _latent_attention(model: ModelDescription) -> int:
    hidden, heads, norm = model.hidden_size, model.num_attention_heads, model.norm_size
    query_head = model.qk_head_dim + model.qk_pos_emb_head_dim
    query = model.q_lora_rank * (hidden + heads * query_head + norm) if model.q_lora_rank else hidden * heads * query_head
    latent = model.kv_lora_rank * (hidden + heads * (model.qk_head_dim + model.v_head_dim) + norm)
    return query + latent + hidden * model.qk_pos_emb_head_dim + heads * model.v_head_dim * hidden


def _mlp(model: ModelDescription, width: int) -> tuple[int, int]:
    bias = (width * (model.mlp_matrices - 1), model.hidden_size) if model.mlp_bias else (0, 0)
    return model.mlp_matrices * model.hidden_size * width + bias[0], bias[1]


def parameter_counts(model: ModelDescription) -> ParameterCounts:
    """Parameters of the whole model."""
    layer = layer_counts(model)
    final_norm = model.norm_size * model.hidden_size
    block = layer.dense_layer * model.num_dense_layers + layer.moe_layer * model.num_moe_layers + final_norm
    active = layer.dense_layer * model.num_dense_layers + layer.active_moe_layer * model.num_moe_layers + final_norm
    mtp = layer.dense_layer * model.num_mtp_dense_layers + layer.moe_layer * model.num_mtp_moe_layers
    embedding, positions = model.hidden_size * model.vocab_size, model.learned_positions * model.hidden_size
    outside = mtp + embedding * (2 if model.untie_embeddings_and_output_weights else 1) + positions
    return ParameterCounts(block, mtp, embedding, positions, block + outside, active + outside)


def most_loaded_share(model: ModelDescription, layout: ParallelLayout) -> RankShare:
    """What a rank of the first pipeline stage holds, as Megatron-LM counts it: its part of the layers, the embedding, and the
    layers that predict further tokens."""
    layer, stages = layer_counts(model), layout.pipeline
    split, whole, experts = _of_layers(layer, model.num_dense_layers, model.num_moe_layers)
    mtp = _of_layers(layer, model.num_mtp_dense_layers, model.num_mtp_moe_layers)
    embedding = model.hidden_size * model.vocab_size
    num_embeddings = 2 if model.untie_embeddings_and_output_weights and stages == 1 else 1
    final_norm = model.norm_size * model.hidden_size
    positions = model.learned_positions * model.hidden_size
    return RankShare(
        (Fraction(split, stages) + mtp[0] + embedding * num_embeddings) / layout.tensor,
        Fraction(whole + final_norm, stages) + mtp[1] + positions,
        (Fraction(experts, stages) + mtp[2]) / (layout.expert_tensor_size * layout.expert),
    )


def other_share(model: ModelDescription, layout: ParallelLayout) -> RankShare:
    """What a rank of a middle pipeline stage holds."""
    split, whole, experts = _of_layers(layer_counts(model), model.num_dense_layers, model.num_moe_layers)
    final_norm = model.norm_size * model.hidden_size
    return RankShare(
        Fraction(split, layout.pipeline * layout.tensor),
        Fraction(whole + final_norm, layout.pipeline),
        Fraction(experts, layout.pipeline * layout.expert_tensor_size * layout.expert),
    )


def _of_layers(layer: LayerCounts, num_dense: int, num_moe: int) -> tuple[int, int, int]:
    split = (layer.attention_split + layer.mlp_split) * num_dense + (layer.attention_split + layer.shared_split) * num_moe
    whole = (layer.norms + layer.attention_whole) * (num_dense + num_moe)
    whole += layer.mlp_whole * num_dense + (layer.shared_whole + layer.router) * num_moe
    return split, whole, layer.routed * num_moe
