"""How far two numbers are apart, by a total rule. Pure, without torch."""

import math

FLOOR = 1e-12
"""Values below it are compared by their distance: relative to 0, every number is infinitely large."""

_HUGE = 1e300


def difference(initial: float, again: float) -> float:
    """0.0 where two values are the same (NaN and NaN, infinities of one sign), inf where only one of them is a finite
    number or they are different non-finite ones, else the symmetric relative difference: 2 |a - b| / (|a| + |b|).

    Never NaN, never raises. `x` and `-x` differ by 2.
    """
    if initial == again or (math.isnan(initial) and math.isnan(again)):
        return 0.0
    if not (math.isfinite(initial) and math.isfinite(again)):
        return math.inf
    if max(abs(initial), abs(again)) > _HUGE:  # the sum could overflow
        initial, again = initial / 16, again / 16
    return 2 * abs(initial - again) / max(abs(initial) + abs(again), FLOOR)
