"""A model in consecutive parts, as a pipeline stage with several model chunks has them: each takes data of its own.

Here all chunks are on one rank and follow each other in one autograd graph, so the numbers are those of the undivided model.
"""

from collections.abc import Sequence
from typing import cast

import torch

from rsup.worker.reference.micro_batches import Batch
from rsup.worker.reference.model import GPT, Block


class ModelChunk:
    """Blocks `first` to `end` (without it) of a model; the first chunk embeds the text, the last gives the loss."""

    def __init__(self, model: GPT, first: int, end: int) -> None:
        self._model = model
        self._blocks = [cast(Block, model.blocks[i]) for i in range(first, end)]
        self._is_first = first == 0
        self._is_last = end == len(model.blocks)

    def __call__(self, hidden: torch.Tensor | None, inputs: Batch) -> torch.Tensor:
        """`hidden`: [batch, sequence, hidden] from the chunk before, None for the first. What the next one gets; of the last
        chunk the mean cross entropy, []."""
        if self._is_first:
            hidden = self._model.embed(inputs["text"][:, :-1])
        assert hidden is not None
        out = hidden
        for block in self._blocks:
            out = block(out)
        return self._model.loss(out, inputs["text"][:, 1:]) if self._is_last else out


def divided(model: GPT, num_chunks: int) -> list[ModelChunk]:
    """The model in so many parts of equal length."""
    length = len(model.blocks) // num_chunks
    return [ModelChunk(model, first, first + length) for first in range(0, len(model.blocks), length)]


def inputs_of_chunks(batch: Batch, num_chunks: int) -> list[Batch]:
    """What each chunk needs of a micro-batch: the first reads the text, the last its targets and the weights."""
    inputs: list[Batch] = [{} for _ in range(num_chunks)]
    inputs[0] = {"text": batch["text"]}
    inputs[-1] = batch
    return inputs


def chunked_loss(
    model: GPT, chunks: Sequence[ModelChunk], inputs: Sequence[Batch], compute: torch.dtype | None
) -> torch.Tensor:
    """Loss of one micro-batch, counted by the mean of its samples' weights: [], float32, as `model.microbatch_loss` has it.
    `inputs`: by chunk, on the model's device. `compute`: as of `model.mean_loss`."""
    hidden: torch.Tensor | None = None
    kind = inputs[-1]["text"].device.type
    with torch.autocast(kind, compute or torch.bfloat16, enabled=compute is not None), model.saving():
        for chunk, mine in zip(chunks, inputs, strict=True):
            hidden = chunk(hidden, mine)
    assert hidden is not None
    return hidden.float() * inputs[-1]["weight"].mean()
