"""What an option is, and how a flag that was typed is found among them.

The tables in `torchrun_options`, `own_options` and `ft_options` are made of `Option`s; parser, `--help` and `docs/options.md`
all read them, so that they cannot differ.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from rsup.supervisor.wire import UsageError

TORCHRUN = "torchrun's options"
OURS = "rsup's own options"
HANG_LIMITS = "Hang limits and other options of ft_launcher"
NO_EFFECT = "Options of ft_launcher without effect"


class CommandLineError(UsageError):
    """What torchrun's parser exits with 2 for: an unknown option, a missing value, a word for a number."""


class BadValue(UsageError, ValueError):
    """A value that makes no sense, by itself or with others."""


class BadNodeRange(UsageError, RuntimeError):
    """`--nnodes` with three parts; torchrun's error is a RuntimeError too."""


@dataclass(frozen=True)
class Option:
    """One option of `rsup launch`. All values are text here, as typed; `OptionValues` gives them their types."""

    flags: tuple[str, ...]
    """The flag as documented, then a short one and other names. `-` and `_` are alike in all of them."""
    meaning: str
    default: str | None = None
    """None: unset."""
    shown_default: str = ""
    """For people, where `default` does not say it."""
    is_switch: bool = False
    """Takes no value; its values are `1` and `0`."""
    env: str = ""
    choices: tuple[str, ...] = ()
    joins: bool = False
    """Repeats add up, joined by commas; else the last one counts."""
    no_effect: str = ""
    """Accepted without effect, and why."""
    group: str = OURS

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def dest(self) -> str:
        """Its key, as argparse would name it: `--log-dir` is `log_dir`."""
        return self.flags[0].lstrip("-").replace("-", "_")


def bare(flag: str) -> str:
    """A flag's name, `_` and `-` made alike; NVRx's old `--ft-param-x` is `--ft-x`."""
    dashes = "--" if flag.startswith("--") else "-"
    name = flag.removeprefix(dashes).replace("_", "-")
    return dashes + ("ft-" + name.removeprefix("ft-param-") if name.startswith("ft-param-") else name)


@dataclass(frozen=True)
class OptionIndex:
    """Finds options by their flags, by abbreviation too.

    torchrun's options are looked at first: an abbreviation that torchrun takes means the same here, whatever we have added.
    """

    options: Sequence[Option]
    by_flag: dict[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option in self.options:
            for flag in option.flags:
                assert bare(flag) not in self.by_flag, f"{flag} is twice in the tables"
                self.by_flag[bare(flag)] = option

    def exact(self, flag: str) -> Option | None:
        """The option with this very flag."""
        return self.by_flag.get(bare(flag))

    def find(self, flag: str) -> Option:
        """The option that `flag` names or abbreviates. Raise `CommandLineError` if there is none, or more than one."""
        found = self.exact(flag)
        if found is not None:
            return found
        matches = self._abbreviated(flag, TORCHRUN) or self._abbreviated(flag, None)
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = " or ".join(option.flag for option in matches)
            raise CommandLineError(f"ambiguous option {flag}: {names}? Write it out")
        raise CommandLineError(f"unknown option {flag}{self._suggestion(flag)}; options of the script go after the script")

    def _abbreviated(self, flag: str, group: str | None) -> list[Option]:
        if not flag.startswith("--") or len(flag) < 3:
            return []
        candidates = [option for name, option in self.by_flag.items() if name.startswith(bare(flag)) and name.startswith("--")]
        return list({o.flag: o for o in candidates if group is None or o.group == group}.values())

    def _suggestion(self, flag: str) -> str:
        return did_you_mean(bare(flag), [name for name in self.by_flag if name.startswith("--")])


def did_you_mean(word: str, words: Sequence[str]) -> str:
    """`: did you mean X?` where one of `words` is near, else nothing."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.7)
    return f": did you mean {near[0]}?" if near else ""
