"""The process's own generators, which nobody hands around: Python's, NumPy's, torch's CPU one and that of a CUDA device.

Reading and setting their states; and `DrawWatch`, which sees whether a data source drew from them while it made a batch. That
is asked at every draw, so it must cost little: NumPy takes 30 us to hand out its state, and is asked only where its words in
memory do not answer.
"""

import ctypes
import random
import sys
from typing import Any

import torch

from rsup.worker.rerun.rng_bytes import RngStates, numpy_plain, rng_from_bytes, rng_to_bytes

_MT19937_BYTES = 625 * 4
"""NumPy's own form of it: 624 words and the position."""


def default_states(device: torch.device | None) -> RngStates:
    """Copies of all states; CUDA's is that of `device`, None: none. Draws nothing, and does not wait for the device."""
    numpy = sys.modules.get("numpy")
    return RngStates(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(legacy=False),
        torch_cpu=torch.get_rng_state(),
        cuda=None if device is None else torch.cuda.get_rng_state(device),
    )


def set_default_states(states: RngStates, device: torch.device | None) -> None:
    """Put those of the process's generators back that `states` has; CUDA's is that of `device`, None: none."""
    if states.python is not None:
        random.setstate(states.python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and states.numpy is not None:
        numpy.random.set_state(states.numpy)  # copies it
        _NumpyMark.without_normal = b""
    if states.torch_cpu is not None:
        torch.set_rng_state(states.torch_cpu)
    if device is not None and states.cuda is not None:
        torch.cuda.set_rng_state(states.cuda, device)


def cuda_device_in_use() -> torch.device | None:
    """The current CUDA device, where this process uses CUDA."""
    is_in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if is_in_use else None


class DrawWatch:
    """Made before a draw; `changed` after it says what the draw left behind."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _NumpyMark()
        self._torch = torch.get_rng_state()
        self._cuda = _cuda_state()

    def changed(self) -> bytes:
        """The states now of the generators that have changed since, for `set_changed`; empty where none has."""
        python, cpu, cuda = random.getstate(), torch.get_rng_state(), _cuda_state()
        states = RngStates(
            python=None if python == self._python else python,
            numpy=self._numpy.changed(),
            torch_cpu=None if _is_same(cpu, self._torch) else cpu,
            cuda=None if _is_same(cuda, self._cuda) else cuda,
        )
        found = (states.python, states.numpy, states.torch_cpu, states.cuda)
        return b"" if all(state is None for state in found) else rng_to_bytes(states)


def set_changed(states: bytes) -> None:
    """Do to the generators what the draw did that `DrawWatch` saw."""
    set_default_states(rng_from_bytes(states), cuda_device_in_use())


class _NumpyMark:
    """Tells whether NumPy's generator has changed since it was made."""

    without_normal = b""
    """Words with which no second normal number waited, when last asked for. Two are made at once, and the second is handed out
    without a new word; one cannot come to wait without any."""

    def __init__(self) -> None:
        self._words = _numpy_words()
        self._state: dict[str, Any] | None = None
        if not self._words or self._words != _NumpyMark.without_normal:
            self._state = _numpy_state()
            if self._state is not None and not self._state["has_gauss"]:
                _NumpyMark.without_normal = self._words

    def changed(self) -> dict[str, Any] | None:
        """The state now, None: it has not changed."""
        words = _numpy_words()
        if words and words == self._words and words == _NumpyMark.without_normal:
            return None
        state = _numpy_state()
        return None if words == self._words and numpy_plain(state) == numpy_plain(self._state) else state


def _numpy_words() -> bytes:
    """The words of NumPy's generator as they are in memory, 1 us; empty where it is not the usual one."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy.random, "get_bit_generator"):
        return b""
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _numpy_state() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    state: dict[str, Any] | None = None if numpy is None else numpy.random.get_state(legacy=False)
    return state


def _cuda_state() -> torch.Tensor | None:
    device = cuda_device_in_use()
    return None if device is None else torch.cuda.get_rng_state(device)


def _is_same(now: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    if now is None or before is None:
        return now is before
    return now.numpy().tobytes() == before.numpy().tobytes()
