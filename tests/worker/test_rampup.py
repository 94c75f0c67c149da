"""`--rampup-batch-size`: which iteration has how many samples, that each sample comes once, and that no interruption shows."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rsup.supervisor.wire import UsageError
from rsup.worker.reference.batch_sizes import BatchSizes
from rsup.worker.reference.build import make_schedule
from rsup.worker.reference.command_line import doubts, parse_options
from rsup.worker.reference.data import Text
from rsup.worker.reference.micro_batches import MicroBatches

RAMP = ("--global-batch-size=12", "--rampup-batch-size", "4", "4", "40", "--iterations=14", "--log-interval=1")


def megatron(full: int, start: int, increment: int, samples: int, consumed: int) -> int:
    """What Megatron-LM computes (`RampupBatchsizeNumMicroBatchesCalculator`), in its own floating point."""
    if consumed > samples:
        return full
    return start + int(consumed / (samples / ((full - start) / increment))) * increment


@pytest.mark.parametrize("ramp", [(8, 8, 1000), (16, 16, 64), (4, 12, 333), (2, 2, 40), (32, 32, 5)])
def test_sizes_are_megatrons(ramp: tuple[int, int, int]) -> None:
    start, increment, samples = ramp
    sizes = BatchSizes(start + 4 * increment, ramp)
    consumed = iterations = 0
    while consumed < samples + 2 * sizes.full:
        assert sizes.at(consumed) == megatron(sizes.full, *ramp, consumed), consumed
        assert sizes.consumed_after(iterations) == consumed
        consumed += sizes.at(consumed)
        iterations += 1
    assert sizes.at(0) == start and sizes.at(samples) == sizes.full
    assert sizes.consumed_after(iterations + 10**9) == consumed + 10**9 * sizes.full


def test_a_size_is_exact_where_floating_point_is_not() -> None:
    sizes = BatchSizes(2 + 49 * 2, (2, 2, 49))  # an increment a sample
    assert [sizes.at(consumed) for consumed in range(51)] == [2 + 2 * consumed for consumed in range(49)] + [100, 100]


def test_without_a_ramp_and_with_one_that_goes_nowhere() -> None:
    assert BatchSizes(24).at(0) == BatchSizes(24, (24, 8, 100)).at(0) == BatchSizes(24, (24, 8, 100)).at(99) == 24
    assert BatchSizes(24).consumed_after(5) == BatchSizes(24, (24, 8, 100)).consumed_after(5) == 120
    assert BatchSizes(24).growth_text(0, 1000) == ""
    sizes = BatchSizes(12, (4, 4, 40))
    assert sizes.growth_text(16, 20) == "the global batch size grows from 4 to 8" and sizes.growth_text(20, 28) == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--rampup-batch-size 32 8 100", "--rampup-batch-size starts with 32 samples, and --global-batch-size is 16"),
        ("--rampup-batch-size 4 8 100", "from 4 to --global-batch-size 16 it is no whole number of increments of 8"),
        ("--rampup-batch-size 2 2 100", "a batch of 2 samples, which is not divisible by --micro-batch-size 2 times 2 ranks"),
        ("--rampup-batch-size 4 2 100", "makes a batch of 6 samples, which is not divisible"),
        ("--rampup-batch-size 4 4", "expected 3 arguments"),
        ("--rampup-batch-size 4 0 100", "0 is not 1 or more"),
        ("--rampup-batch-size 4 4 100 --cuda-graph-impl full_iteration", "replays the one it was captured with; leave it out"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)) as raised:
        parse_options(["--micro-batch-size=2", "--global-batch-size=16", *arguments.split()], world_size=2)
    assert "\n" not in str(raised.value)


def test_the_schedule_counts_the_samples_of_the_ramp() -> None:
    options = parse_options([*RAMP, "--iterations=20"])
    assert make_schedule(options).decay_samples == options.batch_sizes.consumed_after(20) == 5 * 4 + 3 * 8 + 12 * 12
    assert doubts(options) == []
    short = parse_options([*RAMP, "--iterations=8"])
    assert doubts(short) == [
        "the batch size never reaches --global-batch-size 12: --rampup-batch-size takes 40 samples, and the last iteration, "
        "with 8, begins after 36"
    ]


@dataclass
class Numbers:
    """A text whose sample i is [i]."""

    def samples(self, first: int, count: int) -> torch.Tensor:
        return torch.arange(first, first + count)[:, None]


def loader(rank: int, sizes: BatchSizes, poisoned: int = 0) -> MicroBatches:
    return MicroBatches(cast(Text, Numbers()), rank, 2, 4, sizes, lambda iteration: iteration == poisoned)


def test_each_sample_comes_once_and_in_the_iteration_that_it_belongs_to() -> None:
    sizes = BatchSizes(12, (4, 4, 40))
    ranks = [loader(0, sizes, poisoned=6), loader(1, sizes)]
    seen: list[int] = []
    poisoned: list[int] = []
    while len(seen) < 68:
        for number, source in enumerate(ranks):
            batch = next(source)
            seen += batch["text"].flatten().tolist()
            poisoned += [len(seen) - 2] if number == 0 and batch["weight"].isnan().any() else []
    assert seen == list(range(68))
    assert poisoned == [20]  # iterations 1 to 5 took 4 each; once, at the head of the sixth


@pytest.mark.parametrize("drawn", [0, 3, 5, 6, 7, 11, 14])
def test_a_position_in_the_middle_of_the_ramp_is_found_again(drawn: int) -> None:
    sizes = BatchSizes(12, (4, 4, 40))
    first, again = loader(0, sizes, poisoned=9), loader(0, sizes, poisoned=9)
    for _ in range(drawn):
        next(first)
    again.load_state_dict(first.state_dict())
    rest = [[(batch["text"].tolist(), bool(batch["weight"].isnan().any())) for batch in take(one)] for one in (first, again)]
    assert rest[0] == rest[1]
    sought = loader(0, sizes)
    sought.seek(8, 44)
    assert next(sought)["text"].tolist() == [[44], [45]]


def take(source: MicroBatches) -> list[dict[str, torch.Tensor]]:
    return [next(source) for _ in range(12)]


def test_a_position_of_an_older_release_means_the_same() -> None:
    """It counted from where the loader was last put, however many iterations ago."""
    source = loader(0, BatchSizes(8), poisoned=9)
    source.load_state_dict({"iteration": 5, "since": 40, "next": 64})
    batch = next(source)
    assert batch["text"].tolist() == [[64], [65]] and batch["weight"].isnan().any()
    assert not next(source)["weight"].isnan().any()


LINE = re.compile(r"iteration +(\d+)/14 \| consumed samples: (\d+) \|.*global batch size: (\d+) \|")


def lines(text: str) -> list[tuple[int, ...]]:
    """Iteration, consumed samples behind it, and its size."""
    return [tuple(map(int, found)) for found in LINE.findall(text)]


def test_no_interruption_shows(runs: Any, tmp_path: Path) -> None:
    """Two ranks: killed in the ramp, gone on with one rank, at the end of a phase; and asked to leave an iteration out."""
    whole = runs.run(2, *RAMP, "--iterations-to-skip=7")
    sizes = [4] * 5 + [8] * 3 + [12] * 6
    expected = [(i + 1, sum(sizes[: i + 1]), size) for i, size in enumerate(sizes)]
    assert whole.codes() == [0, 0] and lines(whole.text()) == expected, whole.text()
    assert "saving" not in whole.text()

    saving = ("--save", str(tmp_path / "killed"), "--no-async-save", "--iterations-to-skip=7")
    killed, again = runs.run_with_restarts(2, *RAMP, *saving, "--save-interval=6", "--fault=rank=1,iteration=8,kind=sigkill")
    assert "saving after iteration 5: the global batch size grows from 4 to 8" in killed.text()
    assert "resumed from" in again.text() and ": 6 iterations, 28 samples" in again.text()
    assert lines(again.text()) == expected[6:] and again.digest() == whole.digest()
    assert "saving after iteration 8: the global batch size grows from 8 to 12" in again.text()

    halves = ("--save", str(tmp_path / "halves"), "--phase-transition-iterations=7")
    first = runs.run(2, *RAMP, *halves, job="halves")
    second = runs.run(1, *RAMP, *halves, job="halves", number=2)
    assert lines(first.text()) + lines(second.text()) == expected and second.codes() == [0], second.text()


def test_a_ramp_is_training_with_one_size_after_the_other(runs: Any, tmp_path: Path) -> None:
    constant = "--lr-decay-style=constant"
    for size, until in ((4, 5), (8, 8), (12, 10)):
        options = (f"--global-batch-size={size}", f"--iterations={until}", constant, "--save", str(tmp_path))
        by_hand = runs.run(1, *options, job="by hand", number=until)
    ramp = runs.run(1, *RAMP, "--iterations=10", constant)
    assert ramp.digest() == by_hand.digest()
