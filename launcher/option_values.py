"""Typed access to options that were given as text; every refusal names the option as the user gave it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from rsup.launcher.command_line import FALSE_WORDS, TRUE_WORDS, Setting
from rsup.launcher.option_table import BadValue, CommandLineError, Option, OptionIndex, did_you_mean
from rsup.supervisor.wire import UsageError

LARGEST_INTEGER = 2**31 - 1
UNLIMITED_WORDS = ("none", "null", "")


@dataclass(frozen=True)
class OptionValues:
    """Settings over the table's defaults. Every method takes an `Option.dest` and raises `UsageError`."""

    index: OptionIndex
    settings: Mapping[str, Setting]
    notes: list[str] = field(default_factory=list)
    """Lines for the terminal; whoever interprets an option may add to them."""

    def option(self, dest: str) -> Option:
        found = self.index.exact("--" + dest)
        assert found is not None, dest
        return found

    def given(self, dest: str) -> bool:
        """Whether the user gave it, rather than the default."""
        return self.option(dest).dest in self.settings

    def fail(self, dest: str, why: str, kind: type[UsageError] = BadValue) -> NoReturn:
        """Refuse the option's value: `why` says what is wrong and what to do."""
        setting = self.settings.get(dest)
        if setting and ("$(" in setting.text or "${" in setting.text):
            why += f"; nothing has filled in the variable in {setting.text}"
        raise kind(f"{setting.source if setting else self.option(dest).flag}: {why}")

    def _misread(self, dest: str, why: str) -> NoReturn:
        """Refuse what is not even of the option's type."""
        self.fail(dest, why, CommandLineError)

    def maybe_text(self, dest: str) -> str | None:
        """The text, checked against the option's choices; None if it is unset."""
        setting = self.settings.get(dest)
        value = setting.text if setting else self.option(dest).default
        choices = self.option(dest).choices
        if value is not None and choices and value not in choices:
            self._misread(dest, f"must be one of {', '.join(choices)}{did_you_mean(value, choices)}")
        return value

    def text(self, dest: str) -> str:
        value = self.maybe_text(dest)
        assert value is not None, f"{dest} has no default"
        return value

    def switch(self, dest: str) -> bool:
        value = self.text(dest).strip().lower()
        if value not in TRUE_WORDS + FALSE_WORDS:
            self._misread(dest, "must be 1 or 0, true or false")
        return value in TRUE_WORDS

    def integer(self, dest: str, at_least: int = 0, at_most: int = LARGEST_INTEGER, hint: str = "") -> int:
        """A whole number within bounds; `hint` is added to what a refusal says."""
        try:
            value = int(self.text(dest))
        except ValueError:
            self._misread(dest, "must be a whole number")
        if not at_least <= value <= at_most:
            self.fail(dest, (f"must be at least {at_least}" if value < at_least else f"must be at most {at_most}") + hint)
        return value

    def seconds(self, dest: str, above: float | None = None) -> float:
        """A time of at least 0, or of more than `above`."""
        return self.number(dest, self.text(dest), 0.0, above)

    def maybe_seconds(self, dest: str, above: float | None = None) -> float | None:
        """As `seconds`; None where it is unset, or `none`, `null` or empty."""
        value = self.maybe_text(dest)
        if value is None or value.strip().lower() in UNLIMITED_WORDS:
            return None
        return self.number(dest, value, 0.0, above)

    def number(self, dest: str, text: str, at_least: float, above: float | None = None) -> float:
        """`text`, which is or is part of the option's value, as a finite number within bounds."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self._misread(dest, f"{text!r} is not a number" if text != self.maybe_text(dest) else "must be a number")
        if above is not None and value <= above:
            self.fail(dest, f"must be more than {above:g}")
        if value < at_least:
            self.fail(dest, f"must be at least {at_least:g}")
        return value
