"""The built-in rules: NaN and Inf, and values that are unexpectedly large for where they are checked."""

import math

from rsup.worker.rerun.contract import RerunConfig
from rsup.worker.rerun.large_values import LargeValues
from rsup.worker.rerun.passes import Rule

LARGE_FACTOR = 10.0
"""A value more than this many times its baseline is unexpectedly large. Source: Megatron-LM's checks."""
MAX_NORM = math.sqrt(3.4028234663852886e38)
"""Beyond it the square, which Adam and gradient clipping compute in float32, is Inf. A flipped exponent bit ends up here."""


class BuiltInRules:
    """The rules that the configuration turns on."""

    def __init__(self, config: RerunConfig, large: LargeValues) -> None:
        self.loss_scaling = False
        """A dynamic loss scale is in use: NaN and Inf are skipped steps, no cases."""
        self._config = config
        self._large = large
        self._finite_loss = _finite("loss")
        self._finite_gradient = (*_finite("gradient"), Rule("gradient whose square overflows float32", _overflows))

    def of_loss(self, context: str) -> tuple[Rule, ...]:
        """For a micro-batch's loss, known as `context`."""
        return (self._finite_loss if self._looks_for_nan else ()) + self._not_large(
            "loss", context, self._config.check_for_spiky_loss
        )

    def of_gradients(self, context: str) -> tuple[Rule, ...]:
        """For the norm of one bucket's, or parameter group's, gradients."""
        finite = self._finite_gradient if self._looks_for_nan else ()
        return finite + self._not_large("gradient", context, self._config.check_for_large_grads)

    @property
    def _looks_for_nan(self) -> bool:
        return self._config.check_for_nan_in_loss_and_grad and not self.loss_scaling

    def _not_large(self, kind: str, context: str, is_on: bool) -> tuple[Rule, ...]:
        if not is_on:
            return ()

        def is_large(value: float) -> bool:
            return self._large.is_unexpectedly_large(value, LARGE_FACTOR, context)

        return (Rule(f"unexpectedly large {kind}", is_large, fatal=False),)


def _finite(kind: str) -> tuple[Rule, ...]:
    return Rule(f"NaN in {kind}", math.isnan), Rule(f"Inf in {kind}", math.isinf)


def _overflows(norm: float) -> bool:
    return MAX_NORM < norm < math.inf
