"""Stored stories played quickly: the same as the machine decides piece after piece, in random stories; and the bound that says
which stories need no playing."""

import random
from collections.abc import Iterator

import pytest
from msgspec.structs import replace as replaced

from rsup.supervisor.evidence import FOLLOWED_RANK
from rsup.supervisor.hardware import growing_evidence, policy, scoring
from rsup.supervisor.hardware.device_machine import Sighted, TimePassed, decide, fingerprint, next_due_us, replay
from rsup.supervisor.hardware.states import Dossier, clear_dossier
from rsup.supervisor.hardware.suspicion_bound import LEVELS, RulesTried, Told, may_reach_suspicion
from rsup.supervisor.records import EvidenceSaved, TransitionSaved
from tests.core.evidence_story import HOUR_US, START_US, job, sighting_of

RULES = policy.parse(
    """
suspect_score = 1.2
[rules.xid-contained]
first = "watch"
repeat = "suspect"
repeat_count = 3
window_h = 200.0
weight = 0.5
half_life_h = 100.0
""",
    "tried.toml",
)
TOLD = (
    *(("xid", "94"), ("xid", "94"), ("xid", "63"), ("xid", "43"), ("hang", "step"), ("rank-lost", "SIGSEGV"), ("xid", "48")),
    *(("verdict", "transient"), ("verdict", "persistent"), ("verdict", FOLLOWED_RANK), ("test", "passed"), ("throttle", "x")),
)


def story(seed: int, num: int, mild: bool) -> list[EvidenceSaved]:
    """`mild`: nothing in it leads further than suspicion by itself."""
    chance, rows = random.Random(seed), dict[str, EvidenceSaved]()
    kinds = [one for one in TOLD if not mild or one not in (("xid", "48"), ("verdict", "persistent"))]
    at_us = START_US
    for number in range(num):
        at_us += chance.choice((0, 1, 5, 20, 90)) * HOUR_US
        source, code = chance.choice(kinds)
        one = EvidenceSaved(
            kind="device",
            subject="GPU-b",
            fingerprint="",
            source=source,
            code=code,
            episode=f"boot:{chance.randrange(1 + num)}",
            first_us=at_us,
            last_us=at_us,
            recorded_us=at_us,
            job=job(f"t{chance.randrange(1 + num // 2)}") if chance.random() < 0.4 else None,
            case_id=f"c{chance.randrange(3)}" if source == "verdict" else "",
            share=0.5 if chance.random() < 0.1 else 1.0,
            text=f"{source} {code} {number}",
        )
        key = fingerprint(sighting_of(one), one.subject, one.effect)
        rows.setdefault(key, replaced(one, fingerprint=key))
    return sorted(rows.values(), key=lambda row: (row.last_us, row.fingerprint))


def played_slowly(rows: list[EvidenceSaved], until_us: int) -> tuple[Dossier, list[TransitionSaved]]:
    """Each piece and each expiry through `decide`."""
    dossier, found = clear_dossier("device", "GPU-b"), list[TransitionSaved]()

    def take(event: Sighted | TimePassed, now_us: int) -> bool:
        nonlocal dossier
        dossier, new = decide(dossier, event, RULES, now_us)
        found.extend(one for one in new if isinstance(one, TransitionSaved))
        return bool(new)

    def wait(until_us: int) -> None:
        while (due_us := next_due_us(dossier.saved)) is not None and due_us <= until_us:
            if not take(TimePassed(), due_us):
                break

    for row in rows:
        wait(row.last_us)
        take(Sighted(sighting_of(row), row.effect), row.last_us)
    wait(until_us)
    return dossier, found


@pytest.fixture(params=[256, 12])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many pieces are weighed at most: with few, the oldest are pushed out again and again."""
    monkeypatch.setattr(scoring, "MAX_WEIGHED", request.param)
    monkeypatch.setattr(growing_evidence, "MAX_WEIGHED", request.param)
    yield request.param


@pytest.mark.parametrize("mild", [True, False])
def test_random_stories_come_to_the_same_states_at_the_same_times(most: int, mild: bool) -> None:
    seen: set[str] = set()
    for seed in range(60):
        rows = story(seed, 50, mild)
        until_us = rows[-1].last_us + 2000 * HOUR_US
        slow, expected = played_slowly(rows, until_us)
        quick, found = replay("device", "GPU-b", rows, RULES, until_us)
        assert [(c.at_us, c.before, c.after, c.verb) for c in found] == [
            (c.at_us, c.before, c.after, c.verb) for c in expected
        ], f"seed {seed}"
        assert (quick.saved.state, quick.saved.score, quick.saved.expires_us, quick.saved.may_drain) == (
            slow.saved.state,
            slow.saved.score,
            slow.saved.expires_us,
            slow.saved.may_drain,
        ), f"seed {seed}"
        seen |= {change.after for change in found}
    assert {"watch", "suspect", "clear"} <= seen if mild else {"quarantined"} <= seen


def test_the_bound_never_leaves_out_a_story_that_leads_to_suspicion() -> None:
    rules, left_out = RulesTried(RULES), 0
    for seed in range(300):
        rows = story(1000 + seed, 1 + seed % 7, mild=seed % 4 > 0)
        since_us = rows[len(rows) // 2].last_us
        told = [Told("device", row.source, row.code, row.last_us, row.share) for row in rows]
        telling = [one for one in told if rules.may_move(*one[:3])]
        _, found = replay("device", "GPU-b", rows, RULES, rows[-1].last_us)
        reaches = any(change.after in LEVELS and change.at_us >= since_us for change in found)
        may = may_reach_suspicion(telling, rules, RULES.suspect_score, since_us)
        assert may or not reaches, f"seed {1000 + seed}"
        left_out += not may
    assert left_out > 60, "it is of some use"
