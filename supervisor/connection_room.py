"""Room for connections: who only holds one makes place for who asks something. Standard library only.

Anybody who reaches a port may open connections to it without a credential, and send nothing. So each is open for `ARRIVE_S` at
most until a request has come whole, and where there are too many, the one that has waited longest without one is closed. A
request that is being answered is left alone, unless its answer has not been taken for `TAKE_S`.
"""

import asyncio
import time
from typing import Protocol

ARRIVE_S = 15.0
TAKE_S = 30.0
MAX_CONNECTIONS = 512


class Connection(Protocol):
    """What has room here."""

    def cut(self) -> None:
        """End it at once, whatever it was about."""
        ...


class Room:
    """Of one listening socket. All calls come from the thread of the running event loop."""

    def __init__(self, size: int = MAX_CONNECTIONS, arrive_s: float = ARRIVE_S, take_s: float = TAKE_S) -> None:
        self._size, self._arrive_s, self._take_s = size, arrive_s, take_s
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}
        """The one that has waited longest is the first."""
        self._answered: dict[Connection, float] = {}
        """Since when, monotonic; the first has been answered for longest."""

    def enter(self, one: Connection) -> bool:
        """A connection has come; False: there is no room for it."""
        if len(self._waiting) + len(self._answered) >= self._size and not self._make_room():
            return False
        self.waits(one)
        return True

    def waits(self, one: Connection) -> None:
        """It has no request that has come whole; said again before one has: nothing."""
        if one not in self._waiting:
            self._answered.pop(one, None)
            self._waiting[one] = asyncio.get_running_loop().call_later(self._arrive_s, self._cut, one)

    def is_answered(self, one: Connection) -> None:
        """A request of it has come whole."""
        self._forget_waiting(one)
        self._answered.pop(one, None)
        self._answered[one] = time.monotonic()

    def leave(self, one: Connection) -> None:
        """It has ended, or never had room."""
        self._forget_waiting(one)
        self._answered.pop(one, None)

    def _make_room(self) -> bool:
        if self._waiting:
            self._cut(next(iter(self._waiting)))
            return True
        one, since_s = next(iter(self._answered.items()))
        if time.monotonic() - since_s < self._take_s:
            return False
        self._cut(one)
        return True

    def _cut(self, one: Connection) -> None:
        self.leave(one)
        one.cut()

    def _forget_waiting(self, one: Connection) -> None:
        timer = self._waiting.pop(one, None)
        if timer is not None:
            timer.cancel()
