"""Whose bad gradient is it, when gradients are reduced several times in a pass?

DDP without `no_sync` reduces after every backward, and the next backward adds to the reduced gradients: from then on every rank
holds what one has spoiled. Only the earliest reduction with a bad value says whose it was; what later ones show is its echo.
Such checks are named `..., reduction N`. (FSDP2 reduces each backward's gradients apart: there a later one is no echo.)
"""

import sys
from collections.abc import Iterable

_MARK = ", reduction "
NO_LIMIT = sys.maxsize


def name_of_reduction(message: str, number: int) -> str:
    """The name of a check of the number-th reduction (1-based) of a pass."""
    return message if number == 1 else f"{message}{_MARK}{number}"


def is_gradient_check(check: str) -> bool:
    """Whether it is one of `gradient_checks`."""
    return check.startswith("grad norm of ")


def reduction_of(check: str) -> int:
    """The number of its reduction; 0 for a check of another kind, which echoes nothing."""
    number = check.rpartition(_MARK)[2] if _MARK in check else "1"
    return int(number) if is_gradient_check(check) and number.isdigit() else 0


def earliest(checks: Iterable[str]) -> int:
    """The first reduction among bad checks: what comes after it is an echo. `NO_LIMIT` where there is none."""
    return min((number for check in checks if (number := reduction_of(check)) > 0), default=NO_LIMIT)


def is_echo(check: str, first_bad: int) -> bool:
    """Whether the check can only repeat what went wrong in reduction `first_bad`, on whatever rank."""
    return reduction_of(check) > first_bad
