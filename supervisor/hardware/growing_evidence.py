"""The evidence of one subject as it comes in, piece after piece in order of time, for playing a long story through the machine.

The same states as `scoring.Weighed` gives for the same pieces; what the next piece cannot change is not found anew. It can
change what older ones lead to where it shows that episodes belong together, takes a verdict back, is a passed test, came at the
same moment, or pushes the oldest out of what is weighed. (Only a reason's count of episodes may be that of the moment at which
it was found.)
"""

from collections import Counter
from collections.abc import Callable

from rsup.supervisor.evidence import FOLLOWED_RANK
from rsup.supervisor.hardware.policy import Policy, Rule
from rsup.supervisor.hardware.scoring import MAX_WEIGHED, ROUNDED, Weighed, episode_names, faded
from rsup.supervisor.records import EvidenceSaved

_TAKES_BACK = ("verdict", FOLLOWED_RANK)
_PASSED = ("test", "passed")


class GrowingEvidence(Weighed):
    """Begins empty. `rule_of`: as in `Weighed`."""

    def __init__(
        self, policy: Policy, kind: str, generation: str = "", rule_of: Callable[[str, str], Rule] | None = None
    ) -> None:
        super().__init__(policy, kind, (), generation, rule_of)
        self._episodes = _Episodes()

    def add(self, row: EvidenceSaved) -> None:
        """One more counted piece, which comes after all others by time and fingerprint."""
        rule = self._rules[row.fingerprint] = self._rule_of(row.source, row.code)
        changes_more = bool(self.rows) and self.rows[-1].last_us == row.last_us
        self.rows.append(row)
        self._sort_in(row, rule)
        changes_more |= self._episodes.add(row)
        self._episode = self._episodes.of
        if (row.source, row.code) == _TAKES_BACK:
            self._taken_back.add(row.case_id)
            changes_more = True
        if (row.source, row.code) == _PASSED:
            self._passed_us = row.last_us
            changes_more = True
        if len(self.rows) > MAX_WEIGHED:
            changes_more |= self._drop_oldest()
        if changes_more:
            self._forget()
        elif self._weights is not None and rule.weight:
            self._weights.append(self._weight(row))

    def _forget(self) -> None:
        self._known.clear()
        self._scores.clear()
        self._repeats.clear()
        self._weights = None

    def _drop_oldest(self) -> bool:
        """Whether that can change anything that the others lead to; what it may have changed for some is forgotten here."""
        row = self.rows.pop(0)
        rule = self._rules.pop(row.fingerprint)
        if rule.may_move:
            self._moving.pop(0)
        if rule.repeat:
            self._by_name[rule.name].pop(0)
        changes_more = self._episodes.drop(row)
        if changes_more:
            self._episodes = _Episodes()
            for other in self.rows:
                self._episodes.add(other)
            self._episode = self._episodes.of
        if (row.source, row.code) == _TAKES_BACK:
            self._taken_back = {one.case_id for one in self.rows if (one.source, one.code) == _TAKES_BACK}
            changes_more = True
        if (row.source, row.code) == _PASSED and row.last_us == self._passed_us:
            self._passed_us = max((one.last_us for one in self.rows if (one.source, one.code) == _PASSED), default=0)
            changes_more = True
        if rule.may_move and not changes_more:
            self._without(row, rule)
        return changes_more

    def _without(self, gone: EvidenceSaved, rule: Rule) -> None:
        """Forget the grounds for which that piece may have made the difference."""
        if rule.weight and self._weights is not None:
            self._weights.pop(0)
        self._known.pop(gone.fingerprint, None)
        least, weight = self._policy.suspect_score_of(self._kind), rule.weight * self._share(gone)
        for row in self._moving:
            score = self._scores.get(row.fingerprint, 0.0)
            if score >= least and weight:
                score = self._scores[row.fingerprint] = score - faded(weight, rule.half_life_us, row.last_us - gone.last_us)
                if score < least + ROUNDED:
                    self._known.pop(row.fingerprint, None)
            if not rule.repeat or self.rule(row).name != rule.name or gone.last_us <= row.last_us - rule.window_us:
                continue
            repeats = self._repeats.get(row.fingerprint, 0)
            self._repeats[row.fingerprint] = repeats - 1
            if repeats == rule.repeat_count:
                self._known.pop(row.fingerprint, None)


class _Episodes:
    """Which pieces belong together, as `scoring` has it. `of`: by fingerprint, the same for those that do."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self._of_name: dict[str, str] = {}
        self._num: Counter[str] = Counter()
        """How many pieces have that name."""
        self._last = 0

    def add(self, row: EvidenceSaved) -> bool:
        """Whether it shows that earlier ones belong together."""
        names = episode_names(row)
        self._num.update(names)
        known = sorted({self._of_name[name] for name in names if name in self._of_name})
        self._last += not known
        one = known[0] if known else str(self._last)
        self._of_name |= dict.fromkeys(names, one)
        self.of[row.fingerprint] = one
        if len(known) < 2:
            return False
        self._of_name = {name: one if of in known else of for name, of in self._of_name.items()}
        self.of = {fingerprint: one if of in known else of for fingerprint, of in self.of.items()}
        return True

    def drop(self, row: EvidenceSaved) -> bool:
        """Whether others may belong together only by that piece."""
        names = episode_names(row)
        self._num.subtract(names)
        del self.of[row.fingerprint]
        for name in names:
            if not self._num[name]:
                del self._of_name[name], self._num[name]
        return sum(name in self._num for name in names) > 1
