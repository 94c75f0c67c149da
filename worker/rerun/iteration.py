"""The iteration in progress on one rank: its data, the state before it, what its passes showed, and how it ends."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rsup.worker.rerun.contract import Checked, Exit, Judgement, Payload, RerunError, RerunState
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.large_values import LargeValues
from rsup.worker.rerun.machine import GO_ON
from rsup.worker.rerun.passes import Judged, PassLog
from rsup.worker.rerun.replay_state import ReplayState


class Iteration:
    """Begun anew for each iteration with `start`; the fields are those of this iteration only."""

    def __init__(self, replay_state: ReplayState, large: LargeValues, torch_device: torch.device) -> None:
        self.state = RerunState.NOT_RUNNING_YET
        self.loaded: Sequence[Mapping[str, Any]] = ()
        """States of the data iterators from a checkpoint: batches that were drawn and not used."""
        self._replay_state = replay_state
        self._large = large
        self._torch_device = torch_device
        self.start(0, [])

    def start(self, number: int, iterators: list[RerunDataIterator]) -> None:
        """Forget the iteration before."""
        self.number = number
        self.exit = GO_ON
        self.skip_step = False
        self.log = PassLog()
        self.first: list[Judged] = []
        """Values of the first pass; of a replay from a checkpoint those that were rejected in the attempt before."""
        self.again: list[Judged] = []
        """Values of the replay in place."""
        self.others: list[Judged] = []
        """Values of an earlier attempt that no check had rejected."""
        self.found_on: tuple[str, ...] = ()
        """Likeness of the device on which an earlier attempt found them."""
        self.confirmed: list[Judged] = []
        """Of the first pass: this rank's fatal findings that came out again in place. (Of an earlier attempt: those of it.)"""
        self.there: list[Checked] = []
        """Values of another rank's data here, in an audit."""
        self.judgement: Judgement | None = None
        """What has yet to be confirmed."""
        self.is_audit = False
        self.snapshot: Any = None
        self.iterators = iterators
        for iterator in iterators:
            iterator.keeps_batches = True
        self.kept: Sequence[Mapping[str, Any]] = ()
        """States of the iterators with the batches of this iteration, where a checkpoint must hold them."""

    def begin_data(self) -> None:
        """Go on in the data, first with what a checkpoint has kept, and take the snapshot that replays begin from."""
        loaded, self.loaded = self.loaded, ()
        if loaded and len(loaded) != len(self.iterators):
            raise RerunError(f"the checkpoint holds {len(loaded)} data iterators, the loop hands in {len(self.iterators)}")
        for i, iterator in enumerate(self.iterators):
            if loaded:
                iterator.load_state_dict(dict(loaded[i]), self._torch_device)
                iterator.rewind()
            else:
                iterator.advance()

    def capture(self) -> None:
        """Remember the state before the first pass."""
        self.snapshot = self._replay_state.capture()

    def replay(self, state: RerunState) -> bool:
        """Roll everything back, and run once more. True."""
        self.roll_back()
        self.state = state
        return True

    def roll_back(self) -> None:
        """Put state and data back to before the first pass."""
        self._large.rollback()
        self._replay_state.restore(self.snapshot)
        for iterator in self.iterators:
            iterator.rewind()

    def give_up(self) -> None:
        """Back to before the iteration: it has not begun, and its data come again."""
        if self.snapshot is not None:
            self._replay_state.restore(self.snapshot)
        for iterator in self.iterators:
            iterator.undo_advance()
        self.state = RerunState.NOT_RUNNING_YET

    def payload(self) -> tuple[Payload, tuple[int, ...]]:
        """This rank's data, to be computed elsewhere, and how many batches of each iterator it has."""
        batches: list[list[Any] | None] = [iterator.lend() for iterator in self.iterators]
        counts = tuple(iterator.num_taken for iterator in self.iterators)
        return Payload(batches, self._replay_state.rng_bytes(self.snapshot)), counts

    def borrow(self, payload: Payload) -> bool:
        """Run another rank's data next. True."""
        self.roll_back()
        self._replay_state.restore_rng_bytes(payload.rng)
        for iterator, lent in zip(self.iterators, payload.batches, strict=True):
            iterator.borrow(lent or [])
        self.state = RerunState.RERUNNING_ROTATED
        return True

    def read_log(self) -> list[Judged]:
        """The values of the pass that is over."""
        log, self.log = self.log, PassLog()
        return log.read()

    def end(self, exit_: Exit = GO_ON, skip_step: bool = False, *, keeps_batches: bool = False) -> bool:
        """The iteration is over. `keeps_batches`: a checkpoint of this moment must hold its data. False."""
        self._large.commit()
        self.kept = self.iterator_states() if keeps_batches else ()
        self.state, self.exit, self.skip_step = RerunState.NOT_RUNNING_YET, exit_, skip_step
        return False

    def iterator_states(self) -> list[Mapping[str, Any]]:
        """States of the iterators, with the batches of this iteration."""
        return [iterator.state_dict() for iterator in self.iterators]
