"""Evaluation: the mean loss over a fixed part of the validation split. Draws no random number and changes no parameter."""

from collections.abc import Callable

import torch

from rsup.worker.reference.data import Text
from rsup.worker.reference.hooks import Sections
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import Ranks
from rsup.worker.rerun.state_machine import RerunStateMachine
from rsup.worker.unused_memory import empty_unused_memory


def evaluate(
    evaluated: Callable[[torch.Tensor], torch.Tensor],
    module: torch.nn.Module,
    validation: Text,
    options: Options,
    ranks: Ranks,
    sections: Sections,
    rerun: RerunStateMachine,
) -> tuple[float, float]:
    """Cross entropy in nats per byte, of this rank: the sum over `eval_iters` steps, and their number. The same samples every
    time. Collective.

    `evaluated`: the loss of samples, [batch, sequence + 1], on the CPU. A wrong loss is warned of; nothing is replayed, and no
    training iteration is marked.
    """
    total = torch.zeros((), dtype=torch.float64)
    module.eval()
    try:
        for step in range(options.eval_iters):
            first = step * options.samples_per_pass + ranks.rank * options.micro_batch_size
            with sections.eval_step(), torch.no_grad(), rerun.evaluation():
                loss = evaluated(validation.samples(first, options.micro_batch_size))
                rerun.validate_loss(loss)
                total += loss.double().cpu()
            empty_unused_memory(options.empty_unused_memory_level, 1, ranks.device)
    finally:
        module.train()
    return float(total), float(options.eval_iters)
