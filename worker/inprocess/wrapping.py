"""`restartable`: NVRx's `inprocess.Wrapper` around a training function, under the supervisor's eyes."""

import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import rsup.worker
from rsup.supervisor import wire
from rsup.worker.inprocess import entry, entry_store, faults, preconditions
from rsup.worker.inprocess.nvrx_log import quiet_nvrx
from rsup.worker.inprocess.settings import InProcessSettings, check_settings
from rsup.worker.session import Session

P = ParamSpec("P")
R = TypeVar("R")


class RestartsOver(wire.RsupError):
    """no further restart inside the processes: WHY; the supervisor starts them anew"""


def restartable(function: Callable[P, R], settings: InProcessSettings | None = None) -> Callable[P, R | None]:
    """`function`, entered again in the same process after a fault of any rank. A rank in reserve returns None.

    The function makes and leaves its process groups itself, resumes from the newest checkpoint, and lets every BaseException
    pass. An `RsupError` of its own ends the process: it would come again. Outside `rsup launch` the function is called once.
    Raises `UsageError` for settings that cannot work, `CannotRestartInProcess` where NVRx is missing or a process group exists
    already, `RestartsOver` when NVRx gives up.
    """
    chosen = settings or InProcessSettings()

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R | None:
        session = rsup.worker.init()
        if not isinstance(session, Session):
            return function(*arguments, **named)
        return _Run(session, chosen).call(lambda: function(*arguments, **named))

    return run


class EntryOver(Exception):
    """The entry has met a fault before this process was in it; its store may be gone."""


class _Leaves(BaseException):
    """An operating error, which the next entry would meet again: this process ends with it."""

    def __init__(self, error: wire.RsupError) -> None:
        super().__init__(str(error))
        self.error = error


class _Run:
    """One call of a restartable function in this process."""

    def __init__(self, session: Session, settings: InProcessSettings) -> None:
        self._session = session
        self._settings = settings
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._death = _take_death()
        self._attempt_store = entry_store.attempt_store()
        self._joins = bool(self._death)
        self._faulted_s = 0.0
        self._own_fault = False
        self._rank = session.rank
        check_settings(settings, self._world_size, self._local_world_size)
        preconditions.set_environment(self._warn)
        preconditions.check(self._warn)
        from nvidia_resiliency_ext.inprocess.monitor_thread import RankShouldRestart

        from rsup.worker.inprocess.job_store import JobStore, hurry
        from rsup.worker.inprocess.peers import Peers

        self._hurry, self._interruption = hurry, RankShouldRestart
        self._store = JobStore(self._attempt_store.host, self._attempt_store.port, joining=bool(self._death))
        self._peers = Peers(self._store, self._world_size, settings, self._warn)
        session.peers_failed = self._peers.hear

    def call(self, function: Callable[[], R]) -> R | None:
        """Enter `function` until it returns on all ranks."""
        from nvidia_resiliency_ext.inprocess.exception import RestartAbort

        def guarded() -> R:  # without parameters: NVRx would put itself in the place of any that is annotated generously
            return self._enter(function)

        gc.freeze()  # what was imported is no garbage: a restart's collection then takes milliseconds
        quiet_nvrx()
        try:
            result: R | None = self._wrapper()(guarded)()
        except RestartAbort as error:
            raise RestartsOver(f"no further restart inside the processes: {error}") from None
        except _Leaves as leaves:
            raise leaves.error from None
        finally:
            self._session.peers_failed = None
            entry.begin(None)
        return result

    def _wrapper(self) -> Any:
        from nvidia_resiliency_ext.inprocess import Compose, Wrapper
        from nvidia_resiliency_ext.inprocess.initialize import RetryController

        from rsup.worker.inprocess.callbacks import AbortGroups, BeginEntry, DeviceAnswers, LeaveEntry
        from rsup.worker.inprocess.job_store import JobStore
        from rsup.worker.inprocess.seats import make_seats

        settings, world_size = self._settings, self._world_size
        limits = RetryController(
            max_iterations=settings.max_iterations, min_active_world_size=settings.active_world_size or world_size
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
                },
                initialize=Compose(BeginEntry(self._begin), limits),  # the last one first
                abort=AbortGroups(self._interrupted),
                finalize=LeaveEntry(self._clean_up, settings.empty_cuda_cache),
                health_check=DeviceAnswers(self._device_failed),
                rank_assignment=make_seats(settings, world_size, self._local_world_size, self._store, self._death),
                **times,
            )

    # ----------------------------------------------------------------------------------------- called in an entry's course

    def _begin(self, state: Any) -> None:
        number = state.iteration + 1
        self._peers.iteration = state.iteration
        self._own_fault = False
        self._rank = state.rank
        took_s = time.monotonic() - self._faulted_s if self._faulted_s else 0.0
        self._faulted_s = 0.0
        self._hurry(False)
        self._attempt_store.use_store_of(number)
        if self._peers.is_over():
            raise EntryOver(f"another rank has ended entry {number} before this one was in it")  # NVRx goes on to the next
        joined, self._joins = self._joins, False
        entry.begin(entry.Entry(number, state.active_rank, state.active_world_size, joined))
        self._session.send(wire.RankEntered(number, joined, took_s, self._settings.reserves(self._world_size)))

    def _enter(self, function: Callable[[], R]) -> R:
        try:
            result = function()
        except wire.RsupError as error:
            faults.drop_frames(error)
            self._let_go()
            raise _Leaves(error) from None
        except Exception as error:
            self._note_time()
            self._own_fault = True
            faults.report_exception(error, self._rank, self._number, self._session.iteration)
            faults.drop_frames(error)
            self._peers.record_exception(self._rank)
            raise
        except BaseException as error:
            faults.drop_frames(error)
            if not isinstance(error, self._interruption):
                self._let_go()
            raise
        self._hurry(True)
        return result

    def _let_go(self) -> None:
        """This process leaves for good: close its process groups, in which others wait for it. NVRx has no step for that."""
        from rsup.worker.inprocess.callbacks import destroy_groups

        destroy_groups()
        gc.collect()

    @property
    def _number(self) -> int:
        return self._peers.iteration + 1

    def _note_time(self) -> None:
        self._faulted_s = self._faulted_s or time.monotonic()

    def _interrupted(self) -> None:
        """In NVRx's monitor thread: the training thread may be stuck for good, so what frees it comes first."""
        self._note_time()
        current = entry.current_entry()
        try:
            if current is not None:
                current.abort()
        finally:
            self._attempt_store.entry_over(self._number)
        if not self._own_fault and self._peers.timed_out(self._rank):
            text = f"no sign of progress for {self._settings.soft_timeout:g} s"
            iteration = self._session.iteration
            faults.report(wire.RankFault(self._number, "soft-timeout", text, signature="soft-timeout", iteration=iteration))

    def _clean_up(self) -> None:
        current = entry.current_entry()
        if current is not None:
            try:
                current.clean_up()
            except Exception as error:
                faults.report(wire.RankFault(self._number, "finalize", str(error), signature=faults.signature(str(error))))
                raise

    def _device_failed(self, text: str) -> None:
        faults.report(wire.RankFault(self._number, "health-check", text, signature=faults.signature(text)))

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
