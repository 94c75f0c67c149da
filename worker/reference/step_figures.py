"""What is measured of gradients and parameters for the log alone, on the device, without waiting for it."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from rsup.worker.reference.observed import Observed
from rsup.worker.reference.options import Options
from rsup.worker.reference.stepper import NUM_ZEROS, PARAMS_NORM


def logged_figures(options: Options, module: nn.Module, observed: Observed) -> Mapping[str, Callable[[], torch.Tensor]]:
    """What the options ask for, by name; to be called behind a step's update, gradients still in place."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    figures: dict[str, Callable[[], torch.Tensor]] = {}
    if options.log_num_zeros_in_grad:
        timer = observed.timer("optimizer-count-zeros", 1)

        def counted() -> torch.Tensor:
            with timer:
                return num_zeros(parameters)

        figures[NUM_ZEROS] = counted
    if options.log_params_norm:
        figures[PARAMS_NORM] = lambda: norm(parameters)
    return figures


def num_zeros(parameters: list[nn.Parameter]) -> torch.Tensor:
    """How many elements of the gradients are exactly 0: [], float64, on their device. One without a gradient has none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    non_zeros = torch.stack([torch.count_nonzero(gradient) for gradient in gradients]).sum()
    return sum(gradient.numel() for gradient in gradients) - non_zeros.double()


def norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all parameters together: [], float32, on their device."""
    with torch.no_grad():
        return torch.nn.utils.get_total_norm([parameter.data for parameter in parameters])
