"""A rerun that a checkpoint asks for: a rank's findings, its data, the case. Plain values and tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rsup.supervisor.wire import CaseFinding
from rsup.worker.rerun.contract import Checked
from rsup.worker.rerun.passes import Judged
from rsup.worker.rerun.report import OpenCase

VERSION = 1


@dataclass
class Pending:
    """What a rank needs to repeat an iteration of the attempt before."""

    case: OpenCase
    first: list[Judged] = field(default_factory=list)
    """This rank's rejected values."""
    others: list[Judged] = field(default_factory=list)
    """Its values that no check rejected."""
    likeness: tuple[str, ...] = ()
    """`RankDevice.likeness` of the device that found it."""
    rng: str = ""
    """Its generators before the iteration, hex: loops restore those of a checkpoint at moments of their own."""
    state: Any = None
    """Registered state, as `ReplayState` keeps it in a checkpoint."""
    iterators: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def flagged(self) -> list[Judged]:
        """The fatal findings: what has to be repeated."""
        return [one for one in self.first if one.checked.fatal]


def to_plain(pending: Pending) -> dict[str, Any]:
    """For a checkpoint; read back by `from_plain` of this release and later ones."""
    case = pending.case
    return {
        "version": VERSION,
        "case_id": case.case_id,
        "iteration": case.iteration,
        "found_by": case.found_by,
        "findings": [msgspec.structs.asdict(finding) for finding in case.findings],
        "tried": {str(rank): list(uuids) for rank, uuids in case.tried.items()},
        "proven": list(case.proven),
        "first": [_checked_plain(one) for one in pending.first],
        "others": [_checked_plain(one) for one in pending.others],
        "likeness": list(pending.likeness),
        "rng": pending.rng,
        "state": pending.state,
        "iterators": list(pending.iterators),
    }


def from_plain(plain: Mapping[str, Any]) -> Pending:
    """The rerun that a checkpoint asks for. Raise `ValueError` for another version or damaged content."""
    if plain.get("version") != VERSION:
        raise ValueError(f"rerun state of version {plain.get('version')!r}, this release reads {VERSION}")
    try:
        case = OpenCase(
            case_id=str(plain["case_id"]),
            iteration=int(plain["iteration"]),
            found_by=str(plain["found_by"]),
            findings=msgspec.convert(plain["findings"], list[CaseFinding]),
            proven=[int(rank) for rank in plain["proven"]],
            tried={int(rank): [str(uuid) for uuid in uuids] for rank, uuids in plain["tried"].items()},
        )
        first = _checked_list(plain["first"])
        likeness = tuple(str(one) for one in plain["likeness"])
        return Pending(
            case, first, _checked_list(plain["others"]), likeness, str(plain["rng"]), plain["state"], list(plain["iterators"])
        )
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"damaged rerun state: {error!r}") from None


def _checked_plain(one: Judged) -> dict[str, Any]:
    checked = one.checked
    return {
        "check": checked.check,
        "value": checked.value,
        "rejected": checked.rejected,
        "fatal": checked.fatal,
        "tolerance": checked.tolerance,
        "labels": list(one.labels),
    }


def _checked_list(plain: Sequence[Mapping[str, Any]]) -> list[Judged]:
    return [
        Judged(
            Checked(str(one["check"]), float(one["value"]), bool(one["rejected"]), bool(one["fatal"]), float(one["tolerance"])),
            tuple(str(label) for label in one["labels"]),
        )
        for one in plain
    ]
