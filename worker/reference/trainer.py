"""The training loop. The order of one pass is the seed's: finalise an asynchronous save, step, log, evaluate, decide."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rsup.worker
from rsup.supervisor.places import runtime_dir
from rsup.supervisor.wire import Limits
from rsup.worker.checkpoint import Checkpointer, SaveResult, claim_for_all, find_whole_checkpoint
from rsup.worker.checkpoint_directory import CheckpointDirectory, CheckpointError
from rsup.worker.corruption import Corruption
from rsup.worker.deterministic import parameter_digest, rank_order_hook
from rsup.worker.exit_policy import Decision, decide
from rsup.worker.faults import FaultPlan, StrikeMarks
from rsup.worker.numeric_faults import NumericFault
from rsup.worker.reference.agreement import Agreement, ExitSignal
from rsup.worker.reference.build import make_loader, make_model, make_optimizer, make_schedule
from rsup.worker.reference.data import load_text
from rsup.worker.reference.evaluate import evaluate
from rsup.worker.reference.hooks import Sections, read_ft_state, write_ft_state
from rsup.worker.reference.interval_log import IntervalLog
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks, job_identity
from rsup.worker.reference.rerun_states import layout, load_state, save_beside, state_tensor
from rsup.worker.reference.state import (
    Progress,
    model_tensors,
    prepare_optimizer,
    progress_record,
    restore,
    rng_tensor,
    seed_for,
)
from rsup.worker.reference.training_step import TrainingStep
from rsup.worker.rerun.contract import EXIT_ELSEWHERE, Exit, RankDevice, RerunMode
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.skip_list import iterations_to_skip
from rsup.worker.rerun.state_machine import RerunStateMachine
from rsup.worker.rerun.tracker import read_trackers


class Trainer:
    """One rank of a run. Everything here is on the training thread; methods that say so are collective."""

    def __init__(self, options: Options, ranks: Ranks, sections: Sections, deterministic: bool, device: RankDevice) -> None:
        self.options = options
        self.ranks = ranks
        self.sections = sections
        self.progress = Progress()
        self.training, self.validation = load_text(options.data_path, options.seq_length, options.seed)
        seed_for(options.seed, 0, -1)
        self.module = make_model(options).to(ranks.device)
        self.optimizer = make_optimizer(self.module, options)
        prepare_optimizer(self.optimizer)
        seed_for(options.seed, ranks.rank, 0)
        self.ddp = DistributedDataParallel(
            self.module, device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None
        )
        self.schedule = make_schedule(options)
        self._device = device
        self._job = job_key, attempt = job_identity()
        self._faults = FaultPlan(options.fault, ranks.rank, marker_dir(options), job_key)
        marks = StrikeMarks(marker_dir(options), job_key)
        corruption = Corruption(options.fault, ranks.rank, device.uuid, marks, self.module)
        self.rerun = RerunStateMachine(
            options.rerun_config,
            device=device,
            torch_device=ranks.device,
            group=ranks.control,
            ledger_folder=options.save_dir,
            seed=options.seed,
            injected=corruption.is_armed,
        )
        self.rerun.attach(self.ddp, self.optimizer, hook=rank_order_hook if deterministic else None)
        self._loader = make_loader(self.training, options, ranks.rank)
        data = RerunDataIterator(self._loader)
        self._step = TrainingStep(
            options, self.ddp, self.optimizer, ranks.device, data, self.rerun, corruption, self._faults, sections
        )
        self._to_skip: frozenset[int] = frozenset()
        self._directory = CheckpointDirectory(options.save_dir, options.keep_checkpoints) if options.save_dir else None
        self._checkpointer = self._make_checkpointer(job_key, attempt)
        self._exit_signal = ExitSignal(options.exit_signal) if options.exit_signal_handler else None
        duration_min = options.exit_duration_in_mins
        self._agreement = Agreement(ranks.control, self._exit_signal, None if duration_min is None else duration_min * 60)
        self._interval = IntervalLog()
        self._durable_iteration = -1
        self._failed_save = ""

    # ------------------------------------------------------------------------------------------------------- the loop

    def train(self) -> int:
        """Resume and run to the end, or until something asks to leave; return the exit code. Collective."""
        if self.options.async_save:
            self.sections.on_async_save()
        self._resume()
        self._to_skip = self._agree_on_skips()
        self._say_what_is_not_armed()
        self._faults.at_start()
        try:
            return self._loop()
        finally:
            if self._exit_signal is not None:
                self._exit_signal.release()
            self.sections.on_shutdown()

    def _loop(self) -> int:
        self._interval.restart()
        while self.progress.iteration < self.options.train_iters:
            self._finalise(wait=False)
            leave = self._iterate()
            if leave.should_exit:
                return self._leave_unfinished(leave)
            decision = decide(self.options.exit_plan, self._agreement.ask(self.progress.iteration), self.progress.iteration)
            self._carry_out(decision)
            if decision.leave:
                return self._leave(decision.reason)
        return self._leave("")

    def _iterate(self) -> Exit:
        """Compute the next iteration, or only take its data if it is to be skipped. Where the answer says to exit, it is not
        completed."""
        iteration = self.progress.iteration + 1
        rsup.worker.set_iteration(iteration)
        self.rerun.data_position["consumed_samples"] = self.progress.consumed_samples
        lr = self.schedule.at(self.progress.consumed_samples)
        leave, loss, grad_norm = Exit(False, False, 0), None, None
        if iteration in self._to_skip:
            self._step.skip(iteration)
            self.warn(f"iteration {iteration} is skipped, as asked")
        else:
            with self.sections.training_step():
                leave, loss, grad_norm = self._step.run(iteration, lr)
            if leave.should_exit:
                return leave
        self.progress = Progress(iteration, self.progress.consumed_samples + self.options.global_batch_size)
        self._interval.add(loss)
        if iteration % self.options.log_interval == 0 or self._interval.is_first:
            self._log(lr, grad_norm)
        if iteration % self.options.eval_interval == 0:
            self._evaluate()
        return leave

    def _say_what_is_not_armed(self) -> None:
        """A fault of a device that no rank computes on cannot strike in this attempt."""
        devices: list[str] = [""] * self.ranks.world_size
        dist.all_gather_object(devices, self._device.uuid, group=self.ranks.control)
        for fault in self.options.fault:
            if isinstance(fault, NumericFault) and fault.device and fault.device not in devices:
                self.say(f"no rank computes on {fault.device}: --fault {fault} is not armed now")

    def _agree_on_skips(self) -> frozenset[int]:
        """Iterations that the command line, or what earlier runs rejected, leaves out. Rank 0 reads for all."""
        found: list[list[int]] = [list(self.options.iterations_to_skip)]
        tracker = self.options.result_rejected_tracker_filename
        if tracker and self.ranks.rank == 0:
            trackers = read_trackers(tracker)
            if trackers.complaint:
                self.warn(trackers.complaint)
            found[0] += iterations_to_skip(trackers.records)
        dist.broadcast_object_list(found, src=0, group=self.ranks.control)
        return frozenset(found[0])

    # --------------------------------------------------------------------------------------------------- what is said

    def say(self, text: str) -> None:
        """A line on rank 0's standard output."""
        if self.ranks.rank == 0:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """A line on rank 0's standard error, and in the job's story."""
        if self.ranks.rank == 0:
            print(f"warning: {text}", file=sys.stderr, flush=True)
            rsup.worker.note("warning", text)

    def _log(self, lr: float, grad_norm: torch.Tensor | None) -> None:
        options, progress = self.options, self.progress
        skipped = self._interval.take_num_skipped()
        sums = torch.tensor([self._interval.take_loss()], dtype=torch.float64)
        dist.all_reduce(sums, group=self.ranks.control)
        width = len(str(options.train_iters))
        self.say(
            f" iteration {progress.iteration:{width}d}/{options.train_iters} | consumed samples: {progress.consumed_samples} | "
            f"elapsed time per iteration (ms): {self._interval.take_elapsed_ms():.1f} | learning rate: {lr:.6E} | "
            f"global batch size: {options.global_batch_size} | lm loss: {float(sums) / self.ranks.world_size:.6E} | "
            f"grad norm: {float('nan') if grad_norm is None else float(grad_norm):.3f} |"
            + (f" number of skipped iterations: {skipped} |" if skipped else "")
        )

    def _evaluate(self) -> None:
        if not self.options.eval_iters:
            return
        with self._interval.paused():
            loss = evaluate(self.module, self.validation, self.options, self.ranks, self.sections, self.rerun)
        self.say(f" validation loss at iteration {self.progress.iteration} | lm loss value: {loss:.6E} |")

    # --------------------------------------------------------------------------------------------------- checkpoints

    def _make_checkpointer(self, job_key: str, attempt: int) -> Checkpointer | None:
        if self._directory is None:
            return None
        owner = claim_for_all(self._directory, job_key, attempt, self.ranks.saving)
        return Checkpointer(self._directory, owner, self.ranks.saving, self._faults.while_saving, _report_commit)

    def _resume(self) -> None:
        load_dir = self.options.load_dir
        found = None
        if load_dir is not None:
            found = find_whole_checkpoint(CheckpointDirectory(load_dir), self.ranks.saving, self.warn)
        if found is None:
            if self.options.exit_on_missing_checkpoint:
                raise CheckpointError(f"there is no whole checkpoint in {load_dir}, and --exit-on-missing-checkpoint is given")
            if self.options.load:
                self.warn(f"there is no whole checkpoint in {load_dir}: training starts from the beginning")
            self.say(f"training starts on {self.ranks.world_size} ranks, {self.ranks.device.type}")
            return
        tensors = model_tensors(self.module, self.optimizer)
        self.progress = restore(found, tensors, self.options, self.ranks, self.training.digest, self.warn)
        self._durable_iteration = self.progress.iteration if load_dir == self.options.save_dir else -1
        self._loader.seek(self.progress.iteration, self.progress.consumed_samples)
        state = load_state(found, self.options, self.ranks, self.warn)
        if state is not None and (ignored := self.rerun.load_state_dict(state)):
            self.warn(ignored)
        self.sections.on_checkpoint_loaded()
        if self.ranks.rank == 0:
            rsup.worker.resumed(self.progress.iteration, str(found.path), self._read_ft_state(found.path.parent))
        self.say(f"resumed from {found.path}: {self.progress.iteration} iterations, {self.progress.consumed_samples} samples")

    def _carry_out(self, decision: Decision) -> None:
        """Begin the save that was decided on; a save that leaves is waited for by `_leave`."""
        if decision.save:
            with self._interval.paused(), self.sections.checkpointing():
                self._save()
                if not self.options.async_save:
                    self._finish_save()
        elif not decision.leave and decision.reason:
            self.warn(f"a checkpoint was {decision.reason}, but the trainer has no --save")
            self._agreement.close_requests(self.progress.iteration)

    def _save(self) -> None:
        assert self._checkpointer is not None
        self._faults.at_save(self.progress.iteration)
        tensors = model_tensors(self.module, self.optimizer) | rng_tensor(self.ranks)
        state = self.rerun.state_dict()
        tensors |= state_tensor(state, self.ranks.rank)
        record = progress_record(self.progress, self.options, self.training.digest)
        record |= {"layout": layout(self.options), "has_open_case": state["pending"] is not None}
        self._report(self._checkpointer.save(self.progress.iteration, tensors, record))

    def _finalise(self, wait: bool) -> None:
        if self._checkpointer is None:
            return
        with self.sections.checkpointing(is_async_finalization=True):
            if wait:
                self._finish_save()
            else:
                self._report(self._checkpointer.poll())

    def _finish_save(self) -> None:
        assert self._checkpointer is not None
        self._report(self._checkpointer.finish())

    def _report(self, result: SaveResult | None) -> None:
        if result is None:
            return
        if result.error:
            self._failed_save = result.error
            self.warn(f"the checkpoint of iteration {result.iteration} does not count: {result.error}")
        else:
            self._durable_iteration = result.iteration
            self.say(f"checkpoint of iteration {result.iteration} is durable: {result.path} ({result.duration_s:.2f} s)")
            if self.ranks.rank == 0:
                self._write_ft_state()
        self._agreement.close_requests(result.iteration)

    def _read_ft_state(self, folder: Path) -> Limits | None:
        try:
            return read_ft_state(folder) if self.options.calc_ft_timeouts else None
        except (OSError, ValueError) as error:
            self.warn(f"the limits kept in {folder} are not used: {error}")
            return None

    def _write_ft_state(self) -> None:
        limits = rsup.worker.limits() if self.options.calc_ft_timeouts else None
        if limits is None or self.options.save_dir is None:
            return
        try:
            write_ft_state(self.options.save_dir, limits)
        except OSError as error:
            self.warn(f"cannot write the limits beside the checkpoints: {error.strerror}")

    def _leave(self, reason: str) -> int:
        """The one way out: a durable save, finalised; then the reason, or the end of the run with its evaluation."""
        self._finalise(wait=True)
        iteration = self.progress.iteration
        if reason:
            self.say(f"leaving after iteration {iteration}: {reason}")
        else:
            self._evaluate()
        if self.rerun.config.mode is RerunMode.REPORT_DETERMINISM_STATS:
            self.rerun.report_statistics()
        self._agreement.close_requests(iteration)
        if self._checkpointer is not None and self._durable_iteration != iteration:
            text = f"no durable checkpoint of iteration {iteration}: {self._failed_save}"
            self.warn(text)
            return 1
        return 0

    def _leave_unfinished(self, leave: Exit) -> int:
        """The way out in the middle of an iteration, whose numbers were rejected: parameters are as before it."""
        iteration = self.progress.iteration + 1
        elsewhere = leave.exit_code == EXIT_ELSEWHERE
        what = "another device has to run it" if elsewhere else "its numbers were rejected"
        if leave.should_checkpoint:
            with self.sections.checkpointing():
                self._keep_for_rerun()
        self._finalise(wait=True)
        self.say(f"leaving at iteration {iteration} with {leave.exit_code}: {what}")
        self._agreement.close_requests(self.progress.iteration)
        rsup.worker.declare_exit(leave.exit_code, f"iteration {iteration}: {what}")
        return leave.exit_code

    def _keep_for_rerun(self) -> None:
        """Checkpoint the completed iterations with the rerun machine's state. A durable checkpoint of them stays as it is: what
        another device needs then goes beside it."""
        if self._checkpointer is None or self.options.save_dir is None:
            self.warn("there is no --save: the iteration cannot be kept for another device, training begins anew")
            return
        self._finish_save()
        if self._durable_iteration != self.progress.iteration:
            self._save()
            self._finish_save()
            return
        tensors = state_tensor(self.rerun.state_dict(), self.ranks.rank)
        folder = CheckpointDirectory(self.options.save_dir).folder(self.progress.iteration)
        error = save_beside(folder, tensors, self._job, self.options, self.ranks)
        if error:
            self.warn(f"the iteration's data could not be kept beside {folder}: {error}")

    def digest(self) -> str:
        """SHA-256 of the parameters; warns if the ranks differ. Collective."""
        mine = parameter_digest(self.module)
        digests = [""] * self.ranks.world_size
        dist.all_gather_object(digests, mine, group=self.ranks.control)
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            self.warn(f"parameters of ranks {different} differ from those of rank 0")
        return mine


def marker_dir(options: Options) -> Path | None:
    """Where faults that have struck are remembered: with the checkpoints, else in the runtime directory of this host."""
    if not options.fault:
        return None
    return options.save_dir / "faults-struck" if options.save_dir else runtime_dir() / "faults-struck"


def _report_commit(iteration: int, path: Path, duration_s: float) -> None:
    rsup.worker.report_checkpoint(iteration, str(path), duration_s)
