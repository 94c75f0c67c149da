"""How a model is spread over ranks: sizes of the parallel groups, and what data-parallel ranks divide among them. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from rsup.supervisor.wire import UsageError
from rsup.worker.observe.model_description import ModelDescription


class LayoutError(UsageError):
    """A layout that does not fit the number of ranks or the model; the text says which numbers."""


class Sharding(StrEnum):
    """What data-parallel ranks divide among them, Megatron-LM's names: `optim` is its distributed optimizer (ZeRO-1),
    `optim_grads` ZeRO-2, `optim_grads_params` ZeRO-3 or FSDP."""

    NONE = "no_shard"
    OPTIMIZER = "optim"
    GRADIENTS = "optim_grads"
    PARAMETERS = "optim_grads_params"


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the groups, for `world_size` ranks in all. Raises `LayoutError` where they do not divide each other.

    `expert_tensor`: tensor parallelism inside experts; that of the rest unless given. `virtual_pipeline`: model chunks of a
    pipeline stage.
    """

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool = False
    sharding: Sharding = Sharding.NONE

    def __post_init__(self) -> None:
        sizes = {
            "world_size": self.world_size,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor_size,
            "virtual_pipeline": self.virtual_pipeline or 1,
        }
        for name, size in sizes.items():
            if size < 1:
                raise LayoutError(f"{name} is {size}; it should be 1 or more")
        _divide(self.world_size, {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context})
        experts = {"expert": self.expert, "expert tensor": self.expert_tensor_size, "pipeline": self.pipeline}
        if self.expert > 1 or self.expert_tensor is not None:
            _divide(self.world_size, experts)

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallelism inside experts."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def data(self) -> int:
        """Ranks that hold the same part of the model, experts aside, and see other data."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.expert_tensor_size * self.expert * self.pipeline)

    def __str__(self) -> str:
        parts = [("TP", self.tensor), ("PP", self.pipeline), ("CP", self.context), ("EP", self.expert), ("DP", self.data)]
        return " ".join(f"{name}{size}" for name, size in parts if size > 1) or "one rank"


def _divide(world_size: int, sizes: dict[str, int]) -> None:
    product = 1
    for size in sizes.values():
        product *= size
    if world_size % product:
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise LayoutError(f"{world_size} ranks are no multiple of {text} = {product}")


def check_model(layout: ParallelLayout, model: ModelDescription) -> None:
    """Raise `LayoutError` where that model cannot be spread so: parts of it would be left over, or ranks without one."""
    chunks = layout.virtual_pipeline or 1
    if chunks > 1 and layout.pipeline == 1:
        raise LayoutError(f"{chunks} model chunks of a stage need more than one pipeline stage")
    if layout.pipeline * chunks > model.num_layers:
        parts = f"{layout.pipeline} pipeline stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise LayoutError(f"{parts} are more than the model's {model.num_layers} layers")
    tensor, groups = layout.tensor, model.num_groups
    if model.num_attention_heads % tensor:
        raise LayoutError(f"num_attention_heads {model.num_attention_heads} is not divisible by tensor {tensor}")
    if not model.has_latent_attention and groups % tensor and tensor % groups:
        raise LayoutError(f"num_query_groups {groups} and tensor {tensor} do not divide each other")
    if layout.expert > 1 and (not model.num_experts or model.num_experts % layout.expert):
        raise LayoutError(f"num_experts {model.num_experts} is not divisible by expert {layout.expert}")


def check_sequence(layout: ParallelLayout, seq_length: int) -> None:
    """Raise `LayoutError` where a sequence of so many tokens cannot be divided among the ranks."""
    if layout.context > 1 and seq_length % (2 * layout.context):  # each rank has two parts, for an even load
        raise LayoutError(f"seq_length {seq_length} is not divisible by 2 x context {layout.context}")
    if layout.sequence_parallel and seq_length // layout.context % layout.tensor:
        of_a_rank = f"seq_length {seq_length}" + (f" / context {layout.context}" if layout.context > 1 else "")
        raise LayoutError(f"{of_a_rank} is not divisible by tensor {layout.tensor}")
