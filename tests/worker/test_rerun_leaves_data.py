"""The data of an iteration: kept as it was drawn, replayed any number of times, and back from a checkpoint."""

import dataclasses
import io
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from rsup.worker.rerun.batch_packing import pack_batch, unpack_batch
from rsup.worker.rerun.batches import copy_batch
from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.data_iterator import RerunDataIterator, as_iterators


class Pair(NamedTuple):
    tokens: torch.Tensor
    name: str


@dataclasses.dataclass
class Sample:
    mask: torch.Tensor
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    label: torch.Tensor


class Batch(UserDict[str, Any]):
    """Like Hugging Face's."""


def keeping(source: Any, **more: Any) -> RerunDataIterator:
    """As the machine has it."""
    iterator = RerunDataIterator(source, **more)
    iterator.keeps_batches = True
    return iterator


def nested(start: float) -> dict[str, Any]:
    tokens = torch.arange(6.0).reshape(2, 3) + start
    return {
        "tokens": tokens,
        "again": tokens,
        "parts": [torch.full((2,), start), (torch.ones(1, dtype=torch.bfloat16), "text", None)],
        "pair": Pair(torch.tensor([start]), "a"),
        "sample": Sample(torch.zeros(3), {"deep": [torch.ones(2)]}),
        "frozen": Frozen(torch.tensor(start)),
        "user": Batch({"x": torch.ones(2)}),
        "array": numpy.arange(3) + int(start),
        "ordered": OrderedDict(z=torch.ones(1), a=1.5),
        "default": defaultdict(list, {1: [torch.ones(1)]}),
        "number": 7,
    }


def spoil(value: Any) -> None:
    """Change everything in place."""
    if isinstance(value, torch.Tensor):
        value.data.fill_(-99)
    elif isinstance(value, numpy.ndarray):
        value[...] = -99
    elif isinstance(value, UserDict):
        spoil(value.data)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["added"] = 1
    elif isinstance(value, list | tuple):
        for item in value:
            spoil(item)
        if isinstance(value, list):
            value.append("added")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            spoil(getattr(value, field.name))


def is_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict | UserDict):
        return list(a) == list(b) and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if dataclasses.is_dataclass(a):
        return all(is_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def test_a_replay_sees_pristine_data_however_it_was_changed() -> None:
    """H3, S13: nested batches, changed in place by the loop, in the first pass and in each replay."""
    iterator = keeping(nested(float(i)) for i in range(10))
    for step in range(3):
        iterator.advance()
        for replay in range(3):
            if replay:
                iterator.rewind()
            for micro in range(2):
                batch = next(iterator)
                assert is_equal(batch, nested(float(2 * step + micro))), (step, replay, micro)
                spoil(batch)
        assert iterator.num_taken == 2


def test_a_loader_may_reuse_its_memory() -> None:
    memory = torch.zeros(2)

    def loader() -> Iterator[torch.Tensor]:
        for i in range(4):
            yield memory.fill_(i)

    iterator = keeping(loader())
    iterator.advance()
    assert [float(next(iterator).sum()) for _ in range(3)] == [0, 2, 4]
    iterator.rewind()
    assert [float(next(iterator).sum()) for _ in range(3)] == [0, 2, 4]


def test_what_is_one_thing_in_a_batch_is_one_in_its_copy() -> None:
    """Tokens and labels are views of one tensor; a change of one shows in the other, in the replay as in the first pass."""
    window = torch.arange(10)
    batch = {"tokens": window[1:-1], "labels": window[2:], "same": window[1:-1].reshape(2, 4), "far": window[:1]}
    batch["again"] = batch["tokens"]
    made = copy_batch(batch)
    assert is_equal(made, batch) and made["again"] is made["tokens"]
    made["labels"][0] = -100
    assert made["tokens"].tolist() == [1, -100, 3, 4, 5, 6, 7, 8] and made["same"][0, 1] == -100
    assert window.tolist() == list(range(10))
    assert made["far"].untyped_storage().nbytes() == 8  # of parts that do not overlap, the memory between is not copied


def test_views_of_one_memory_with_several_types_and_strides() -> None:
    memory = torch.arange(32, dtype=torch.uint8)
    batch = [memory[8:24].view(torch.int32), memory[10:20:3], memory[8:24].reshape(4, 4).t()]
    made = copy_batch(batch)
    assert is_equal(made, batch) and made[2].stride() == (1, 4)
    made[0].zero_()
    assert int(made[1].sum()) == 0 and int(made[2].sum()) == 0 and int(batch[1].sum()) > 0


def test_a_batch_may_refer_to_itself() -> None:
    batch: dict[str, Any] = {"x": torch.ones(1)}
    batch["self"] = batch
    made = copy_batch(batch)
    assert made["self"] is made and made["x"] is not batch["x"]


def test_gradients_of_inputs_are_asked_for_again() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert copy_batch([leaf])[0].requires_grad and copy_batch(leaf).is_leaf
    assert copy_batch({"hidden": leaf * 2})["hidden"].tolist() == [2, 2]


def test_what_cannot_be_copied_is_named() -> None:
    iterator = keeping(iter([{"x": [iter([])], "y": (i for i in [1])}]))
    with pytest.raises(RerunError, match=r"_iterator|generator"):
        next(iterator)


# ------------------------------------------------------------------------------------------------------------ several


def test_several_iterators_with_none_entries() -> None:
    """S13, P25: None entries are left out, one that appears twice counts once, and an unwrapped loader is named."""
    a, b = RerunDataIterator([1]), RerunDataIterator([2])
    assert as_iterators(None) == [] and as_iterators([None, None]) == []
    assert as_iterators(a) == [a]
    assert as_iterators([None, a, b, None, a]) == [a, b]
    with pytest.raises(RerunError, match="RerunDataIterator"):
        as_iterators([a, iter([3])])
    with pytest.raises(RerunError, match="DataLoader"):
        as_iterators(DataLoader([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(RerunError, match="wrapped in another"):
        RerunDataIterator(a)
    with pytest.raises(RerunError, match="int"):
        RerunDataIterator(3)  # type: ignore[arg-type]


def test_an_external_loader_needs_no_iter() -> None:
    """H11"""

    class External:
        def __init__(self) -> None:
            self.drawn = 0

        def __next__(self) -> int:
            self.drawn += 1
            return self.drawn

    iterator = keeping(External())
    assert [next(iter(iterator)), next(iterator)] == [1, 2]


def test_a_loop_that_asks_for_more_than_was_taken_is_told() -> None:
    iterator = keeping(range(9))
    assert [next(iterator), next(iterator)] == [0, 1]
    iterator.rewind()
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(RerunError, match="batch 3, but the iteration took 2"):
        next(iterator)
    iterator.advance()
    assert next(iterator) == 2


def test_data_that_ends_within_an_iteration_ends_there_in_the_replay_too() -> None:
    """Nothing is lost: what was taken replays, and the next epoch begins where the loop began it."""
    iterator = keeping([1, 2, 3])

    def run() -> list[int]:
        taken: list[int] = []
        while len(taken) < 4:
            try:
                taken.append(next(iterator))
            except StopIteration:
                iter(iterator)
        return taken

    assert run() == [1, 2, 3, 1]
    assert iterator.has_ended and iterator.num_taken == 4
    for _ in range(2):
        iterator.rewind()
        assert run() == [1, 2, 3, 1]
    iterator.advance()
    assert run() == [2, 3, 1, 2]
    ended = keeping(iter([1]))
    assert list(ended) == [1] and list(ended) == []


def test_each_epoch_of_a_loader_is_a_new_pass() -> None:
    loader: Any = DataLoader(torch.arange(4.0), batch_size=2)  # type: ignore[arg-type]
    iterator = keeping(loader)
    for _ in range(2):
        iterator.advance()
        assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]


def test_lending_and_borrowing() -> None:
    mine, theirs = keeping([torch.zeros(1)] * 3), keeping([torch.ones(1)] * 3)
    spoil([next(mine), next(mine), next(theirs)])
    mine.borrow(theirs.lend())
    batch = next(mine)
    assert batch.tolist() == [1]
    spoil(batch)
    assert [x.tolist() for x in theirs.lend()] == [[1]]
    with pytest.raises(RerunError, match="another rank's"):
        next(mine)
    mine.rewind()
    assert [next(mine).tolist(), next(mine).tolist()] == [[0], [0]] and mine.num_taken == 2


def test_when_reruns_are_disabled_nothing_is_kept_or_copied() -> None:
    source = [torch.ones(1), torch.ones(1)]
    iterator = RerunDataIterator(source)
    assert next(iterator) is source[0] and iterator.num_taken == 0 and iterator.lend() == []
    with pytest.raises(RerunError, match="cannot be replayed"):
        iterator.rewind()
    iterator.advance()
    assert next(iterator) is source[1]


# -------------------------------------------------------------------------------------------------------- checkpoints


class OwnPosition:
    """A loader that knows where it is, and whose position cannot be derived from consumed samples: it skips at will."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1 + self.at % 2
            yield torch.tensor([self.at])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Energon(OwnPosition):
    """The same, with Energon's names for it."""

    def save_state(self) -> dict[str, int]:
        return super().state_dict()

    def restore_state(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)

    state_dict = None  # type: ignore[assignment]
    load_state_dict = None  # type: ignore[assignment]


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """P43: read back as plain primitives and tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def take(iterator: RerunDataIterator, count: int = 2) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


@pytest.mark.parametrize("kind", [OwnPosition, Energon])
def test_a_loader_with_its_own_position_replays_and_goes_on(kind: type[OwnPosition]) -> None:
    """P6, S14: the job that resumes replays the same micro-batches, then continues after them exactly once."""
    undisturbed = keeping(kind())
    steps = [take(undisturbed) for _ in range(4)]
    first = keeping(kind())
    for expected in steps[:2]:
        first.advance()
        assert take(first) == expected
    first.rewind()
    again = keeping(kind())
    again.load_state_dict(through_a_checkpoint(first.state_dict()))
    for _ in range(2):
        assert take(again) == steps[1]
        again.rewind()
    again.advance()
    assert take(again) == steps[2]
    again.advance()
    assert take(again) == steps[3]


@pytest.mark.parametrize("length", [100, 5, 3])
def test_a_loader_repositioned_from_consumed_samples_goes_on_after_the_replay(length: int) -> None:
    """P6: the caller places the loader by completed iterations; the replayed batches are passed over, also into a new epoch."""

    def source(consumed: int) -> Callable[[], Iterator[int]]:
        def loader() -> Iterator[int]:
            nonlocal consumed
            while consumed < length:
                consumed += 1
                yield consumed - 1
            consumed = 0

        return loader

    class Loader:
        def __init__(self, consumed: int) -> None:
            self._make = source(consumed)

        def __iter__(self) -> Iterator[int]:
            return self._make()

    def take_over_epochs(iterator: RerunDataIterator) -> list[int]:
        taken: list[int] = []
        while len(taken) < 2:
            try:
                taken.append(next(iterator))
            except StopIteration:
                iter(iterator)
        return taken

    first = keeping(Loader(0))
    steps = []
    for _ in range(2):
        first.advance()
        steps.append(take_over_epochs(first))
    first.rewind()
    state = through_a_checkpoint(first.state_dict())
    first.advance()
    steps.append(take_over_epochs(first))
    again = keeping(Loader(2))
    again.load_state_dict(state)
    assert take_over_epochs(again) == steps[1]
    again.advance()
    assert take_over_epochs(again) == steps[2]


def test_a_source_that_follows_the_loops_progress_is_not_moved_on() -> None:
    progress = {"iteration": 1}

    def loader() -> Iterator[int]:
        while True:
            yield 10 * progress["iteration"]

    first = keeping(loader(), follows_progress=True)
    assert next(first) == 10
    first.rewind()
    again = keeping(loader(), follows_progress=True)
    again.load_state_dict(through_a_checkpoint(first.state_dict()))
    assert next(again) == 10
    again.advance()
    progress["iteration"] = 2
    assert next(again) == 20


def test_an_ordinary_checkpoint_has_only_the_position() -> None:
    first = keeping(OwnPosition())
    before = take(first)
    state = through_a_checkpoint(first.state_dict(with_batches=False))
    assert state["batches"] == []
    again = keeping(OwnPosition())
    again.load_state_dict(state)
    assert take(again) != before and take(first) == [int(batch) for batch in again.lend()]


def test_a_borrowed_batch_is_not_saved_as_ones_own() -> None:
    iterator = keeping([1, 2])
    assert next(iterator) == 1
    iterator.borrow([8])
    assert next(iterator) == 8
    again = keeping([1, 2])
    again.load_state_dict(through_a_checkpoint(iterator.state_dict()))
    assert again.lend() == [1]


def test_nested_batches_come_back_from_a_checkpoint_as_they_were() -> None:
    batch = nested(3.0)
    batch["size"] = torch.Size([2, 3])
    del batch["default"]
    packed = through_a_checkpoint({"packed": pack_batch(batch)})["packed"]
    made = unpack_batch(packed)
    assert is_equal(made, batch | {"size": (2, 3)})
    assert made["again"] is made["tokens"]
    spoil(made)
    assert is_equal(unpack_batch(packed), batch | {"size": (2, 3)})


def test_views_stay_views_of_one_memory_in_a_checkpoint() -> None:
    window = torch.arange(1000)
    packed = through_a_checkpoint({"packed": pack_batch([window[0:8], window[1:9]])})["packed"]
    tokens, labels = unpack_batch(packed)
    labels[0] = -100
    assert tokens.tolist() == [0, -100, 2, 3, 4, 5, 6, 7]
    assert tokens.untyped_storage().nbytes() == 9 * 8


def test_what_cannot_be_kept_in_a_checkpoint_is_named() -> None:
    for value in ({1, 2}, numpy.array(["text"]), object(), torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {}))):
        with pytest.raises(RerunError, match="cannot be kept in a checkpoint"):
            pack_batch([value])


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        ({"kind": "container", "class": "os:system", "attributes": {}}, "needs the class os:system"),
        ({"kind": "container", "class": "subprocess:Popen", "attributes": {}}, "no container"),
        ({"kind": "container", "class": "nowhere:Batch", "attributes": {}}, "nowhere:Batch"),
        ({"kind": "container"}, "unreadable"),
        ({"kind": "later"}, "unreadable"),
        ({}, "unreadable"),
    ],
)
def test_a_checkpoint_cannot_make_anything_but_containers(packed: dict[str, Any], says: str) -> None:
    with pytest.raises(RerunError, match=says):
        unpack_batch(packed)


def test_the_data_of_another_release_is_refused() -> None:
    with pytest.raises(RerunError, match="another release"):
        RerunDataIterator([]).load_state_dict({"format": 99})


# --------------------------------------------------------------------------------- two iterations whose numbers nobody saw yet


def draw(data: RerunDataIterator, count: int) -> list[int]:
    return [int(next(data)) for _ in range(count)]


def test_two_iterations_are_taken_back_and_their_batches_come_again_in_order() -> None:
    data = keeping(iter([torch.tensor(i) for i in range(20)]))
    data.advance()
    assert draw(data, 2) == [0, 1]
    data.advance(keeps_last=True)
    assert draw(data, 2) == [2, 3]
    data.step_back(2)
    assert [int(batch) for batch in data.not_consumed()] == [0, 1, 2, 3]
    data.advance()
    assert draw(data, 2) == [0, 1]
    data.rewind()
    assert draw(data, 2) == [0, 1], "what was taken back is replayed as any iteration"
    data.advance()
    assert draw(data, 2) == [2, 3]
    data.advance()
    assert draw(data, 2) == [4, 5]
    data.step_back(1)
    data.advance()
    assert draw(data, 3) == [4, 5, 6]


def test_an_end_of_the_data_is_taken_back_too() -> None:
    data = keeping(iter([torch.tensor(i) for i in range(3)]))
    data.advance()
    assert draw(data, 2) == [0, 1]
    data.advance(keeps_last=True)
    with pytest.raises(StopIteration):
        draw(data, 2)
    data.step_back(2)
    data.advance()
    assert draw(data, 2) == [0, 1]
    data.advance()
    assert draw(data, 1) == [2]
    with pytest.raises(StopIteration):
        next(data)


@pytest.mark.parametrize("with_batches", [True, False])
def test_what_was_taken_back_comes_back_from_a_checkpoint(with_batches: bool) -> None:
    def source(first: int) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(i) for i in range(first, 20)])

    data = keeping(source(0))
    for _ in range(2):
        data.advance(keeps_last=True)
        draw(data, 2)
    data.step_back(2)
    data.advance()
    draw(data, 2)  # 0 and 1, the iteration; 2 and 3 were drawn behind it, and wait
    state = data.state_dict(with_batches)
    again = keeping(source(0 if with_batches else 2))  # where the consumed samples say
    again.load_state_dict(state)
    if with_batches:
        again.rewind()
        assert draw(again, 2) == [0, 1]
    again.advance()
    assert draw(again, 3) == [2, 3, 4]


def test_without_reruns_nothing_can_be_taken_back() -> None:
    data = RerunDataIterator(iter([1, 2]))
    next(data)
    with pytest.raises(RerunError, match="reruns are disabled"):
        data.step_back(1)
