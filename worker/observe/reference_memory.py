"""What the reference trainer needs in GPU memory, tensor by tensor: the theory that is printed beside the measured figure.

It differs from Megatron-LM's model in what it keeps. Weights, gradients and both of AdamW's moments are float32, also with
`--bf16`: autocast makes a bfloat16 copy of every matrix in the forward pass and keeps the residual stream in float32.
DistributedDataParallel has a second copy of the gradients (its buckets), the graph-captured step has none.

With x = sequence * micro-batch * hidden and w = the hidden size squared, a layer keeps, in bytes:

    |                         | bf16 | fp32 |
    | inputs of both norms    | 8 x  | 8 x  |
    | what the norms give     | 4 x  | 8 x  |
    | queries, keys, values   | 6 x  | 12 x |
    | mixed values            | 2 x  | 4 x  |
    | before and after GELU   | 16 x | 32 x |
    | dropout's two masks     | 2 x  | 2 x  |
    | copies of its weights   | 24 w | -    |

and 4 bytes a head and token (attention's row sums) with 16 a token (means and deviations of the norms).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rsup.worker.observe.memory_estimate import megabytes, theory_line
from rsup.worker.observe.model_description import ModelDescription
from rsup.worker.observe.parameter_count import layer_counts, parameter_counts

_VOCABULARY_SIZE = 256
_WORKSPACE_BYTES = 64 << 20
"""cuBLAS takes 32 MiB of torch's memory for the forward pass's thread and as much for autograd's, on Hopper."""


class ReferenceOptions(Protocol):
    """What is needed of the trainer's options (`rsup.worker.reference.options.Options`)."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def hidden_dropout(self) -> float: ...
    @property
    def bf16(self) -> bool: ...
    @property
    def recompute_granularity(self) -> str | None: ...
    @property
    def is_graphed(self) -> bool: ...


@dataclass(frozen=True)
class ReferenceMemory:
    """Bytes of one rank. `gradients` has DistributedDataParallel's buckets, too. The peak is that of a step, and includes the
    libraries' workspace: what `torch.cuda.max_memory_allocated` should say."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What is there at the peak beside the others; gradients that are not yet there at that moment are taken off."""
    workspace: int = _WORKSPACE_BYTES

    @property
    def weights_and_optimizer(self) -> int:
        """All that stays from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights_and_optimizer + self.activations + self.workspace


def reference_description(options: ReferenceOptions) -> ModelDescription:
    """The model that the trainer's options describe: for FLOPs and for the number of parameters, to the last bias."""
    num_experts = int(getattr(options, "num_experts", None) or 0)
    return ModelDescription(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        vocab_size=_VOCABULARY_SIZE,
        learned_positions=options.seq_length,
        qkv_bias=True,
        projection_bias=True,
        mlp_bias=not num_experts,
        num_experts=num_experts,
        moe_router_topk=int(getattr(options, "moe_router_topk", None) or 1) if num_experts else 0,
        moe_ffn_hidden_size=int(getattr(options, "moe_ffn_hidden_size", None) or 0) if num_experts else 0,
    )


def reference_memory(options: ReferenceOptions, state_bytes: int = 8) -> ReferenceMemory:
    """What a rank needs. `state_bytes`: of the optimizer, for a parameter; AdamW's unless given. With `--activation-offload`
    an upper bound."""
    num_parameters = parameter_counts(reference_description(options)).total
    gradients = 4 * num_parameters
    has_all_gradients = options.is_graphed or options.num_microbatches > 1
    moments = _moments(_Sizes(options), gradients)
    most = max(moment.activations + (gradients if has_all_gradients else moment.gradients) for moment in moments)
    return ReferenceMemory(
        4 * num_parameters,
        gradients if options.is_graphed else 2 * gradients,
        state_bytes * num_parameters,
        most - gradients,
    )


def theory_of_reference(options: ReferenceOptions) -> tuple[list[str], int]:
    """What `MemoryReport` is given as `theory`: its lines, and the peak that the allocator should show."""
    counts = parameter_counts(reference_description(options))
    found = reference_memory(options)
    line = theory_line(found.weights_and_optimizer, found.activations)
    line += f"; on a GPU workspaces of its libraries, {megabytes(found.workspace)} MB"
    offloads = bool(getattr(options, "activation_offload", False))
    lines = [f"parameters in millions: {counts.total / 1e6:.2f} in all, {counts.active / 1e6:.2f} active", line]
    if offloads:
        lines[-1] += " (activations as if they stayed on the device)"
    return lines, 0 if offloads else found.peak


class _Moment(NamedTuple):
    """Bytes at a moment of a micro-batch's pass. `gradients`: of parameters, as far as they are there in the first pass."""

    activations: int
    gradients: int


class _Sizes:
    """Bytes of what one micro-batch computes; names as in the table above."""

    def __init__(self, options: ReferenceOptions) -> None:
        model = reference_description(options)
        layer = layer_counts(model)
        self.num_layers = model.num_layers
        self.tokens = options.seq_length * options.micro_batch_size
        self.x = self.tokens * model.hidden_size
        self.w = model.hidden_size**2
        self.is_narrow = options.bf16 or bool(getattr(options, "fp16", False))
        self.number = 2 if self.is_narrow else 4
        """Bytes of a number in a matrix product."""
        self.recomputes = options.recompute_granularity == "full"
        self.mask = self.x if options.hidden_dropout > 0 else 0
        self.logits = self.tokens * model.vocab_size
        self.table = 4 * model.vocab_size * model.hidden_size
        self.layer_gradients = 4 * (layer.moe_layer if model.num_experts else layer.dense_layer)
        self.has_experts = model.num_experts > 0
        width = model.num_experts * model.expert_ffn_size if self.has_experts else model.ffn_size
        """Of the feed-forward part: every expert computes every token (`reference.experts`)."""
        self.wide = self.number * self.tokens * width
        self.matrix = model.hidden_size * width
        self._count_copies(model, options)
        row_sums = 0 if options.recompute_granularity == "selective" else 4 * options.num_attention_heads * self.tokens
        norms = (8 + 2 * self.number) * self.x + 16 * self.tokens
        feed_forward = 2 * self.wide
        if self.has_experts:  # what is weighed, what the router gets, its scores, weights and choice, and the experts' shares
            feed_forward += self.wide + (4 * self.x if self.is_narrow else 0)
            feed_forward += (4 + 4 + 1 + (2 if self.is_narrow else 0)) * self.tokens * model.num_experts
            feed_forward += 4 * model.num_experts
        attention = (3 + 1) * self.number * self.x + row_sums
        self.layer = norms + attention + feed_forward + 2 * self.mask + self.copies_in_layer

    def _count_copies(self, model: ModelDescription, options: ReferenceOptions) -> None:
        """Those of matrices: the backward pass needs no bias. Autocast keeps the copies of parameters, and experts' matrices
        are parameters in another shape or order."""
        attention, feed_forward = 4 * model.hidden_size**2, 2 * self.matrix
        cached = 2 * (attention + (0 if self.has_experts else feed_forward)) if self.is_narrow else 0
        own = 0
        if self.has_experts:
            own = 2 * feed_forward if self.is_narrow else 4 * self.matrix
        self.cached_in_layer = cached
        """Autocast's, of one layer, until it ends: in an eager step with the forward pass of a micro-batch."""
        self.copies_in_layer = own if options.is_graphed else own + cached
        """Kept by a layer until its backward pass."""
        self.copies_throughout = cached * self.num_layers if options.is_graphed else 0
        """The captured step has one autocast around all its micro-batches."""
        self.waiting_in_layer = cached if options.is_graphed and options.num_microbatches > 1 else 0
        """Gradients of autocast's copies, from the second micro-batch on: autograd turns to the older node, which makes them
        float32, when all newer ones are done."""


def _moments(sizes: _Sizes, all_gradients: int) -> list[_Moment]:
    """Those of which one is the peak."""
    x, logits = sizes.x, sizes.logits
    begin = sizes.mask + 8 * sizes.tokens + sizes.copies_throughout
    kept = 4 * x if sizes.recomputes else sizes.layer
    all_layers = begin + sizes.num_layers * kept
    casts = sizes.cached_in_layer * sizes.num_layers if sizes.recomputes and not sizes.copies_throughout else 0
    """With full recompute no layer keeps the copies of its weights, but autocast does until the forward pass is over."""
    head = (4 + sizes.number) * x
    in_forward = max(4 * x, 10 * logits) if sizes.is_narrow else 8 * logits
    moments = [
        _Moment(all_layers + casts + head + in_forward, 0),
        _Moment(all_layers + head + 12 * logits, 0),
        _Moment(all_layers + 12 * x, 0),
        _Moment(begin + 8 * x + sizes.table + sizes.waiting_in_layer * sizes.num_layers, all_gradients),
    ]
    if sizes.recomputes:
        moments.append(_Moment(all_layers + casts + 4 * x + 2 * sizes.wide, 0))
    computed_again = sizes.layer - kept
    for layer in {1, sizes.num_layers}:
        num_done = sizes.num_layers - layer
        beside = computed_again + _widest(sizes) + sizes.table + num_done * sizes.waiting_in_layer
        moments.append(_Moment(begin + layer * kept + beside, num_done * sizes.layer_gradients))
        # at the layer's first matrix all others have their gradients
        first_matrix = (3 * (2 + 4) if sizes.is_narrow else 3 * 4) * sizes.w
        beside = (4 + 4 + sizes.number) * x + first_matrix + sizes.table + num_done * sizes.waiting_in_layer
        there = num_done * sizes.layer_gradients + 4 * (2 * sizes.matrix + sizes.w)
        moments.append(_Moment(begin + (layer - 1) * kept + beside, there))
    return moments


def _widest(sizes: _Sizes) -> int:
    """What the backward pass of a layer has beside what is kept, at its widest place: behind the second matrix of the
    feed-forward part, where the gradient of that matrix becomes float32, or where that of experts is divided."""
    residual = 4 * sizes.x
    branch = sizes.number * sizes.x if sizes.mask or sizes.is_narrow else 0
    at_product = residual + branch + sizes.wide + sizes.number * sizes.matrix
    at_cast = residual + (6 - (2 if sizes.copies_in_layer else 0)) * sizes.matrix if sizes.is_narrow else 0
    at_experts = residual + 2 * sizes.wide if sizes.has_experts else 0
    return max(at_product, at_cast, at_experts) - sizes.mask
