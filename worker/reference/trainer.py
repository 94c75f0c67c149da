"""The training loop. The order of one pass is the seed's: finalise an asynchronous save, step, log, evaluate, decide."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import rsup.worker
from rsup.supervisor.places import runtime_dir
from rsup.worker.agreement import Agreement
from rsup.worker.deadline import read_deadline
from rsup.worker.deterministic import parameter_digest
from rsup.worker.exit_policy import NOTHING, Asked, Decision, decide
from rsup.worker.exit_signals import ExitSignals
from rsup.worker.faults import FaultPlan, StrikeMarks
from rsup.worker.inprocess.entry import current_entry
from rsup.worker.loader_state import ResumableLoader
from rsup.worker.numeric_faults import NumericFault
from rsup.worker.optimizer_offload import OptimizerOffload
from rsup.worker.phases import current_phase
from rsup.worker.reference.build import make_loader, make_model, make_optimizer, make_schedule, make_stepper
from rsup.worker.reference.data import load_text
from rsup.worker.reference.evaluate import evaluate
from rsup.worker.reference.hooks import Sections
from rsup.worker.reference.interval_log import IntervalLog
from rsup.worker.reference.options import Options
from rsup.worker.reference.phase_start import begin_of_phase
from rsup.worker.reference.program import program_of
from rsup.worker.reference.ranks import Ranks, job_identity
from rsup.worker.reference.saving import Saves
from rsup.worker.reference.state import Progress, prepare_optimizer, seed_for
from rsup.worker.reference.stepper import Report, Scalar, StepParts
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
        self.module = make_model(options, ranks.device)
        self.optimizer = make_optimizer(self.module, options)
        prepare_optimizer(self.optimizer)
        self._offload = OptimizerOffload(self.optimizer, [])  # the stepper knows which graph reads its state
        seed_for(options.seed, ranks.rank, 0)
        self.schedule = make_schedule(options)
        self._device = device
        job = job_key, _ = job_identity()
        self._faults = FaultPlan(options.fault, ranks.rank, marker_dir(options), job_key)
        marks = StrikeMarks(marker_dir(options), job_key)
        self.rerun = RerunStateMachine(
            options.rerun_config,
            device=device,
            torch_device=ranks.device,
            group=ranks.control,
            ledger_folder=options.save_dir,
            seed=options.seed,
            injected=any(isinstance(fault, NumericFault) for fault in options.fault),
        )
        self.rerun.program.update(program_of(options, deterministic))
        self._source = source = make_loader(self.training, options, ranks.rank)
        if (entry := current_entry()) is not None:
            entry.at_restart(source.close)
        self._loader = ResumableLoader(source, options.require_loader_state)
        data = RerunDataIterator(self._loader)
        parts = StepParts(
            options,
            ranks,
            self.module,
            self.optimizer,
            self.rerun,
            data,
            self._faults,
            marks,
            sections,
            device.uuid,
            deterministic,
            self._consumed_before,
        )
        self._step = make_stepper(parts)
        self._offload.invalidate.append(self._step.optimizer_moves)
        self._launched = 0
        """The newest iteration that the stepper was asked for; those behind `progress` are not settled."""
        self._to_skip: frozenset[int] = frozenset()
        self._phase = current_phase()
        self._exit_signals = ExitSignals(options.exit_signals) if options.exit_signals else None
        duration_s = None if options.exit_duration_in_mins is None else options.exit_duration_in_mins * 60
        deadline = read_deadline() if options.save else None
        self._agreement = Agreement(ranks.control, self._exit_signals, options.quiet_signals, duration_s, deadline)
        self._interval = IntervalLog()
        self._saves = Saves(
            options,
            ranks,
            job,
            self._faults,
            sections,
            self.module,
            self.optimizer,
            self.rerun,
            source,
            self._loader,
            data,
            self.training.digest,
            self.say,
            self.warn,
            self._save_is_over,
        )

    # ------------------------------------------------------------------------------------------------------- the loop

    def train(self) -> int:
        """Resume and run to the end, or until something asks to leave; return the exit code. Collective."""
        if self.options.async_save:
            self.sections.on_async_save()
        self._resume()
        self._to_skip = self._agree_on_skips()
        self._say_what_is_not_armed()
        if self._phase is not None and (left_out := self._phase.left_out(self.options.train_iters)):
            self.warn(f"{left_out} (rsup launch --phases, --train-iters)")
        self._faults.at_start()
        try:
            return self._loop()
        finally:
            self.sections.on_shutdown()

    def _loop(self) -> int:
        self._interval.restart()
        if self._phase is not None and (problem := self._phase.problem_at(self.progress.iteration)):
            return self._leave(Decision(False, True, problem, "phase"))
        while self.progress.iteration < self.options.train_iters:
            self._saves.finalise(wait=False)
            before = self.progress.iteration
            leave = self._iterate()
            if leave.should_exit:
                return self._leave_unfinished(leave)
            if self.progress.iteration == before:
                continue  # it runs ahead: there is nothing new to decide on
            decision = decide(self.options.exit_plan, self._agreement.ask(self.progress.iteration), self.progress.iteration)
            decision = self._agreement.explained(decision)
            if decision != NOTHING and (leave := self._complete(self._step.settle())).should_exit:
                return self._leave_unfinished(leave)
            self._carry_out(decision)
            if decision.leave:
                return self._leave(decision)
        finished = Decision(self._saves.can_save, True, "", "finished")
        self._carry_out(finished)
        return self._leave(finished)

    def _iterate(self) -> Exit:
        """Launch the next iteration, or only take its data if it is to be skipped; complete what is settled. Where the answer
        says to exit, the iteration behind the last completed one was rejected."""
        iteration = self._launched = self._launched + 1
        rsup.worker.set_iteration(iteration)
        self.rerun.data_position["consumed_samples"] = self._consumed_before(iteration)
        if iteration in self._to_skip:
            reports = [self._step.skip(iteration)]
            if not reports[-1].exit.should_exit:
                self.warn(f"iteration {iteration} is skipped, as asked")
        else:
            with self.sections.training_step():
                reports = [self._step.run(iteration, self.schedule.at(self._consumed_before(iteration)))]
                if self._must_settle(iteration) and not reports[-1].exit.should_exit:
                    reports.append(self._step.settle())
        leave = self._complete(*reports)
        if not leave.should_exit and self.progress.iteration == iteration and iteration % self.options.eval_interval == 0:
            self._evaluate()
        return leave

    def _must_settle(self, iteration: int) -> bool:
        """Whether something is due behind that iteration that needs it completed."""
        options = self.options
        is_logged = self._interval.is_first or iteration % options.log_interval == 0
        is_due = decide(options.exit_plan, Asked(), iteration) != NOTHING
        return is_logged or is_due or iteration % options.eval_interval == 0

    def _complete(self, *reports: Report) -> Exit:
        """Count what is settled as done, and log it; whether to leave."""
        for done in (done for report in reports for done in report.settled):
            consumed = self._consumed_before(done.iteration)
            lr = self.schedule.at(consumed)
            consumed += self.options.global_batch_size
            self.progress = dataclasses.replace(self.progress, iteration=done.iteration, consumed_samples=consumed)
            num_open = (self._launched - done.iteration) * self.options.num_microbatches
            self._loader.consumed(max(0, self._loader.num_outstanding - num_open))
            self._interval.add(done.loss)
            if done.iteration % self.options.log_interval == 0 or self._interval.is_first:
                self._log(lr, done.grad_norm)
        return reports[-1].exit

    def _consumed_before(self, iteration: int) -> int:
        """Samples that were consumed before an iteration that is not completed."""
        num_between = iteration - 1 - self.progress.iteration
        return self.progress.consumed_samples + num_between * self.options.global_batch_size

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

    def _log(self, lr: float, grad_norm: Scalar | None) -> None:
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
        away = self._offload.away() if self.options.offload_optimizer_during_evaluation else contextlib.nullcontext()
        with self._interval.paused(), away:
            loss = evaluate(
                self._step.evaluated,
                self.module,
                self.validation,
                self.options,
                self.ranks,
                self.sections,
                self.rerun,
            )
        self.say(f" validation loss at iteration {self.progress.iteration} | lm loss value: {loss:.6E} |")

    # --------------------------------------------------------------------------------------------------- checkpoints

    def _resume(self) -> None:
        progress = self._saves.resume()
        if progress is None:
            self.say(f"training starts on {self.ranks.world_size} ranks, {self.ranks.device.type}")
        else:
            self.progress = progress
        done = self.progress
        start = begin_of_phase(
            self._phase,
            self.options.phase_transition_iterations,
            done.iteration,
            done.consumed_samples,
            done.phase_start,
            self.options.global_batch_size,
        )
        self.progress = dataclasses.replace(done, phase_start=start)
        self._source.count_from(start.samples)
        self._launched = self.progress.iteration

    def _carry_out(self, decision: Decision) -> None:
        """Begin the save that was decided on; a save that leaves is waited for by `_leave`."""
        if decision.save and self._saves.durable_iteration == self.progress.iteration:
            return
        if decision.save and decision.reason and not decision.leave:
            self.say(f"saving after iteration {self.progress.iteration}: {decision.reason}")
        if decision.save:
            with self._interval.paused(), self._agreement.standing_still():
                self._saves.save(self.progress)
        elif decision.save_local:
            with self._interval.paused(), self._agreement.standing_still():
                self._saves.save_local(self.progress)
        elif not decision.leave and decision.reason:
            self.warn(f"a checkpoint was {decision.reason}, but the trainer has no --save")
            self._agreement.close_requests(self.progress.iteration, "the trainer has no --save")

    def _save_is_over(self, iteration: int) -> None:
        """A save became durable, or failed."""
        is_durable = self._saves.durable_iteration == iteration
        if self._agreement.deadline is not None and is_durable:
            self._agreement.deadline.saved_in(self._saves.last_save_s)
        self._agreement.close_requests(iteration, "" if is_durable else self._saves.failure)

    def _leave(self, decision: Decision) -> int:
        """The one way out: a durable save, finalised; then the reason, or the end of the run with its evaluation."""
        self._saves.finalise(wait=True)
        self._source.close()
        iteration = self.progress.iteration
        is_durable = self._saves.durable_iteration == iteration
        if decision.kind != "finished":
            self.say(f"leaving after iteration {iteration}: {decision.reason}")
        else:
            self._evaluate()
        if self.rerun.config.mode is RerunMode.REPORT_DETERMINISM_STATS:
            self.rerun.report_statistics()
        self._agreement.close_requests(iteration)
        if self.ranks.rank == 0:
            reason = decision.reason or f"all {iteration} iterations are done"
            of_phase = (self.progress.consumed_samples, self._phase.number if self._phase is not None else 0)
            rsup.worker.report_leaving(iteration, decision.kind, reason, is_durable, *of_phase)
        if self._exit_signals is not None:
            self._exit_signals.release()
        if decision.save and not is_durable:
            self.warn(f"no durable checkpoint of iteration {iteration}: {self._saves.failure}")
            return 1
        self._saves.close()
        return 0

    def _leave_unfinished(self, leave: Exit) -> int:
        """The way out in the middle of an iteration, whose numbers were rejected: parameters are as before it."""
        iteration = self.progress.iteration + 1
        elsewhere = leave.exit_code == EXIT_ELSEWHERE
        what = "another device has to run it" if elsewhere else "its numbers were rejected"
        if leave.should_checkpoint:
            self._saves.keep_for_rerun(self.progress)
        self._saves.finalise(wait=True)
        self._source.close()
        if self._exit_signals is not None:
            self._exit_signals.release()
        if not elsewhere:
            self._saves.discard_local()
        self.say(f"leaving at iteration {iteration} with {leave.exit_code}: {what}")
        self._agreement.close_requests(self.progress.iteration)
        rsup.worker.declare_exit(leave.exit_code, f"iteration {iteration}: {what}")
        return leave.exit_code

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
