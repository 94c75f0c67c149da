"""Leaving on purpose, for any training loop: when to save, when to leave, the same on all ranks.

    leaving = Leaving(save_interval=500)            # on every rank, after init_process_group
    for iteration in ...:
        train_step()
        todo = leaving.after(iteration)             # 1
        if todo.save:
            with leaving.saving():                  # 2
                save_checkpoint()                   # durable when the block ends
        if todo.leave:
            sys.exit(leaving.leave())               # 3

It answers exit signals on any rank, `rsup stop` and `rsup checkpoint`, intervals, a time budget, the scheduler's deadline and
the end of a phase (`rsup launch --phases`). The decision is in `exit_policy`, what ranks agree on in `agreement`. It works
without a launcher, too.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import rsup.worker
from rsup.worker.agreement import Agreement
from rsup.worker.deadline import Deadline, read_deadline
from rsup.worker.exit_policy import Decision, ExitPlan, decide
from rsup.worker.exit_signals import ExitSignals
from rsup.worker.phases import JobPhase, current_phase

if TYPE_CHECKING:
    import torch.distributed as dist

FAILED_WORD_WITHIN_S = 20.0
"""How long a rank whose save has failed keeps its word ready for the others, and so how long its process outlives the error."""


class Leaving:
    """The same for a loop of your own: plan, agreement, and the report on the way out. See the head of this file.

    `signals`: those that mean save and leave. `can_save` False: there is nowhere to save to, ways out only leave. `group`: a
    gloo group of all ranks; default: one is made. Raises `UsageError` off the main thread, where signals cannot be handled.
    """

    def __init__(
        self,
        save_interval: int | None = None,
        *,
        signals: Sequence[str] = ("SIGTERM",),
        exit_interval: int | None = None,
        exit_duration_in_mins: float | None = None,
        last_iteration: int | None = None,
        can_save: bool = True,
        deadline: Deadline | None = None,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self._group = group if group is not None else _gloo_group()
        self._signals = ExitSignals(signals) if signals else None
        self.phase: JobPhase | None = current_phase()
        """The phase of the job that this attempt is in; None: it has none."""
        ends = (self.phase.until_iteration,) if self.phase is not None and self.phase.until_iteration else ()
        self._plan = ExitPlan(last_iteration, can_save, save_interval, exit_interval, ends)
        duration_s = None if exit_duration_in_mins is None else exit_duration_in_mins * 60
        found = deadline if deadline is not None else read_deadline() if can_save else None
        self._agreement = Agreement(self._group, self._signals, (), duration_s, found)
        self._decision = Decision(False, False, "")
        self._iteration = 0
        self._durable_iteration = -1
        self._consumed_samples = 0
        self._failure = ""
        self._last_word: object = None

    def after(self, iteration: int, consumed_samples: int = 0) -> Decision:
        """What to do after `iteration` (1-based, of the whole job): `save`, then `leave`. Collective, on every rank.

        `consumed_samples`: of the whole job so far, where phases count them.
        """
        rsup.worker.set_iteration(iteration)
        self._agreement.close_requests(self._iteration, self._why_not_saved())
        self._iteration, self._consumed_samples = iteration, consumed_samples
        decision = decide(self._plan, self._agreement.ask(iteration), iteration)
        self._decision = self._agreement.explained(decision)
        return self._decision

    def resumed(self, iteration: int) -> Decision:
        """After a checkpoint of `iteration` iterations was loaded: whether to leave at once, because they are not of this phase
        (an older checkpoint was whole, say). The supervisor then starts the phase that they are of."""
        self._iteration = self._durable_iteration = iteration
        self._decision = Decision(False, False, "")
        if self.phase is not None and (problem := self.phase.problem_at(iteration)):
            self._decision = Decision(False, True, problem, "phase")
        return self._decision

    @contextlib.contextmanager
    def saving(self, path: str = "") -> Iterator[None]:
        """Around a save that is durable once the block has ended on every rank: measured, and reported as `path`. Collective.

        An error in the block on any rank is said and goes on there at once, and the save counts on none. Whoever catches it has
        to do so within `FAILED_WORD_WITHIN_S` of the other ranks' end of the block: else the group is broken.
        """
        began_s = time.monotonic()
        if self._is_first:
            rsup.worker.report_save(self._iteration, "begun", path)
        with self._agreement.standing_still():
            try:
                yield
            except BaseException as error:
                self._say_failed(error, path)
                raise
            all_worked = self._all_worked()
        duration_s = time.monotonic() - began_s
        if all_worked:
            self._has_become_durable(path, duration_s)
        else:
            self._failure = f"the save of iteration {self._iteration} has failed on another rank"
            if self._is_first:
                rsup.worker.report_save(self._iteration, "stood", path, duration_s)

    def _why_not_saved(self) -> str:
        """For a request that is still open when the loop goes on; empty: it was saved."""
        if self._durable_iteration == self._iteration:
            return ""
        return self._failure or f"the loop has reported no durable save of iteration {self._iteration}"

    def _has_become_durable(self, path: str, duration_s: float) -> None:
        self._durable_iteration, self._failure = self._iteration, ""
        if self._agreement.deadline is not None:
            self._agreement.deadline.saved_in(duration_s)
        if self._is_first:
            rsup.worker.report_checkpoint(self._iteration, path, duration_s)
            rsup.worker.report_save(self._iteration, "stood", path, duration_s)
        self._agreement.close_requests(self._iteration)

    def _say_failed(self, error: BaseException, path: str) -> None:
        """At once, because the others may be stuck in the save: with us, or for as long as their group lets them."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        self._failure = f"the save of iteration {self._iteration} has failed: {what}"
        print(f"warning: rank {self._rank}: {self._failure}", file=sys.stderr, flush=True)
        rsup.worker.note("warning", self._failure)
        rsup.worker.report_save(self._iteration, "failed", path, text=what)
        self._tell_others_of_failure()

    def leave(self) -> int:
        """Report the way out, and give the signals back. The exit code: 0; 1 where a save was due and is not durable."""
        decision, iteration = self._decision, self._iteration
        is_durable = self._durable_iteration == iteration
        if self._is_first:
            print(f"leaving after iteration {iteration}: {decision.reason or decision.kind}", flush=True)
            phase = self.phase.number if self.phase is not None else 0
            of_it = (is_durable, self._consumed_samples, phase)
            rsup.worker.report_leaving(iteration, decision.kind or "finished", decision.reason, *of_it)
        self._agreement.close_requests(iteration, self._why_not_saved() if decision.save and not is_durable else "")
        if self._signals is not None:
            self._signals.release()
        return 1 if decision.save and not is_durable else 0

    @property
    def _is_first(self) -> bool:
        return self._rank == 0

    @property
    def _rank(self) -> int:
        import torch.distributed as dist

        return 0 if self._group is None else dist.get_rank()

    def _all_worked(self) -> bool:
        """Whether it went well on the others, too. Collective; a rank where it failed calls `_tell_others_of_failure`."""
        if self._group is None:
            return True
        import torch
        import torch.distributed as dist

        agreed = torch.tensor([1])
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._group)
        return bool(agreed.item())

    def _tell_others_of_failure(self) -> None:
        """Take part in `_all_worked` without waiting. Limited: an exiting process waits for what its group has under way."""
        if self._group is None:
            return
        import torch
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        options.timeout = timedelta(seconds=FAILED_WORD_WITHIN_S)
        with contextlib.suppress(RuntimeError):  # a peer is gone: nobody there to be told
            self._last_word = self._group.allreduce([torch.tensor([0])], options)


def _gloo_group() -> "dist.ProcessGroup | None":
    """A gloo group of all ranks; None where torch.distributed is not in use. Collective."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
