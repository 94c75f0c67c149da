"""The seed's three sections at the seed's places: `setup`, `step`, `checkpointing`.

`setup` runs from `on_setup` to the first training or evaluation step. `step` wraps each step but the first
`num_warmup_iters` of the process (of each run of evaluation steps, for those), which are slower and count as out of section.
`checkpointing` wraps every save and the finalisation of an asynchronous one; loading belongs to `setup`.
Use the context managers: they close a section also when the step raises.
"""

import contextlib
from collections.abc import Iterator

import rsup.worker
from rsup.supervisor import heartbeat_board as board


class TrainingSections:
    """Opens and closes the sections of one training loop. Use from the training thread."""

    def __init__(self, num_warmup_iters: int = 5) -> None:
        self.num_warmup_iters = num_warmup_iters
        self._session = rsup.worker.init()
        self._setup = self._session.section("setup")
        self._step = self._session.section("step")
        self._checkpointing = self._session.section("checkpointing")
        self._in_setup = False
        self._in_step = False
        self._in_checkpointing = 0
        self._num_train_steps = 0
        self._num_eval_steps = 0
        self._eval_index = 0
        self._num_checkpoints = 0

    def on_setup(self) -> None:
        """Training is being set up."""
        self._in_setup = True
        self._write_phase("setup")
        self._setup.enter()

    def on_training_step_start(self) -> None:
        """A training step begins."""
        self._leave_setup()
        self._eval_index = 0
        warm = self._num_train_steps >= self.num_warmup_iters
        self._write_phase("train" if warm else "warmup")
        self._in_step = warm
        if warm:
            self._step.enter()

    def on_replay(self) -> None:
        """The step computes its iteration once more: that is progress, so the section's time begins anew."""
        if self._in_step:
            self._step.exit()
            self._step.enter()

    def on_training_step_end(self) -> None:
        """The training step is done."""
        self._in_step = False
        self._step.exit()
        self._num_train_steps += 1
        self._session.write(board.TRAIN_STEPS, self._num_train_steps)

    def on_eval_step_start(self) -> None:
        """An evaluation step begins."""
        self._leave_setup()
        self._write_phase("eval")
        if self._eval_index >= self.num_warmup_iters:
            self._step.enter()

    def on_eval_step_end(self) -> None:
        """The evaluation step is done."""
        self._step.exit()
        self._eval_index += 1
        self._num_eval_steps += 1
        self._session.write(board.EVAL_STEPS, self._num_eval_steps)

    def on_checkpointing_start(self) -> None:
        """A save, or the finalisation of an asynchronous one, begins. May be nested."""
        self._in_checkpointing += 1
        if self._in_checkpointing == 1:
            self._checkpointing.enter()

    def on_checkpointing_end(self, is_async_finalization: bool = False) -> None:
        """It is done; only a save counts as a checkpoint."""
        self._in_checkpointing -= 1
        if self._in_checkpointing == 0:
            self._checkpointing.exit()
        if not is_async_finalization:
            self._num_checkpoints += 1
            self._session.write(board.CHECKPOINTS, self._num_checkpoints)

    def on_checkpoint_loaded(self, is_local: bool = False) -> None:
        """A checkpoint was loaded; only one from persistent storage makes the length of `setup` count."""
        if not is_local:
            self._session.set_flag(board.FLAG_LOADED_PERSISTENT)

    def on_async_save(self) -> None:
        """Saves are asynchronous: the length of `checkpointing` then says nothing about their limit."""
        self._session.set_flag(board.FLAG_ASYNC_SAVE)

    def on_shutdown(self) -> None:
        """Training is over: nothing stays open."""
        self._leave_setup()
        self._step.exit()
        self._in_checkpointing = 0
        self._checkpointing.exit()

    @contextlib.contextmanager
    def training_step(self) -> Iterator[None]:
        """Wrap one training step."""
        self.on_training_step_start()
        try:
            yield
        finally:
            self.on_training_step_end()

    @contextlib.contextmanager
    def eval_step(self) -> Iterator[None]:
        """Wrap one evaluation step."""
        self.on_eval_step_start()
        try:
            yield
        finally:
            self.on_eval_step_end()

    @contextlib.contextmanager
    def checkpointing(self, is_async_finalization: bool = False) -> Iterator[None]:
        """Wrap a save, or the finalisation of one."""
        self.on_checkpointing_start()
        try:
            yield
        finally:
            self.on_checkpointing_end(is_async_finalization)

    def _leave_setup(self) -> None:
        if self._in_setup:
            self._in_setup = False
            self._setup.exit()

    def _write_phase(self, phase: str) -> None:
        self._session.write(board.PHASE, board.PHASES.index(phase))
