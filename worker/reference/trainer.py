"""The training loop. The order of one pass is the seed's: finalise an asynchronous save, step, log, evaluate, decide."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rsup.worker
from rsup.supervisor.places import runtime_dir
from rsup.supervisor.wire import Limits
from rsup.worker.checkpoint import Checkpointer, SaveResult, find_whole_checkpoint
from rsup.worker.checkpoint_directory import CheckpointDirectory, CheckpointError, Owner
from rsup.worker.deterministic import parameter_digest, rank_order_hook
from rsup.worker.exit_policy import Decision, decide
from rsup.worker.faults import FaultPlan
from rsup.worker.reference.agreement import Agreement, ExitSignal
from rsup.worker.reference.data import load_text
from rsup.worker.reference.evaluate import evaluate
from rsup.worker.reference.hooks import Sections, read_ft_state, write_ft_state
from rsup.worker.reference.model import GPT, mean_loss
from rsup.worker.reference.optimizer_schedule import LearningRate
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks, job_identity
from rsup.worker.reference.state import (
    Progress,
    model_tensors,
    prepare_optimizer,
    progress_record,
    restore,
    rng_tensor,
    seed_for,
)


class Trainer:
    """One rank of a run. Everything here is on the training thread; methods that say so are collective."""

    def __init__(self, options: Options, ranks: Ranks, sections: Sections, deterministic: bool) -> None:
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
        if deterministic:
            self.ddp.register_comm_hook(None, rank_order_hook)
        self.schedule = make_schedule(options)
        job_key, attempt = job_identity()
        self._faults = FaultPlan(options.fault, ranks.rank, marker_dir(options), job_key)
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
            self._iterate()
            decision = decide(self.options.exit_plan, self._agreement.ask(self.progress.iteration), self.progress.iteration)
            self._carry_out(decision)
            if decision.leave:
                return self._leave(decision.reason)
        return self._leave("")

    def _iterate(self) -> None:
        iteration = self.progress.iteration + 1
        rsup.worker.set_iteration(iteration)
        lr = self.schedule.at(self.progress.consumed_samples)
        with self.sections.training_step():
            self._faults.at_step(iteration)
            loss, grad_norm = self._train_step(lr)
        self.progress = Progress(iteration, self.progress.consumed_samples + self.options.global_batch_size)
        self._interval.add(loss)
        if iteration % self.options.log_interval == 0 or self._interval.is_first:
            self._log(lr, grad_norm)
        if iteration % self.options.eval_interval == 0:
            self._evaluate()

    def _train_step(self, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.ranks.device)
        for micro in range(options.num_microbatches):
            is_last = micro == options.num_microbatches - 1
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                loss = mean_loss(self.ddp, self._microbatch(micro), options.bf16) / options.num_microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        limit = options.clip_grad or float("inf")
        grad_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        self.optimizer.step()
        return total, grad_norm

    def _microbatch(self, micro: int) -> torch.Tensor:
        options = self.options
        first = self.progress.consumed_samples + micro * options.samples_per_pass + self.ranks.rank * options.micro_batch_size
        return self.training.samples(first, options.micro_batch_size).to(self.ranks.device)

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

    def _log(self, lr: float, grad_norm: torch.Tensor) -> None:
        options, progress = self.options, self.progress
        sums = torch.tensor([self._interval.take_loss()], dtype=torch.float64)
        dist.all_reduce(sums, group=self.ranks.control)
        width = len(str(options.train_iters))
        self.say(
            f" iteration {progress.iteration:{width}d}/{options.train_iters} | consumed samples: {progress.consumed_samples} | "
            f"elapsed time per iteration (ms): {self._interval.take_elapsed_ms():.1f} | learning rate: {lr:.6E} | "
            f"global batch size: {options.global_batch_size} | lm loss: {float(sums) / self.ranks.world_size:.6E} | "
            f"grad norm: {float(grad_norm):.3f} |"
        )

    def _evaluate(self) -> None:
        if not self.options.eval_iters:
            return
        with self._interval.paused():
            loss = evaluate(self.module, self.validation, self.options, self.ranks, self.sections)
        self.say(f" validation loss at iteration {self.progress.iteration} | lm loss value: {loss:.6E} |")

    # --------------------------------------------------------------------------------------------------- checkpoints

    def _make_checkpointer(self, job_key: str, attempt: int) -> Checkpointer | None:
        if self._directory is None:
            return None
        outcome: list[Owner | CheckpointError | None] = [None]
        if self.ranks.rank == 0:
            try:
                outcome = [self._directory.claim(job_key, attempt)]
            except CheckpointError as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, group=self.ranks.saving)
        owner = outcome[0]
        if isinstance(owner, CheckpointError):
            raise owner
        assert owner is not None
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
        record = progress_record(self.progress, self.options, self.training.digest)
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
        self._agreement.close_requests(iteration)
        if self._checkpointer is not None and self._durable_iteration != iteration:
            text = f"no durable checkpoint of iteration {iteration}: {self._failed_save}"
            self.warn(text)
            return 1
        return 0

    def digest(self) -> str:
        """SHA-256 of the parameters; warns if the ranks differ. Collective."""
        mine = parameter_digest(self.module)
        digests = [""] * self.ranks.world_size
        dist.all_gather_object(digests, mine, group=self.ranks.control)
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            self.warn(f"parameters of ranks {different} differ from those of rank 0")
        return mine


class IntervalLog:
    """Loss and time since the last log line; saves and evaluations do not count as time."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._num_logged = 0
        self._count = 0
        self._spent_s = 0.0
        self._since_s = time.monotonic()

    def restart(self) -> None:
        """Begin an interval now."""
        self._spent_s, self._count = 0.0, 0
        self._since_s = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of what is inside."""
        self._spent_s += time.monotonic() - self._since_s
        try:
            yield
        finally:
            self._since_s = time.monotonic()

    def add(self, loss: torch.Tensor) -> None:
        """One iteration more."""
        self._losses.append(loss)
        self._count += 1

    @property
    def is_first(self) -> bool:
        """Nothing has been logged by this process."""
        return self._num_logged == 0

    def take_loss(self) -> float:
        """Mean loss of this rank since the last call; waits for the device."""
        mean = float(torch.stack(self._losses).double().mean())
        self._losses.clear()
        self._num_logged += 1
        return mean

    def take_elapsed_ms(self) -> float:
        """Mean time of an iteration since the last call, in milliseconds."""
        elapsed_s = self._spent_s + time.monotonic() - self._since_s
        count = max(self._count, 1)
        self.restart()
        return elapsed_s / count * 1e3


def make_model(options: Options) -> GPT:
    """The model that the options describe, freshly initialised from torch's generator."""
    return GPT(
        options.num_layers,
        options.hidden_size,
        options.num_attention_heads,
        options.seq_length,
        options.attention_dropout,
        options.hidden_dropout,
    )


def make_optimizer(module: torch.nn.Module, options: Options) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.adam_eps, fused=True)


def make_schedule(options: Options) -> LearningRate:
    """The learning rate that the options describe."""
    decay_samples = options.lr_decay_samples or options.train_iters * options.global_batch_size
    return LearningRate(
        lr=options.lr,
        min_lr=options.min_lr,
        warmup_init=options.lr_warmup_init,
        warmup_samples=options.lr_warmup_samples,
        decay_samples=decay_samples,
        decay_style=options.lr_decay_style,
        wsd_decay_samples=options.lr_wsd_decay_samples or 0,
    )


def marker_dir(options: Options) -> Path | None:
    """Where faults that have struck are remembered: with the checkpoints, else in the runtime directory of this host."""
    if not options.fault:
        return None
    return options.save_dir / "faults-struck" if options.save_dir else runtime_dir() / "faults-struck"


def _report_commit(iteration: int, path: Path, duration_s: float) -> None:
    rsup.worker.report_checkpoint(iteration, str(path), duration_s)
