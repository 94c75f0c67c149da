"""What all ranks agree on after each iteration: exit signals, requests from outside, budget, deadline. One small all-reduce.

Each rank sees a signal or a request at a moment of its own. The maximum over all ranks is what counts, so all act after the
same iteration.
"""

import contextlib
import dataclasses
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import rsup.worker
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.worker.deadline import Deadline
from rsup.worker.exit_policy import Asked, Decision
from rsup.worker.exit_signals import ExitSignals

if TYPE_CHECKING:
    import torch.distributed as dist


class Agreement:
    """What holds for any rank, asked once after each iteration. Everything is on the training thread; `ask` is collective.

    `signals` (None: none are handled), `quiet_signals`: names among them that end the training without a save. `duration_s`:
    time budget of this process. `group`: a gloo group; None: the default one, or none where torch.distributed is not in use.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | None" = None,
        signals: ExitSignals | None = None,
        quiet_signals: Sequence[str] = (),
        duration_s: float | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._group = group
        self._signals = signals
        self._quiet = frozenset(quiet_signals)
        self._duration_s = duration_s
        self.deadline = deadline
        self._taken: set[int] = set()
        self._open: dict[int, int] = {}
        self._failures: dict[int, str] = {}
        self._said_replaced = False
        self._passed_s: float | None = None

    def ask(self, iteration: int) -> Asked:
        """What holds for any rank now. Collective."""
        request = rsup.worker.requested()
        number = _request_number(request.request_id) if request is not None else 0
        if request is not None and number in self._taken:  # seen late: the others have brought us to act on it before
            if number not in self._open:
                rsup.worker.request_done(request.request_id, iteration, self._failures.get(number, ""))
            request, number = None, 0
        received = self._received()
        mine = [
            int(signal.Signals[received]) if received and received not in self._quiet else 0,
            int(signal.Signals[received]) if received in self._quiet else 0,
            int(request is not None and request.leave),
            int(self._duration_s is not None and rank_age_s() > self._duration_s),
            *self._of_deadline(),
            number,
        ]
        saving, quiet, leave, over, near, measure, number = self._maximum(mine)
        if measure and self.deadline is not None:
            self.deadline.measure(time.time())
        if number:
            self._taken.add(number)
            self._open[number] = iteration
        return Asked(
            signal=signal.Signals(saving or quiet).name if saving or quiet else "",
            save=bool(number),
            leave=bool(leave),
            duration_over=bool(over),
            deadline_near=bool(near),
            saves_on_signal=bool(saving) or not quiet,
            measure_save=bool(measure),
        )

    def _received(self) -> str:
        if self._signals is None:
            return ""
        if not self._said_replaced and (names := self._signals.replaced()):
            self._said_replaced = True
            text = f"another handler was put on {', '.join(names)}: rsup does not hear it any more"
            print(f"warning: {text}", file=sys.stderr, flush=True)
            rsup.worker.note("warning", text)
        return self._signals.received

    def _of_deadline(self) -> tuple[int, int]:
        """Whether the end comes too near, and whether to find out how long a save takes; measures the loop's own pace."""
        if self.deadline is None:
            return 0, 0
        now_s = time.monotonic()
        if self._passed_s is not None:
            self.deadline.iterated_in(now_s - self._passed_s)
        self._passed_s = now_s
        measure = self.deadline.should_measure(time.time())
        return int(self.deadline.is_near(time.time()) and not measure), int(measure)

    def explained(self, decision: Decision) -> Decision:
        """The same, with what a decision for the deadline rests on."""
        if decision.kind != "deadline" or self.deadline is None:
            return decision
        return dataclasses.replace(decision, reason=f"{decision.reason}: {self.deadline.text(time.time())}")

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Around a save: the time that it takes is no iteration's. The rest of the iteration counts all the same, so that one
        is measured where every iteration saves."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            if self._passed_s is not None:
                self._passed_s += time.monotonic() - began_s

    def _maximum(self, mine: list[int]) -> list[int]:
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return mine
        agreed = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        found: list[int] = agreed.tolist()
        return found

    def close_requests(self, iteration: int, failure: str = "") -> None:
        """What was asked for up to `iteration` has been done, or could not be, and `failure` says why; tell the agent."""
        closed = {number for number, asked_at in self._open.items() if asked_at <= iteration}
        request = rsup.worker.requested() if closed else None
        if request is not None and _request_number(request.request_id) in closed:
            rsup.worker.request_done(request.request_id, iteration, failure)
        for number in closed:
            del self._open[number]
            if failure:
                self._failures[number] = failure


def _request_number(request_id: str) -> int:
    """A positive 62-bit number for a request id: ranks can take the maximum of numbers."""
    return (int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 2) | 1


def rank_age_s() -> float:
    """Seconds since this process became a rank, start-up included; a machine's sleep counts. The time that it waited as a warm
    standby does not."""
    text = os.environ.get("RSUP_RANK_STARTED_S", "")
    try:
        started_s = float(text)
    except ValueError:
        started_s = process_start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
