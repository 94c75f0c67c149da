"""The one owner of exit signals in a process. A handler notes that its signal came, and nothing else.

Handlers stay over the entries of an in-process restart, and so does what was received: whoever asks next (the trainer is built
anew for each entry) takes both over. `release` puts back what was there before the first one, whoever that was.
"""

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from rsup.supervisor.wire import UsageError

_Handler = Any  # what `signal.getsignal` gives

_owner: "ExitSignals | None" = None


class ExitSignals:
    """Notes which of the signals `names` came. Made on the main thread. A later object takes the place of an earlier one."""

    def __init__(self, names: Iterable[str]) -> None:
        global _owner
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("exit signals can only be handled from the main thread: make this object there")
        self._numbers = {int(signal.Signals[name]): name for name in names}
        self._received: list[str] = []
        self._before: dict[int, _Handler] = {}
        before = _owner
        if before is not None:
            self._received = [name for name in before._received if name in self._numbers.values()]
            self._before = before._before
            for number in self._before.keys() - self._numbers.keys():
                signal.signal(number, self._before.pop(number))
        for number in self._numbers:
            found = signal.getsignal(number)
            if number not in self._before:
                self._before[number] = signal.SIG_DFL if found is None else found
            signal.signal(number, self._note)
        if before is not None:
            self._received += [name for name in before._received if name in self._numbers.values()][len(self._received) :]
        _owner = self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(self._numbers[number])

    @property
    def names(self) -> tuple[str, ...]:
        """The signals it listens to."""
        return tuple(self._numbers.values())

    @property
    def received(self) -> str:
        """The name of the first that came; empty: none did."""
        return self._received[0] if self._received else ""

    def replaced(self) -> list[str]:
        """Signals that somebody else has put a handler on since: they are not heard here any more."""
        return [name for number, name in self._numbers.items() if signal.getsignal(number) != self._note]

    def release(self) -> None:
        """Put the handlers back that were there before, and forget what was received. May be repeated."""
        global _owner
        if _owner is not self:
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        _owner = None
