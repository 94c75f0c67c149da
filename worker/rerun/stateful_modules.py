"""What changes in forward or backward without being registered for replay: it would make every replay look like a fault.

Some of it is known by its kind: running statistics, TransformerEngine's FP8 scaling with a history, a mixture of experts' bias.
The rest is found by comparing values before and after the first pass: version counters do not tell, since batch
normalisation writes its statistics without raising them, and DDP's broadcast raises them without changing a value.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import torch

_KNOWN_NAMES = ("expert_bias", "local_tokens_per_expert", "amax_history")


class Registered(Protocol):
    """What is restored before a replay; `ReplayState`."""

    def is_covered(self, module: torch.nn.Module) -> bool: ...

    @property
    def covered_names(self) -> Sequence[str]: ...


class WatchedModule:
    """The state of `module` that `state` does not restore, as it was before a pass."""

    def __init__(self, state: Registered, module: torch.nn.Module) -> None:
        self._state = state
        self._module = module
        self._before = {name: _on_host(tensor) for name, _, tensor in self._unregistered_tensors()}

    def changed(self) -> list[str]:
        """Names of what has changed since then. What the pass has added is no state that it found."""
        changed = []
        for name, kind, tensor in self._unregistered_tensors():
            before = self._before.get(name)
            if before is not None and not _is_equal(before, tensor):
                changed.append(f"{name} ({kind})")
        return changed

    def _unregistered_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for prefix, part in self._module.named_modules():
            held = dict(vars(part))
            if not self._state.is_covered(part):
                held |= part._buffers
            for leaf, tensor in held.items():
                name = f"{prefix}.{leaf}" if prefix else leaf
                if _is_plain(tensor) and not _is_named(self._state, name, prefix):
                    yield name, type(part).__name__, tensor


def unregistered_by_kind(state: Registered, module: torch.nn.Module) -> list[str]:
    """Names of modules and tensors of `module` that are known to change in a pass, and that `state` does not restore."""
    found = []
    for prefix, part in module.named_modules():
        if _is_named(state, prefix, prefix):
            continue
        covered = state.is_covered(part)
        label = f"{prefix or 'the module'} ({type(part).__name__})"
        if not covered and part.training and _has_running_statistics(part):
            found.append(label)
        if _has_fp8_history(part) and not _is_named(state, f"{prefix}.fp8_meta", prefix):
            found.append(f"{label}: fp8_meta")
        for leaf in _KNOWN_NAMES:
            name = f"{prefix}.{leaf}" if prefix else leaf
            is_buffer = part._buffers.get(leaf) is not None and not covered
            is_there = is_buffer or isinstance(vars(part).get(leaf), torch.Tensor)
            if is_there and not _is_named(state, name, prefix):
                found.append(f"{name} ({type(part).__name__})")
    return sorted(found)


def _is_named(state: Registered, *names: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in state.covered_names)


def _has_running_statistics(part: torch.nn.Module) -> bool:
    return bool(getattr(part, "track_running_stats", False)) and part._buffers.get("running_mean") is not None


def _has_fp8_history(part: torch.nn.Module) -> bool:
    """A module of TransformerEngine that scales by the history of its amax; known by its names, it is not imported."""
    if not type(part).__module__.startswith("transformer_engine"):
        return False
    meta = getattr(part, "fp8_meta", None)
    if not isinstance(meta, dict) or not (getattr(part, "fp8", False) or getattr(part, "fp8_initialized", False)):
        return False
    is_delayed = getattr(meta.get("recipe"), "delayed", None)
    return bool(is_delayed()) if callable(is_delayed) else True


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.layout == torch.strided


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _is_equal(before: torch.Tensor, now: torch.Tensor) -> bool:
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    return torch.equal(before.reshape(-1).view(torch.uint8), _on_host(now).reshape(-1).view(torch.uint8))
