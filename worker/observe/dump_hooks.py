"""What modules get and give, copied to the host while they compute: activations, and the gradients of these.

Hooks are there for one iteration and change no number. A module's own data gradient is read behind a view of each input, since
an input that several modules share carries the sum of theirs. Source: the seed's section 2.4.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rsup.worker.observe.dump_plan import ACTIVATIONS, DGRADS, MicroBatchChoice, size_text

IsWatched = Callable[[str, nn.Module], bool]
"""Says of a module, by its name within the chunk, whether it is dumped."""

LINEAR_TYPES = frozenset(
    {
        *("Linear", "Embedding"),
        *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
        *("Router", "TopKRouter", "InferenceTopKRouter"),
        *("TELinear", "TENorm", "TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear"),
        *("TEGroupedLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"),
        *("GroupedLinear", "GroupedSum"),
    }
)
"""Names of classes, so that nothing is imported: torch's, Megatron-LM's, TransformerEngine's, the reference trainer's."""


def is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is of one of `LINEAR_TYPES`, or made of torch's."""
    return isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ in LINEAR_TYPES


class Collected:
    """Copies on the host, by label, chunk and key. `budget_bytes`: a label that would go beyond it is dropped as a whole, and
    stands in `refused` with a reason. `where`: what the budget is of, as in `on the disk`."""

    def __init__(self, budget_bytes: int, where: str = "") -> None:
        self._budget_bytes = budget_bytes
        self._where = f" {where}" if where else ""
        self.content: dict[str, dict[str, dict[str, Any]]] = {}
        self.sizes: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Keys of values that no file can hold, with their type."""

    def put(self, label: str, chunk: str, key: str, value: Any) -> None:
        """Keep a copy of `value`: a tensor, or plain values, also nested. None is nothing."""
        if value is None or label in self.refused:
            return
        self._forget_key(label, chunk, key)
        size_bytes = _size_of(value)
        if not self.has_room(label, size_bytes):
            return
        try:
            kept = _host_copy(value)
        except TypeError as error:
            self.left_out[key] = str(error)
            return
        self.sizes[label] = self.sizes.get(label, 0) + size_bytes
        self.content.setdefault(label, {}).setdefault(chunk, {})[key] = kept

    def has_room(self, label: str, more_bytes: int) -> bool:
        """Whether so much more fits; where it does not, the label is refused and what it has is dropped."""
        total = sum(self.sizes.values()) + more_bytes
        if total <= self._budget_bytes:
            return True
        so_far = self.sizes.get(label, 0) + more_bytes
        room = f"{size_text(self._budget_bytes)}{self._where}"
        self.refuse(label, f"they take {size_text(so_far)} or more, and there is room for {room}")
        return False

    def refuse(self, label: str, why: str) -> None:
        """Keep nothing of it."""
        self.forget(label)
        self.refused[label] = why

    def forget(self, label: str) -> None:
        """Drop what there is of it."""
        self.content.pop(label, None)
        self.sizes.pop(label, None)

    def _forget_key(self, label: str, chunk: str, key: str) -> None:
        keys = self.content.get(label, {}).get(chunk, {})
        if key in keys:
            self.sizes[label] -= _size_of(keys.pop(key))


class ModuleHooks:
    """Activations and data gradients of one iteration. Calls come from the training thread, hooks also on autograd's.

    `chunks`: the model's parts by name. `micro_batches`: which are kept; without a word of `micro_batch` all are, each in the
    place of the one before.
    """

    def __init__(self, chunks: Mapping[str, nn.Module], is_watched: IsWatched, micro_batches: MicroBatchChoice) -> None:
        self._chunks = chunks
        self._is_watched = is_watched
        self._choice = micro_batches
        self._handles: list[RemovableHandle] = []
        self._collected: Collected | None = None
        self._number: int | None = None
        self._count = 0

    def watch(self, labels: frozenset[str], collected: Collected) -> int:
        """Put hooks on all modules that are watched, for what `labels` has of activations and data gradients; their number."""
        assert self._collected is None, "the hooks of a dump are there already"
        self._collected, self._number = collected, None
        num_modules = 0
        for chunk, model in self._chunks.items():
            for name, module in model.named_modules():
                if self._is_watched(name, module):
                    num_modules += 1
                    self._add(chunk, name, module, labels)
        return num_modules

    def release(self) -> None:
        """Take all hooks away; what a tensor still has of them does nothing. May be repeated."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._collected = None

    def micro_batch(self, number: int, count: int) -> None:
        """What is computed from now on is that micro-batch (0-based) of so many."""
        self._number, self._count = number, count

    def _add(self, chunk: str, name: str, module: nn.Module, labels: frozenset[str]) -> None:
        where = chunk, f"{name}/" if name else ""
        if DGRADS in labels:
            before = functools.partial(self._tap_inputs, where)
            after = functools.partial(self._tap_outputs, where)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
        if ACTIVATIONS in labels:
            keep = functools.partial(self._keep_activations, where)
            self._handles.append(module.register_forward_hook(keep, with_kwargs=True, prepend=True))

    def _keep_activations(
        self, where: tuple[str, str], module: nn.Module, inputs: tuple[Any, ...], more: dict[str, Any], outputs: Any
    ) -> None:
        for index, value in enumerate(inputs):
            self._put(ACTIVATIONS, where, f"input{index}", value)
        for name, value in more.items():
            self._put(ACTIVATIONS, where, name, value)
        for index, value in enumerate(_as_tuple(outputs)):
            if isinstance(value, torch.Tensor):
                self._put(ACTIVATIONS, where, f"output{index}", value)

    def _tap_inputs(
        self, where: tuple[str, str], module: nn.Module, inputs: tuple[Any, ...], more: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seen = tuple(self._tap(where, f"input{index}", value, aside=True) for index, value in enumerate(inputs))
        return seen, {name: self._tap(where, name, value, aside=True) for name, value in more.items()}

    def _tap_outputs(self, where: tuple[str, str], module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        for index, value in enumerate(_as_tuple(outputs)):
            self._tap(where, f"output{index}", value, aside=False)

    def _tap(self, where: tuple[str, str], key: str, value: Any, aside: bool) -> Any:
        """Keep the gradient of `value` when it comes. `aside`: only what flows through the module that gets the result."""
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not torch.is_grad_enabled():
            return value
        tapped = value.view_as(value) if aside else value
        number, collected = self._number, self._collected

        def keep(gradient: torch.Tensor) -> None:
            if collected is not None and self._collected is collected:
                self._put(DGRADS, where, key, gradient, number)

        tapped.register_hook(keep)  # type: ignore[no-untyped-call]
        return tapped

    def _put(self, label: str, where: tuple[str, str], key: str, value: Any, number: int | None = None) -> None:
        number = self._number if number is None else number
        is_last = number is None or number == self._count - 1
        if self._collected is None or (self._choice is MicroBatchChoice.LAST and not is_last):
            return
        chunk, name = where
        of_micro_batch = f"/micro_batch{number}" if self._choice is MicroBatchChoice.ALL and number is not None else ""
        with torch.no_grad():
            self._collected.put(label, chunk, f"{name}{key}{of_micro_batch}", value)


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)  # of a DTensor
    return tensor.detach() if to_local is None else to_local().detach()


def _size_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        local = local_part(value)
        return local.numel() * local.element_size()
    if isinstance(value, list | tuple):
        return sum(map(_size_of, value))
    if isinstance(value, Mapping):
        return sum(map(_size_of, value.values()))
    return 0


def _host_copy(value: Any) -> Any:
    """The same on the CPU, in memory of its own and of types that `torch.load` takes. Raise `TypeError` with another type's
    name."""
    if isinstance(value, torch.Tensor):
        return local_part(value).to("cpu", copy=True)
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        return value
    if isinstance(value, list | tuple):
        copies = [_host_copy(one) for one in value]
        return copies if isinstance(value, list) else tuple(copies)
    if isinstance(value, Mapping):
        return {str(key): _host_copy(one) for key, one in value.items()}
    raise TypeError(type(value).__qualname__)
