"""Rerun validation, sections and device identity for a Lightning `Trainer`, in one line:

    from rsup.worker.integrations.lightning import rerun_callback

    trainer = Trainer(..., callbacks=[rerun_callback()])
    trainer.fit(model, ckpt_path="last")

For automatic optimization. Each optimizer step is validated and, where a number is wrong, replayed inside the closure of its
last batch, before gradients are clipped and used. What the machine has to keep of all ranks is in every checkpoint, under
`rsup_rerun`. A job that has to end (16 or 17) does so by `SystemExit`, after the checkpoint `last-<step>.ckpt` of the completed
steps where one is needed, which `ckpt_path="last"` finds. The step that is replayed from it uses the batches kept in it; those
after it come from the loader, which has to be stateful to go on in the middle of an epoch, as ever with Lightning.

What `self.log` averages over an epoch has the values of replays in it, too.
"""

import contextlib
import functools
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rsup.worker
from rsup.worker.integrations.micro_batches import MicroBatches
from rsup.worker.rerun.contract import RerunConfig, RerunError
from rsup.worker.sections import TrainingSections

_KEY = "rsup_rerun"


def rerun_callback(config: RerunConfig | None = None, **options: Any) -> Any:
    """A callback that puts a `Trainer`'s `fit` under the rerun machine.

    `options`: of `RerunStateMachine`. The machine is `callback.rerun.machine` once training has begun, for checks of one's own
    in `training_step`. Raises `RerunError` where Lightning's loop cannot be replayed.
    """
    package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    if "lightning.pytorch" in sys.modules:
        package = "lightning.pytorch"
    return type("RerunCallback", (_Hooks, importlib.import_module(package).Callback), {})(config or RerunConfig(), options)


class _Hooks:
    """The callback's hooks, which Lightning calls on the training thread."""

    def __init__(self, config: RerunConfig, options: dict[str, Any]) -> None:
        self.rerun: MicroBatches | None = None
        self._config = config
        self._options = options
        self._trainer: Any = None
        self._loaded: list[dict[str, Any]] | None = None
        self._num_to_repeat = 0
        self._evaluation = contextlib.ExitStack()
        self._sections = TrainingSections()
        self._sections.on_setup()

    # ------------------------------------------------------------------------------------------------ training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is wrapped, optimizers are made, a checkpoint is loaded."""
        if self.rerun is not None:
            return
        loop: Any = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "automatic_optimization", None)
        if not pl_module.automatic_optimization or not hasattr(loop, "_make_closure"):
            raise RerunError(
                "rerun_callback needs automatic optimization of Lightning 2: with a loop of your own use "
                "RerunStateMachine in it"
            )
        if trainer.strategy.handles_gradient_accumulation or len(trainer.optimizers) != 1:
            raise RerunError("rerun_callback needs one optimizer, and a strategy that leaves the step to it: use DDP or FSDP")
        self._trainer = trainer
        self._begin(trainer)
        make_closure = loop._make_closure
        loop._make_closure = lambda kwargs, optimizer, batch_idx: self._wrap(make_closure(kwargs, optimizer, batch_idx), kwargs)

    def _begin(self, trainer: Any) -> None:
        options = {"ledger_folder": self._folder()} | self._options
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        optimizer = trainer.optimizers[0]
        self.rerun = MicroBatches(
            self._config, trainer.strategy.root_device, trainer.strategy.model, optimizer, self._save_now, scaler, **options
        )
        if self._loaded is None:
            return
        mine = self._loaded[trainer.global_rank] if trainer.global_rank < len(self._loaded) else self._loaded[0]
        ignored = self.rerun.load_state_dict(mine)
        self._sections.on_checkpoint_loaded()
        if trainer.global_rank == 0:
            rsup.worker.resumed(trainer.global_step, str(trainer.ckpt_path))
            if ignored:
                rsup.worker.note("warning", ignored)

    def _wrap(self, closure: Any, kwargs: Any) -> Any:
        """`closure` runs forward, zeroing of gradients, and backward of a batch; the last one of a step runs replays too."""
        trainer, forward_backward = self._trainer, closure.closure
        if "batch" not in kwargs:
            raise RerunError(
                "a training_step that takes dataloader_iter draws its own data, which cannot be replayed: take a batch"
            )

        def run(batch: Any) -> tuple[Any, torch.Tensor | None]:
            kwargs["batch"] = batch
            result = forward_backward()
            return result, result.closure_loss

        def closed(*_: Any, **__: Any) -> Any:
            assert self.rerun is not None
            return self.rerun.run(
                kwargs["batch"],
                trainer.global_step + 1,
                not trainer.fit_loop._should_accumulate(),
                run,
                lambda: None,  # the closure of a step's first batch zeroes
                functools.partial(_no_sync, trainer.strategy),
            )

        closure.closure = closed
        return closure

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch begins, maybe not the first of its step."""
        rsup.worker.set_iteration(trainer.global_step + 1)
        self._sections.on_training_step_start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """It is done."""
        self._sections.on_training_step_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        self._sections.on_shutdown()

    # ---------------------------------------------------------------------------------------------- evaluation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Nothing in it is replayed."""
        if self.rerun is not None:
            self._evaluation.enter_context(self.rerun.machine.evaluation())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Training goes on."""
        self._evaluation.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Whatever was open is not any more."""
        self._evaluation.close()
        self._sections.on_shutdown()

    # --------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the machines of all ranks to a checkpoint; collective, as saving is."""
        if self.rerun is None:
            return
        checkpoint[_KEY] = self.rerun.agreement.gather(self.rerun.state_dict())
        if self._num_to_repeat:
            _turn_back(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"], self._num_to_repeat)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep what was saved until training starts."""
        self._loaded = checkpoint.get(_KEY)

    def _save_now(self) -> None:
        assert self.rerun is not None
        path = self._folder() / f"last-{self._trainer.global_step}.ckpt"
        started_s = time.monotonic()
        self._num_to_repeat = self.rerun.num_batches - 1
        with self._sections.checkpointing():
            self._trainer.save_checkpoint(path)
        self._num_to_repeat = 0
        if self._trainer.global_rank == 0:
            rsup.worker.report_checkpoint(self._trainer.global_step, str(path), time.monotonic() - started_s)

    def _folder(self) -> Path:
        """Where `ckpt_path="last"` looks."""
        callback = self._trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None)
        return Path(folder or self._trainer.default_root_dir)


def _turn_back(progress: dict[str, Any], num_batches: int) -> None:
    """Count the finished batches of the step that will be repeated as not begun: a step begins with its first batch."""
    for counts in (progress["total"], progress["current"]):
        completed = counts["completed"] - num_batches
        counts.update({name: completed for name in ("ready", "started", "processed", "completed") if name in counts})


def _no_sync(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    """Gradients of a batch that is not the last of its step are not reduced, as in Lightning's own loop."""
    block = getattr(strategy, "block_backward_sync", None)
    if block is None:
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[Any] = block()
    return made
