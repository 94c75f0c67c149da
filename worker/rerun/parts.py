"""The parts of one rank's rerun machine, which all that works on an iteration shares."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import rsup.worker
from rsup.worker.device import this_device
from rsup.worker.rerun.agreement import Agreement
from rsup.worker.rerun.built_in import BuiltInRules
from rsup.worker.rerun.case_work import CaseWork
from rsup.worker.rerun.contract import Checked, RankDevice, Rejection, RerunConfig
from rsup.worker.rerun.injector import ErrorInjector
from rsup.worker.rerun.iteration import Iteration
from rsup.worker.rerun.large_values import LargeValues
from rsup.worker.rerun.machine import same
from rsup.worker.rerun.replay_state import ReplayState
from rsup.worker.rerun.rotation import Rotation
from rsup.worker.rerun.tracking import Tracking


class Parts:
    """Made once by the facade, whose arguments these are."""

    def __init__(
        self,
        config: RerunConfig,
        device: RankDevice | None,
        torch_device: torch.device,
        group: Any,
        ledger_folder: Path | None,
        seed: int,
        injected: bool,
    ) -> None:
        self.config = config
        self.agreement = Agreement(group)
        rank = self.agreement.rank
        self.device = device or this_device(torch_device)
        rsup.worker.device_used(self.device.uuid)
        self.torch_device = torch_device
        self.replay_state = ReplayState(torch_device)
        self.large = LargeValues()
        self.rules = BuiltInRules(config, self.large)
        self.injector = ErrorInjector(config.error_injection_rate, config.error_injection_type, seed, rank)
        self.tracking = Tracking(config.result_rejected_tracker_filename, rank, self.device)
        self.work = CaseWork(config, self.agreement, self.device, ledger_folder, injected or self.injector.is_armed)
        self.iteration = Iteration(self.replay_state, self.large, torch_device)
        self.rotation: Rotation | None = None
        self.data_position: dict[str, int] = {}
        self.skips_in_row = 0
        """Iterations left out for their data since the last healthy one."""
        self.named_state: Callable[[], Mapping[str, torch.Tensor]] = dict
        """Parameters, buffers and optimizer state of what is attached."""
        self.named_parameters: Callable[[], Mapping[str, torch.Tensor]] = dict
        """Parameters of what is attached."""
        self.program: dict[str, Any] = {}
        """What the loop says of its model, for a replay of a kept step."""

    def same(self, before: Checked, after: Checked) -> bool:
        """Whether a replay in place gave the value again; the error injector may say otherwise."""
        faked = self.injector.outcome(before.check, elsewhere=False)
        return same(before, after) if faked is None else faked

    def same_elsewhere(self, before: Checked, after: Checked) -> bool:
        """Whether another device gave the value again."""
        faked = self.injector.outcome(before.check, elsewhere=True)
        return same(before, after) if faked is None else faked

    def track(self, status: Rejection, checked: Checked, evaluating: bool = False) -> None:
        """A record about a value of this iteration."""
        self.tracking.rejected(status, self.iteration.number, checked, self.work.case_id, evaluating)

    def finish(self) -> bool:
        """The iteration is over, and what its last pass computed is used. False."""
        self.injector.clear()
        self.skips_in_row = 0
        return self.iteration.end()
