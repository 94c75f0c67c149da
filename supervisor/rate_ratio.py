"""How much likelier than others a device (node, firmware, ...) is to be behind failures, given how much it was used.

**Conditional likelihood.** Say one candidate makes the failures of whatever uses it r times likelier per hour than others do,
and nothing else is special. A job on N devices then fails at the rate (N - 1 + r) / N of an ordinary one of its size. Given
that there were K failures, the probability that they fell where they did, against r = 1, is

    L(r) = prod over failures with the candidate (1 + (r - 1) / N_f)  /  (1 + (r - 1) s) ** K

where s is the candidate's share of all exposure hours. The base rate has dropped out; a device that was used ten times as much
has a ten times larger s, so ten times as many failures are no evidence against it. L is averaged over `RATIOS`, evenly on a
logarithmic scale: a Bayes factor.

**Probability.** At most one candidate is the cause. Half of the prior is "no single one"; the other half is spread evenly. With
100,000 candidates each begins with 1 in 200,000, so a coincidence in a large fleet convinces nobody.

**Ratio.** Failures against those expected of its exposure, with a Gamma(1, 1) prior that pulls small numbers to 1:
(failures + 1) / (expected + 1). `above_one` is the posterior probability that the rate is really above that of the others.
Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

RATIOS = tuple(10.0**power for power in range(1, 7))
"""10, 100, ... 1e6."""
NO_CULPRIT = 0.5
"""Prior probability that no single candidate is behind the failures."""


@dataclass(frozen=True)
class Ratio:
    """Posterior of a rate ratio."""

    ratio: float
    above_one: float


def rate_ratio(failures: int, expected: float) -> Ratio:
    """The posterior for that many failures where `expected` were to be expected."""
    rate = expected + 1.0
    # P(Gamma(k + 1, rate) > 1) is the probability of at most k events of a Poisson process with that rate
    term = total = math.exp(-rate) if rate < 700 else 0.0
    for number in range(1, failures + 1):
        term *= rate / number
        total += term
    return Ratio((failures + 1) / rate, min(1.0, total))


def log_bayes_factor(sizes: Sequence[int], num_failures: int, share: float) -> float:
    """Natural logarithm of the averaged L(r). `sizes`: N_f of each failure that the candidate took part in."""
    share, log1p = min(1.0, share), math.log1p
    gains = _gains(tuple(sorted(sizes)) if len(sizes) > 1 else tuple(sizes))
    terms = [gain - num_failures * log1p((ratio - 1.0) * share) for gain, ratio in zip(gains, RATIOS, strict=True)]
    highest = max(terms)
    return highest + math.log(sum([math.exp(term - highest) for term in terms]) / len(terms))


@lru_cache(maxsize=4096)
def _gains(sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Logarithms of the first product, for each of `RATIOS`; the same for most candidates of a question."""
    return tuple(sum(math.log1p((ratio - 1.0) / size) for size in sizes) for ratio in RATIOS)


def probabilities(log_factors: Sequence[float], num_candidates: int) -> tuple[list[float], float]:
    """The posterior probability of each of these candidates, and that of none. `num_candidates`: all there are; those without
    a factor count as if nothing were known of them, which is more than they deserve."""
    if not num_candidates:
        return [], 1.0
    prior = math.log((1.0 - NO_CULPRIT) / num_candidates)
    logs = [prior + factor for factor in log_factors]
    others = num_candidates - len(log_factors)
    rest = NO_CULPRIT + (1.0 - NO_CULPRIT) * others / num_candidates
    highest = max([*logs, math.log(rest)])
    weights = [math.exp(value - highest) for value in logs]
    total = sum(weights) + math.exp(math.log(rest) - highest)
    return [weight / total for weight in weights], math.exp(math.log(rest) - highest) / total
