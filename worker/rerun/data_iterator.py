"""The data of an iteration, taken once from the loader and played again as often as a replay needs it.

What is kept is a copy made when a batch is drawn, before anybody can change it; the loop gets the loader's own object. A
replay gets a fresh copy each time. The copy is made at once and not when first needed: a change in place by the loop, through
a NumPy view, by `.data` or by a loader that reuses its memory cannot be seen afterwards. Its cost is one pass over the batch.

Where the loader drew from the process's own generators meanwhile (a shuffle, augmentation), their states after that are kept
with the batch, and are set whenever it is played: what is computed next draws the same as after the first draw.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch

from rsup.worker.rerun.batch_packing import pack_batch, unpack_batch
from rsup.worker.rerun.batches import copy_batch
from rsup.worker.rerun.contract import Drawn, RerunError
from rsup.worker.rerun.default_generators import (
    DrawWatch,
    cuda_device_in_use,
    default_states,
    set_changed,
    set_default_states,
)

_FORMAT = 1
_STATE_METHODS = (
    ("state_dict", "load_state_dict"),
    ("save_state_rank", "restore_state_rank"),  # Energon's
    ("save_state", "restore_state"),
)


class _End:
    """Marks where the loader ended within an iteration."""


_END = _End()


class RerunDataIterator:
    """An iterator over `source` that can replay what was taken since the last `advance()`.

    `source`: an iterator (used as it is), or an iterable, whose iterator is made at the first `next` and anew by `iter()` once
    it has ended. One that has drawn from generators outside of its `next` gives `Drawn`. `follows_progress`: what the source
    gives next follows from the loop's own counters (of samples, say), so that it need not be moved on after a replay from a
    checkpoint.

    Where the source ends in the middle of an iteration, `StopIteration` reaches the loop, in each replay at the same place.
    """

    def __init__(self, source: Iterable[Any] | Iterator[Any], follows_progress: bool = False) -> None:
        if isinstance(source, RerunDataIterator):
            raise RerunError("a RerunDataIterator is wrapped in another: wrap the loader once, and hand that one in everywhere")
        if not (hasattr(source, "__next__") or hasattr(source, "__iter__")):
            raise RerunError(f"cannot iterate over a {type(source).__qualname__}: hand in a loader or an iterator")
        self.keeps_batches = False
        """Set by the machine unless reruns are disabled: else nothing is kept, nothing can be replayed, and nothing is paid."""
        self._source = source
        self._follows_progress = follows_progress
        self._iterator: Iterator[Any] | None = None
        self._kept: list[Any] = []
        self._before: list[Any] = []
        self._again: deque[Any] = deque()
        self._playing: list[Any] | None = None
        self._position = 0
        self._is_borrowed = False
        self._has_run_out = False
        self._num_to_skip = 0

    def __iter__(self) -> Self:
        if self._playing is None and self._has_run_out and not hasattr(self._source, "__next__"):
            self._iterator, self._has_run_out = None, False  # the next pass over the loader
        return self

    def __next__(self) -> Any:
        if self._playing is not None:
            return self._replay()
        if self._again:
            return self._hand_out_again()
        watch = DrawWatch() if self.keeps_batches else None
        try:
            fetched = self._fetch()
        except StopIteration:
            self._has_run_out = True
            if watch is not None:
                self._kept.append(_with_states(_END, watch.changed()))
            raise
        batch = _batch_of(fetched)
        if watch is not None:
            states = fetched.rng if type(fetched) is Drawn else watch.changed()
            self._kept.append(_with_states(copy_batch(batch), states))
        return batch

    def advance(self, keeps_last: bool = False) -> None:
        """Begin a new iteration: drop what was kept, and go on with the source. `keeps_last`: the iteration that is left now
        may yet be taken back by `step_back`, since nobody has seen its numbers."""
        self._before = self._kept if keeps_last else []
        self._kept = []
        self._playing, self._is_borrowed = None, False

    def step_back(self, num_iterations: int) -> None:
        """Take back the last iteration, or the last two of which the first was left with `keeps_last`: after the next
        `advance` their batches are handed out again, in order, before the source goes on."""
        if not self.keeps_batches:
            raise RerunError("the data cannot be taken back: reruns are disabled, so this RerunDataIterator keeps nothing")
        taken = self._before + self._kept if num_iterations == 2 else self._kept
        self._again.extendleft(reversed(taken))
        self._before, self._kept = [], []
        self._playing, self._is_borrowed = None, False

    def rewind(self) -> None:
        """Play this iteration's own batches again, from the first."""
        if not self.keeps_batches:
            raise RerunError("the data cannot be replayed: reruns are disabled, so this RerunDataIterator keeps nothing")
        self._playing, self._position, self._is_borrowed = self._kept, 0, False

    def lend(self) -> list[Any]:
        """This iteration's batches as they were drawn, for somebody else to `borrow`: do not change them. `Drawn`, where the
        draw changed generators."""
        return [kept for kept in self._kept if not _is_end(kept)]

    def undo_advance(self) -> None:
        """The iteration begun last was not begun after all: what it has drawn comes again, and the one before it, left with
        `keeps_last`, is the current one again. Where nothing is kept, nothing can be given back."""
        self._again.extendleft(reversed(self._kept))
        self._kept, self._before = self._before, []
        self._playing, self._is_borrowed = None, False

    def not_consumed(self) -> list[Any]:
        """What was drawn and belongs to this iteration or to later ones: do not change it."""
        return [_batch_of(kept) for kept in (*self._kept, *self._again) if not _is_end(kept)]

    def borrow(self, batches: list[Any]) -> None:
        """Play these batches, which another iterator lent, until the next `rewind` or `advance`."""
        self._playing, self._position, self._is_borrowed = list(batches), 0, True

    @property
    def num_taken(self) -> int:
        """Batches taken in this iteration."""
        return sum(not _is_end(kept) for kept in self._kept)

    @property
    def has_ended(self) -> bool:
        """Whether the source ended within this iteration: nobody else can then compute its data, `lend` cannot say that."""
        return any(map(_is_end, self._kept))

    def state_dict(self, with_batches: bool = True) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint, loadable with `weights_only`: batches, position, the source's own state.

        The batches belong in a checkpoint from which the iteration is replayed; an ordinary one is taken `with_batches=False`
        (and has only what `step_back` has yet to hand out again).
        Raises `RerunError` where a batch has no plain form.
        """
        state: dict[str, Any] = {"format": _FORMAT, "batches": [], "is_replaying": False, "position": 0}
        if with_batches:
            is_own = self._playing is not None and not self._is_borrowed
            state["batches"] = [_packed(batch) for batch in self._kept]
            state["is_replaying"] = is_own
            state["position"] = self._position if is_own else 0
        if self._again:
            state["again"] = [_packed(batch) for batch in self._again]
        source = self._source_state()
        return state if source is None else state | {"source": source}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Come back to what `state_dict` gave: a replay plays its batches, and what follows continues after them, once.

        A source with a `load_state_dict` (or Energon's `restore_state`) is put back to where it was AFTER the batches were
        drawn. Another one stands, as the caller places it by the samples of completed iterations, BEFORE them: that many
        batches are passed over once the replay is over, unless the source `follows_progress`. Batches of a GPU come to
        `device`, or to the current one.
        """
        if state.get("format") != _FORMAT:
            raise RerunError("the data kept in the checkpoint was written by another release: the iteration cannot be replayed")
        self._kept = [_unpacked(kept, device) for kept in state["batches"]]
        again = [] if self._follows_progress else state.get("again", [])
        self._before, self._again = [], deque(_unpacked(kept, device) for kept in again)
        self._playing = self._kept if state["is_replaying"] else None
        self._position, self._is_borrowed = int(state["position"]), False
        if "source" in state and self._load_source_state(state["source"]):
            self._num_to_skip = 0
        else:
            num_again = sum(not _is_end(kept) for kept in self._again)
            self._num_to_skip = 0 if self._follows_progress else self.num_taken + num_again

    # ------------------------------------------------------------------------------------------------------ the replay

    def _replay(self) -> Any:
        assert self._playing is not None
        if self._position >= len(self._playing):
            whose = "another rank's" if self._is_borrowed else "its own"
            raise RerunError(
                f"a replay asks for batch {self._position + 1}, but the iteration took {len(self._playing)} ({whose} data): "
                f"the loop must take the same batches each time it runs an iteration"
            )
        kept = self._playing[self._position]
        self._position += 1
        return _play(kept)

    def _hand_out_again(self) -> Any:
        kept = self._again.popleft()
        if self.keeps_batches:
            self._kept.append(kept)
        return _play(kept)

    # ------------------------------------------------------------------------------------------------------ the source

    def _fetch(self) -> Any:
        if self._num_to_skip:
            self._skip()
        if self._iterator is None:
            self._iterator = self._start()
        return next(self._iterator)

    def _skip(self) -> None:
        """Move a source that stands before the replayed batches past them. What it draws meanwhile has been drawn already."""
        device = cuda_device_in_use()
        states = default_states(device)
        try:
            self._pass_over()
        finally:
            set_default_states(states, device)

    def _pass_over(self) -> None:
        """Drop the batches to skip; where the source ends meanwhile, begin it anew."""
        skipped, self._num_to_skip = self._num_to_skip, 0
        while skipped:
            if self._iterator is None:
                self._iterator = self._start()
                if next(self._iterator, _END) is _END:
                    raise StopIteration
                skipped -= 1
            elif next(self._iterator, _END) is not _END:
                skipped -= 1
            elif hasattr(self._source, "__next__"):
                raise StopIteration
            else:
                self._iterator = None

    def _start(self) -> Iterator[Any]:
        source: Any = self._source
        iterator: Iterator[Any] = source if hasattr(source, "__next__") else iter(source)
        return iterator

    def _source_state(self) -> Any:
        for holder in (self._source, self._iterator):
            for name, _ in _STATE_METHODS:
                save = getattr(holder, name, None)
                if callable(save):
                    return pack_batch(save())
        return None

    def _load_source_state(self, packed: Any) -> bool:
        if self._load_into(self._source, packed):
            if self._source is not self._iterator:
                self._iterator = None  # begun before: the loader's next iterator starts at the restored position
            self._has_run_out = False
            return True
        self._iterator = self._start()  # its state was saved, so it may know its position where its loader does not
        return self._load_into(self._iterator, packed)

    @staticmethod
    def _load_into(holder: Any, packed: Any) -> bool:
        for _, name in _STATE_METHODS:
            load = getattr(holder, name, None)
            if callable(load):
                load(unpack_batch(packed))
                return True
        return False


def _with_states(batch: Any, states: bytes) -> Any:
    return Drawn(batch, states) if states else batch


def _batch_of(kept: Any) -> Any:
    return kept.batch if type(kept) is Drawn else kept


def _is_end(kept: Any) -> bool:
    return _batch_of(kept) is _END


def _play(kept: Any) -> Any:
    """A copy of the batch, with the generators as its draw left them."""
    batch = _END if _is_end(kept) else copy_batch(_batch_of(kept))
    if type(kept) is Drawn:
        set_changed(kept.rng)
    if batch is _END:
        raise StopIteration
    return batch


def _packed(kept: Any) -> dict[str, Any]:
    packed = {"end": True} if _is_end(kept) else {"batch": pack_batch(_batch_of(kept))}
    return packed | {"rng": kept.rng} if type(kept) is Drawn else packed


def _unpacked(packed: dict[str, Any], device: torch.device | None) -> Any:
    """`packed` has no `rng` where the draw changed no generator, and in checkpoints of older releases."""
    batch = _END if "end" in packed else unpack_batch(packed["batch"], device)
    return _with_states(batch, packed.get("rng", b""))


def as_iterators(data: Any) -> list[RerunDataIterator]:
    """The iterators of a rank: of None, one, or a list of them in which None entries (stages without data) are left out.

    Raises `RerunError` for a loader that is not wrapped: wrapped here, in each iteration anew, it would forget what it kept.
    """
    entries = list(data) if isinstance(data, list | tuple) else [data]
    iterators: list[RerunDataIterator] = []
    for entry in entries:
        if entry is None or any(entry is known for known in iterators):
            continue
        if not isinstance(entry, RerunDataIterator):
            raise RerunError(
                f"the data of an iteration comes from a {type(entry).__qualname__}: wrap it once, before the loop, as "
                f"data = RerunDataIterator(loader), and hand that in"
            )
        iterators.append(entry)
    return iterators
