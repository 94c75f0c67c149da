"""Gradients in the host's memory: what is kept of DDP's buckets from pass to pass never gives another norm."""

import math
from typing import Any, cast

import pytest
import torch

from rsup.worker.rerun.gradient_norms import combined_on_host
from rsup.worker.rerun.host_buckets import HostBuckets

SIZES = (4, 6, 5)
GROUPS = (0, 0, 1)


class Bucket:
    """As much of DDP's `GradBucket` as is looked at; `gap` elements lie between its gradients."""

    def __init__(self, places: tuple[int, ...], numbers: float, index: int = 0, gap: int = 0) -> None:
        self.places, self._index, self.asked = places, index, 0
        self.memory = torch.full((sum(SIZES[place] + gap for place in places),), numbers)
        self.offsets = [sum(SIZES[p] + gap for p in places[:i]) for i in range(len(places))]

    def index(self) -> int:
        return self._index

    def gradients(self) -> list[torch.Tensor]:
        self.asked += 1
        return [self.memory[at : at + SIZES[place]] for at, place in zip(self.offsets, self.places, strict=True)]


def buckets() -> HostBuckets:
    return HostBuckets(GROUPS, lambda bucket: cast(Any, bucket).places)


def measured(known: HostBuckets, *all_of_them: Bucket) -> list[dict[int, float]]:
    known.begin_iteration()
    return [dict(zip(*known.norms(cast(Any, one), one.memory), strict=True)) for one in all_of_them]


def total(norms: list[dict[int, float]]) -> float:
    return combined_on_host([norm for some in norms for norm in some.values()])


def test_neighbours_of_a_group_are_measured_together_once_their_place_is_settled() -> None:
    known, first, second = buckets(), Bucket((2, 1), 2.0), Bucket((0,), 3.0, index=1)
    expected = math.sqrt(11 * 4 + 4 * 9)
    for _ in range(2):
        norms = measured(known, first, second)
        assert [sorted(some) for some in norms] == [[1, 2], [0]] and total(norms) == pytest.approx(expected)
    both = buckets()
    one = Bucket((2, 1, 0), 2.0)
    for _ in range(2):
        assert sorted(measured(both, one)[0]) == [0, 1, 2]
    (norms,) = measured(both, one)
    assert sorted(norms) == [1, 2], "0 and 1 are neighbours of one group"
    assert norms[1] == pytest.approx(math.sqrt(10 * 4)) and one.asked == 1
    again = dict(zip(*both.norms(cast(Any, one), one.memory), strict=True))
    assert again == norms, "a replay adds in the same order"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e36, -1e30])
def test_one_wrong_number_shows_as_itself(wrong: float) -> None:
    known, one = buckets(), Bucket((0, 1, 2), 1.0)
    for _ in range(3):
        measured(known, one)
    one.memory[7] = wrong
    (norms,) = measured(known, one)
    if math.isnan(wrong):
        assert math.isnan(norms[0])
    else:
        assert norms[0] == pytest.approx(abs(wrong), rel=1e-6)
    assert norms[2] == pytest.approx(math.sqrt(5)), "the other group has nothing of it"


def test_buckets_that_are_arranged_anew_are_looked_at_anew() -> None:
    known, old = buckets(), (Bucket((0,), 1.0), Bucket((1, 2), 1.0, index=1))
    for _ in range(3):
        measured(known, *old)
    new = Bucket((2, 1, 0), 1.0)
    norms = measured(known, new)
    assert sorted(norms[0]) == [0, 1, 2] and total(norms) == pytest.approx(math.sqrt(15)) and new.asked == 1
    measured(known, new)
    assert sorted(measured(known, new)[0]) == [1, 2] and new.asked == 1


def test_a_bucket_with_gaps_is_measured_by_parameter() -> None:
    known, one = buckets(), Bucket((0, 1), 1.0, gap=2)
    for _ in range(3):
        measured(known, one)
    norms = measured(known, one)
    assert norms == [{0: 2.0, 1: pytest.approx(math.sqrt(6))}]
