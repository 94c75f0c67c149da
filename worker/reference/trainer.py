"""The training loop. The order of one pass is the seed's: finalise an asynchronous save, step, log, evaluate, decide."""

import contextlib
import dataclasses
import sys
from pathlib import Path

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
from rsup.worker.observe.timers import Timers
from rsup.worker.optimizer_offload import OptimizerOffload
from rsup.worker.phases import current_phase
from rsup.worker.reference.agreed_start import agreed_skips, unarmed_faults
from rsup.worker.reference.build import make_loader, make_loss_scale, make_model, make_optimizer, make_schedule, make_stepper
from rsup.worker.reference.data import load_text
from rsup.worker.reference.dumping import make_dumps
from rsup.worker.reference.evaluate import evaluate
from rsup.worker.reference.hooks import Sections
from rsup.worker.reference.loss_scale import doubt_of_loss_scale
from rsup.worker.reference.observed import Observed
from rsup.worker.reference.options import Options
from rsup.worker.reference.phase_start import begin_of_phase
from rsup.worker.reference.program import program_of
from rsup.worker.reference.ranks import Ranks, job_identity
from rsup.worker.reference.run_log import RunLog, open_run_log
from rsup.worker.reference.run_parts import end_to_end
from rsup.worker.reference.saving import Saves
from rsup.worker.reference.state import Progress, prepare_optimizer, seed_for
from rsup.worker.reference.stepper import Report, StepParts
from rsup.worker.reference.watching import make_straggler, make_timers
from rsup.worker.rerun.contract import EXIT_ELSEWHERE, Exit, RankDevice, RerunMode
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.state_machine import RerunStateMachine


class Trainer:
    """One rank of a run. Everything here is on the training thread; methods that say so are collective."""

    def __init__(self, options: Options, ranks: Ranks, sections: Sections, deterministic: bool, device: RankDevice) -> None:
        self.options = options
        self.ranks = ranks
        self.sections = sections
        self.progress = Progress()
        self._end_to_end = end_to_end(options, ranks, self.warn)
        timers = make_timers(options, ranks, self.warn)
        self._make_data_and_model(timers)
        self._offload = OptimizerOffload(self.optimizer, [])  # the stepper knows which graph reads its state
        seed_for(options.seed, ranks.rank, 0)
        self.schedule = make_schedule(options)
        self._batch_sizes = options.batch_sizes
        self._batch_size = 0
        """Of the last completed iteration."""
        self._loss_scale = make_loss_scale(options)
        self._is_overflow_doubted = False
        if doubt := doubt_of_loss_scale(options.loss_scale):
            self.warn(doubt)
        self._evaluated_at = -1
        """The iteration of the last evaluation of this process."""
        self._device = device
        job = job_key, _ = job_identity()
        self._faults = FaultPlan(options.fault, ranks.rank, marker_dir(options), job_key)
        marks = StrikeMarks(marker_dir(options), job_key)
        self.rerun = _rerun_machine(options, ranks, deterministic, device)
        self._source = source = make_loader(self.training, options, ranks.rank)
        if (entry := current_entry()) is not None:
            entry.at_restart(source.close)
        self._loader = ResumableLoader(source, options.require_loader_state)
        data = RerunDataIterator(self._loader)
        straggler = make_straggler(options, ranks, device, self.warn)
        if entry is not None:
            entry.at_restart(straggler.close)  # the log, which closes it too, comes later
        self._observed = Observed(timers, straggler, make_dumps(options, ranks, self.module, self.warn))
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
            loss_scale=self._loss_scale,
            observed=self._observed,
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
        self._log: RunLog
        """From the moment on in which it is known where the run goes on."""
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
            self._loss_scale,
        )

    def _make_data_and_model(self, timers: Timers) -> None:
        options, stage = self.options, self._end_to_end.stage
        with stage("build_dataiters"), timers("train/valid/test-data-iterators-setup", 0):
            self.training, self.validation = load_text(options.data_path, options.seq_length, options.seed)
        seed_for(options.seed, 0, -1)
        setup = timers("model-and-optimizer-setup", 0)
        with stage("model_init"), setup:
            self.module = make_model(options, self.ranks.device)
        with stage("build_optimizer"), setup:
            self.optimizer = make_optimizer(self.module, options)
            prepare_optimizer(self.optimizer)

    # ------------------------------------------------------------------------------------------------------- the loop

    def train(self) -> int:
        """Resume and run to the end, or until something asks to leave; return the exit code. Collective."""
        if self.options.async_save:
            self.sections.on_async_save()
        self._resume()
        self._log = open_run_log(
            self.options, self.ranks, self.progress, self._end_to_end, self._observed, self._device.uuid, self.say, self.warn
        )
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._log.close)
            leaving.callback(self.sections.on_shutdown)
            try:
                return self._run()
            except BaseException:
                self._log.close(ends=current_entry() is None)  # it may be entered again
                raise

    def _run(self) -> int:
        self._log.phase("model-and-optimizer-setup", "train/valid/test-data-iterators-setup", "load-checkpoint")
        self._to_skip = agreed_skips(self.options, self.ranks, self.warn)
        for fault in unarmed_faults(self.options, self.ranks, self._device.uuid):
            self.say(fault)
        if self._phase is not None and (left_out := self._phase.left_out(self.options.train_iters)):
            self.warn(f"{left_out} (rsup launch --phases, --train-iters)")
        self._faults.at_start()
        return self._loop()

    def _loop(self) -> int:
        self._log.started()
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
            if not (decision.save or decision.leave) and self._saves.can_save and (growth := self._growth()):
                decision = Decision(True, False, growth)
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
                reports = [self._step.run(iteration, self._lr_of(iteration))]
                if self._must_settle(iteration) and not reports[-1].exit.should_exit:
                    reports.append(self._step.settle())
        leave = self._complete(*reports)
        if self._observed.dumps.due(iteration):  # not in the step's section, nor in its time
            with self._log.training.paused(), self.sections.checkpointing(is_async_finalization=True):
                self._observed.dumps.write(iteration)
        if not leave.should_exit and self.progress.iteration == iteration and self._is_evaluated(iteration):
            self._evaluate()
        return leave

    def _must_settle(self, iteration: int) -> bool:
        """Whether something is due behind that iteration that needs it completed."""
        options = self.options
        is_due = self._log.training.is_due(iteration) or decide(options.exit_plan, Asked(), iteration) != NOTHING
        return is_due or self._is_evaluated(iteration)

    def _is_evaluated(self, iteration: int) -> bool:
        """Whether an evaluation follows that iteration, also where it is not the last."""
        interval = self.options.eval_interval
        return interval > 0 and iteration % interval == 0

    def _complete(self, *reports: Report) -> Exit:
        """Count what is settled as done, and log it; whether to leave."""
        for done in (done for report in reports for done in report.settled):
            lr = self._lr_of(done.iteration)
            consumed = self.progress.consumed_samples
            self._batch_size = self._batch_sizes.at(consumed)
            overflowed = done.skipped and done.loss is not None
            self.progress = dataclasses.replace(
                self.progress,
                iteration=done.iteration,
                consumed_samples=consumed + self._batch_size,
                overflow_samples=self.progress.overflow_samples + self._batch_size * overflowed,
            )
            num_open = (self._launched - done.iteration) * self.options.num_microbatches
            self._loader.consumed(max(0, self._loader.num_outstanding - num_open))
            self._doubt_overflow(done.iteration, overflowed)
            scale = None if self._loss_scale is None else self._loss_scale.value
            self._log.step(done, self.progress, self._batch_size, lr, scale)
        return reports[-1].exit

    def _consumed_before(self, iteration: int) -> int:
        """Samples that were consumed before an iteration that is not completed."""
        consumed = self.progress.consumed_samples
        for _ in range(iteration - 1 - self.progress.iteration):
            consumed += self._batch_sizes.at(consumed)
        return consumed

    def _lr_of(self, iteration: int) -> float:
        """The learning rate of an iteration that is not completed."""
        return self.schedule.at(self._consumed_before(iteration) - self.progress.overflow_samples)

    def _growth(self) -> str:
        """Why to save before the next iteration, which is greater than the last one: Megatron-LM does."""
        consumed = self.progress.consumed_samples
        return self._batch_sizes.growth_text(consumed - self._batch_size, consumed)

    def _doubt_overflow(self, iteration: int, overflowed: bool) -> None:
        """Warn of the first of a row of overflows that no lower scale can help against."""
        is_at_minimum = overflowed and self._loss_scale is not None and self._loss_scale.is_at_minimum
        if is_at_minimum and not self._is_overflow_doubted and self._loss_scale is not None:
            self.warn(
                f"iteration {iteration} is skipped: its gradients overflow with the loss scale {self._loss_scale.value:g},"
                " which goes no lower; losses that are NaN or Inf, or data, may be the cause"
            )
        self._is_overflow_doubted = is_at_minimum

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

    def _evaluate(self) -> None:
        if not self.options.eval_iters or self._evaluated_at == self.progress.iteration:
            return
        self._evaluated_at = self.progress.iteration
        away = self._offload.away() if self.options.offload_optimizer_during_evaluation else contextlib.nullcontext()
        with self._log.training.paused():
            with self._log.evaluating(), away:
                found = evaluate(
                    self._step.evaluated,
                    self.module,
                    self.validation,
                    self.options,
                    self.ranks,
                    self.sections,
                    self.rerun,
                )
            self._log.evaluated(found)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def _resume(self) -> None:
        with self._end_to_end.stage("load_checkpoint"), self._observed.timers("load-checkpoint", 0):
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
            self._batch_sizes.consumed_after,
        )
        self.progress = dataclasses.replace(done, phase_start=start)
        self._source.count_from(start.samples)
        self._launched = self.progress.iteration
        self._observed.dumps.resumed(self.progress.iteration)

    def _carry_out(self, decision: Decision) -> None:
        """Begin the save that was decided on; a save that leaves is waited for by `_leave`."""
        if decision.save and self._saves.durable_iteration == self.progress.iteration:
            return
        if decision.save and decision.reason and not decision.leave:
            self.say(f"saving after iteration {self.progress.iteration}: {decision.reason}")
        if decision.save:
            with self._log.saving(is_durable=True), self._agreement.standing_still():
                self._saves.save(self.progress)
        elif decision.save_local:
            with self._log.saving(is_durable=False), self._agreement.standing_still():
                self._saves.save_local(self.progress)
        elif not decision.leave and decision.reason:
            self.warn(f"a checkpoint was {decision.reason}, but the trainer has no --save")
            self._agreement.close_requests(self.progress.iteration, "the trainer has no --save")

    def _save_is_over(self, iteration: int) -> None:
        """A save became durable, or failed."""
        is_durable = self._saves.durable_iteration == iteration
        if self._agreement.deadline is not None and is_durable:
            self._agreement.deadline.saved_in(self._saves.last_save_s)
        self._log.save_is_over(iteration, is_durable)
        self._agreement.close_requests(iteration, "" if is_durable else self._saves.failure)

    def _leave(self, decision: Decision) -> int:
        """The one way out: a durable save, finalised; then the reason, or the end of the run with its evaluation."""
        with self._log.training.paused():
            self._log.training.flush()
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
        with self._log.training.paused():
            self._log.training.flush()
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


def _rerun_machine(options: Options, ranks: Ranks, deterministic: bool, device: RankDevice) -> RerunStateMachine:
    machine = RerunStateMachine(
        options.rerun_config,
        device=device,
        torch_device=ranks.device,
        group=ranks.control,
        ledger_folder=options.save_dir,
        seed=options.seed,
        injected=any(isinstance(fault, NumericFault) for fault in options.fault),
    )
    machine.program.update(program_of(options, deterministic))
    return machine


def marker_dir(options: Options) -> Path | None:
    """Where faults that have struck are remembered: with the checkpoints, else in the runtime directory of this host."""
    if not options.fault:
        return None
    return options.save_dir / "faults-struck" if options.save_dir else runtime_dir() / "faults-struck"
