"""Rerun validation, sections and device identity for Hugging Face's `Trainer`, in two lines:

    from rsup.worker.integrations.hugging_face import add_rerun

    trainer = Trainer(...)
    add_rerun(trainer)
    trainer.train(resume_from_checkpoint=...)

Each optimizer step is validated and, where a number is wrong, replayed inside the `training_step` of its last micro-batch. What
the machine has to keep is in the checkpoint's folder, `rsup_rerun_<rank>.pt`. A job that has to end (16 or 17) does so by
`SystemExit`, after a checkpoint of the completed steps where one is needed: resume from the newest one.

DeepSpeed and Megatron-LM step inside `backward` and cannot be replayed: `RerunError`. Metrics that `compute_loss` collects by
itself are collected in replays too.
"""

import functools
import importlib
import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch

import rsup.worker
from rsup.worker.integrations.micro_batches import MicroBatches
from rsup.worker.rerun.contract import RerunConfig, RerunError
from rsup.worker.sections import TrainingSections
from rsup.worker.unreadable import why_unreadable

_STEPS_IN_BACKWARD = ("DEEPSPEED", "MEGATRON_LM")


def add_rerun(trainer: Any, config: RerunConfig | None = None, **options: Any) -> Any:
    """Put `trainer` (a `transformers.Trainer`, before `train()`) under the rerun machine; return it.

    `options`: of `RerunStateMachine`. The machine is `trainer.rerun.machine` once training has begun, for checks of one's own
    in `compute_loss`. Raises `RerunError` for a back end whose steps cannot be replayed.
    """
    kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if kind in _STEPS_IN_BACKWARD:
        raise RerunError(f"under {kind} backward also steps the optimizer, which no replay can undo: use DDP or FSDP")
    _Hooks(trainer, config or RerunConfig(), options)
    return trainer


class _Hooks:
    """What is put around a trainer's methods, and its callback."""

    def __init__(self, trainer: Any, config: RerunConfig, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._config = config
        self._options = {"ledger_folder": Path(trainer.args.output_dir), "seed": trainer.args.seed} | options
        self._rank = int(trainer.args.process_index)
        self._sections = TrainingSections()
        self._sections.on_setup()
        self._resume_from: Path | None = None
        self._training_step = trainer.training_step
        self._save_checkpoint = trainer._save_checkpoint
        self._load_from_checkpoint = trainer._load_from_checkpoint
        self._evaluate = trainer.evaluate
        trainer.rerun = None
        trainer.training_step = self.training_step
        trainer._save_checkpoint = self.save_checkpoint
        trainer._load_from_checkpoint = self.load_from_checkpoint
        trainer.evaluate = self.evaluate
        trainer.add_callback(_make_callback(self))

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """In place of `Trainer.training_step`."""
        trainer: Any = self._trainer
        if trainer.rerun is None:
            trainer.rerun = self._begin(model)

        def run(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss: torch.Tensor = self._training_step(model, batch, num_items_in_batch)
            return loss, loss

        found: torch.Tensor = trainer.rerun.run(
            inputs,
            trainer.state.global_step + 1,
            bool(trainer.accelerator.sync_gradients),
            run,
            model.zero_grad,
            functools.partial(trainer.accelerator.no_sync, model=model),
        )
        return found

    def _begin(self, model: torch.nn.Module) -> MicroBatches:
        """At the first step: the model is wrapped, the optimizer made, the process group there."""
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
        rerun = MicroBatches(
            self._config, trainer.args.device, model, optimizer, self._save_now, trainer.accelerator.scaler, **self._options
        )
        if self._resume_from is None:
            return rerun
        file = self._resume_from / f"rsup_rerun_{self._rank}.pt"
        if file.exists():
            ignored = rerun.load_state_dict(_read(file))
            if ignored and self._rank == 0:
                rsup.worker.note("warning", ignored)
        if self._rank == 0:
            rsup.worker.resumed(trainer.state.global_step, str(self._resume_from))
        return rerun

    def load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> Any:
        """In place of `Trainer._load_from_checkpoint`."""
        self._resume_from = Path(resume_from_checkpoint)
        self._sections.on_checkpoint_loaded()
        return self._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """In place of `Trainer._save_checkpoint`."""
        started_s = time.monotonic()
        folder = self._folder()
        with self._sections.checkpointing():
            result = self._save_checkpoint(*args, **kwargs)
            if self._trainer.rerun is not None:
                _write(self._trainer.rerun.state_dict(), folder / f"rsup_rerun_{self._rank}.pt")
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
        if self._rank == 0:
            rsup.worker.report_checkpoint(self._trainer.state.global_step, str(folder), time.monotonic() - started_s)
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """In place of `Trainer.evaluate`."""
        if self._trainer.rerun is None:
            return self._evaluate(*args, **kwargs)
        with self._trainer.rerun.machine.evaluation():
            return self._evaluate(*args, **kwargs)

    def _folder(self) -> Path:
        return Path(self._trainer.args.output_dir) / f"checkpoint-{self._trainer.state.global_step}"

    def _save_now(self) -> None:
        """The completed steps; a checkpoint that is there already has them and gets only the state of the rerun."""
        if (self._folder() / "trainer_state.json").exists():
            _write(self._trainer.rerun.state_dict(), self._folder() / f"rsup_rerun_{self._rank}.pt")
        else:
            self.save_checkpoint(self._trainer.model, None)

    def on_step_begin(self, step: int) -> None:
        """An optimizer step begins, the first of its micro-batches."""
        rsup.worker.set_iteration(step + 1)
        self._sections.on_training_step_start()

    def on_step_end(self) -> None:
        """It is done."""
        self._sections.on_training_step_end()

    def on_train_end(self) -> None:
        """Training is over."""
        self._sections.on_shutdown()


def _make_callback(hooks: _Hooks) -> Any:
    transformers = importlib.import_module("transformers")

    def on_step_begin(_self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        hooks.on_step_begin(state.global_step)

    def on_step_end(_self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        hooks.on_step_end()

    def on_train_end(_self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        hooks.on_train_end()

    members = {"on_step_begin": on_step_begin, "on_step_end": on_step_end, "on_train_end": on_train_end}
    return type("RsupCallback", (transformers.TrainerCallback,), members)()


def _write(state: dict[str, Any], path: Path) -> None:
    """Whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    torch.save(state, part)
    part.replace(path)


def _read(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RerunError(f"cannot read {file}: {why_unreadable(error)}; remove those of all ranks to go on without") from None
    return state
