"""What an option of the trainer is made of: a field of a dataclass with its help, and the kinds of values that words are."""

import argparse
import signal
from collections.abc import Sequence
from dataclasses import field
from typing import Any


def flag(
    default: Any, help: str, kind: Any = None, *aliases: str, choices: Sequence[Any] = (), values: Sequence[str] = ()
) -> Any:
    """`values`: names of several values, each of that kind, that are given together."""
    return field(
        default=default, metadata={"help": help, "kind": kind, "aliases": aliases, "choices": choices, "values": values}
    )


def whole(text: str) -> int:
    """A whole number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def not_negative(text: str) -> int:
    """A whole number of 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def rate(text: str) -> float:
    """A finite number of 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number, 0 or more")
    return value


def probability(text: str) -> float:
    """A number in [0, 1)."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def iterations(text: str) -> tuple[int, ...]:
    """Iterations, comma-separated."""
    return tuple(whole(part) for part in text.split(","))


def signals(text: str) -> tuple[str, ...]:
    """Signals, comma-separated, each once, as `SIG...`."""
    return tuple(dict.fromkeys(signal_name(part.strip()) for part in text.split(",")))


def signal_name(text: str) -> str:
    """A signal that can be caught, as `SIG...`."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise argparse.ArgumentTypeError(f"{text} is no signal that can be caught")
    return name


def graph_impl(text: str) -> str:
    """Also those of Megatron-LM that rsup has not: `cuda_graph.constraints` says why, and what to use."""
    if text not in ("none", "full_iteration", "local", "transformer_engine"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither none nor full_iteration")
    return text


def patterns(text: str) -> tuple[str, ...]:
    """Patterns of names, comma-separated, one at least."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern")
    return found


for _kind, _name in ((whole, "count"), (not_negative, "count"), (rate, "number"), (probability, "probability")):
    _kind.__name__ = _name  # argparse says "invalid count value: 'x'"
iterations.__name__ = "list of iterations"
signals.__name__ = "list of signals"
patterns.__name__ = "list of patterns"
