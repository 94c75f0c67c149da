"""Replays a kept step of the reference trainer: `python -m rsup.worker.reference.replay`, started by `rsup devices test`.

The step says which model it was; nobody needs to know its options.
"""

import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from rsup.supervisor.wire import RsupError
from rsup.worker.checkpoint import load_tensors
from rsup.worker.checkpoint_directory import CheckpointDirectory, Damaged, read_commit
from rsup.worker.corruption import Corruption, MemoryMarks
from rsup.worker.deterministic import make_deterministic
from rsup.worker.faults import FaultPlan
from rsup.worker.numeric_faults import parse_numeric_fault
from rsup.worker.reference.build import make_loss_scale, make_model
from rsup.worker.reference.hooks import make_sections
from rsup.worker.reference.mixed_precision import scaled_gradients
from rsup.worker.reference.options import Options
from rsup.worker.reference.program import read_program
from rsup.worker.reference.ranks import joined
from rsup.worker.reference.training_step import TrainingStep
from rsup.worker.rerun.case_replay import replay_case, replay_order, write_answer
from rsup.worker.rerun.contract import RankDevice, RerunConfig, RerunError
from rsup.worker.rerun.data_iterator import RerunDataIterator
from rsup.worker.rerun.kept_step import KeptStep, read_step
from rsup.worker.rerun.replay_order import ReplayAnswer, ReplayOrder
from rsup.worker.rerun.state_machine import RerunStateMachine


def main() -> int:
    """Compute the step that the environment names; 0: the answer is written. Raise `RerunError` without an order."""
    order = replay_order()
    if order is None:
        raise RerunError("this replays a step for `rsup devices test --replay CASE`: start that")
    try:
        step = read_step(Path(order.step))
        options, deterministic = read_program(step)
        _replay(order, step, options, deterministic)
    except RsupError as error:
        write_answer(order, ReplayAnswer(problem=str(error)))
    return 0


def _replay(order: ReplayOrder, step: KeptStep, options: Options, deterministic: bool) -> None:
    if deterministic:
        make_deterministic()
    torch.set_num_threads(step.num_threads)
    if order.kind == "cuda" and not torch.cuda.is_available():
        raise RerunError("torch cannot use the GPU here")
    device = torch.device(order.kind, 0) if order.kind == "cuda" else torch.device("cpu")
    with joined(device, 600.0):
        module = make_model(options, device)
        _load_from_checkpoint(module, step)
        faults = [parse_numeric_fault(order.fault)] if order.fault else []
        corruption = Corruption(faults, step.rank, order.uuid, MemoryMarks(), module)
        ddp = DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
        config = RerunConfig(
            check_for_nan_in_loss_and_grad=not options.no_check_for_nan_in_loss_and_grad,
            check_for_spiky_loss=options.check_for_spiky_loss,
            check_for_large_grads=options.check_for_large_grads,
        )
        rerun = RerunStateMachine(config, device=RankDevice(order.uuid), torch_device=device)
        scaling = scaled_gradients(make_loss_scale(options), module)
        rerun.attach(ddp, scaler=None if scaling is None else scaling.for_rerun)
        data, optimizer = RerunDataIterator(iter(())), torch.optim.SGD(module.parameters(), lr=0.0)  # it makes no step
        sections, no_faults = make_sections(False, 0), FaultPlan((), step.rank, None, "")
        one = TrainingStep(options, ddp, optimizer, device, data, rerun, corruption, no_faults, sections, scaling=scaling)
        replay_case(rerun, data, lambda: one.forward_backward(step.iteration), has_loaded_parameters=True)


def _load_from_checkpoint(module: torch.nn.Module, step: KeptStep) -> None:
    """The parameters of a model that was too large to be kept with the step."""
    if step.parameters is not None:
        return
    folder = CheckpointDirectory(Path(step.checkpoint)).folder(step.iteration - 1)
    try:
        read_commit(folder)
    except Damaged as damage:
        raise RerunError(f"the step's parameters are in {folder}, which cannot be used: {damage}") from None
    load_tensors(folder, {f"model.{name}": parameter.data for name, parameter in module.named_parameters()})


if __name__ == "__main__":
    try:
        exit_code = main()
    except RsupError as error:
        print(f"rsup.worker.reference.replay: error: {error}", file=sys.stderr)
        exit_code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # Python's and torch's clean-up takes half a second
