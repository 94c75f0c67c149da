"""The checks of a step, made by the device that computed it, and the gate that keeps a bad step from changing anything.

Each check's value and the verdict lie in one small result buffer, which the host reads when it likes. The worst code of all
ranks closes the gate: a float32 scalar of exactly 0 or 1, because fused Adam skips on 1 and on nothing else (a gate of 2 lets
the NaN through and spoils the step count). It stays closed until the host opens it, so steps that were launched behind a bad
one change nothing either.

The rules are those of `rerun.built_in`, to the bit, since the rerun machine judges the same numbers again. Every value has four
ascending limits; how many of them it exceeds is its code. So one search judges all values, whatever rules are on. Source:
DESIGN.md section 7.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rsup.worker.cuda_graph.baselines import DeviceBaselines
from rsup.worker.cuda_graph.contract import Code, GraphError, Verdict
from rsup.worker.rerun.built_in import MAX_NORM
from rsup.worker.rerun.contract import RerunConfig, RerunMode
from rsup.worker.rerun.large_values import LargeValues

MAX_LOSS = torch.finfo(torch.float32).max
_FOR_INF, _BEYOND_INF, _FOR_NAN = 1e200, 1e250, 1e300
"""What stands for Inf and NaN in the search: greater than any float32, and apart from one another."""
_NUM_CODES = 2
"""Places of the result buffer before the values."""


class DeviceChecks:
    """The checks of one rank's step. `begin`, `loss`, `norm` and `judge` belong into the step (and its graph), in this order;
    the rest is called outside, on the stream that the step runs on.

    `num_losses`, `num_norms`: values that each step hands in, losses by micro-batch, norms by gradient group. Either may be 0.
    `group`: the ranks that close their gates together; its backend must be the device's. None: all ranks, where there are any.
    `large`: what is known already of large values, with the contexts `loss` and `grad norm of bucket N`.
    """

    def __init__(
        self,
        num_losses: int,
        num_norms: int,
        device: torch.device,
        *,
        config: RerunConfig,
        group: ProcessGroup | None = None,
        large: LargeValues | None = None,
    ) -> None:
        self.num_losses = num_losses
        self.num_norms = num_norms
        self.gate = torch.zeros((), device=device)
        """[], float32, exactly 0 or 1. 1: no update. For `OptimizerGraph`."""
        self.result = torch.zeros(_NUM_CODES + num_losses + num_norms, device=device)
        """[2 + num_losses + num_norms], float32: this rank's code, that of all ranks, losses, norms. For `LateReader`."""
        self._values = self.result[_NUM_CODES:]
        self._group = group
        self._is_alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self._finite = config.check_for_nan_in_loss_and_grad
        replays = config.mode is not RerunMode.DISABLED  # else large values are warned of by the host, and change nothing
        self._limits = _limits(num_losses, num_norms, self._finite).to(device)
        """[values, 4], float64, ascending. A value's code is the number of limits that it exceeds."""
        spiky = slice(0, num_losses if config.check_for_spiky_loss and replays else 0)
        self._spiky = spiky
        self._watched = slice(
            0 if spiky.stop else num_losses, num_losses + (num_norms if config.check_for_large_grads and replays else 0)
        )
        """Values that have a baseline."""
        self._caps = self._limits[self._watched, 2].clone()
        self._losses_in: set[int] = set()
        self._norms_in: dict[int, torch.Tensor] = {}
        loss_contexts = ["loss"] * num_losses
        norm_contexts = [f"grad norm of bucket {number}" for number in range(num_norms)]
        watched = [*loss_contexts, *norm_contexts][self._watched]
        self._baselines = DeviceBaselines(watched, device) if watched else None
        if large is not None:
            self.load_baselines(large, loss_contexts, norm_contexts)

    # ------------------------------------------------------------------------------------------------------ in the step

    def begin(self) -> None:
        """A pass begins. No kernels: what was handed in before is forgotten."""
        self._losses_in.clear()
        self._norms_in.clear()

    @torch.no_grad()
    def loss(self, index: int, loss: torch.Tensor) -> None:
        """Hand in a micro-batch's loss (one element, any floating dtype, kept as float32). It may be changed afterwards."""
        assert 0 <= index < self.num_losses, f"loss {index} of {self.num_losses}"
        self._losses_in.add(index)
        self._values[index].copy_(loss.reshape(()))

    def norm(self, index: int, norm: torch.Tensor) -> None:
        """Hand in a gradient norm ([], kept as float32). It must not be changed before `judge`."""
        assert 0 <= index < self.num_norms, f"norm {index} of {self.num_norms}"
        self._norms_in[index] = norm

    @torch.no_grad()
    def judge(self) -> None:
        """Judge what was handed in, agree with the other ranks, and close the gate where one of them found something.

        Eight small kernels and an all-reduce of one number; about twenty more with spiky losses or large gradients on; one
        where no check is. Raises `GraphError` where a value was not handed in: its check would pass for ever.
        """
        self._require_all()
        if self._norms_in:
            norms = torch.stack([self._norms_in[index].reshape(()) for index in range(self.num_norms)])
            self._values[self.num_losses :].copy_(norms)
        self.begin()
        if not self._finite and self._baselines is None:
            return
        sizes = self._sizes()
        if self._baselines is not None:
            self._set_limits(self._baselines)
        self._write_code(sizes)
        if not self._is_alone:
            dist.all_reduce(self.result[1:2], dist.ReduceOp.MAX, self._group)
        torch.maximum(self.gate, self.result[1].clamp(max=1.0), out=self.gate)
        if self._baselines is not None:
            self._baselines.learn(sizes[self._watched], self.gate)

    # --------------------------------------------------------------------------------------------------------- outside

    def open_gate(self) -> None:
        """Updates count again. On the step's stream."""
        self.gate.zero_()

    def close_gate(self) -> None:
        """No update from now on, until it is opened. On the step's stream."""
        self.gate.fill_(1.0)

    def load_baselines(self, large: LargeValues, loss_contexts: Sequence[str], norm_contexts: Sequence[str]) -> None:
        """Take over what the host has learned, in place: at the start, and after iterations that the device did not learn from
        (those judged with the gate closed). `contexts`: under which name `large` knows each value; several may share one."""
        if len(loss_contexts) != self.num_losses or len(norm_contexts) != self.num_norms:
            raise GraphError(
                f"baselines for {len(loss_contexts)} losses and {len(norm_contexts)} gradient norms, but the step has "
                f"{self.num_losses} and {self.num_norms}: name a context for each"
            )
        if self._baselines is not None:
            self._baselines.load(large, [*loss_contexts, *norm_contexts][self._watched])

    @staticmethod
    def parse(values: Sequence[float]) -> Verdict:
        """What a copy of the result buffer says. Raises `GraphError` for one that no step has written."""
        try:
            code, agreed = (Code(int(value)) for value in values[:_NUM_CODES])
        except (ValueError, OverflowError):
            text = f"the result buffer of the step begins with {values[:_NUM_CODES]}, which are no codes"
            raise GraphError(f"{text}: something has written over it; test the device's memory") from None
        return Verdict(code, agreed, tuple(values[_NUM_CODES:]))

    # ----------------------------------------------------------------------------------------------------------- parts

    def _sizes(self) -> torch.Tensor:
        """Magnitudes, [values], float64. NaN and Inf become numbers: beyond the last limits, or, where nobody looks for them,
        below all."""
        sizes = self._values.double().abs_()
        if self._finite:
            return sizes.nan_to_num_(nan=_FOR_NAN, posinf=_FOR_INF)
        return sizes.nan_to_num_(nan=-1.0, posinf=-1.0)

    def _set_limits(self, baselines: DeviceBaselines) -> None:
        thresholds = torch.minimum(baselines.thresholds(), self._caps)
        self._limits[self._watched, 0].copy_(thresholds)
        self._limits[self._spiky, 1].copy_(thresholds[self._spiky])

    def _write_code(self, sizes: torch.Tensor) -> None:
        if len(sizes) == 0:
            self.result[:_NUM_CODES].zero_()
            return
        codes = torch.searchsorted(self._limits, sizes.unsqueeze(1), out_int32=True)
        self.result[:_NUM_CODES].copy_(codes.amax())

    def _require_all(self) -> None:
        missing = [f"loss {index}" for index in range(self.num_losses) if index not in self._losses_in]
        missing += [f"gradient norm {index}" for index in range(self.num_norms) if index not in self._norms_in]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            text = f"the step has not handed in {', '.join(missing[:3])}{more}"
            raise GraphError(f"{text}: call checks.loss() for every micro-batch and checks.norm() for every gradient group")


def _limits(num_losses: int, num_norms: int, finite: bool) -> torch.Tensor:
    """Limits without baselines. A loss that exceeds two is `SPIKY_LOSS`, a norm that exceeds one `LARGE_GRADIENT`; three `INF`,
    four `NAN`."""
    largest = torch.tensor([MAX_LOSS] * num_losses + [MAX_NORM] * num_norms, dtype=torch.float64)
    beyond = torch.full_like(largest, _BEYOND_INF)
    if not finite:
        largest.fill_(math.inf)
        beyond.fill_(math.inf)
    return torch.stack([largest, largest, largest, beyond], dim=1).contiguous()
