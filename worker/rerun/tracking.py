"""What the tracker file is told, in the terms of the rerun machine; nothing where there is no such file."""

import rsup.worker
from rsup.worker.rerun.contract import Checked, RankDevice, Rejection
from rsup.worker.rerun.tracker import EVALUATION, TRAINING, RejectionTracker


class Tracking:
    """One rank's records. `name`: of the tracker files, None: none are written. Raises `UsageError` if it cannot be opened."""

    def __init__(self, name: str | None, rank: int, device: RankDevice) -> None:
        self._file: RejectionTracker | None = None
        if name is not None:
            key, attempt = rsup.worker.job_key(), rsup.worker.attempt()
            self._file = RejectionTracker(name, rank, key, attempt, device.uuid, device.node)

    def rejected(
        self, status: Rejection, iteration: int, checked: Checked, case_id: str = "", evaluating: bool = False
    ) -> None:
        """A value was rejected, or a replay of it says something."""
        if self._file is not None:
            phase = EVALUATION if evaluating else TRAINING
            self._file.write(status, iteration, checked.check, checked.value, fatal=checked.fatal, phase=phase, case_id=case_id)

    def verdict(self, iteration: int, case_id: str, verdict: str) -> None:
        """The case has its verdict."""
        if self._file is not None:
            self._file.write(Rejection.VERDICT, iteration, case_id=case_id, verdict=verdict)
