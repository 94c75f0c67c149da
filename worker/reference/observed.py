"""What watches a step of the reference trainer from within: timers, the straggler detector, dumps. Each may be an idle twin."""

from dataclasses import dataclass
from typing import Protocol

from rsup.supervisor.wire import StragglerReport
from rsup.worker.observe.dump_plan import NO_DUMPS, Dumps
from rsup.worker.observe.timer_contract import NO_TIMERS, OFF, TimerLike, TimersLike


class StragglerLike(Protocol):
    """See `rsup.worker.observe.straggler.StragglerDetector`."""

    def timer(self, name: str) -> TimerLike | None:
        """What measures the section `name` for it; None for one that it does not look at."""
        ...

    def report(self, iteration: int) -> StragglerReport | None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def begin_pass(self) -> None: ...

    def replayed(self) -> None: ...

    def close(self) -> None: ...


class _NoStraggler:
    """No detector."""

    def timer(self, name: str) -> TimerLike | None:
        return None

    def report(self, iteration: int) -> StragglerReport | None:
        return None

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def begin_pass(self) -> None:
        pass

    def replayed(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_STRAGGLER = _NoStraggler()


@dataclass
class Observed:
    """Made before the stepper, which asks for its timers once."""

    timers: TimersLike = NO_TIMERS
    straggler: StragglerLike = NO_STRAGGLER
    dumps: Dumps = NO_DUMPS

    def timer(self, name: str, level: int) -> TimerLike:
        """What is to be started and stopped at the place of that name: for the timers, the detector, both or nobody. Ask once,
        and keep it."""
        return joined(self.timers(name, level), self.straggler.timer(name))

    def begin_pass(self) -> None:
        """Forward and backward of a step begin, on the host: run, or captured."""
        self.timers.begin_pass()
        self.straggler.begin_pass()

    def replayed(self) -> None:
        """A pass was launched as a graph, or run where there is none yet."""
        self.timers.replayed()
        self.straggler.replayed()


def joined(first: TimerLike, second: TimerLike | None) -> TimerLike:
    """Both as one; what is asked is answered by the first."""
    if second is None:
        return first
    return second if first is OFF else _Both(first, second)


class _Both:
    """Two timers of one place; `inner` starts last and stops first."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: TimerLike, inner: TimerLike) -> None:
        self._outer = outer
        self._inner = inner

    def start(self, barrier: bool | None = None) -> None:
        self._outer.start(barrier)
        self._inner.start(False)

    def stop(self, barrier: bool | None = None) -> None:
        self._inner.stop(False)
        self._outer.stop(barrier)

    def elapsed_s(self, reset: bool = True, barrier: bool = False) -> float:
        return self._outer.elapsed_s(reset, barrier)

    def active_s(self) -> float:
        return self._outer.active_s()

    def set_elapsed(self, elapsed_s: float) -> None:
        self._outer.set_elapsed(elapsed_s)

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self._inner.__exit__(kind, error, trace)
        self._outer.__exit__(kind, error, trace)


class StepTimers:
    """The timers of a step, by the names and at the places of Megatron-LM's."""

    def __init__(self, observed: Observed) -> None:
        self.forward_backward = observed.timer("forward-backward", 1)
        self.batch_generator = observed.timer("batch-generator", 2)
        self.forward = observed.timer("forward-compute", 2)
        self.backward = observed.timer("backward-compute", 2)
        self.optimizer = observed.timer("optimizer", 1)
        self.unscale = observed.timer("optimizer-unscale-and-check-inf", 1)
        self.clip = observed.timer("optimizer-clip-main-grad", 1)
        self.inner_step = observed.timer("optimizer-inner-step", 1)
