"""Cases as the supervisor is told of them, from what all ranks found."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from rsup.supervisor.wire import CaseFinding, CaseReport, clip
from rsup.worker.rerun.audit import Compared
from rsup.worker.rerun.contract import Checked, Judgement, RankDevice
from rsup.worker.rerun.machine import Closing
from rsup.worker.rerun.passes import Judged

MAX_FINDINGS = 64
"""In one report: a packet to the agent has 64 KiB."""


@dataclass
class OpenCase:
    """A case while the ranks work on it; the same on all of them."""

    case_id: str
    iteration: int
    found_by: str = "check"
    findings: list[CaseFinding] = field(default_factory=list)
    tried: dict[int, list[str]] = field(default_factory=dict)
    proven: list[int] = field(default_factory=list)
    """Ranks whose data earlier moves have proven to be at fault."""
    kept: str = ""
    """The folder with what a device needs to compute the iteration again; empty: nothing is kept."""

    def add(self, found: Sequence[CaseFinding]) -> None:
        """Take findings in; a later one of the same rank and check fills what the earlier one left empty."""
        for one in found:
            for i, known in enumerate(self.findings):
                if (known.rank, known.check) == (one.rank, one.check):
                    self.findings[i] = _merged(known, one)
                    break
            else:
                self.findings.append(one)

    @property
    def fatal(self) -> bool:
        """Whether one of its checks was fatal."""
        return any(one.fatal for one in self.findings)


def _merged(known: CaseFinding, new: CaseFinding) -> CaseFinding:
    return replace(
        known,
        in_place=known.in_place or new.in_place,
        elsewhere=new.elsewhere or known.elsewhere,
        elsewhere_rank=new.elsewhere_rank if new.elsewhere else known.elsewhere_rank,
        elsewhere_device=new.elsewhere_device or known.elsewhere_device,
    )


def findings_of(first: Sequence[Judged], again: Sequence[Judged], rank: int, device: RankDevice) -> list[CaseFinding]:
    """A rank's rejected values of the first pass, with those of the replay in place."""
    now = {one.checked.check: one.checked for one in again}
    found = []
    for one in first:
        if one.checked.rejected:
            after: Checked | None = now.get(one.checked.check)
            check = f"{one.checked.check}: {', '.join(one.labels)}"
            in_place = repr(after.value) if after is not None else ""
            found.append(_finding(one, check, rank, device, in_place))
    return found


def differences_of(
    first: Sequence[Judged], again: Sequence[Judged], compared: Compared, differing: Collection[str], device: RankDevice
) -> list[CaseFinding]:
    """Values of an audited iteration that came out otherwise on another rank's device."""
    now = {one.checked.check: one.checked for one in again}
    found = []
    for one in first:
        name = one.checked.check
        if name in differing:
            after = now.get(name)
            finding = _finding(
                one, f"{name}: differs on another device", compared.rank, device, repr(after.value) if after else ""
            )
            value = repr(compared.values[name][1]) if name in compared.values else ""
            found.append(replace(finding, fatal=False, elsewhere=value, elsewhere_rank=compared.ran_on))
    return found


def _finding(one: Judged, check: str, rank: int, device: RankDevice, in_place: str) -> CaseFinding:
    return CaseFinding(
        rank=rank,
        device=device.uuid,
        check=check[:200],
        fatal=one.checked.fatal,
        initial=repr(one.checked.value),
        in_place=in_place,
        tolerance=one.checked.tolerance,
        node=device.node,
    )


def make_report(
    case: OpenCase,
    judgement: Judgement | None,
    closing: Closing | None,
    devices: dict[int, str],
    *,
    is_open: bool = False,
    data_position: dict[str, int] | None = None,
    injected: bool = False,
) -> CaseReport:
    """The report of a case. `devices`: UUID by rank. `is_open`: another placement has to decide."""
    found = case.findings[:MAX_FINDINGS]
    more = len(case.findings) - len(found)
    reason = judgement.reason if judgement is not None else ""
    if more > 0:
        reason += f" ({more} further findings are left out)"
    return CaseReport(
        case_id=case.case_id,
        iteration=case.iteration,
        fatal=case.fatal,
        findings=found,
        verdict=judgement.verdict if judgement is not None and not is_open else "",
        reason=clip(reason, 1000),
        action="elsewhere" if is_open else closing.action if closing is not None else "",
        data_dependent=judgement is not None and judgement.data_dependent,
        accused=[devices[rank] for rank in judgement.accused if rank in devices] if judgement is not None else [],
        suspect_of=judgement.suspect_of if judgement is not None else 1,
        tried={rank: list(uuids) for rank, uuids in case.tried.items()},
        checkpoint=case.kept,
        data_position=dict(data_position or {}),
        found_by=case.found_by,
        injected=injected,
    )
