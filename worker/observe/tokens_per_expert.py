"""How many tokens each expert gets: one line of JSON a layer and iteration, `[[of micro-batch 0, by expert], ...]`.

Counts are read where the experts' first layer is called: its second input, a list or a tensor. Tensors stay on the device
until the pass is over and come to the host in one copy, so that routing waits for nothing. Names and format are Megatron-LM's.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rsup.worker.observe.contract import Warn

_DECODER = re.compile(r"(?:^|\.)(?:decoder\.layers|blocks)\.(\d+)\.mlp\.experts\.linear_fc1$")
_MTP = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\.mtp_model_layer\.layers\.(\d+)\.mlp\.experts\.linear_fc1$")
_LAST_PART = "linear_fc1"


class ExpertPlace(NamedTuple):
    """A layer of experts. Sorted as the lines are: the decoder's layers, then those for multi-token prediction."""

    block: str
    mtp_index: int
    layer: int

    def line(self, iteration: int, counts: Sequence[Sequence[int]]) -> str:
        """The line of that layer. `counts`: by micro-batch, then by expert."""
        mtp = {"mtp_idx": self.mtp_index} if self.block == "mtp" else {}
        content = {"iter": iteration, "block": self.block, **mtp, "layer": self.layer, "tpe": counts}
        return json.dumps(content, separators=(",", ":"))


def place_of(name: str) -> ExpertPlace | None:
    """The layer that a module of this name is the experts' first layer of; None where it is none that we know.

    Megatron-LM's `decoder.layers.N.mlp.experts.linear_fc1`, the same below `mtp.layers.M.mtp_model_layer`, and the reference
    trainer's `blocks.N...`.
    """
    if found := _MTP.search(name):
        return ExpertPlace("mtp", int(found[1]), int(found[2]))
    if found := _DECODER.search(name):
        return ExpertPlace("decoder", 0, int(found[1]))
    return None


class TokenCounts:
    """Collects the counts of one iteration.

    `place`: which modules have them, see `place_of`. Modules called `...experts.linear_fc1` that it does not know are told of.
    """

    def __init__(self, place: Callable[[str], ExpertPlace | None] = place_of, *, warn: Warn) -> None:
        self._place = place
        self._warn = warn
        self._handles: list[RemovableHandle] = []
        self._counts: dict[ExpertPlace, dict[int, Any]] = {}
        self._micro_batch: int | None = None
        self._warned: set[str] = set()

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Be called whenever experts are. `modules`: by their full names."""
        assert not self._handles, "the hooks of tokens per expert are there already"
        self._micro_batch = None
        for name, module in modules.items():
            if (place := self._place(name)) is not None:
                self._handles.append(module.register_forward_pre_hook(self._hook(place)))
            elif name.endswith(f".experts.{_LAST_PART}"):
                self._say_once(f"tokens per expert are not counted in {name}: which layer that is cannot be told from its name")
        if not self._handles:
            self._say_once("tokens per expert are not counted: the model has no layer of experts that is known by its name")

    def release(self) -> None:
        """Take the hooks away. May be repeated."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """What was counted so far counts no more."""
        self._counts.clear()

    def micro_batch(self, number: int) -> None:
        """What is computed from now on is that micro-batch; a layer that is computed twice in it counts once. Where nobody says
        so, each call is a micro-batch."""
        self._micro_batch = number

    def take_lines(self, iteration: int) -> list[str]:
        """The lines of what was counted, which is forgotten. Waits for the device."""
        counts, self._counts = _on_host(self._counts), {}
        return [place.line(iteration, counts[place]) for place in sorted(counts)]

    def _hook(self, place: ExpertPlace) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if len(inputs) < 2:
                self._say_once(
                    f"tokens per expert are not counted in {place.block} layer {place.layer}: no second input has them"
                )
                return
            of_layer = self._counts.setdefault(place, {})
            counts = inputs[1]
            kept = counts.detach().clone() if isinstance(counts, torch.Tensor) else [int(count) for count in counts]
            of_layer[len(of_layer) if self._micro_batch is None else self._micro_batch] = kept

        return hook

    def _say_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


def _on_host(counts: Mapping[ExpertPlace, Mapping[int, Any]]) -> dict[ExpertPlace, list[list[int]]]:
    """The same as plain numbers, micro-batches in order. Tensors are copied together."""
    tensors = [one for of_layer in counts.values() for one in of_layer.values() if isinstance(one, torch.Tensor)]
    numbers = iter(torch.cat([tensor.reshape(-1).long() for tensor in tensors]).tolist() if tensors else ())
    plain: dict[ExpertPlace, dict[int, list[int]]] = {}
    for place, of_layer in counts.items():
        plain[place] = {
            number: [next(numbers) for _ in range(one.numel())] if isinstance(one, torch.Tensor) else one
            for number, one in of_layer.items()
        }
    return {place: [of_layer[number] for number in sorted(of_layer)] for place, of_layer in plain.items()}


def lines_until(text: str, iteration: int) -> str:
    """Of a file's lines those of no later iteration than that, without what is no whole line."""
    kept = []
    for line in text.splitlines(keepends=True):
        try:
            if line.endswith("\n") and int(json.loads(line)["iter"]) <= iteration:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # a line of somebody else's: not ours to drop
            kept.append(line)
    return "".join(kept)
