"""All that a pass changes beside its data and gradients, and that a replay must find as the first pass found it.

Generators always: Python's, NumPy's, torch's CPU one and that of the rank's CUDA device. More is registered: other
generators, named CUDA RNG trackers, buffers of modules, anything with a way to save and to load it. Everything is copied by
value when it is captured and again when it is restored, so that one snapshot restores any number of times, and changing the
live state never changes it. (A tracker that gets the snapshot's own dict back would change it at its next fork.)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from rsup.worker.rerun.batch_packing import pack_batch, unpack_batch
from rsup.worker.rerun.batches import copy_batch
from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.default_generators import cuda_device_in_use, default_states, set_default_states
from rsup.worker.rerun.rng_bytes import NamedStates, RngStates, rng_from_bytes, rng_to_bytes
from rsup.worker.rerun.stateful_modules import WatchedModule, unregistered_by_kind

GetStates = Callable[[], Mapping[str, Any]]
SetStates = Callable[[dict[str, Any]], object]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Snapshot:
    """The state before a pass. Holds copies that nobody else refers to; nothing but `ReplayState` looks inside."""

    rng: RngStates
    registered: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, dict[str, torch.Tensor | None]] = field(default_factory=dict)


class ReplayState:
    """The registry of one rank. `device`: the CUDA device whose generator counts; None: the current one, if CUDA is in use."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._registered: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._generators: dict[str, torch.Generator] = {}
        self._trackers: dict[str, tuple[GetStates, SetStates]] = {}
        self._covered: list[str] = []
        self._watched: dict[int, WatchedModule] = {}

    def register(self, name: str, save: Callable[[], Any], load: Callable[[Any], object], covers: Sequence[str] = ()) -> None:
        """Take `save()` into each snapshot, and hand a copy of it to `load` before each replay.

        The value: tensors, arrays, plain values, in dicts, lists, tuples or dataclasses. `covers`: patterns (`*`) of the names
        of modules, buffers and attributes that are thereby restored, so that nobody asks for them.
        """
        self._check_new(name)
        self._registered[name] = (save, load)
        self._covered += covers

    def register_buffers(self, name: str, module: torch.nn.Module) -> None:
        """Restore all buffers of `module` and of the modules in it, in place."""
        self._check_new(name)
        self._modules[name] = module

    def register_generator(self, name: str, generator: torch.Generator) -> None:
        """Restore a generator of the caller's own; one that a CUDA graph uses too: its seed and offset are kept as numbers."""
        self._check_new(name)
        self._generators[name] = generator

    def register_rng_tracker(self, name: str, get_states: GetStates, set_states: SetStates) -> None:
        """Restore the named states of an RNG tracker, such as Megatron's `get_cuda_rng_tracker()`.

        `get_states()` gives tensors (states) or `torch.Generator` objects (a graph-safe tracker) by name. `set_states` gets
        fresh tensors; generators are restored in place, by value.
        """
        self._check_new(name)
        self._trackers[name] = (get_states, set_states)

    def is_covered(self, module: torch.nn.Module) -> bool:
        """Whether the buffers of `module` are registered."""
        return any(part is module for registered in self._modules.values() for part in registered.modules())

    @property
    def covered_names(self) -> Sequence[str]:
        """Patterns of the names that `register` said to restore."""
        return self._covered

    def watch(self, module: torch.nn.Module) -> None:
        """Remember the unregistered state of `module`, before its first pass; copies it to the host."""
        self._watched[id(module)] = WatchedModule(self, module)

    def unregistered(self, module: torch.nn.Module) -> list[str]:
        """Names of what changes in a pass of `module` and is not registered.

        Known kinds at any time; with `watch` before the first pass and this right after it, also what that has changed. Waits
        for the device, and forgets what `watch` remembered.
        """
        watched = self._watched.pop(id(module), None)
        return sorted({*unregistered_by_kind(self, module), *(watched.changed() if watched else ())})

    # ----------------------------------------------------------------------------------------------- snapshots

    def capture(self) -> Snapshot:
        """The state as it is now. Draws nothing, and does not wait for the device."""
        return Snapshot(
            rng=self._capture_rng(),
            registered={name: copy_batch(save()) for name, (save, _) in self._registered.items()},
            buffers={name: _copy_buffers(module) for name, module in self._modules.items()},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Put everything back. Raises `RerunError` where something of the snapshot is not registered any more."""
        for name, tensors in snapshot.buffers.items():
            _restore_buffers(self._known(self._modules, name), tensors)
        for name, value in snapshot.registered.items():
            self._known(self._registered, name)[1](copy_batch(value))
        self._restore_rng(snapshot.rng)  # last: loading may have drawn

    def rng_bytes(self, snapshot: Snapshot) -> bytes:
        """The generators of `snapshot`: what another rank needs to compute this one's data."""
        return rng_to_bytes(snapshot.rng)

    def restore_rng_bytes(self, data: bytes) -> None:
        """Take over the generators that `rng_bytes` gave on a rank set up alike. Raises `RerunError` for anything else."""
        self._restore_rng(rng_from_bytes(data))

    def state_dict(self, snapshot: Snapshot) -> dict[str, Any]:
        """What `snapshot` holds beside the generators, for a checkpoint: plain values and CPU tensors (`weights_only`)."""
        return {
            "registered": {name: pack_batch(value) for name, value in snapshot.registered.items()},
            "buffers": {name: pack_batch(tensors) for name, tensors in snapshot.buffers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; generators stay as they are."""
        for name, tensors in state["buffers"].items():
            _restore_buffers(self._known(self._modules, name), unpack_batch(tensors, self._device))
        for name, value in state["registered"].items():
            self._known(self._registered, name)[1](unpack_batch(value, self._device))

    # ---------------------------------------------------------------------------------------------- generators

    def _capture_rng(self) -> RngStates:
        return replace(
            default_states(self._cuda_device()),
            generators={name: generator.get_state().clone() for name, generator in self._generators.items()},
            trackers={name: _copy_states(name, get_states()) for name, (get_states, _) in self._trackers.items()},
        )

    def _restore_rng(self, states: RngStates) -> None:
        set_default_states(states, self._cuda_device())
        for name, state in states.generators.items():
            self._known(self._generators, name).set_state(state.clone())
        for name, tracked in states.trackers.items():
            _restore_tracker(self._known(self._trackers, name), tracked)

    def _cuda_device(self) -> torch.device | None:
        if self._device is not None:
            return self._device if self._device.type == "cuda" else None
        return cuda_device_in_use()

    def _check_new(self, name: str) -> None:
        if name in self._registered or name in self._modules or name in self._generators or name in self._trackers:
            raise RerunError(f"the replayable state {name!r} is registered twice: give each a name of its own")

    @staticmethod
    def _known(registry: dict[str, _T], name: str) -> _T:
        if name not in registry:
            raise RerunError(f"the replayable state {name!r} is not registered here: register the same on every rank and run")
        return registry[name]


def _copy_states(name: str, states: Mapping[str, Any]) -> NamedStates:
    copies: NamedStates = {}
    for key, state in states.items():
        if isinstance(state, torch.Generator):  # an object, not a value: kept, it would roll back nothing
            state = state.get_state()
        if not isinstance(state, torch.Tensor):
            raise RerunError(
                f"the RNG tracker {name!r} gives a {type(state).__qualname__} for {key!r}: it must give tensors or generators"
            )
        copies[key] = state.detach().clone()
    return copies


def _restore_tracker(tracker: tuple[GetStates, SetStates], states: NamedStates) -> None:
    get_states, set_states = tracker
    live = get_states()
    restored: dict[str, Any] = {}
    for key, state in states.items():
        generator = live.get(key)
        if isinstance(generator, torch.Generator):
            generator.set_state(state.clone())
            restored[key] = generator
        else:
            restored[key] = state.clone()
    if set(live) != set(restored) or not all(isinstance(state, torch.Generator) for state in restored.values()):
        set_states(restored)


def _copy_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    if not any(part._buffers for part in _parts(module)):  # naming all modules takes its time
        return {}
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in _buffers(module)}


def _parts(module: torch.nn.Module) -> Collection[torch.nn.Module]:
    """The module and all in it."""
    found, open_ = {id(module): module}, [module]
    for part in open_:
        for inner in part._modules.values():
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                open_.append(inner)
    return found.values()


@torch.no_grad()
def _restore_buffers(module: torch.nn.Module, saved: Mapping[str, torch.Tensor | None]) -> None:
    """In place, so that whoever holds the tensor (a CUDA graph) sees it; a buffer that came after the snapshot stays."""
    for name, value in saved.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        buffer = owner._buffers.get(leaf)
        if value is None or buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            owner._buffers[leaf] = None if value is None else value.clone()
        else:
            buffer.copy_(value)


def _buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    found = []
    for prefix, part in module.named_modules():
        for leaf, buffer in part._buffers.items():
            found.append((f"{prefix}.{leaf}" if prefix else leaf, buffer))
    return found
