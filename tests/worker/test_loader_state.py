"""States of data loaders: for the samples consumed, whatever draws ahead; an error where one is asked for and there is none."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rsup.worker.loader_state import LoaderStateError, ResumableLoader, loader_tensors, restore_loader, tensor_name
from rsup.worker.reference.batch_sizes import BatchSizes
from rsup.worker.reference.data import load_text
from rsup.worker.reference.micro_batches import MicroBatches
from rsup.worker.rerun.data_iterator import RerunDataIterator


class Stateful:
    """An iterable like torchdata's: its state is what it has handed out, and holds for the next iterator."""

    def __init__(self, last: int = 100) -> None:
        self._last = last
        self._next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._next < self._last:
            self._next += 1
            yield torch.tensor([self._next])
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "generator": torch.tensor([7])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["generator"].tolist() == [7]
        self._next = state["next"]


class EnergonRank(Stateful):
    """Named as Megatron Energon names them."""

    state_dict = None  # type: ignore[assignment]
    load_state_dict = None  # type: ignore[assignment]

    def save_state_rank(self) -> dict[str, Any]:
        return {"at": self._next}

    def restore_state_rank(self, state: dict[str, Any]) -> None:
        self._next = state["at"]


class Energon(EnergonRank):
    """The older names."""

    save_state_rank = None  # type: ignore[assignment]
    restore_state_rank = None  # type: ignore[assignment]

    def save_state(self) -> dict[str, Any]:
        return {"at": self._next}

    def restore_state(self, state: dict[str, Any]) -> None:
        self._next = state["at"]


def take(loader: Any, count: int) -> list[int]:
    """The next values."""
    return [int(next(loader)) for _ in range(count)]


def through_a_file(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a checkpoint gives them back."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    buffer.seek(0)
    loaded: dict[str, torch.Tensor] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("kind", [Stateful, EnergonRank, Energon])
def test_what_was_drawn_ahead_comes_again_after_a_restart(kind: type[Any]) -> None:
    loader = ResumableLoader(kind(), required=True)
    assert take(loader, 5) == [1, 2, 3, 4, 5]
    loader.consumed(3)
    assert loader.num_outstanding == 2
    kept = through_a_file(loader_tensors(loader, 1))
    assert list(kept) == [tensor_name(1)] == ["train_dataloader_dprank001"]
    again = ResumableLoader(kind())
    assert restore_loader(again, {1: kept[tensor_name(1)]}, 1, 2, num_saved=2)
    assert take(again, 3) == [4, 5, 6]
    again.consumed(1)
    once_more = ResumableLoader(kind())
    assert restore_loader(once_more, {0: loader_tensors(again, 0)[tensor_name(0)]}, 0, 1, num_saved=1)
    assert take(once_more, 4) == [5, 6, 7, 8]


def test_under_a_replaying_iterator_batches_are_kept_as_they_were_drawn() -> None:
    loader = ResumableLoader(Stateful())
    data = RerunDataIterator(loader)
    data.keeps_batches = True
    assert take(data, 2) == [1, 2]
    loader.consumed()
    data.advance()
    next(data).zero_()  # the loop changes its batch in place, and is interrupted
    kept = loader_tensors(loader, 0, data)[tensor_name(0)]
    again = ResumableLoader(Stateful())
    assert restore_loader(again, {0: kept}, 0, 1, num_saved=1)
    assert take(again, 2) == [3, 4]


def test_a_replay_from_a_checkpoint_does_not_hand_out_twice() -> None:
    """The replaying iterator's own state stands after what was drawn; both states are loaded, as the trainer does."""
    loader = ResumableLoader(Stateful())
    data = RerunDataIterator(loader)
    data.keeps_batches = True
    take(data, 2)
    data.rewind()
    replay, kept = data.state_dict(), loader_tensors(loader, 0, data)[tensor_name(0)]
    again = ResumableLoader(Stateful())
    restore_loader(again, {0: kept}, 0, 1, num_saved=1)
    replaying = RerunDataIterator(again)
    replaying.keeps_batches = True
    replaying.load_state_dict(replay)
    assert take(replaying, 2) == [1, 2]
    replaying.advance()
    assert take(replaying, 2) == [3, 4]


def test_the_next_pass_over_a_loader_that_ends() -> None:
    loader = ResumableLoader(Stateful(last=3))
    assert [int(batch) for batch in loader] == [1, 2, 3]
    loader.consumed()
    assert take(loader, 1) == [1]


def test_a_loader_without_state_is_an_error_only_where_it_is_asked_for() -> None:
    assert loader_tensors(ResumableLoader(iter([1])), 0) == {}
    with pytest.raises(
        LoaderStateError, match=r"^the data loader is a list_iterator and has no state to save: give it state_dict"
    ):
        ResumableLoader(iter([1]), required=True)
    with pytest.raises(LoaderStateError, match="the checkpoint has no state of the data loader, and it is asked for"):
        restore_loader(ResumableLoader(Stateful()), {}, 0, 1, num_saved=0, required=True)
    assert not restore_loader(ResumableLoader(Stateful()), {}, 0, 1, num_saved=0)


def test_a_batch_or_a_state_that_cannot_be_kept_or_read_is_said_in_one_line() -> None:
    loader = ResumableLoader([object()])
    loader.source = type("Odd", (Stateful,), {"state_dict": lambda self: {"next": object()}})()
    with pytest.raises(LoaderStateError, match=r"^the state of the Odd cannot be kept: .*object"):
        loader.consumed_state()
    with pytest.raises(LoaderStateError, match="is unreadable"):
        restore_loader(ResumableLoader(Stateful()), {0: torch.zeros(9, dtype=torch.uint8)}, 0, 1, num_saved=1)
    with pytest.raises(LoaderStateError, match="another release"):
        ResumableLoader(Stateful()).load_state_dict({"format": 99})


def test_another_number_of_ranks_is_an_error_unless_the_loader_can_divide_its_state() -> None:
    states = {rank: loader_tensors(ResumableLoader(Stateful()), rank)[tensor_name(rank)] for rank in range(2)}
    with pytest.raises(
        LoaderStateError, match=r"of 2 data-parallel ranks, and now there are 3: a Stateful cannot .*; start with 2"
    ):
        restore_loader(ResumableLoader(Stateful()), states, 0, 3, num_saved=2)

    class Divides(Stateful):
        def load_state_dicts(self, states: list[dict[str, Any]], dp_rank: int) -> None:
            self._next = sum(state["next"] for state in states) + dp_rank

    loader = ResumableLoader(Divides())
    assert restore_loader(loader, states, 2, 3, num_saved=2)
    assert take(loader, 1) == [3]


def test_the_trainers_loader() -> None:
    text, _ = load_text(None, 8, 1)
    loader = ResumableLoader(MicroBatches(text, 0, 2, 4, BatchSizes(8), lambda iteration: False), required=True)
    next(loader)
    loader.consumed()
    kept, wanted = loader_tensors(loader, 0)[tensor_name(0)], next(loader)["text"]
    again = ResumableLoader(MicroBatches(text, 0, 2, 4, BatchSizes(8), lambda iteration: False))
    restore_loader(again, {0: kept}, 0, 1, num_saved=1)
    assert torch.equal(next(again)["text"], wanted)
