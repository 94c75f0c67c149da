"""Injected faults that change numbers: what `--fault` may say of them. No torch; `corruption` makes them strike.

    device=ID,kind=K,site=S              persistent: whenever that device computes, whatever rank uses it
    rank=R,iteration=I,kind=K,site=S     transient: once in the job, at the first computation of that iteration on that rank
    kind=nan-data,iteration=I[,rank=R]   application: the batch itself carries a NaN, so it is there wherever the data go
                                         and whenever they are loaded (R: whose batch it is, default 0)

    K   nan, inf, bitflip (bit=N of the float32, default 30), scale (factor=F, default 2: wrong without a NaN)
    S   loss     the loss of a micro-batch, once it is computed
        grad     one number of a parameter's gradient, in the backward pass, before any communication
        param    one number of a parameter in memory: it stays wrong until it is loaded again (of a rank only)

Further keys: `param=NAME` (default: the first parameter of one dimension) and `element=N` (default: the one of greatest
magnitude) for grad and param; `when=K/N` only for inputs whose content hash is K modulo N; `from=I`, `until=I` iterations in
which a device is faulty; `repeat` at every computation of that iteration on that rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rsup.supervisor.wire import UsageError

DATA_KIND = "nan-data"
NUMERIC_KINDS = ("nan", "inf", "bitflip", "scale", DATA_KIND)
SITES = ("loss", "grad", "param")
_KEYS = ("rank", "iteration", "device", "kind", "site", "bit", "factor", "param", "element", "when", "from", "until", "repeat")


@dataclass(frozen=True)
class NumericFault:
    """One such fault. Exactly one of `device` and `iteration` says when it strikes; iterations are 1-based and global."""

    kind: str
    site: str = ""
    device: str = ""
    rank: int = 0
    iteration: int = 0
    bit: int = 30
    factor: float = 2.0
    parameter: str = ""
    element: int | None = None
    when: tuple[int, int] | None = None
    first_iteration: int = 1
    last_iteration: int | None = None
    repeat: bool = False

    @property
    def is_data(self) -> bool:
        """The batch carries it."""
        return self.kind == DATA_KIND

    def __str__(self) -> str:
        parts = [f"device={self.device}"] if self.device else [f"rank={self.rank}", f"iteration={self.iteration}"]
        parts.append(f"kind={self.kind}")
        optional = (
            (bool(self.site), f"site={self.site}"),
            (self.kind == "bitflip", f"bit={self.bit}"),
            (self.kind == "scale", f"factor={self.factor}"),
            (bool(self.parameter), f"param={self.parameter}"),
            (self.element is not None, f"element={self.element}"),
            (self.when is not None, f"when={self.when[0]}/{self.when[1]}" if self.when else ""),
            (self.first_iteration != 1, f"from={self.first_iteration}"),
            (self.last_iteration is not None, f"until={self.last_iteration}"),
        )
        return ",".join(parts + [text for is_given, text in optional if is_given])


def parse_numeric_fault(text: str) -> NumericFault:
    """The fault that `text` describes; raise `UsageError` for what cannot be."""
    values = _values(text)
    kind, site = values["kind"], values.get("site", "")
    if kind == DATA_KIND:
        _allow(text, values, kind, ("rank", "iteration"))
        return NumericFault(kind, rank=_number(text, values, "rank", 0), iteration=_number(text, values, "iteration"))
    if site not in SITES:
        raise _wrong(text, f"{kind} needs site=, one of {', '.join(SITES)}")
    if ("device" in values) == ("rank" in values):
        raise _wrong(text, f"{kind} needs either device=ID (whenever it computes) or rank=R,iteration=I (once)")
    allowed = ["site", "when"]
    allowed += ["device", "from", "until"] if "device" in values else ["rank", "iteration", "repeat"]
    allowed += {"bitflip": ["bit"], "scale": ["factor"]}.get(kind, [])
    allowed += [] if site == "loss" else ["param", "element"]
    if site == "param" and ("device" in values or "repeat" in values or "when" in values):
        raise _wrong(text, "site=param is damaged once and stays so: give rank=R,iteration=I, and no repeat or when")
    _allow(text, values, f"{kind} at {site}", allowed)
    fault = NumericFault(
        kind,
        site,
        device=values.get("device", ""),
        rank=_number(text, values, "rank", 0 if "device" in values else None),
        iteration=_number(text, values, "iteration", 0 if "device" in values else None),
        bit=_number(text, values, "bit", 30),
        factor=_factor(text, values),
        parameter=values.get("param", ""),
        element=_number(text, values, "element") if "element" in values else None,
        when=_when(text, values),
        first_iteration=_number(text, values, "from", 1),
        last_iteration=_number(text, values, "until") if "until" in values else None,
        repeat="repeat" in values,
    )
    if fault.bit > 31:
        raise _wrong(text, "a float32 has bits 0 to 31")
    return fault


def _values(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS:
            raise _wrong(text, f"unknown key {key!r}; use {', '.join(_KEYS)}")
        if key in values or (key == "repeat") == bool(value):
            raise _wrong(text, f"{key!r} is given twice, or has no value, or takes none")
        values[key] = value
    return values


def _allow(text: str, values: dict[str, str], what: str, allowed: Sequence[str]) -> None:
    for key in values:
        if key != "kind" and key not in allowed:
            raise _wrong(text, f"{key}= means nothing for {what}")


def _number(text: str, values: dict[str, str], key: str, default: int | None = None) -> int:
    value = values.get(key, "" if default is None else str(default))
    if not value.isascii() or not value.isdigit():
        raise _wrong(text, f"{key}= must be a number, 0 or more")
    return int(value)


def _factor(text: str, values: dict[str, str]) -> float:
    try:
        factor = float(values.get("factor", "2"))
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor) or factor == 1.0:
        raise _wrong(text, "factor= must be a finite number other than 1")
    return factor


def _when(text: str, values: dict[str, str]) -> tuple[int, int] | None:
    if "when" not in values:
        return None
    rest, _, modulus = values["when"].partition("/")
    if not (rest.isascii() and rest.isdigit() and modulus.isascii() and modulus.isdigit()) or int(rest) >= int(modulus):
        raise _wrong(text, "when= must be K/N with K below N")
    return int(rest), int(modulus)


def _wrong(text: str, complaint: str) -> UsageError:
    return UsageError(f"--fault {text}: {complaint}")


def check_numeric_fault(fault: NumericFault, world_size: int, last_iteration: int) -> None:
    """Raise `UsageError` if that fault cannot happen in such a run. Whether a device exists only the launch knows."""
    _check_rank(fault, world_size)
    if fault.device:
        until = last_iteration if fault.last_iteration is None else fault.last_iteration
        if not 1 <= fault.first_iteration <= min(until, last_iteration):
            raise _wrong(str(fault), f"no iteration of 1 to {last_iteration} is in from= to until=")
    elif not 1 <= fault.iteration <= last_iteration:
        raise _wrong(str(fault), f"there is no iteration {fault.iteration} among 1 to {last_iteration}")


def _check_rank(fault: NumericFault, world_size: int) -> None:
    if fault.rank >= world_size:
        raise _wrong(str(fault), f"there is no rank {fault.rank} among {world_size}")


def poisons(faults: Sequence[object], rank: int) -> Callable[[int], bool]:
    """Whether the batch of `rank` carries a NaN, by iteration."""
    iterations = {f.iteration for f in faults if isinstance(f, NumericFault) and f.is_data and f.rank == rank}
    return iterations.__contains__
