"""What becomes of the interruption that NVRx raises in the training thread: a function may swallow it, or raise something else.

NVRx raises it once and then waits; a function that has swallowed it and returned, or raised another exception, would leave its
Wrapper with an internal error. The function has been left, though, and that is what the restart needs.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

from rsup.worker.inprocess.faults import causes

DELIVERED_WITHIN_S = 2.0
SENT_WITHIN_S = 30.0
LOOK_EVERY_S = 0.005


class Interruption:
    """The interruption of one entry. `kind`: NVRx's exception."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self._begun_s = 0.0
        self._sent_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether a fault is known that ends this entry."""
        return bool(self._begun_s)

    def reset(self) -> None:
        """A new entry begins."""
        self._begun_s = self._sent_s = 0.0

    def begin(self) -> None:
        """NVRx's monitor thread knows of a fault."""
        self._sent_s = 0.0
        self._begun_s = time.monotonic()

    def sent(self) -> None:
        """It has raised the interruption in the training thread, which was in Python's code then."""
        self._sent_s = time.monotonic()

    def is_cause_of(self, error: BaseException) -> bool:
        """Whether `error` was raised while the interruption was being handled."""
        return any(isinstance(one, self.kind) for one in causes(error))

    def was_swallowed(self) -> bool:
        """Whether it was raised, and went no further. One that is still on its way is raised in here.

        NVRx raises none before the training thread is back in Python: a rank that stood in a collective for long, and was freed
        by the end of another, comes here first.
        """
        if not self._begun_s:
            return False
        end_s = time.monotonic() + SENT_WITHIN_S
        while not self._sent_s:
            if time.monotonic() > end_s:
                return False
            time.sleep(LOOK_EVERY_S)
        while time.monotonic() < self._sent_s + DELIVERED_WITHIN_S:
            time.sleep(LOOK_EVERY_S)
        return True


_watched: Interruption | None = None


def watch(interruption: Interruption) -> None:
    """Tell `interruption` when NVRx raises it, from now on. Without NVRx's `async_raise` nobody is accused of anything."""
    global _watched
    from nvidia_resiliency_ext.inprocess import monitor_thread

    send = getattr(monitor_thread, "async_raise", None)
    if _watched is None and callable(send):

        def send_and_tell(*arguments: Any, **named: Any) -> Any:
            result = send(*arguments, **named)
            if _watched is not None:
                _watched.sent()
            return result

        monitor_thread.async_raise = send_and_tell
    _watched = interruption


def name_of(function: Callable[..., Any]) -> str:
    """How a person finds `function`: its name, file and line."""
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
