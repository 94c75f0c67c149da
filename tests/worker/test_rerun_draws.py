"""Sources that draw from the process's own generators: a replay leaves these as the first pass left them."""

import contextlib
import io
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from rsup.worker.integrations.micro_batches import MicroBatches
from rsup.worker.rerun.batch_packing import pack_batch, unpack_batch
from rsup.worker.rerun.contract import Drawn, Payload, RerunConfig
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.exchange import pack
from rsup.worker.rerun.replay_state import ReplayState
from rsup.worker.rerun.rng_bytes import rng_from_bytes


def python(_: int) -> None:
    random.random()


def legacy_numpy(_: int) -> None:
    numpy.random.random()


def every_second_normal(_: int) -> None:
    numpy.random.randn()  # two are made at once: every second draw changes no word of the generator


def torch_cpu(_: int) -> None:
    torch.rand(1)


def all_of_them(_: int) -> None:
    for one in (python, legacy_numpy, torch_cpu):
        one(0)


def sometimes(i: int) -> None:
    if i % 3 == 1:
        all_of_them(0)


def drawing(draw_one: Callable[[int], None]) -> Iterator[int]:
    """A loader that augments, and shuffles once more before it ends."""
    for i in range(8):
        draw_one(i)
        yield i
    draw_one(8)


def keeping(source: Any) -> RerunDataIterator:
    """As the machine has it."""
    iterator = RerunDataIterator(source)
    iterator.keeps_batches = True
    return iterator


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def computed(data: RerunDataIterator, num_batches: int = 3) -> list[Any]:
    """What a pass draws after each batch, as dropout does, beside what it gets."""
    seen: list[Any] = []
    for _ in range(num_batches):
        batch = next(data, "end")
        seen.append((batch, random.random(), numpy.random.randn(), float(torch.rand(1))))
    return seen


def seed() -> ReplayState:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    return ReplayState(torch.device("cpu"))


DRAWS = [python, legacy_numpy, every_second_normal, torch_cpu, all_of_them, sometimes]


@pytest.mark.parametrize("draw_one", DRAWS)
def test_a_replay_draws_what_the_first_pass_drew(draw_one: Callable[[int], None]) -> None:
    """In place, lent to another rank, and out of a checkpoint; and the iteration after it goes on as if there had been none."""
    seed()
    undisturbed = [computed(data, 3) for data in [keeping(drawing(draw_one))] for _ in range(3)]
    state = seed()
    data, other = keeping(drawing(draw_one)), keeping(range(0))
    for expected in undisturbed:
        data.advance()
        before = state.capture()
        assert computed(data) == expected
        after = state.capture()
        for times in range(3):
            state.restore(before)
            data.rewind()
            assert computed(data) == expected
            state.restore(before)
            if not data.has_ended:
                other.borrow(data.lend() if times else [unpack_batch(pack_batch(batch)) for batch in data.lend()])
                assert computed(other) == expected
            state.restore(before)
            loaded = keeping(drawing(draw_one))
            loaded.load_state_dict(through_a_checkpoint(data.state_dict()))
            loaded.rewind()
            assert computed(loaded) == expected
        state.restore(after)
    assert data.has_ended


@pytest.mark.parametrize("draw_one", DRAWS)
def test_batches_that_were_taken_back_draw_again_what_they_drew(draw_one: Callable[[int], None]) -> None:
    seed()
    undisturbed = [computed(data, 2) for data in [keeping(drawing(draw_one))] for _ in range(3)]
    state = seed()
    data = keeping(drawing(draw_one))
    data.advance()
    before = state.capture()
    assert computed(data, 2) == undisturbed[0]
    data.advance(keeps_last=True)
    assert computed(data, 2) == undisturbed[1]
    data.step_back(2)
    state.restore(before)
    again = keeping(drawing(draw_one))
    again.load_state_dict(through_a_checkpoint(data.state_dict()))
    for one in (data, again):
        state.restore(before)
        for expected in undisturbed:
            one.advance()
            assert computed(one, 2) == expected, "and the source, moved on after a checkpoint, has drawn nothing meanwhile"


def test_states_are_kept_only_where_a_draw_changed_them() -> None:
    seed()
    data = keeping(drawing(sometimes))
    numpy.random.randn()  # a second normal number waits: also then nothing is seen where nothing is drawn
    kept = [next(data) for _ in range(6)]
    assert [type(one) is Drawn for one in data.lend()] == [False, True, False, False, True, False]
    assert kept == data.not_consumed() == list(range(6))
    assert ["rng" in one for one in data.state_dict()["batches"]] == [False, True, False, False, True, False]
    only = keeping(drawing(python))
    next(only)
    states = rng_from_bytes(only.lend()[0].rng)
    assert states.python is not None and states.numpy is None and states.torch_cpu is None and states.cuda is None


def test_another_bit_generator_of_numpy_is_seen_too() -> None:
    """Its state is not in memory as the usual one's is."""
    seed()
    set_generator: Any = numpy.random.set_bit_generator  # type: ignore[attr-defined]
    usual = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        set_generator(numpy.random.PCG64(3))
        data = keeping(drawing(legacy_numpy))
        expected = computed(data, 2)
        numpy.random.random(5)
        data.rewind()
        assert computed(data, 1)[0][2] == expected[0][2]
        assert all(type(one) is Drawn for one in data.lend())
    finally:
        set_generator(usual)


def test_states_move_to_another_rank_without_pickled_classes() -> None:
    data = keeping(drawing(all_of_them))
    next(data)
    with torch.serialization.safe_globals([Drawn]):
        content = torch.load(io.BytesIO(pack(Payload([data.lend()], b"states"))), weights_only=True)
    assert content["batches"] == [data.lend()] and type(content["batches"][0][0]) is Drawn


def test_a_shuffling_loader_draws_its_order_once() -> None:
    """DataLoader takes a seed from torch's generator when an epoch begins; a replay does not begin one."""
    state = seed()
    loader: Any = DataLoader(torch.arange(6.0), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    data = keeping(loader)
    for _ in range(3):
        data.advance()
        before = state.capture()
        first = [(batch.tolist(), float(torch.rand(1))) for batch in data]
        state.restore(before)
        data.rewind()
        assert [(batch.tolist(), float(torch.rand(1))) for batch in data] == first


def of_a_framework(strikes_at: int) -> list[float]:
    """Three steps of two micro-batches, each augmented right before it is run, the pass `strikes_at` giving NaN."""
    seed()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer, passes = torch.optim.SGD(model.parameters(), lr=0.1), 0
    rerun = MicroBatches(RerunConfig(), torch.device("cpu"), model, optimizer, save=lambda: None)

    def run(batch: torch.Tensor) -> tuple[None, torch.Tensor]:
        nonlocal passes
        passes += 1
        loss = model(batch).square().mean() * (math.nan if passes == strikes_at else 1.0)
        loss.backward()
        return None, loss

    for step in range(1, 4):
        optimizer.zero_grad()
        for micro in range(2):
            batch = torch.ones(2, 4) + torch.randn(2, 4) + random.random() * numpy.random.randn()
            rerun.run(batch, step, micro == 1, run, optimizer.zero_grad, contextlib.nullcontext)
        optimizer.step()
    assert passes == (8 if strikes_at else 6)
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def test_a_framework_that_draws_between_micro_batches_is_replayed_with_its_draws() -> None:
    undisturbed = of_a_framework(0)
    assert of_a_framework(3) == undisturbed and of_a_framework(4) == undisturbed
