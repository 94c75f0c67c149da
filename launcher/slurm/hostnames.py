"""SLURM's lists of nodes, `n[0-3,7],login`, as names. Pure."""

import itertools
import re

MAX_NAMES = 65536

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def node_names(text: str) -> list[str]:
    """The names in order; none of a list that cannot be read, or is longer than `MAX_NAMES`."""
    names: list[str] = []
    for item in _ITEM.findall(text):
        choices = [_numbers(ranges) if ranges else [fixed] for ranges, fixed in _PART.findall(item)]
        if not all(choices):
            return []
        names += ["".join(words) for words in itertools.islice(itertools.product(*choices), MAX_NAMES + 1)]
        if len(names) > MAX_NAMES:
            return []
    return names


def _numbers(ranges: str) -> list[str]:
    """`0-3,07` spelled out, leading zeros kept; empty where it is no such list."""
    found: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not 0 <= int(last) - int(first) < MAX_NAMES:
            return []
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
