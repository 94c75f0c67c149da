"""The values that the checks of one pass hand in, kept on the device and read all at once when the pass is over."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rsup.worker.rerun.contract import Checked, Compare, RerunError
from rsup.worker.rerun.values import as_value, read_values


@dataclass(frozen=True)
class Rule:
    """One way in which a value can be wrong. `reject` gets the value as a float; `label` names what it found."""

    label: str
    reject: Callable[[float], bool]
    fatal: bool = True


@dataclass(frozen=True)
class _Entry:
    check: str
    rules: tuple[Rule, ...]
    tolerance: float
    compare: Compare | None


@dataclass(frozen=True)
class Judged:
    """A value of the pass with the labels of the rules that reject it."""

    checked: Checked
    labels: tuple[str, ...] = ()


class PassLog:
    """The checks of one pass of one rank. A check is known by its message and how often that came before in the pass, so the
    order of different messages does not matter."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._values: list[torch.Tensor | float] = []
        self._times: dict[str, int] = {}

    def add(
        self, message: str, result: object, rules: tuple[Rule, ...], tolerance: float = 0.0, compare: Compare | None = None
    ) -> str:
        """Take a value in, without waiting for the device; return the check's name. Raise `RerunError` for no scalar."""
        value = as_value(result)
        count = self._times[message] = self._times.get(message, 0) + 1
        check = message if count == 1 else f"{message} #{count}"
        self._entries.append(_Entry(check, rules, tolerance, compare))
        self._values.append(value)
        return check

    def read(self) -> list[Judged]:
        """All values, with what the rules say to them. One copy from the device. Raise `RerunError` for a rule that raises."""
        return [_judge(entry, value) for entry, value in zip(self._entries, read_values(self._values), strict=True)]


def _judge(entry: _Entry, value: float) -> Judged:
    broken = []
    for rule in entry.rules:
        try:
            if rule.reject(value):
                broken.append(rule)
        except Exception as error:
            text = f"the check {entry.check!r} raised {type(error).__name__} for {value!r}: {error}"
            raise RerunError(text) from error
    fatal = any(rule.fatal for rule in broken) if broken else any(rule.fatal for rule in entry.rules)
    checked = Checked(entry.check, value, bool(broken), fatal, entry.tolerance, entry.compare)
    return Judged(checked, tuple(rule.label for rule in broken))
