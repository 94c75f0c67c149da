"""What code that is timed sees of timers, and the timers that are off. No torch is needed to import it."""

from collections.abc import Sequence
from typing import Protocol

from rsup.supervisor.wire import RsupError
from rsup.worker.observe.timer_report import NOTHING, GatheredTimes

LOWEST_LEVEL, HIGHEST_LEVEL = 0, 2
"""Level 0: what happens now and then; 1: the parts of a step; 2: the parts of each micro-batch."""


class TimerError(RsupError):
    """A timer is asked for what it cannot do; the message says what to do instead."""


class TimerLike(Protocol):
    """A named timer. One thread; also a context manager, which starts and stops it.

    `barrier`: meet the other ranks first; None: as its level says. A barrier is collective: all ranks or none.
    """

    def start(self, barrier: bool | None = None) -> None: ...

    def stop(self, barrier: bool | None = None) -> None: ...

    def elapsed_s(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds between starts and stops since the last reset; goes on if it runs. 0 for a timer that is off."""
        ...

    def active_s(self) -> float:
        """The same since it was made; no reset clears it."""
        ...

    def set_elapsed(self, elapsed_s: float) -> None:
        """Count what was measured elsewhere, in place of what it has measured since the last reset."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, kind: object, error: object, trace: object, /) -> None: ...


class TimersLike(Protocol):
    """See `rsup.worker.observe.timers.Timers`."""

    @property
    def log_option(self) -> str:
        """What is printed of them, one of `timer_report.OPTIONS`."""
        ...

    def __call__(self, name: str, log_level: int | None = None) -> TimerLike: ...

    def gather(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> GatheredTimes: ...

    def log(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None: ...

    def maxima(self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = False) -> dict[str, float]: ...

    def begin_pass(self) -> None: ...

    def replayed(self) -> None: ...


class OffTimer:
    """A timer that is off: one object for all of them, whose start and stop do nothing."""

    __slots__ = ()

    def start(self, barrier: bool | None = None) -> None:
        pass

    def stop(self, barrier: bool | None = None) -> None:
        pass

    def elapsed_s(self, reset: bool = True, barrier: bool = False) -> float:
        return 0.0

    def active_s(self) -> float:
        return 0.0

    def set_elapsed(self, elapsed_s: float) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        pass


OFF = OffTimer()


class NoTimers:
    """All timers are off, and nothing is reported. No call is collective."""

    log_option = "minmax"

    def __call__(self, name: str, log_level: int | None = None) -> TimerLike:
        return OFF

    def gather(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> GatheredTimes:
        return NOTHING

    def log(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        return None

    def maxima(self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = False) -> dict[str, float]:
        return {}

    def begin_pass(self) -> None:
        pass

    def replayed(self) -> None:
        pass


NO_TIMERS = NoTimers()
