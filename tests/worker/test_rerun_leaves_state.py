"""The state that a replay finds again: generators, trackers, buffers, whatever is registered."""

import copy
import dataclasses
import io
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.replay_state import ReplayState


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(torch.rand(())), float(numpy.random.standard_normal())]


def test_generators_come_back_as_often_as_asked() -> None:
    """S15"""
    state = ReplayState()
    draw()  # Python and NumPy each hold back one of a pair of Gaussian numbers
    snapshot = state.capture()
    expected = [draw() for _ in range(3)]
    for _ in range(3):
        state.restore(snapshot)
        assert [draw() for _ in range(3)] == expected
    assert draw() != expected[0]


def test_capturing_draws_nothing() -> None:
    state = ReplayState()
    snapshot = state.capture()
    expected = draw()
    state.restore(snapshot)
    for _ in range(5):
        state.capture()
    assert draw() == expected


def test_generators_travel_as_bytes() -> None:
    """What a rank computes for another one is drawn from the other's numbers."""
    mine, theirs = ReplayState(), ReplayState()
    for state in (mine, theirs):
        state.register_generator("augmentation", torch.Generator().manual_seed(3 if state is mine else 4))
    snapshot = mine.capture()
    data = mine.rng_bytes(snapshot)
    expected = draw()
    draw()
    theirs.restore_rng_bytes(data)
    assert draw() == expected
    assert mine.rng_bytes(theirs.capture())[:20] == data[:20]
    assert torch.equal(theirs.capture().rng.generators["augmentation"], snapshot.rng.generators["augmentation"])
    assert len(data) < 30_000


def test_another_bit_generator_of_numpys_travels_too() -> None:
    state = ReplayState()
    generators: Any = numpy.random
    before = generators.get_bit_generator()
    generators.set_bit_generator(numpy.random.PCG64(5))  # a state of 128 bits
    try:
        data = state.rng_bytes(state.capture())
        expected = draw()
        state.restore_rng_bytes(data)
        assert draw() == expected
    finally:
        generators.set_bit_generator(before)


def test_generators_that_are_not_registered_here_are_refused() -> None:
    state = ReplayState()
    state.register_generator("mine", torch.Generator())
    data = state.rng_bytes(state.capture())
    with pytest.raises(RerunError, match="'mine' is not registered here"):
        ReplayState().restore_rng_bytes(data)
    for damaged in (b"", b"\x80", data[:100], b"x" * 10):
        with pytest.raises(RerunError, match="unreadable"):
            state.restore_rng_bytes(damaged)
    with pytest.raises(RerunError, match="registered twice"):
        state.register("mine", dict, print)


class Tracker:
    """Like Megatron's: named states, of which one is live inside `fork`; it installs the very dict that it is handed."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.states: dict[str, Any] = {"model-parallel": make(1), "expert": make(2)}

    def get_states(self) -> dict[str, Any]:
        return self.states

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states

    def fork(self, name: str) -> float:
        state = self.states[name]
        if isinstance(state, torch.Generator):
            return float(torch.rand((), generator=state))
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        number = float(torch.rand(()))
        self.states[name].copy_(torch.get_rng_state())  # in place, the worst case
        torch.set_rng_state(before)
        return number


@pytest.mark.parametrize(
    "make", [lambda seed: torch.Generator().manual_seed(seed).get_state(), lambda seed: torch.Generator().manual_seed(seed)]
)
def test_named_trackers_roll_back_each_time(make: Callable[[int], Any]) -> None:
    """P9 and P10: a second restore is no no-op, and of live generators the values are kept, not the objects."""
    tracker = Tracker(make)
    state = ReplayState()
    state.register_rng_tracker("cuda", tracker.get_states, tracker.set_states)
    snapshot = state.capture()
    data = state.rng_bytes(snapshot)
    expected = [tracker.fork("model-parallel"), tracker.fork("expert"), tracker.fork("expert")]
    for replay in range(3):
        tracker.states["added in the pass"] = make(9)
        if replay < 2:
            state.restore(snapshot)
            assert "added in the pass" not in tracker.states
        else:
            state.restore_rng_bytes(data)
        assert [tracker.fork("model-parallel"), tracker.fork("expert"), tracker.fork("expert")] == expected


def test_a_tracker_of_something_else_is_named() -> None:
    state = ReplayState()
    state.register_rng_tracker("odd", lambda: {"a": 3}, print)
    with pytest.raises(RerunError, match="'odd' gives a int for 'a'"):
        state.capture()


# --------------------------------------------------------------------------------------------------------- other state


class Moving(torch.nn.Module):
    """A forward with state: a buffer changed in place, one that is replaced, one that is created, and a tensor attribute."""

    ema: torch.Tensor
    replaced: torch.Tensor
    created: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("ema", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("created", None)
        self.register_buffer("mask", torch.ones(2))
        self.plain = torch.zeros(2)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0))
            self.replaced = self.replaced + 1
            self.created = self.replaced * 2 if self.created is None else self.created + 1
        found: torch.Tensor = self.norm(self.inner(x))
        return found + self.ema + self.created


def test_buffers_roll_back_in_place() -> None:
    """P11, S16: a stateful forward gives the same again, and who holds a buffer (a CUDA graph) sees it."""
    module = Moving()
    state = ReplayState()
    state.register_buffers("model", module)
    x = torch.randn(4, 2)
    ema = module.ema
    for _ in range(2):
        snapshot = state.capture()
        expected = module(x)
        for _ in range(2):
            state.restore(snapshot)
            assert torch.equal(module(x), expected)
        assert module.ema is ema


def test_registered_state_is_copied_both_ways() -> None:
    live: dict[str, Any] = {"amax": [torch.zeros(2)], "count": 0}
    state = ReplayState()
    state.register("fp8", lambda: live, lambda value: live.update(value))
    snapshot = state.capture()
    for _ in range(2):
        live["amax"][0] += 1
        live["count"] += 1
        state.restore(snapshot)
        assert live["amax"][0].tolist() == [0, 0] and live["count"] == 0


def test_registered_state_travels_with_a_checkpoint() -> None:
    """P11: a replay elsewhere begins with the state before the iteration, not with one that a pass has changed."""
    module = Moving()
    live: dict[str, Any] = {"count": 3, "t": torch.ones(2)}
    state = ReplayState()
    state.register_buffers("model", module)
    state.register("counters", lambda: live, lambda value: live.update(value))
    snapshot = state.capture()
    x = torch.randn(4, 2)
    expected = module(x)
    live["count"] = 4
    file = io.BytesIO()
    torch.save(state.state_dict(snapshot), file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    for _ in range(2):
        state.load_state_dict(kept)
        assert live["count"] == 3 and torch.equal(module(x), expected)
        live["t"].zero_()
    with pytest.raises(RerunError, match="not registered here"):
        ReplayState().load_state_dict(kept)


# --------------------------------------------------------------------------------------------------------- unregistered


def changed_by_a_pass(state: ReplayState, module: torch.nn.Module) -> list[str]:
    state.watch(module)
    module(torch.randn(4, 2))
    return state.unregistered(module)


def test_state_that_nobody_registered_is_named() -> None:
    """P11, S16: by its kind before any pass, by its value after the first one; constants are not named."""
    module = Moving()
    state = ReplayState()
    assert state.unregistered(module) == ["norm (BatchNorm1d)"]
    module(torch.randn(4, 2))
    assert changed_by_a_pass(state, module) == [
        "created (Moving)",
        "ema (Moving)",
        "norm (BatchNorm1d)",
        "norm.num_batches_tracked (BatchNorm1d)",
        "norm.running_mean (BatchNorm1d)",
        "norm.running_var (BatchNorm1d)",
        "replaced (Moving)",
    ]
    state.register_buffers("model", module)
    assert changed_by_a_pass(state, module) == []


def test_a_tensor_that_is_no_buffer_is_named_too() -> None:
    class Plain(Moving):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.plain = self.plain + 1
            self.last_output = x  # new in this pass: no state that it found
            return super().forward(x)

    module = Plain()
    state = ReplayState()
    state.register_buffers("model", module)
    assert changed_by_a_pass(state, module) == ["plain (Plain)"]
    state = ReplayState()
    state.register_buffers("model", module)
    state.register(
        "plain", lambda: module.plain, lambda value: setattr(module, "plain", value), covers=["plain", "*last_output"]
    )
    assert changed_by_a_pass(state, module) == []


def test_a_version_counter_alone_is_no_change() -> None:
    """DDP writes every buffer in each forward, with the same values."""

    class Broadcast(torch.nn.Linear):
        mask: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask.copy_(self.mask.clone())
            return super().forward(x)

    module = Broadcast(2, 2)
    module.register_buffer("mask", torch.tensor([1.0, float("nan")]))
    assert changed_by_a_pass(ReplayState(), module) == []


def test_statistics_at_rest_are_not_named() -> None:
    module = Moving().eval()
    assert ReplayState().unregistered(module) == []


@dataclasses.dataclass
class Recipe:
    is_delayed: bool

    def delayed(self) -> bool:
        return self.is_delayed


@pytest.mark.parametrize(("is_delayed", "in_use", "named"), [(True, True, True), (False, True, False), (True, False, False)])
def test_fp8_scaling_with_a_history_is_known_by_its_names(is_delayed: bool, in_use: bool, named: bool) -> None:
    """P11: TransformerEngine's delayed scaling; it is never imported."""
    kind = types.new_class("Linear", (torch.nn.Linear,))
    kind.__module__ = "transformer_engine.pytorch.module.linear"
    linear: Any = kind(2, 2)
    module = torch.nn.Sequential(linear)
    linear.fp8_initialized = in_use
    linear.fp8_meta = {"recipe": Recipe(is_delayed)}
    state = ReplayState()
    assert state.unregistered(module) == (["0 (Linear): fp8_meta"] if named else [])
    state.register("fp8", dict, lambda _: None, covers=["*.fp8_meta"])
    assert state.unregistered(module) == []


def test_a_mixture_of_experts_bias_is_known_by_its_name() -> None:
    """P11: it is updated inside the replayed region."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module[0].expert_bias = torch.zeros(4)
    module[0].register_buffer("local_tokens_per_expert", torch.zeros(4))
    state = ReplayState()
    assert state.unregistered(module) == ["0.expert_bias (Linear)", "0.local_tokens_per_expert (Linear)"]
    state.register_buffers("model", module)
    assert state.unregistered(module) == ["0.expert_bias (Linear)"]
    assert copy.deepcopy(module[0].expert_bias).tolist() == [0, 0, 0, 0]
