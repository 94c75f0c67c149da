"""Can some evidence lead to suspicion at all? A quick bound from above, so that only few stories have to be played. Pure.

It takes every piece for an episode of its own, of whichever GPU generation weighs most, and knows nothing of passed tests or
verdicts that were taken back: all of these only lower what the machine (`scoring`) comes to.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rsup.supervisor.hardware.policy import Policy, Rule
from rsup.supervisor.hardware.scoring import ROUNDED, faded

LEVELS = ("suspect", "quarantined", "in_repair")
MAX_LOOKED_AT = 64
"""Of so many pieces nobody needs a bound: their story is played."""


class Told(NamedTuple):
    """A piece of evidence, as far as it matters here."""

    kind: str
    source: str
    code: str
    last_us: int
    share: float = 1.0


class RulesTried:
    """The rules of a policy by evidence, each looked up once."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._found: dict[tuple[str, str, str, str], Rule] = {}
        self._any: dict[tuple[str, str, str], list[Rule]] = {}

    def may_move(self, kind: str, source: str, code: str) -> bool:
        """Whether such evidence can move a device of any generation."""
        return any(rule.may_move for rule in self.of_any_generation(kind, source, code))

    def of_generation(self, kind: str, generation: str) -> Callable[[str, str], Rule]:
        """The rule for source and code of such a device; empty: of unknown generation."""
        found, policy = self._found, self.policy

        def rule_of(source: str, code: str) -> Rule:
            key = (kind, source, code, generation)
            if key not in found:
                found[key] = policy.rule(*key)
            return found[key]

        return rule_of

    def of_any_generation(self, kind: str, source: str, code: str) -> list[Rule]:
        """All that may apply."""
        key = (kind, source, code)
        if key not in self._any:
            tried = (self.of_generation(kind, generation)(source, code) for generation in ("", *self.policy.generations))
            self._any[key] = list({rule.name: rule for rule in tried}.values())
        return self._any[key]


def may_reach_suspicion(told: Sequence[Told], rules: RulesTried, suspect_score: float, since_us: int) -> bool:
    """Whether a piece since then could lead there: by its own rule, by the repeats of it, or by the score at its moment.
    `told`: in order of time, back as far as the policy's windows reach."""
    if not told or told[-1].last_us < since_us:
        return False
    if len(told) > MAX_LOOKED_AT:
        return True
    tried = [rules.of_any_generation(one.kind, one.source, one.code) for one in told]
    since = [place for place, one in enumerate(told) if one.last_us >= since_us]
    if any(_by_rule(told, tried, place) for place in since):
        return True
    heaviest = [max(rule.weight for rule in found) * one.share for one, found in zip(told, tried, strict=True)]
    if sum(heaviest) < suspect_score - ROUNDED:
        return False
    return any(_score(told, tried, told[place].last_us) >= suspect_score - ROUNDED for place in since)


def _by_rule(told: Sequence[Told], tried: Sequence[Sequence[Rule]], place: int) -> bool:
    at_us = told[place].last_us
    for rule in tried[place]:
        if rule.first in LEVELS:
            return True
        if rule.repeat in LEVELS and len(told) >= rule.repeat_count:
            from_us, same = at_us - rule.window_us, 0
            for one, found in zip(told, tried, strict=True):
                same += from_us < one.last_us <= at_us and any(other.name == rule.name for other in found)
            if same >= rule.repeat_count:
                return True
    return False


def _score(told: Sequence[Told], tried: Sequence[Sequence[Rule]], at_us: int) -> float:
    return sum(
        one.share * max(faded(rule.weight, rule.half_life_us, at_us - one.last_us) for rule in found)
        for one, found in zip(told, tried, strict=True)
        if one.last_us <= at_us
    )
