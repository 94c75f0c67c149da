"""`restartable`: NVRx's `inprocess.Wrapper` around a training function, under the supervisor's eyes."""

import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, TypeVar

import rsup.worker
from rsup.supervisor import wire
from rsup.worker.inprocess import entry, entry_store, faults, preconditions
from rsup.worker.inprocess.interruption import Interruption, name_of, watch
from rsup.worker.inprocess.nvrx_log import quiet_nvrx
from rsup.worker.inprocess.settings import InProcessSettings, check_settings
from rsup.worker.inprocess.timings import RestartTimings
from rsup.worker.inprocess.torch_log import only_errors
from rsup.worker.session import Session

ENDS_WITHIN_S = 2.0
"""A killed process, as others see it."""

P = ParamSpec("P")
R = TypeVar("R")


class RestartsOver(wire.RsupError):
    """no further restart inside the processes: WHY; the supervisor starts them anew"""


class CannotLeaveEntry(wire.RsupError):
    """this process cannot let go of an entry: WHY; it ends, and another takes its place"""


def restartable(function: Callable[P, R], settings: InProcessSettings | None = None) -> Callable[P, R | None]:
    """`function`, entered again in the same process after a fault of any rank. A rank in reserve returns None.

    The function makes and leaves its process groups itself, resumes from the newest checkpoint, and lets every BaseException
    pass. An `RsupError` of its own ends the attempt, unless it is of a kind that may pass: it would come again. Outside `rsup
    launch` the function is called once. Raises `UsageError` for settings that cannot work, `CannotRestartInProcess` where NVRx
    is missing or a process group exists already, `RestartsOver` when NVRx gives up, `CannotLeaveEntry` where an entry stays.
    """
    chosen = settings or InProcessSettings()

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R | None:
        session = rsup.worker.init()
        if not isinstance(session, Session):
            return function(*arguments, **named)
        return _Run(session, chosen, name_of(function)).call(lambda: function(*arguments, **named))

    return run


class EntryOver(Exception):
    """The entry has met a fault before this process was in it; its store may be gone."""


class _Leaves(BaseException):
    """An operating error, which the next entry would meet again: this process ends with it."""

    def __init__(self, error: wire.RsupError) -> None:
        super().__init__(str(error))
        self.error = error


class _Run:
    """One call of a restartable function in this process. `name`: what people call the function."""

    def __init__(self, session: Session, settings: InProcessSettings, name: str) -> None:
        self._session = session
        self._settings = settings
        self._name = name
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._death = _take_death()
        self._attempt_store = entry_store.attempt_store()
        self._joins = bool(self._death)
        self._own_fault = False
        self._lost_peer, self._was_hang = "", False
        self._stays = ""
        self._stand = faults.Stand(traceback.StackSummary())
        self._rank = session.rank
        check_settings(settings, self._world_size, self._local_world_size)
        preconditions.set_environment(self._warn)
        preconditions.check(self._warn)
        from nvidia_resiliency_ext.inprocess.monitor_thread import RankShouldRestart

        from rsup.worker.inprocess.groups import OldGroups
        from rsup.worker.inprocess.job_store import JobStore, hurry
        from rsup.worker.inprocess.leftovers import Leftovers
        from rsup.worker.inprocess.monitor import HardLimit
        from rsup.worker.inprocess.peers import Peers

        self._hurry = hurry
        self._interruption = Interruption(RankShouldRestart)
        watch(self._interruption)
        self._timings = RestartTimings()
        self._groups = OldGroups(self._timings)
        self._store = JobStore(self._attempt_store.host, self._attempt_store.port, joining=bool(self._death))
        self._peers = Peers(self._store, self._world_size, settings, self._warn)
        self._hard_limit = HardLimit(session.send_from_fork, settings.hard_timeout)
        self._leftovers = Leftovers(self._store, self._say, self._end_now, settings.hard_timeout)
        session.peers_failed = self._peers.hear

    def call(self, function: Callable[[], R]) -> R | None:
        """Enter `function` until it returns on all ranks."""
        from nvidia_resiliency_ext.inprocess.exception import RestartAbort

        def guarded() -> R:  # without parameters: NVRx would put itself in the place of any that is annotated generously
            try:
                return self._enter(function)
            except BaseException as error:  # an interruption may have come while another error was being told
                faults.drop_frames(error)
                raise

        preconditions.import_early()
        gc.freeze()  # what was imported is no garbage: a restart's collection then takes milliseconds
        quiet_nvrx()
        only_errors()
        try:
            result: R | None = self._wrapper()(guarded)()
        except RestartAbort as error:
            raise RestartsOver(f"no further restart inside the processes: {error}") from None
        except _Leaves as leaves:
            raise leaves.error from None
        except Exception:
            if not self._stays:
                raise
            raise CannotLeaveEntry(f"{self._stays}; this process ends, and another takes its place") from None
        finally:
            self._session.peers_failed = None
            entry.begin(None)
        return result

    def _wrapper(self) -> Any:
        from nvidia_resiliency_ext.inprocess import Compose, Wrapper, wrap
        from nvidia_resiliency_ext.inprocess.initialize import RetryController

        from rsup.worker.inprocess.callbacks import AbortGroups, BeginEntry, DeviceAnswers, LeaveEntry, NoGarbage
        from rsup.worker.inprocess.job_store import JobStore
        from rsup.worker.inprocess.seats import make_seats

        settings, world_size, mark = self._settings, self._world_size, self._timings.mark
        wrap.gc = NoGarbage
        limits = RetryController(
            max_iterations=settings.max_iterations, min_active_world_size=settings.active_world_size or world_size
        )
        have_met = functools.partial(mark, "all ranks have left")
        seats = make_seats(settings, world_size, self._local_world_size, self._store, self._death, have_met)
        leave = LeaveEntry(
            self._groups,
            self._timings,
            left=self._left,
            clean_up=self._clean_up,
            keeps=self._leftovers.kept,
            failed=self._entry_stays,
            empty_cuda_cache=settings.empty_cuda_cache,
        )
        with preconditions.without("LOCAL_RANK"):
            times: dict[str, Any] = {name: timedelta(seconds=getattr(settings, name)) for name in _TIMES}
            # NVRx's monitor looks at the timeouts only when nothing has come for so long, and a stamp comes at every interval
            often = times["progress_watchdog_interval"] / 2
            times["monitor_process_interval"] = min(times["monitor_process_interval"], often)
            return Wrapper(
                store_factory=JobStore,
                store_kwargs={
                    "host": self._attempt_store.host,
                    "port": self._attempt_store.port,
                    "joining": bool(self._death),
                    "rank_pid": os.getpid(),
                },
                initialize=Compose(BeginEntry(self._begin), limits),  # the last one first
                abort=AbortGroups(self._groups, self._unblock, self._tell_interrupted),
                finalize=leave,
                health_check=DeviceAnswers(self._device_failed, functools.partial(mark, "devices answer")),
                rank_assignment=seats,
                **times,
            )

    # ----------------------------------------------------------------------------------------- called in an entry's course

    def _begin(self, state: Any) -> None:
        from rsup.worker.inprocess.newcomers import meet_newcomers

        number = state.iteration + 1
        self._timings.mark("next iteration of NVRx")
        self._peers.iteration = state.iteration
        self._own_fault = False
        self._rank = state.rank
        self._hard_limit.note(waits=False)
        if self._lost_peer and not self._was_hang:
            print(self._lost_peer, file=sys.stderr, flush=True)
        self._lost_peer, self._was_hang = "", False
        self._hurry(False)
        if not self._settings.reserves(self._world_size):  # else they take dead ranks' places
            meet_newcomers(self._store, state)
            self._timings.mark("new processes")
        self._attempt_store.use_store_of(number)
        if self._peers.is_over():
            raise EntryOver(f"another rank has ended entry {number} before this one was in it")  # NVRx goes on to the next
        self._timings.mark("store of the entry")
        took_s, timings = self._timings.end()
        joined, self._joins = self._joins, False
        entry.begin(entry.Entry(number, state.active_rank, state.active_world_size, joined, timings))
        self._session.send(wire.RankEntered(number, joined, took_s, self._settings.reserves(self._world_size)))

    def _enter(self, function: Callable[[], R]) -> R:
        try:
            result = function()
        except Exception as error:
            raise self._ended_by(error) from None
        except BaseException as error:
            faults.drop_frames(error)
            if not isinstance(error, self._interruption.kind):
                if self._interruption.is_cause_of(error):
                    self._say(f"{self._name} made {type(error).__name__} of the interruption: this process ends with it")
                self._let_go()
            raise
        if self._interruption.was_swallowed():
            raise self._swallowed("returned")
        self._hurry(True)
        return result

    def _ended_by(self, error: Exception) -> BaseException:
        """The exception to raise for one that ended the function."""
        is_over = self._interruption.is_under_way
        if self._interruption.is_cause_of(error):
            faults.drop_frames(error)
            return self._swallowed(f"raised {type(error).__name__} in its place: {str(error)[:200]}")
        if isinstance(error, wire.RsupError) and not is_over and not self._peers.is_over() and not faults.may_pass(error):
            self._leave_with(error)
        self._timings.begin()
        self._own_fault = True
        self._lost_peer = faults.report_exception(error, self._rank, self._number, self._session.iteration)
        faults.drop_frames(error)
        self._peers.record_exception(self._rank)
        if is_over and self._interruption.was_swallowed():
            return self._swallowed("went on")
        return error

    def _swallowed(self, what: str) -> BaseException:
        """The interruption once more: the function has been left, which is what a restart needs."""
        self._say(
            f"{self._name} was interrupted for a restart and {what}: it must let every BaseException pass;"
            f" entry {self._number} is over all the same, in-process restart follows"
        )
        return self._interruption.kind()

    def _leave_with(self, error: wire.RsupError) -> NoReturn:
        """End this process, and the attempt with it: the next entry would meet the error again."""
        faults.drop_frames(error)
        self._session.send(wire.RankDeclares(error.exit_code, wire.clip(str(error), 4096)))
        self._let_go()
        raise _Leaves(error) from None

    def _let_go(self) -> None:
        """This process leaves for good: close its process groups, in which others wait for it. NVRx has no step for that."""
        from rsup.worker.inprocess.callbacks import close_groups

        try:
            problem = close_groups(self._groups)
        except self._interruption.kind:  # of a rank that this one's leaving has interrupted: it leaves all the same
            problem = ""
        if problem:  # the end of the process closes them, too
            self._say(f"while leaving: {problem}")

    @property
    def _number(self) -> int:
        return self._peers.iteration + 1

    def _unblock(self) -> None:
        """In NVRx's monitor thread: the training thread may be stuck for good, so what frees it comes first."""
        self._timings.begin()
        self._stand = faults.stand_of_main_thread()
        self._interruption.begin()
        current = entry.current_entry()
        if current is not None:
            current.abort()

    def _tell_interrupted(self) -> None:
        """In the same thread, while NCCL's communicators are being aborted."""
        self._attempt_store.entry_over(self._number)
        if not self._own_fault and self._peers.timed_out(self._rank):
            self._tell_of_hang(self._stand)

    def _tell_of_hang(self, stand: faults.Stand) -> None:
        self._was_hang = True
        self._hard_limit.note(stand.waits)
        settings = self._settings
        faults.report(faults.soft_timeout(stand, self._number, self._session.iteration, settings.soft_timeout))
        if stand.waits:
            # where all wait for each other, which gloo cannot be freed from, the end of one frees the others
            more_s = 0.0 if self._rank == self._world_size - 1 else settings.termination_grace_time + ENDS_WITHIN_S
            left_s = settings.hard_timeout - settings.soft_timeout
            self._hard_limit.begins_anew(settings.progress_watchdog_interval, left_s, more_s)

    def _left(self, state: Any) -> None:
        self._interruption.reset()
        self._leftovers.left(state)

    def _clean_up(self) -> None:
        current = entry.current_entry()
        if current is not None:
            current.clean_up()

    def _entry_stays(self, error: Exception) -> None:
        self._stays = f"entry {self._number} cannot be left: {error}"
        faults.report(wire.RankFault(self._number, "finalize", str(error), signature=faults.signature(str(error))))

    def _device_failed(self, text: str) -> None:
        self._stays = f"its GPU does not answer: {text}"
        faults.report(wire.RankFault(self._number, "health-check", text, signature=faults.signature(text)))

    # --------------------------------------------------------------------------------------------------------- what is said

    def _end_now(self, text: str) -> NoReturn:
        """End this process without NVRx's barriers, whose other ranks wait for what only its end closes."""
        faults.report(wire.RankFault(self._number, "finalize", text, signature=faults.signature(text)))
        self._say(text)
        self._session.flush(1.0)
        os._exit(1)

    def _say(self, text: str) -> None:
        print(f"rsup: rank {self._rank}: {text}", file=sys.stderr, flush=True)
        self._session.send(wire.RankNote("warning", wire.clip(f"rank {self._rank}: {text}", 4096)))

    def _warn(self, text: str) -> None:
        if self._session.rank == 0:
            print(f"rsup: warning: {text}", file=sys.stderr, flush=True)
        self._session.send(wire.RankNote("warning", wire.clip(text, 4096)))


_TIMES = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "last_call_wait",
    "termination_grace_time",
)


def _take_death() -> int:
    """Which death of its rank this process makes good; 0 for one that was there from the start, and at a second call.

    The variable stays: a script that changes its environment before it imports torch is no good for a warm standby.
    """
    global _has_joined
    death = 0 if _has_joined else int(os.environ.get("RSUP_JOIN", "0"))
    _has_joined = True
    return death


_has_joined = False
