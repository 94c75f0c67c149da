"""Splits `rsup launch`'s arguments into our options and the script with its own, before anything is interpreted.

The script is the first word that is neither an option nor an option's value, or the word after `--`. From there on nothing is
ours, whatever it looks like: `s.py --r=16` and `s.py -- --foo` reach the script verbatim. Only the `--` before the script is
dropped. (torchrun reads on: it takes `--r=16` for an ambiguous `--rdzv-...` and eats the later `--`.)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsup.launcher.option_table import CommandLineError, Option, OptionIndex

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Setting:
    """An option's value as text, and how it was given: `--nproc 2`, `PET_NNODES=2`, `ft.yaml: safety_factor`."""

    text: str
    source: str


@dataclass(frozen=True)
class CommandLine:
    """Our options by `Option.dest`, and the script with its arguments (empty if none was given)."""

    settings: dict[str, Setting]
    command: tuple[str, ...]
    wants_help: bool = False


def read_command_line(argv: Sequence[str], index: OptionIndex) -> CommandLine:
    """Raise `CommandLineError` for an unknown or ambiguous option left of the script, and for a value too many or too few."""
    settings: dict[str, Setting] = {}
    words = list(argv)
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return CommandLine(settings, tuple(words[at + 1 :]))
        if not _looks_like_option(word, index):
            break
        if word in ("-h", "--help"):
            return CommandLine(settings, (), wants_help=True)
        option, value, rest = _take_option(word, index)
        at += 1
        if rest:
            words.insert(at, rest)
        if not option.is_switch and value is None:
            value = _following_value(word, words[at : at + 1], index)
            at += 1
        _store(settings, option, word, value)
    return CommandLine(settings, tuple(words[at:]))


def read_environment(environ: Mapping[str, str], options: Sequence[Option]) -> dict[str, Setting]:
    """Settings of the `PET_*` and `RSUP_*` variables; an empty variable counts as unset."""
    return {
        option.dest: Setting(environ[option.env], f"{option.env}={environ[option.env]}")
        for option in options
        if option.env and environ.get(option.env)
    }


def _take_option(word: str, index: OptionIndex) -> tuple[Option, str | None, str]:
    """The option a word begins with, its value if the word holds it, and the flags left over of `-mr3`."""
    if word.startswith("--"):
        flag, equals, value = word.partition("=")
        option = index.find(flag)
        if equals and option.is_switch:
            raise CommandLineError(f"{flag} takes no value; leave out ={value}")
        return option, value if equals else None, ""
    option = index.find(word[:2])
    if option.is_switch:
        return option, None, "-" + word[2:] if len(word) > 2 else ""
    return option, word[2:].removeprefix("=") if len(word) > 2 else None, ""


def _following_value(word: str, following: list[str], index: OptionIndex) -> str:
    if not following or following[0] == "--" or _looks_like_option(following[0], index):
        raise CommandLineError(f"{word} needs a value; write {word} VALUE or {word}=VALUE")
    return following[0]


def _looks_like_option(word: str, index: OptionIndex) -> bool:
    """As argparse: negative numbers, words with a space and a lone `-` are no options."""
    if not word.startswith("-") or word == "-":
        return False
    if index.exact(word.partition("=")[0]):
        return True
    return not re.fullmatch(r"-\d+|-\d*\.\d+", word) and " " not in word.partition("=")[0]


def _store(settings: dict[str, Setting], option: Option, word: str, value: str | None) -> None:
    if option.is_switch or value is None:
        settings[option.dest] = Setting("1", word)
        return
    flag = word if not word.startswith("--") else word.partition("=")[0]
    source = flag if flag.endswith(value) and not flag.startswith("--") else f"{flag} {value}"
    earlier = settings.get(option.dest)
    if option.joins and earlier is not None and earlier.text.strip():
        value = f"{earlier.text},{value}" if value.strip() else earlier.text
    settings[option.dest] = Setting(value, source)
