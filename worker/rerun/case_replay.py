"""For a training script: compute the kept step of a case, where `rsup devices test --replay CASE` asks for it.

    rerun, data = RerunStateMachine(), RerunDataIterator(loader)
    rerun.attach(model, optimizer)

    def forward_backward():
        optimizer.zero_grad()
        loss = model(next(data))
        rerun.validate_loss(loss)
        loss.backward()

    if replay_case(rerun, data, forward_backward):      # False in every other run, at once
        sys.exit()

The same model, attached alike, and what `forward_backward` does must be what the loop does; parameters, random numbers,
registered state and batches are the step's. One process computes, as the only rank; no optimizer step is made. Parameters above
512 MiB are not in the step: where `replayed_checkpoint()` names a checkpoint, the script loads the model from it, and says so
with `has_loaded_parameters=True`.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from rsup.supervisor.wire import RsupError
from rsup.worker.rerun.contract import RankDevice, RerunError
from rsup.worker.rerun.data_iterator import RerunDataIterator, as_iterators
from rsup.worker.rerun.kept_step import KeptStep, likeness, read_step, software
from rsup.worker.rerun.passes import Judged
from rsup.worker.rerun.replay_order import VARIABLE, Reference, ReplayAnswer, ReplayOrder, StepPass
from rsup.worker.rerun.state_machine import RerunStateMachine


def replay_order() -> ReplayOrder | None:
    """What this process was started for, None: for something else. Raise `RerunError` for an order that nobody can read."""
    text = os.environ.get(VARIABLE, "")
    try:
        return msgspec.json.decode(text, type=ReplayOrder) if text else None
    except msgspec.MsgspecError as error:
        raise RerunError(f"{VARIABLE} is no order for a replay: {error}") from None


def replayed_program() -> dict[str, Any] | None:
    """What the loop had put into `rerun.program` when the step was kept, to build the model alike; None outside a replay."""
    order = replay_order()
    return None if order is None else dict(_step(order.step).program)


def replayed_checkpoint() -> tuple[Path, int] | None:
    """Where the parameters of a model are that is too large for the step: the folder of the job's checkpoints, and after how
    many iterations. None: the step has them, or this is no replay."""
    order = replay_order()
    step = None if order is None else _step(order.step)
    return None if step is None or step.parameters is not None else (Path(step.checkpoint), step.iteration - 1)


def replay_case(
    rerun: RerunStateMachine,
    data: RerunDataIterator | Sequence[RerunDataIterator | None] | None,
    forward_backward: Callable[[], object],
    has_loaded_parameters: bool = False,
) -> bool:
    """Compute the step as often as it was asked for, write what came out, and return True; False: this is no replay.

    `data`: the iterators that `forward_backward` takes its batches from, as in `should_run_forward_backward`.
    `has_loaded_parameters`: the model is as `replayed_checkpoint()` has it; without that, a step that needs it is not computed.
    """
    order = replay_order()
    if order is None:
        return False
    try:
        _check_parameters(order, has_loaded_parameters)
        answer = _answer(order, rerun, as_iterators(data), forward_backward)
    except RsupError as error:
        answer = ReplayAnswer(problem=str(error))
    write_answer(order, answer)
    return True


def write_answer(order: ReplayOrder, answer: ReplayAnswer) -> None:
    """In one piece."""
    path = Path(order.answer)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(msgspec.json.encode(answer))
    new.replace(path)


def _answer(
    order: ReplayOrder, rerun: RerunStateMachine, iterators: list[RerunDataIterator], run: Callable[[], object]
) -> ReplayAnswer:
    step, started_s = _step(order.step), time.monotonic()
    if len(iterators) != len(step.batches):
        raise RerunError(f"the step has the batches of {len(step.batches)} iterators, the program hands in {len(iterators)}")
    device = rerun.torch_device
    batches, passes = step.batches_on(device), []
    for _ in range(order.times):
        _restore(rerun, step)
        for iterator, kept in zip(iterators, batches, strict=True):
            iterator.borrow(kept)
        judged = rerun.run_kept(step.iteration, iterators, run)
        passes.append(_pass(judged, _digest(rerun)))
    here = RankDevice(order.uuid, order.node, order.model, order.vbios, order.driver)
    return ReplayAnswer(
        case_id=step.case_id,
        iteration=step.iteration,
        rank=step.rank,
        verdict=step.verdict,
        recorded_on=step.device.uuid,
        flagged={check: repr(value) for check, value in step.flagged.items()},
        tolerances=step.tolerances,
        reference=_reference(step),
        likeness=likeness(here, software(device)),
        passes=passes,
        seconds=time.monotonic() - started_s,
        injected=bool(order.fault),
    )


def _check_parameters(order: ReplayOrder, has_loaded: bool) -> None:
    step = _step(order.step)
    if step.parameters is None and not has_loaded:
        where = f"of iteration {step.iteration - 1} in {step.checkpoint}"
        raise RerunError(
            f"the step's parameters are in the checkpoint {where}: load it in the program (`replayed_checkpoint`), and give "
            f"replay_case has_loaded_parameters=True"
        )


@lru_cache(maxsize=1)
def _step(path: str) -> KeptStep:
    return read_step(Path(path))


def _restore(rerun: RerunStateMachine, step: KeptStep) -> None:
    """Everything as it was before the step, without gradients, which a pass would add to. Random numbers last: loading may
    draw."""
    for parameter in rerun.named_parameters.values():
        parameter.grad = None
    if step.parameters is not None:
        _load_parameters(rerun.named_parameters, step.parameters)
    rerun.replay_state.load_state_dict(step.state)
    rerun.replay_state.restore_rng_bytes(step.rng)


@torch.no_grad()
def _load_parameters(live: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    there = {_bare(name): tensor for name, tensor in kept.items()}
    here = {_bare(name): tensor for name, tensor in live.items()}
    for name in sorted(here.keys() ^ there.keys()):
        raise RerunError(f"the program's model is another one: parameter {name} is not in both")
    for name, tensor in here.items():
        if tensor.shape != there[name].shape or tensor.dtype != there[name].dtype:
            raise RerunError(f"the program's model is another one: {name} was {tuple(there[name].shape)}, {there[name].dtype}")
        tensor.copy_(there[name])


def _bare(name: str) -> str:
    return name.removeprefix("module.")  # of DDP, which a replay can do without


def _pass(judged: Sequence[Judged], digest: str) -> StepPass:
    values = {one.checked.check: repr(one.checked.value) for one in judged}
    rejected = {one.checked.check: ", ".join(one.labels) for one in judged if one.checked.rejected and one.checked.fatal}
    return StepPass(values=values, rejected=rejected, digest=digest)


def _digest(rerun: RerunStateMachine) -> str:
    """Of all gradients; empty where kernels may differ from time to time."""
    if not torch.are_deterministic_algorithms_enabled():
        return ""
    digest = hashlib.sha256()
    for name, parameter in sorted(rerun.named_parameters.items()):
        gradient = parameter.grad
        if gradient is not None and not hasattr(gradient, "to_local") and not gradient.is_sparse:
            digest.update(f"{_bare(name)}\0".encode())
            digest.update(gradient.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _reference(step: KeptStep) -> Reference | None:
    device = step.reference_device
    if device is None or not step.reference:
        return None
    values = {check: repr(value) for check, value in step.reference.items()}
    return Reference(uuid=device.uuid, likeness=likeness(device, step.software), values=values)
