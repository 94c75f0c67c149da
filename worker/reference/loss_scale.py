"""The loss scale of `--fp16`: what the loss is multiplied by, so that small gradients are more than nothing in float16. Pure.

A dynamic one looks for the greatest scale with which nothing overflows, by Megatron-LM's rules:

    an overflow             the step is skipped; once `hysteresis` overflows have come since the scale was last raised, each of
                            them halves it, down to `minimum`
    `window` steps          without an overflow in between double it, and the hysteresis begins anew

A fixed one stays; a step that overflows with it is skipped too. Every rank has the same scale: all are told alike of overflows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FACTOR = 2.0


@dataclass(frozen=True)
class ScaleRules:
    """`initial`: the first scale, or that of all steps where it is not `is_dynamic`. Defaults are Megatron-LM's."""

    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    is_dynamic: bool = True


class LossScale:
    """The scale of one rank, from step to step."""

    def __init__(self, rules: ScaleRules) -> None:
        self.rules = rules
        self.value = rules.initial
        self._num_good = 0
        self._hysteresis = rules.hysteresis

    @property
    def is_at_minimum(self) -> bool:
        """Whether another overflow cannot lower it: then float16 is not to blame."""
        return not self.rules.is_dynamic or self.value <= self.rules.minimum

    def update(self, overflowed: bool) -> None:
        """A step is over, made or skipped."""
        if not self.rules.is_dynamic:
            return
        if overflowed:
            self._num_good = 0
            self._hysteresis -= 1
            if self._hysteresis <= 0:
                self.value = max(self.value / FACTOR, self.rules.minimum)
            return
        self._num_good += 1
        if self._num_good >= self.rules.window:
            self._num_good = 0
            self._hysteresis = self.rules.hysteresis
            if math.isfinite(doubled := self.value * FACTOR):  # from Inf no overflow would ever lead back
                self.value = doubled

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers. Empty for a fixed scale, which is an option and no state."""
        if not self.rules.is_dynamic:
            return {}
        return {"value": self.value, "num_good": self._num_good, "hysteresis": max(self._hysteresis, 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, within what the rules allow now. Does nothing for a fixed scale."""
        if self.rules.is_dynamic:
            self.value = max(float(state["value"]), self.rules.minimum)
            self._num_good = int(state["num_good"])
            self._hysteresis = min(int(state["hysteresis"]), self.rules.hysteresis)


def doubt_of_loss_scale(fixed: float | None) -> str:
    """A warning about a fixed scale; empty: none."""
    if not fixed or math.frexp(fixed)[0] == 0.5:
        return ""
    return f"--loss-scale {fixed:g} is no power of 2: taking it out of the gradients rounds them"


def problem_of_loss_scale(
    fp16: bool, bf16: bool, fixed: float | None, given: Mapping[str, object], initial: float, minimum: float
) -> str:
    """What is wrong with the options, in one sentence; empty: nothing. `given`: flags that are not at their default, but
    `--fp16` and `--bf16`."""
    if fp16 and bf16:
        return "--fp16 and --bf16 do not go together"
    if not fp16 and given:
        return f"{next(iter(given))} needs --fp16"
    of_dynamic = next((flag for flag in given if flag != "--loss-scale"), "")
    if fixed and of_dynamic:
        return f"{of_dynamic} is for a dynamic loss scale, and --loss-scale {fixed:g} is a fixed one: leave one out"
    if not initial or not minimum:
        return "--initial-loss-scale and --min-loss-scale must be more than 0"
    if minimum > initial:
        return f"--min-loss-scale {minimum:g} is above --initial-loss-scale {initial:g}"
    return ""
