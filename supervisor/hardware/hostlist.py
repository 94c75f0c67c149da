"""SLURM's way to write several nodes at once: `n[1-4,7],login`."""

import itertools
import re
from collections.abc import Iterable, Iterator

from rsup.supervisor.wire import UsageError

MAX_NODES = 65_536
_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.ASCII | re.DOTALL)
_RANGES = re.compile(r"\[([^\[\]]*)\]")


def expand(text: str) -> list[str]:
    """The names in order, each once. Raise `UsageError` for what is no hostlist."""
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise _wrong(text)
    names: dict[str, None] = {}
    for item in items:
        for name in _names(item, text):
            names[name] = None
            if len(names) > MAX_NODES:
                raise _too_many(text)
    return list(names)


def fold(names: Iterable[str]) -> str:
    """The other way: names that differ in their last number alone are written as one, `n[1-4,7],login`."""
    groups: dict[tuple[str, str, int], set[int]] = {}
    others: list[str] = []
    for name in dict.fromkeys(names):
        found = _NUMBERED.fullmatch(name)
        if found is None:
            others.append(name)
            continue
        before, digits, after = found.groups()
        groups.setdefault((before, after, len(digits) if digits[0] == "0" != digits else 0), set()).add(int(digits))
    written = [f"{before}{_ranges(sorted(numbers), width)}{after}" for (before, after, width), numbers in groups.items()]
    return ",".join(written + others)


def _ranges(numbers: list[int], width: int) -> str:
    """Of one number the number itself, else `[1-4,7]`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if len(numbers) == 1:
        return f"{numbers[0]:0{width}d}"
    return "[" + ",".join("-".join(f"{number:0{width}d}" for number in run) for run in runs) + "]"


def _names(item: str, text: str) -> Iterator[str]:
    parts = _RANGES.split(item)
    fixed, ranges = parts[::2], [_numbers(part, text) for part in parts[1::2]]
    for chosen in itertools.product(*ranges):
        yield "".join(itertools.chain.from_iterable(itertools.zip_longest(fixed, chosen, fillvalue="")))


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise _wrong(text)
        if int(last) - int(first) >= MAX_NODES:
            raise _too_many(text)
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def _too_many(text: str) -> UsageError:
    return UsageError(f"{text[:60]!r} names more than {MAX_NODES} nodes")


def _wrong(text: str) -> UsageError:
    return UsageError(f"{text[:60]!r} is no list of nodes; write n1, n[1-4] or n[01-16,20],login")
