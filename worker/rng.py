"""The random number generators of one process, as a byte string: Python's, NumPy's, torch's CPU and CUDA ones.

The bytes are JSON of plain numbers, so that a checkpoint holds no pickled class and any later release reads it.
"""

import base64
import json
import random
import sys
from typing import Any

import torch

_FORMAT = 1


def seed_rng(seed: int) -> None:
    """Seed every generator of this process with `seed` (any integer; NumPy's gets the lowest 32 bits)."""
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA's too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def capture_rng(device: torch.device | None = None) -> bytes:
    """The state of all generators; CUDA's is that of `device` where it is a CUDA device. Draws nothing."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "format": _FORMAT,
        "python": [version, list(words), gauss],
        "torch": _encode(torch.get_rng_state()),
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if device is not None and device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return json.dumps(state, separators=(",", ":")).encode()


def restore_rng(data: bytes, device: torch.device | None = None) -> None:
    """Put all generators back as `capture_rng` found them. Raises `ValueError` for bytes that it did not write."""
    state = json.loads(data)
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ValueError("not a state of the random number generators, or of a later release")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_decode(state["torch"]))
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
