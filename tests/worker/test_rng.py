"""All generators come back as they were."""

import random

import pytest
import torch

from rsup.worker.rng import capture_rng, restore_rng, seed_rng


def draw() -> list[float]:
    numpy = __import__("numpy")
    return [random.random(), random.gauss(0, 1), float(torch.rand(())), float(numpy.random.standard_normal())]


def test_a_captured_state_gives_the_same_numbers_again() -> None:
    seed_rng(2**40 + 5)
    draw()
    state = capture_rng(torch.device("cpu"))
    expected = [draw() for _ in range(3)]
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected
    seed_rng(2**40 + 5)
    assert draw() != expected[0]


def test_capturing_draws_nothing() -> None:
    seed_rng(7)
    expected = draw()
    seed_rng(7)
    capture_rng()
    assert draw() == expected


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"format": 99}'])
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        restore_rng(data)
