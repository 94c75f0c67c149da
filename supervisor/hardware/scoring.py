"""What the evidence about one device or node adds up to at a moment. Pure, and the same in whatever order it came.

Only independent episodes count: pieces of evidence of one boot, or of one job, are one episode however many they are (of one
burst the rest is a `count`). Two ways lead to a state: the rule of a single piece of evidence (its first time, or that enough
independent episodes of that rule lie within its window), and the score, the sum of the heaviest weight of each episode, where
soft sources fade by half-life. Whatever leads to suspicion at most holds for a time only; what leads further holds until it is
settled. A verdict that its own job has taken back (`FOLLOWED_RANK`) counts as if it meant one of two.
"""

from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from rsup.supervisor.evidence import FOLLOWED_RANK
from rsup.supervisor.hardware.node_report import EVENT
from rsup.supervisor.hardware.policy import HOUR_US, Policy, Rule
from rsup.supervisor.hardware.states import Standing, one_line, rank
from rsup.supervisor.records import EvidenceSaved

MAX_WEIGHED = 256
"""Pieces of evidence of one subject that are weighed, the newest."""
ROUNDED = 1e-6
"""Scores are rounded to it."""
TAKEN_BACK = "the fault followed the rank to another board"
_MAYBE_THE_PROGRAM = ("hang", "rank-lost", "straggler")
"""Sources that a faulty program feeds as well: runs of one job id count as one episode."""


class Assessment(Struct, frozen=True):
    """What it adds up to. `until_us`: when that changes by itself, None: never."""

    standing: Standing
    score: float
    until_us: int | None = None
    rule: str = ""
    reason: str = ""
    row: EvidenceSaved | None = None
    """The piece of evidence that tips it."""
    may_drain: str = ""


def faded(weight: float, half_life_us: float, age_us: float) -> float:
    """What is left of a weight."""
    return weight * 0.5 ** (age_us / half_life_us) if half_life_us else weight


class _Ground(Struct, frozen=True):
    """A reason to be in a state for a time."""

    reaction: str
    until_us: int | None
    row: EvidenceSaved
    rule: Rule
    reason: str

    @property
    def order(self) -> tuple[int, int, str, str]:
        return rank(self.reaction), self.row.last_us, self.row.fingerprint, self.reason


class Weighed:
    """The counted evidence of one subject under a policy, ready for questions. `generation`: of the device, empty: unknown."""

    def __init__(
        self,
        policy: Policy,
        kind: str,
        rows: Iterable[EvidenceSaved],
        generation: str = "",
        rule_of: Callable[[str, str], Rule] | None = None,
    ) -> None:
        """`rule_of`: the policy's rule for source and code, where the caller has looked it up before."""
        counted = sorted((row for row in rows if row.effect == "counted"), key=lambda row: (row.last_us, row.fingerprint))
        self.rows = counted[-MAX_WEIGHED:]
        self._policy, self._kind = policy, kind
        self._rule_of = rule_of or (lambda source, code: policy.rule(kind, source, code, generation))
        self._rules = {row.fingerprint: self._rule_of(row.source, row.code) for row in self.rows}
        self._moving: list[EvidenceSaved] = []
        self._by_name: dict[str, list[EvidenceSaved]] = {}
        """By rule: those that may repeat."""
        for row in self.rows:
            self._sort_in(row, self.rule(row))
        self._weights: list[tuple[int, float, float, str]] | None = None
        """When, how much, half-life and episode of what has a weight; None: to be found anew."""
        self._soft_us: dict[str, int | None] = {}
        self._known: dict[str, list[_Ground]] = {}
        """Grounds by fingerprint, once found, for `_settled_us`."""
        self._scores: dict[str, float] = {}
        """The scores at the moments of pieces, where grounds are known, and the numbers of episodes in their windows."""
        self._repeats: dict[str, int] = {}
        self._settled_us = 0
        self._episode = _episodes(self.rows)
        self._taken_back = {row.case_id for row in self.rows if (row.source, row.code) == ("verdict", FOLLOWED_RANK)}
        self._passed_us = max((row.last_us for row in self.rows if (row.source, row.code) == ("test", "passed")), default=0)

    def rule(self, row: EvidenceSaved) -> Rule:
        return self._rules[row.fingerprint]

    def _sort_in(self, row: EvidenceSaved, rule: Rule) -> None:
        if rule.may_move:
            self._moving.append(row)
        if rule.repeat:
            self._by_name.setdefault(rule.name, []).append(row)

    def assess(self, settled_us: int, now_us: int) -> Assessment:
        """The state that the evidence after `settled_us` leads to, at most `in_repair`."""
        if settled_us != self._settled_us:
            self._known.clear()
            self._scores.clear()
            self._repeats.clear()
            self._settled_us = settled_us
        telling = [row for row in self._moving if row.last_us > settled_us and not self._is_over(row, now_us)]
        grounds = [g for row in telling for g in self._grounds(row, settled_us)]
        holding = [g for g in grounds if g.until_us is None or g.until_us > now_us]
        score = self.score(settled_us, now_us)
        top = max(holding, key=lambda g: g.order, default=None)
        if top is None:
            return Assessment(Standing.CLEAR, score)
        level = [g for g in holding if rank(g.reaction) == rank(top.reaction)]
        untils = [g.until_us for g in level]
        until_us = None if None in untils else max(until for until in untils if until is not None)
        drain = self._may_drain(settled_us, level)
        label = self._policy.label(top.rule)
        return Assessment(Standing(top.reaction), score, until_us, label, top.reason, top.row, drain)

    def score(self, settled_us: int, now_us: int) -> float:
        """The sum over independent episodes after `settled_us`, as it was or will be at `now_us`."""
        if self._weights is None:
            self._weights = [self._weight(row) for row in self._moving if self.rule(row).weight]
        heaviest: dict[str, float] = {}
        for at_us, weight, half_life_us, episode in self._weights:
            if settled_us < at_us <= now_us:
                now = faded(weight, half_life_us, now_us - at_us)
                if now > heaviest.get(episode, 0.0):
                    heaviest[episode] = now
        return round(sum(sorted(heaviest.values())), 6)

    def _weight(self, row: EvidenceSaved) -> tuple[int, float, float, str]:
        rule = self.rule(row)
        return row.last_us, rule.weight * self._share(row), rule.half_life_us, self._episode[row.fingerprint]

    def reaction(self, row: EvidenceSaved) -> str:
        """What this one leads to by its own rule, repeats included."""
        return max((g.reaction for g in self._by_rule(row)), key=rank, default="note")

    # ---------------------------------------------------------------------------------------------------------- grounds

    def _is_over(self, row: EvidenceSaved, now_us: int) -> bool:
        """Whether all that it can lead to has expired by then."""
        rule = self.rule(row)
        if rule.name not in self._soft_us:
            hours = max(self._policy.watch_ttl_h, rule.ttl_h or self._policy.suspect_ttl_h)
            is_soft = max(rank(rule.first), rank(rule.repeat or "note")) <= rank("suspect")
            self._soft_us[rule.name] = int(hours * HOUR_US) if is_soft else None
        soft_us = self._soft_us[rule.name]
        return soft_us is not None and row.last_us + soft_us <= now_us

    def _grounds(self, row: EvidenceSaved, settled_us: int) -> list[_Ground]:
        known = self._known.get(row.fingerprint)
        if known is None:
            known = self._known[row.fingerprint] = self._found_grounds(row, settled_us)
        return known

    def _found_grounds(self, row: EvidenceSaved, settled_us: int) -> list[_Ground]:
        found = self._by_rule(row)
        rule = self.rule(row)
        score = self._scores[row.fingerprint] = self.score(settled_us, row.last_us) if rule.weight else 0.0
        if rule.weight and score >= self._policy.suspect_score_of(self._kind):
            num = len({self._episode[r.fingerprint] for r in self.rows if settled_us < r.last_us <= row.last_us})
            found += self._soft("suspect", row, f"{num} independent episodes, the last: {row.text}")
        return found

    def _by_rule(self, row: EvidenceSaved) -> list[_Ground]:
        rule = self.rule(row)
        found = self._ground(rule.first, row, row.text or rule.about)
        if rule.repeat:
            num = len({self._episode[r.fingerprint] for r in self._within_window(row, rule)})
            self._repeats[row.fingerprint] = num
            if num >= rule.repeat_count:
                found += self._ground(rule.repeat, row, f"{num} independent episodes ({rule.about}), the last: {row.text}")
        return found

    def _within_window(self, row: EvidenceSaved, rule: Rule) -> list[EvidenceSaved]:
        """Those of the same rule that count together with `row`, settled ones too."""
        from_us = row.last_us - rule.window_us
        same = (r for r in self._by_name.get(rule.name, ()) if from_us < r.last_us <= row.last_us)
        return [r for r in same if not self._is_shared(row) or self._is_shared(r)]

    def _ground(self, reaction: str, row: EvidenceSaved, reason: str) -> list[_Ground]:
        if rank(reaction) > rank("suspect") and self._is_taken_back(row):
            reaction, reason = "suspect", f"{TAKEN_BACK}: {reason}"
        if rank(reaction) > rank("suspect") and self._is_shared(row):
            reaction, reason = "suspect", f"1 of {round(1 / row.share)}: {reason}"
        if rank(reaction) > rank("suspect"):
            return [_Ground(reaction, None, row, self.rule(row), one_line(reason))]
        return self._soft(reaction, row, reason)

    def _soft(self, reaction: str, row: EvidenceSaved, reason: str) -> list[_Ground]:
        """Suspicion becomes watch, and that ends; a test passed since takes suspicion away at once."""
        rule, line = self.rule(row), one_line(reason)
        policy = self._policy
        watch = _Ground("watch", row.last_us + int(policy.watch_ttl_h * HOUR_US), row, rule, line)
        if reaction == "watch":
            return [watch]
        if reaction != "suspect":
            return []
        until_us = row.last_us + int((rule.ttl_h or policy.suspect_ttl_h) * HOUR_US)
        if row.last_us <= self._passed_us:
            return [watch]
        return [_Ground("suspect", until_us, row, rule, line), watch]

    def _is_taken_back(self, row: EvidenceSaved) -> bool:
        """The case that said so has followed its rank to another board; the row stands for that case alone."""
        return row.source == "verdict" and row.count == 1 and row.case_id in self._taken_back and row.code != FOLLOWED_RANK

    def _share(self, row: EvidenceSaved) -> float:
        return row.share / 2 if self._is_taken_back(row) else row.share

    def _is_shared(self, row: EvidenceSaved) -> bool:
        """It points to a group of which one member is at fault: nobody is more than suspect for it."""
        return self._share(row) < 1.0

    def _may_drain(self, settled_us: int, level: Collection[_Ground]) -> str:
        """Why the node may be drained for what these grounds lead to."""
        if not level or rank(next(iter(level)).reaction) < rank("quarantined"):
            return ""
        allowing = [g for g in level if g.rule.drain != "never"]
        at_once = max((g for g in allowing if g.rule.drain == "now"), key=lambda g: g.order, default=None)
        if at_once is not None:
            return f"{at_once.rule.name}: {at_once.rule.about}"
        telling = [
            row
            for row in self.rows
            if row.last_us > settled_us and not self._is_shared(row) and rank(self.reaction(row)) >= rank("suspect")
        ]
        episodes = {self._episode[row.fingerprint] for row in telling}
        return f"{len(episodes)} independent episodes" if allowing and len(episodes) > 1 else ""


def episode_names(row: EvidenceSaved) -> list[str]:
    """What it has in common with others of its episode: those that share one of them belong together."""
    if row.source == "person":
        return [f"person:{row.principal}"]
    names = [row.episode.partition(EVENT)[0]]
    if row.job is not None and row.source != "devices":
        key = row.job
        names.append(f"job:{key.cluster}/{key.owner}/{key.job_id}.{key.run}")
        if row.source in _MAYBE_THE_PROGRAM:
            names.append(f"program:{key.cluster}/{key.owner}/{key.job_id}")
    return names


def _episodes(rows: Iterable[EvidenceSaved]) -> dict[str, str]:
    """For each fingerprint a name that independent ones do not share: evidence of one boot or one job belongs together, what
    one person says is one voice, and devices of a node count apart."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    found = {}
    for row in rows:
        names = episode_names(row)
        first, *more = sorted(root(name) for name in names)
        for other in more:
            parent[other] = first
        found[row.fingerprint] = names[0]
    return {fingerprint: root(name) for fingerprint, name in found.items()}
