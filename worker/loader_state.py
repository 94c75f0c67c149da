"""The states of data loaders in a checkpoint: where each data-parallel rank goes on, by the samples consumed, not those drawn.

Any object with `state_dict`/`load_state_dict` (torchdata's StatefulDataLoader counts what it has handed out, not what its
workers prefetched), or Megatron Energon's `save_state_rank`/`restore_state_rank` or `save_state`/`restore_state`. Between a
loader and the step there is often something that draws ahead (a copy to the GPU, a replay buffer): `ResumableLoader` knows
which batches were handed out and not consumed, and keeps these with the loader's state, to be handed out first after a
restart.

    data = ResumableLoader(loader, required=True)
    for iteration in ...:
        train_step(next(data))
        data.consumed()
        save(tensors | loader_tensors(data, dp_rank))
"""

import io
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from rsup.worker.checkpoint_directory import CheckpointError
from rsup.worker.rerun.batch_packing import pack_batch, unpack_batch
from rsup.worker.rerun.contract import RerunError
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.unreadable import why_unreadable

STATE_METHODS = (
    ("state_dict", "load_state_dict"),
    ("save_state_rank", "restore_state_rank"),
    ("save_state", "restore_state"),
)
_FORMAT = 1


class LoaderStateError(CheckpointError):
    """The state of a loader was asked for and cannot be saved, or does not fit the loader or the number of ranks."""


class ResumableLoader:
    """An iterator over `source` that can be saved by what was consumed and goes on from there.

    `source`: an iterator, or an iterable that is started anew when it ends and `iter()` is called. `required`: raise
    `LoaderStateError` at once where it has no state. A source whose state is plain numbers of the whole job's position may
    have a `load_state_dicts(states, dp_rank, dp_size)`, and then goes on under another number of data-parallel ranks.
    """

    def __init__(self, source: Iterable[Any] | Iterator[Any], required: bool = False) -> None:
        self.source = source
        self._iterator: Iterator[Any] | None = None
        self._outstanding: deque[Any] = deque()
        self._first: deque[Any] = deque()
        self.has_state = _methods_of(source) is not None
        if required and not self.has_state:
            raise LoaderStateError(_no_state_text(source))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._first:
            batch = self._first.popleft()
        else:
            if self._iterator is None:
                self._iterator = self._start()
            try:
                batch = next(self._iterator)
            except StopIteration:
                if not hasattr(self.source, "__next__"):
                    self._iterator = None  # the next pass over the loader
                raise
        self._outstanding.append(batch)
        return batch

    def consumed(self, num_batches: int | None = None) -> None:
        """The oldest `num_batches` handed out are used up and will not be needed again; None: all of them."""
        for _ in range(len(self._outstanding) if num_batches is None else num_batches):
            self._outstanding.popleft()

    @property
    def num_outstanding(self) -> int:
        """Batches handed out and not consumed."""
        return len(self._outstanding)

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, AFTER all that was handed out: what an iterator's `state_dict` means, so that a
        `RerunDataIterator` around this one can keep its own batches. For a checkpoint use `consumed_state`."""
        return {"format": _FORMAT, "source": self._source_state(), "first": [pack_batch(batch) for batch in self._first]}

    def consumed_state(self, outstanding: Iterable[Any] | None = None) -> dict[str, Any]:
        """Where to go on so that every batch is consumed once: the source's state and the batches not consumed.

        `outstanding`: these, where the caller has them as they were drawn; else the objects that were handed out, which must
        not have been changed in place. Raises `LoaderStateError` where the source has no state or a batch cannot be kept.
        """
        batches = list(self._outstanding if outstanding is None else outstanding)
        try:
            state = self.state_dict()
            return state | {"first": [pack_batch(batch) for batch in batches] + state["first"]}
        except RerunError as error:
            raise LoaderStateError(f"the state of the {type(self.source).__qualname__} cannot be kept: {error}") from None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `consumed_state` or `state_dict` gave. Raises `LoaderStateError`."""
        if state.get("format") != _FORMAT:
            raise LoaderStateError("the loader's state in the checkpoint was written by another release")
        try:
            first = [unpack_batch(packed) for packed in state["first"]]
            self._load(unpack_batch(state["source"]))
        except RerunError as error:
            raise LoaderStateError(f"the loader's state in the checkpoint is unreadable: {error}") from None
        self._first = deque(first)
        self._outstanding.clear()

    def load_states(self, states: list[dict[str, Any]], dp_rank: int) -> None:
        """Go on as rank `dp_rank` from the states of all data-parallel ranks at another number of them: only where the source
        has `load_state_dicts` and no batch was left over. Raises `LoaderStateError`."""
        split = getattr(self.source, "load_state_dicts", None)
        if not callable(split) or any(state["first"] for state in states):
            raise LoaderStateError(f"a {type(self.source).__qualname__} cannot divide its state anew among other ranks")
        split([unpack_batch(state["source"]) for state in states], dp_rank)
        self._iterator = None
        self._first.clear()
        self._outstanding.clear()

    def restart(self) -> None:
        """Forget what was handed out: the caller has placed the source itself."""
        self._iterator = None
        self._first.clear()
        self._outstanding.clear()

    def _start(self) -> Iterator[Any]:
        source: Any = self.source
        iterator: Iterator[Any] = source if hasattr(source, "__next__") else iter(source)
        return iterator

    def _source_state(self) -> Any:
        methods = _methods_of(self.source)
        if methods is None:
            raise LoaderStateError(_no_state_text(self.source))
        return pack_batch(getattr(self.source, methods[0])())

    def _load(self, state: Any) -> None:
        methods = _methods_of(self.source)
        if methods is None:
            raise LoaderStateError(_no_state_text(self.source))
        getattr(self.source, methods[1])(state)
        if self.source is not self._iterator:
            self._iterator = None  # begun before: the loader's next iterator starts at the restored position


def _methods_of(source: Any) -> tuple[str, str] | None:
    for save, load in STATE_METHODS:
        if callable(getattr(source, save, None)) and callable(getattr(source, load, None)):
            return save, load
    return None


def _no_state_text(source: Any) -> str:
    pairs = " or ".join(f"{save}/{load}" for save, load in STATE_METHODS)
    return (
        f"the data loader is a {type(source).__qualname__} and has no state to save: give it {pairs} (torchdata's "
        f"StatefulDataLoader has one), or do not ask for loader states"
    )


# --------------------------------------------------------------------------------------------------------- in checkpoints


def loader_tensors(loader: ResumableLoader, dp_rank: int, around: RerunDataIterator | None = None) -> dict[str, torch.Tensor]:
    """The state of data-parallel rank `dp_rank`'s loader as bytes, under a name of its own; nothing where the loader has no
    state.

    Call it on one rank of each data-parallel rank. `around`: the replaying iterator around `loader`, which has the batches
    not consumed as they were drawn.
    """
    if not loader.has_state:
        return {}
    drawn = around.not_consumed() if around is not None and loader.num_outstanding else None
    buffer = io.BytesIO()
    torch.save(loader.consumed_state(drawn), buffer)
    return {tensor_name(dp_rank): torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}


def tensor_name(dp_rank: int) -> str:
    """What the state of a data-parallel rank is called in a checkpoint, after Megatron-LM's `train_dataloader_dprank000.pt`."""
    return f"train_dataloader_dprank{dp_rank:03d}"


def restore_loader(
    loader: ResumableLoader,
    states: Mapping[int, torch.Tensor],
    dp_rank: int,
    dp_size: int,
    num_saved: int,
    required: bool = False,
) -> bool:
    """Put `loader` where the checkpoint's states say; whether it was. `states`: by data-parallel rank, all `num_saved` of
    them where that is not `dp_size`, else this rank's. Raises `LoaderStateError` where it cannot, or there is none and it is
    `required`."""
    if num_saved == 0:
        if required:
            raise LoaderStateError("the checkpoint has no state of the data loader, and it is asked for")
        return False
    if num_saved == dp_size:
        loader.load_state_dict(_unpack(states[dp_rank]))
        return True
    try:
        loader.load_states([_unpack(states[number]) for number in range(num_saved)], dp_rank)
    except LoaderStateError as error:
        raise LoaderStateError(
            f"the checkpoint has loader states of {num_saved} data-parallel ranks, and now there are {dp_size}: {error}; "
            f"start with {num_saved}"
        ) from None
    return True


def _unpack(kept: torch.Tensor) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(kept.numpy().tobytes()), weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise LoaderStateError(f"the loader's state in the checkpoint is unreadable: {why_unreadable(error)}") from None
    return state
