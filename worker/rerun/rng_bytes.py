"""The states of a rank's generators as values, and as bytes that travel to another rank or into a checkpoint.

The bytes are MessagePack of numbers, strings and byte strings: no pickled class.
"""

import struct
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from rsup.worker.rerun.contract import RerunError

_FORMAT = 1
_MAX_INT = 2**63

NamedStates = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RngStates:
    """Copies of all states, None for a generator that is not in use or not meant. Tensors are uint8, on the CPU."""

    python: tuple[Any, ...] | None
    numpy: dict[str, Any] | None
    torch_cpu: torch.Tensor | None
    cuda: torch.Tensor | None = None
    generators: NamedStates = field(default_factory=dict)
    trackers: dict[str, NamedStates] = field(default_factory=dict)


def rng_to_bytes(states: RngStates) -> bytes:
    """`states` as a byte string, 8 to 10 kB where it has all of them."""
    return msgspec.msgpack.encode(
        {
            "format": _FORMAT,
            "python": _python_plain(states.python),
            "numpy": numpy_plain(states.numpy),
            "torch": None if states.torch_cpu is None else _tensor_bytes(states.torch_cpu),
            "cuda": None if states.cuda is None else _tensor_bytes(states.cuda),
            "generators": {name: _tensor_bytes(state) for name, state in states.generators.items()},
            "trackers": {
                name: {key: _tensor_bytes(state) for key, state in tracked.items()} for name, tracked in states.trackers.items()
            },
        }
    )


def rng_from_bytes(data: bytes) -> RngStates:
    """What `rng_to_bytes` was given. Raises `RerunError` for anything else."""
    try:
        state = msgspec.msgpack.decode(data)
        if state["format"] != _FORMAT:
            raise ValueError(f"format {state['format']}")
        return RngStates(
            python=_of_python_plain(state["python"]),
            numpy=_unpack(state["numpy"]),
            torch_cpu=None if state["torch"] is None else _tensor(state["torch"]),
            cuda=None if state["cuda"] is None else _tensor(state["cuda"]),
            generators={name: _tensor(kept) for name, kept in state["generators"].items()},
            trackers={
                name: {key: _tensor(kept) for key, kept in tracked.items()} for name, tracked in state["trackers"].items()
            },
        )
    except (msgspec.DecodeError, struct.error, KeyError, TypeError, ValueError) as error:
        raise RerunError(
            f"the states of the random number generators are unreadable ({error}): nothing can be replayed"
        ) from None


def _python_plain(state: tuple[Any, ...] | None) -> list[Any] | None:
    if state is None:
        return None
    version, words, gauss = state
    return [version, struct.pack(f"<{len(words)}Q", *words), gauss]


def _of_python_plain(plain: list[Any] | None) -> tuple[Any, ...] | None:
    if plain is None:
        return None
    version, words, gauss = plain
    return version, struct.unpack(f"<{len(words) // 8}Q", words), gauss


def _tensor_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.detach().cpu().contiguous().numpy().tobytes())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def numpy_plain(value: Any) -> Any:
    """NumPy's state, a dict of arrays, strings and integers (some of which have 128 bits), as plain values."""
    if isinstance(value, dict):
        return {key: numpy_plain(item) for key, item in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, int) and abs(value) >= _MAX_INT:
        return {"int": str(value)}
    return value


def _unpack(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"int"}:
        return int(value["int"])
    if set(value) != {"dtype", "shape", "data"}:
        return {key: _unpack(item) for key, item in value.items()}
    numpy = sys.modules.get("numpy")  # where NumPy is not in use, nobody draws from its generator
    return None if numpy is None else numpy.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"]).copy()
