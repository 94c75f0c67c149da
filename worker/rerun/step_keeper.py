"""Keeps the failing iteration of the first ranks that failed, before the verdict is told, so that it can be repeated later.

Whatever goes wrong here is said and costs nothing else. Collective where it says so.
"""

from pathlib import Path
from typing import Any

import torch

from rsup.worker.rerun.contract import Judgement, RankDevice, RerunError, RerunState
from rsup.worker.rerun.echoes import reduction_of
from rsup.worker.rerun.kept_step import MAX_RANKS, KeptStep, case_folder, pack_batches, prune, software, write_step
from rsup.worker.rerun.parts import Parts
from rsup.worker.rerun.report import OpenCase

MAX_PARAMETER_BYTES = 512 << 20
"""Larger models are left to the checkpoint of the completed iterations, where the verdict lets one be written."""
_PLAIN = (bool, int, float, str, bytes, type(None))


class StepKeeper:
    """Of one rank. `folder`: where the checkpoints are; None: nothing is kept."""

    def __init__(self, parts: Parts, folder: Path | None) -> None:
        self._parts = parts
        self._folder = None if folder is None else Path(folder).absolute()

    def keep(self, judgement: Judgement, is_open: bool = False) -> None:
        """Keep the open case's step, and note in the case where. Collective."""
        parts, case = self._parts, self._parts.work.case
        if case is None or self._folder is None or judgement.verdict == "corrupted state":
            return
        is_audit = case.found_by == "audit"
        ranks = sorted({one.rank for one in case.findings if one.fatal or is_audit})[:MAX_RANKS]
        if not ranks:
            return
        folder = case_folder(self._folder, case.case_id)
        problem = self._keep(case, judgement, folder, is_open) if parts.agreement.rank in ranks else ""
        problems = parts.agreement.gather(problem)
        if all(problems[rank] for rank in ranks):
            parts.work.say(f"the step of case {case.case_id} is not kept: {problems[ranks[0]]}")
            return
        case.kept = str(folder)
        if parts.agreement.rank == 0:
            try:
                prune(self._folder, folder)
            except OSError as error:
                parts.work.say(f"old steps in {self._folder} are not removed: {error.strerror}")

    def _keep(self, case: OpenCase, judgement: Judgement, folder: Path, is_open: bool) -> str:
        """Write this rank's; return why that failed, empty if it did not."""
        try:
            write_step(self._step(case, judgement, "" if is_open else judgement.verdict), folder)
        except Exception as error:  # the other ranks wait for the answer: whatever it is, training goes on
            return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        return ""

    def _step(self, case: OpenCase, judgement: Judgement, verdict: str) -> KeptStep:
        parts, iteration = self._parts, self._parts.iteration
        if any(iterator.has_ended for iterator in iteration.iterators):
            raise RerunError("the rank's data ended in the middle of the iteration")
        _check_plain(parts.program, "rerun.program")
        payload, _ = iteration.payload()
        rejected = [one.checked for one in iteration.confirmed or iteration.first if one.checked.rejected]
        if case.found_by == "audit":
            names = {one.check.rpartition(": ")[0] for one in case.findings if one.rank == parts.agreement.rank}
            rejected = [one.checked for one in iteration.first if one.checked.check in names]
        compared = [*iteration.first, *iteration.others, *iteration.again]
        device, reference = self._reference(case, judgement, verdict)
        parameters = self._parameters()
        if parameters is None and not self._has_checkpoint(verdict):
            size = f"{MAX_PARAMETER_BYTES >> 20} MiB"
            raise RerunError(f"its parameters are larger than {size}, and after this verdict no checkpoint holds them")
        return KeptStep(
            case_id=case.case_id,
            iteration=case.iteration,
            rank=parts.agreement.rank,
            world_size=parts.agreement.world_size,
            verdict=verdict,
            device=self._found_on(case),
            software=software(parts.torch_device),
            flagged={one.check: one.value for one in rejected},
            tolerances={one.checked.check: one.checked.tolerance for one in compared},
            rng=payload.rng,
            state=parts.replay_state.state_dict(iteration.snapshot),
            batches=pack_batches(payload.batches),
            parameters=parameters,
            checkpoint="" if parameters is not None else str(self._folder),
            reference=reference,
            reference_device=device,
            program=dict(parts.program),
            num_threads=torch.get_num_threads(),
        )

    def _found_on(self, case: OpenCase) -> RankDevice:
        """The device on which the checks had failed: where the rank ran then, if it has moved since."""
        parts = self._parts
        uuid = (case.tried.get(parts.agreement.rank) or [parts.device.uuid])[0]
        like = parts.iteration.found_on or parts.device.likeness
        node = parts.device.node if uuid == parts.device.uuid else ""
        return RankDevice(uuid, node, *like[:3]) if len(like) >= 3 else RankDevice(uuid, node)

    def _parameters(self) -> dict[str, torch.Tensor] | None:
        """Copies on the host; None: there are too many. Raise `RerunError` for those that no single rank holds."""
        tensors = self._parts.named_parameters()
        if any(hasattr(tensor, "to_local") for tensor in tensors.values()):
            raise RerunError("its parameters are sharded, one device cannot compute it")
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > MAX_PARAMETER_BYTES:
            return None
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _has_checkpoint(self, verdict: str) -> bool:
        """Whether the iterations before this one are saved: before a restart elsewhere, where a moved rank began."""
        is_moved = self._parts.iteration.state is RerunState.RERUNNING_FROM_CHECKPOINT
        return verdict in ("", "persistent") or is_moved

    def _reference(self, case: OpenCase, judgement: Judgement, verdict: str) -> tuple[RankDevice | None, dict[str, float]]:
        """A device that the verdict clears, and what came out there of this rank's data."""
        parts, iteration, rank = self._parts, self._parts.iteration, self._parts.agreement.rank
        values = {one.checked.check: one.checked.value for one in iteration.again}
        device: RankDevice | None = parts.device
        if verdict == "transient":  # the replay in place, which is clean
            values = {} if any(one.checked.rejected for one in iteration.again) else values
        elif verdict != "application" and not (verdict == "persistent" and rank in judgement.accused):
            values = {}
        elif case.found_by == "audit":
            mine = [one for one in case.findings if one.rank == rank and one.elsewhere]
            values = {one.check.rpartition(": ")[0]: float(one.elsewhere) for one in mine}
            there = mine[0].elsewhere_device if mine else ""
            device = RankDevice(there, "", *parts.device.likeness) if there else None
        elif iteration.state in (RerunState.RERUNNING_ROTATED, RerunState.RERUNNING_TO_CONFIRM):
            rotation = parts.rotation
            values = dict(rotation.own_elsewhere) if rotation is not None else {}
            device = rotation.elsewhere_device if rotation is not None else None
        elif iteration.state is not RerunState.RERUNNING_FROM_CHECKPOINT:
            values = {}
        values = {check: value for check, value in values.items() if reduction_of(check) <= 1}
        return (device, values) if device is not None and values else (None, {})


def _check_plain(value: Any, where: str) -> None:
    """Raise `RerunError` for what a reader of plain values would refuse: a step that cannot be read is of no use."""
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        for key, item in value.items():
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for place, item in enumerate(value):
            _check_plain(item, f"{where}[{place}]")
    elif type(value) not in _PLAIN and type(value) is not torch.Tensor:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise RerunError(f"{where} is a {kind}: use numbers, strings, lists, dicts with plain keys and tensors")
