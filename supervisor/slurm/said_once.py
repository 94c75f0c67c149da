"""Log lines about conditions that last: each is said when it begins or changes, not at every look."""

import logging

MAX_KEPT = 4096


class SaidOnce:
    """One thread only."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, str] = {}

    def say(self, about: str, text: str, level: int = logging.WARNING) -> None:
        """Say it, unless it was the last that was said about that."""
        if len(self._said) > MAX_KEPT:
            self._said.clear()
        if self._said.get(about) != text:
            self._said[about] = text
            self._log.log(level, "%s", text)

    def over(self, about: str, text: str = "") -> None:
        """The condition is over; say `text` where it was told of."""
        if self._said.pop(about, "") and text:
            self._log.info("%s", text)
