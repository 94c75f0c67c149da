"""The open case of an iteration on all ranks: what was found, who is told, what is kept. Collective where it says so."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

import rsup.worker
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.wire import CaseFinding, CaseReport
from rsup.worker.rerun.agreement import Agreement
from rsup.worker.rerun.contract import Judgement, RankDevice, RerunConfig, RotatedOutcome
from rsup.worker.rerun.ledger import Ledger
from rsup.worker.rerun.machine import Closing, closing
from rsup.worker.rerun.report import OpenCase, make_report


class CaseWork:
    """Opens, tells and closes the cases of a run, one at a time."""

    def __init__(
        self,
        config: RerunConfig,
        agreement: Agreement,
        device: RankDevice,
        ledger_folder: Path | None,
        injected: bool,
    ) -> None:
        self.case: OpenCase | None = None
        self.last_report: CaseReport | None = None
        """What was said last of a case; the same on all ranks."""
        self._config = config
        self._agreement = agreement
        self._device = device
        self._ledger = Ledger(ledger_folder)
        self._injected = injected
        self._devices: dict[int, str] = {}

    def open(self, iteration: int, found: list[CaseFinding], found_by: str = "check") -> OpenCase:
        """Open the iteration's case with every rank's findings, or add to it. Collective."""
        if self.case is None or self.case.iteration != iteration:
            self.case = OpenCase(case_id(iteration, self._agreement), iteration, found_by)
        gathered = self._agreement.gather((self._device.uuid, found))
        self._devices = {rank: uuid for rank, (uuid, _) in enumerate(gathered)}
        for _, ours in gathered:
            self.case.add(ours)
        return self.case

    def add_elsewhere(self, outcomes: Sequence[RotatedOutcome]) -> None:
        """Fill in what came out of each rank's data on another rank's device."""
        assert self.case is not None
        for outcome in outcomes:
            self._fill(outcome.rank, outcome.values, outcome.ran_on, self._devices.get(outcome.ran_on, ""))

    def add_moved(self, values: Mapping[str, float]) -> None:
        """Fill in what came out where each rank runs now, after it has moved. Collective."""
        for rank, ours in enumerate(self._agreement.gather(dict(values))):
            self._fill(rank, ours, rank, self._devices.get(rank, ""))

    def _fill(self, rank: int, values: Mapping[str, float], ran_on: int, device: str) -> None:
        case = self.case
        assert case is not None
        for i, finding in enumerate(case.findings):
            value = values.get(finding.check.rpartition(": ")[0])
            if finding.rank == rank and value is not None:
                case.findings[i] = replace(finding, elsewhere=repr(value), elsewhere_rank=ran_on, elsewhere_device=device)

    @property
    def is_audit(self) -> bool:
        """Whether an audit opened the case: none of its checks failed, a device computed otherwise."""
        return self.case is not None and self.case.found_by == "audit"

    def take_over(self, case: OpenCase) -> None:
        """Go on with a case that a checkpoint holds. Collective."""
        self.case = case
        self._devices = dict(enumerate(self._agreement.gather(self._device.uuid)))

    def tell(self, data_position: dict[str, int]) -> None:
        """Tell the supervisor that the case is open. Does not wait."""
        assert self.case is not None
        if self._agreement.rank == 0:
            rsup.worker.report_case(
                make_report(self.case, None, None, self._devices, data_position=data_position, injected=self._injected), 0
            )

    def closed_before(self) -> str:
        """The verdict that the case has already, empty if none. Collective."""
        assert self.case is not None
        mine = self._ledger.verdict(self.case.case_id) if self._agreement.rank == 0 else ""
        return self._agreement.gather(mine)[0]

    def send_elsewhere(self, judgement: Judgement, data_position: dict[str, int], is_flagged: bool) -> None:
        """Say that another placement has to decide; a rank that `is_flagged` (a fatal finding of it came out again) has
        tried its device. Collective."""
        case = self.case
        assert case is not None
        flagged = self._agreement.gather(is_flagged)
        for finding in case.findings:
            if flagged[finding.rank] or case.found_by == "audit":
                known = case.tried.setdefault(finding.rank, [])
                now = self._devices.get(finding.rank, finding.device)
                known += [uuid for uuid in dict.fromkeys((finding.device, now)) if uuid not in known]
        self._report(judgement, None, data_position, is_open=True)

    def close(self, judgement: Judgement, clean: bool, data_position: dict[str, int]) -> Closing:
        """Give the verdict: stored and in the ledger before anything follows from it. Collective."""
        assert self.case is not None
        accused = {self._accused_device(rank) for rank in judgement.accused}
        in_use = bool(accused & set(self._devices.values()))
        follows = closing(judgement, self._config, clean=clean, accused_in_use=in_use, is_audit=self.is_audit)
        self._report(judgement, follows, data_position)
        self.case = None
        return follows

    def close_minor(self, judgement: Judgement, data_position: dict[str, int]) -> None:
        """Tell a case in which nothing fatal failed; training does not wait for it. Collective."""
        case = self.case
        assert case is not None
        goes_on = Closing("continue")
        report = make_report(case, judgement, goes_on, self._devices, data_position=data_position, injected=self._injected)
        self.last_report = report
        if self._agreement.rank == 0:
            self.say(_sentence(case, judgement, goes_on))
            rsup.worker.report_case(report, 0)
        self.case = None

    @property
    def case_id(self) -> str:
        """Of the open case, else empty."""
        return self.case.case_id if self.case is not None else ""

    def _accused_device(self, rank: int) -> str:
        """The device that a verdict on `rank` is about: where its finding was made, if the rank has moved since."""
        assert self.case is not None
        tried = self.case.tried.get(rank)
        return tried[0] if tried else self._devices[rank]

    def _report(
        self, judgement: Judgement, closing: Closing | None, data_position: dict[str, int], is_open: bool = False
    ) -> None:
        case = self.case
        assert case is not None
        devices = {rank: self._accused_device(rank) for rank in self._devices}
        problem = ""
        report = make_report(
            case, judgement, closing, devices, is_open=is_open, data_position=data_position, injected=self._injected
        )
        self.last_report = report
        if self._agreement.rank == 0:
            self.say(_sentence(case, judgement, closing))
            if report.verdict:
                problem = self._ledger.add(case.case_id, report.verdict, case.iteration, report.reason)
            stored = rsup.worker.report_case(report, self._config.stored_within_s)
            if not stored and rsup.worker.is_supervised():
                problem += f"; the supervisor did not confirm within {self._config.stored_within_s:g} s"
        if problem := self._agreement.gather(problem)[0]:
            self.say(f"case {case.case_id}: {problem.removeprefix('; ')}")

    def say(self, text: str) -> None:
        """A line on rank 0's standard error."""
        if self._agreement.rank == 0:
            print(f"rerun: {text}", file=sys.stderr, flush=True)


def _sentence(case: OpenCase, judgement: Judgement, closing: Closing | None) -> str:
    where = f"iteration {case.iteration}"
    who = sorted({finding.rank for finding in case.findings})
    ranks = f" (found on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))})" if who else ""
    if closing is None:
        return f"{where}{ranks}: another device has to decide: {judgement.reason}; case {case.case_id}"
    kind = " (data-dependent)" if judgement.data_dependent else ""
    return f"{where}{ranks}: {judgement.verdict}{kind}: {judgement.reason}; {closing.action}; case {case.case_id}"


def case_id(iteration: int, agreement: Agreement) -> str:
    """An id that no other case has, the same on all ranks. Collective."""
    key = rsup.worker.job_key()
    if not key and agreement.rank == 0:
        key = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}-{os.getpid()}-{process_start_ticks(os.getpid())}"
    return f"{agreement.gather(key)[0]}-a{rsup.worker.attempt()}-i{iteration}"
