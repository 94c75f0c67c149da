"""Computing in fewer bits: which type, and the loss scale on the way through the gradients. Parameters stay float32."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from rsup.worker.reference.loss_scale import LossScale
from rsup.worker.reference.options import Options

HOOKS = f"{__name__}.*"
"""Those on gradients, by pattern: they only launch kernels, so a graph may hold them."""


def compute_dtype(options: Options) -> torch.dtype | None:
    """The type that matrix products are computed in; None: that of the parameters."""
    if options.fp16:
        return torch.float16
    return torch.bfloat16 if options.bf16 else None


class ScaledGradients:
    """The loss scale in one rank's backward passes. All calls on the training thread.

    A dynamic scale is taken out of the finished gradients, which are looked through for overflows at the same time. A fixed one
    is taken out of each gradient as it is computed: then all that looks at gradients sees them as they are, also in a graph,
    which could not look for overflows on the host.

    Serves as the `scaler` of `RerunStateMachine.attach` where the scale is dynamic: see `for_rerun`.
    """

    def __init__(self, scale: LossScale, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.scale = scale
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not scale.rules.is_dynamic:
            for parameter in self._parameters:
                parameter.register_hook(_divider(scale.value))  # type: ignore[no-untyped-call]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call `backward` on. `loss`: [], float32."""
        return loss * self.scale.value

    def take_out(self) -> bool:
        """After the last backward, gradients being reduced: leave them without the scale, and say whether one has overflowed.
        The step must then be skipped. The next scale holds from now on. Waits for the device. Collective."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        device = gradients[0].device
        overflow = torch.zeros(1, device=device)
        inverse = torch.full((1,), 1.0 / self.scale.value if self.scale.rules.is_dynamic else 1.0, device=device)
        look = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage]
        look(gradients, overflow, inverse)
        if dist.is_initialized() and dist.get_world_size() > 1:  # reduced gradients are alike; memory that went bad is not
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        overflowed = bool(overflow)
        self.scale.update(overflowed)
        return overflowed

    @property
    def for_rerun(self) -> "ScaledGradients | None":
        """For `RerunStateMachine.attach`: with a dynamic scale NaN and Inf in gradients are skipped steps, and no cases."""
        return self if self.scale.rules.is_dynamic else None

    def is_enabled(self) -> bool:
        """As of a `torch.amp.GradScaler`."""
        return True

    @property
    def _scale(self) -> torch.Tensor:
        """As of a `torch.amp.GradScaler`: [], float64, on the CPU."""
        return torch.tensor(self.scale.value, dtype=torch.float64)


def _divider(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook that knows nothing else: one that knew its parameter would keep it for good."""
    return lambda gradient: gradient / value


def scaled_gradients(scale: LossScale | None, module: torch.nn.Module) -> ScaledGradients | None:
    """Those of `module`; None where there is no scale."""
    return None if scale is None else ScaledGradients(scale, module.parameters())
