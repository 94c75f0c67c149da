"""The trainer's checkpoints: begun, finalised in the loop, found again; what they hold is in `state`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rsup.worker
from rsup.supervisor.wire import Limits
from rsup.worker.checkpoint import Checkpointer, SaveResult, WholeCheckpoint, claim_for_all
from rsup.worker.checkpoint_directory import CheckpointDirectory, CheckpointError
from rsup.worker.faults import FaultPlan
from rsup.worker.inprocess.entry import current_entry
from rsup.worker.loader_state import ResumableLoader, loader_tensors
from rsup.worker.reference.hooks import Sections, read_ft_state, write_ft_state
from rsup.worker.reference.local_saving import LocalSaves
from rsup.worker.reference.loss_scale import LossScale
from rsup.worker.reference.micro_batches import MicroBatches
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.reference.rerun_states import layout, load_state, save_beside, state_tensor
from rsup.worker.reference.resuming import find_newest, place_loader
from rsup.worker.reference.state import Progress, model_tensors, progress_record, restore, rng_tensor
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine
from rsup.worker.unused_memory import make_room_for_save


class Saves:
    """Checkpoints of one rank. Made on every rank; all methods are called on the training thread, in the same order everywhere.

    `source`, `loader`, `data`: the micro-batches, what knows which of them are consumed, and the replaying iterator around
    both. `closed(iteration)` is called when what was asked for from outside has been saved, or could not be.
    """

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        job: tuple[str, int],
        faults: FaultPlan,
        sections: Sections,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        rerun: RerunStateMachine,
        source: MicroBatches,
        loader: ResumableLoader,
        data: RerunDataIterator,
        text_digest: str,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        closed: Callable[[int], None],
        loss_scale: LossScale | None = None,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._job = job
        self._faults = faults
        self._sections = sections
        self._module = module
        self._optimizer = optimizer
        self._rerun = rerun
        self._source = source
        self._loader = loader
        self._data = data
        self._text_digest = text_digest
        self._say = say
        self._warn = warn
        self._closed = closed
        self._loss_scale = loss_scale
        self._directory = CheckpointDirectory(options.save_dir, options.keep_checkpoints) if options.save_dir else None
        self._checkpointer = self._make_checkpointer()
        is_local = options.non_persistent_save_interval is not None
        self._local = LocalSaves(options, ranks, job, faults, say, warn) if is_local else None
        self.durable_iteration = -1
        """Of the newest durable checkpoint in the directory that this run saves to; -1 before there is one."""
        self.failure = ""
        """Why the last save that failed did."""
        self.last_save_s = 0.0
        """From the beginning of a save until it was durable: of the last one, on this rank; 0 before the first."""
        self._copied_in_s = 0.0

    @property
    def can_save(self) -> bool:
        """Whether there is a directory to save to."""
        return self._checkpointer is not None

    def _make_checkpointer(self) -> Checkpointer | None:
        if self._directory is None:
            return None
        options = self._options
        on_purpose = options.load is not None and options.load_dir == options.save_dir
        owner = claim_for_all(self._directory, *self._job, self._ranks.saving, on_purpose)
        if owner.took_from:
            self._warn(f"{options.save_dir} was job {owner.took_from}'s and is this job's now: that one commits no more")
        checkpointer = Checkpointer(self._directory, owner, self._ranks.saving, self._faults.while_saving, _report_commit)
        if (entry := current_entry()) is not None:
            entry.at_restart(checkpointer.abandon)
        return checkpointer

    # --------------------------------------------------------------------------------------------------------- resuming

    def resume(self) -> Progress | None:
        """Load the newest whole checkpoint; where it stands, None if there is none. Collective."""
        options, load_dir = self._options, self._options.load_dir
        local = self._local.checkpointer if self._local is not None else None
        found = None
        if options.save_dir is not None and load_dir != options.save_dir:  # a restart goes on from what this job has saved
            found = find_newest(options.save_dir, local, self._ranks.saving, self._warn, self._job[0])
        if found is None and load_dir is not None:
            local = local if load_dir == options.save_dir else None
            found = find_newest(load_dir, local, self._ranks.saving, self._warn)
        if found is None:
            if options.exit_on_missing_checkpoint:
                raise CheckpointError(f"there is no whole checkpoint in {load_dir}, and --exit-on-missing-checkpoint is given")
            if options.load:
                self._warn(f"there is no whole checkpoint in {load_dir}: training starts from the beginning")
            return None
        tensors = model_tensors(self._module, self._optimizer)
        progress = restore(found, tensors, options, self._ranks, self._text_digest, self._warn)
        place_loader(found, self._loader, self._source, progress, options, self._ranks)
        self._restore_loss_scale(found.progress.get("loss_scale"), found.path)
        state = load_state(found, options, self._ranks, self._warn)
        if state is not None and (ignored := self._rerun.load_state_dict(state)):
            self._warn(ignored)
        self._say_resumed(found.path, progress, isinstance(found, WholeCheckpoint))
        return progress

    def _restore_loss_scale(self, state: dict[str, Any] | None, path: Path) -> None:
        if self._loss_scale is None or not self._loss_scale.rules.is_dynamic:
            return
        if state:
            self._loss_scale.load_state_dict(state)
        else:
            self._warn(f"{path} has no loss scale: it begins with {self._loss_scale.value:g} (--initial-loss-scale)")

    def _say_resumed(self, path: Path, progress: Progress, is_durable: bool) -> None:
        self._sections.on_checkpoint_loaded(is_local=not is_durable)
        limits = None
        if is_durable:
            limits = self._read_ft_state(path.parent)
            self.durable_iteration = progress.iteration if path.parent == self._options.save_dir else -1
        elif self._local is not None:
            self._local.newest_iteration = progress.iteration
        if self._ranks.rank == 0:
            rsup.worker.resumed(progress.iteration, str(path), limits, is_durable)
        what = "" if is_durable else "the local checkpoint in "
        self._say(f"resumed from {what}{path}: {progress.iteration} iterations, {progress.consumed_samples} samples")

    # ----------------------------------------------------------------------------------------------------------- saving

    def save(self, progress: Progress) -> None:
        """Begin a durable checkpoint; with `--no-async-save` wait for it. Collective."""
        with self._sections.checkpointing():
            self._begin(progress)
            if not self._options.async_save:
                self._finish()

    def save_local(self, progress: Progress) -> None:
        """Begin a non-persistent checkpoint; with `--no-async-save` wait for it. It never counts as durable. Collective."""
        if self._local is None:
            return
        with self._sections.checkpointing():
            own, record = self._own_state(progress)
            shared = model_tensors(self._module, self._optimizer)
            self._local.save(progress.iteration, own, shared, record)
            if not self._options.async_save:
                self._local.finish()

    def finalise(self, wait: bool) -> None:
        """Take the results of saves that are on their way, if they are over or `wait` is set."""
        if self._checkpointer is None:
            return
        with self._sections.checkpointing(is_async_finalization=True):
            if wait:
                self._finish()
            else:
                self._report(self._checkpointer.poll())
            if self._local is not None:
                self._local.finish() if wait else self._local.poll()

    def close(self) -> None:
        """The run is over, or leaves with a durable checkpoint: local ones that are no newer are of no more use."""
        if self._local is not None and self.durable_iteration >= self._local.newest_iteration:
            self._local.checkpointer.discard()

    def discard_local(self) -> None:
        """Remove the local checkpoints: what they hold is in doubt, and only what is durable is to be resumed from."""
        if self._local is not None:
            self._local.checkpointer.discard()

    def _begin(self, progress: Progress) -> None:
        assert self._checkpointer is not None
        self._faults.at_save(progress.iteration)
        began_s = time.monotonic()
        self._finish()
        copying_since_s = time.monotonic()
        if self._options.async_save:
            make_room_for_save(self._module, self._ranks.device)
        own, record = self._own_state(progress)
        tensors = model_tensors(self._module, self._optimizer) | own
        self._checkpointer.save(progress.iteration, tensors, record)
        self._copied_in_s = time.monotonic() - copying_since_s
        if self._ranks.rank == 0:
            stall_s = time.monotonic() - began_s
            rsup.worker.report_save(progress.iteration, "begun", str(self._options.save_dir), stall_s)

    def _own_state(self, progress: Progress) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What only this rank has, and the record that all ranks write alike."""
        state = self._rerun.state_dict()
        own = rng_tensor(self._ranks) | state_tensor(state, self._ranks.rank)
        own |= loader_tensors(self._loader, self._ranks.rank, self._data)
        record = progress_record(progress, self._options, self._text_digest)
        record |= {"layout": layout(self._options), "has_open_case": state["pending"] is not None}
        if self._loss_scale is not None:
            record["loss_scale"] = self._loss_scale.state_dict()
        return own, record | {"num_loader_states": self._ranks.world_size}

    def _finish(self) -> None:
        assert self._checkpointer is not None
        self._report(self._checkpointer.finish())

    def _report(self, result: SaveResult | None) -> None:
        if result is None:
            return
        if result.error:
            self.failure = result.error
            self._warn(f"the checkpoint of iteration {result.iteration} does not count: {result.error}")
            if self._ranks.rank == 0:
                rsup.worker.report_save(result.iteration, "failed", str(result.path), text=result.error)
        else:
            self.durable_iteration = result.iteration
            self.last_save_s = self._copied_in_s + result.duration_s
            self._say(f"checkpoint of iteration {result.iteration} is durable: {result.path} ({result.duration_s:.2f} s)")
            if self._ranks.rank == 0:
                self._write_ft_state()
        self._closed(result.iteration)

    def keep_for_rerun(self, progress: Progress) -> None:
        """Checkpoint the completed iterations with the rerun machine's state. A durable checkpoint of them stays as it is: what
        another device needs then goes beside it."""
        if self._checkpointer is None or self._options.save_dir is None:
            self._warn("there is no --save: the iteration cannot be kept for another device, training begins anew")
            return
        with self._sections.checkpointing():
            self._finish()
            if self.durable_iteration != progress.iteration:
                self._begin(progress)
                self._finish()
                return
            tensors = state_tensor(self._rerun.state_dict(), self._ranks.rank)
            folder = CheckpointDirectory(self._options.save_dir).folder(progress.iteration)
            error = save_beside(folder, tensors, self._job, self._options, self._ranks)
            if error:
                self._warn(f"the iteration's data could not be kept beside {folder}: {error}")

    # ----------------------------------------------------------------------------------------------- limits beside them

    def _read_ft_state(self, folder: Path) -> Limits | None:
        try:
            return read_ft_state(folder) if self._options.calc_ft_timeouts else None
        except (OSError, ValueError) as error:
            self._warn(f"the limits kept in {folder} are not used: {error}")
            return None

    def _write_ft_state(self) -> None:
        limits = rsup.worker.limits() if self._options.calc_ft_timeouts else None
        if limits is None or self._options.save_dir is None:
            return
        try:
            write_ft_state(self._options.save_dir, limits)
        except OSError as error:
            self._warn(f"cannot write the limits beside the checkpoints: {error.strerror}")


def _report_commit(iteration: int, path: Path, duration_s: float) -> None:
    rsup.worker.report_checkpoint(iteration, str(path), duration_s)
