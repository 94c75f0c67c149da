"""The machine of one device: what evidence, time, tests and people's words make of its state."""

import random
from pathlib import Path

import pytest

from rsup.supervisor.evidence import Evidence
from rsup.supervisor.hardware import policy
from rsup.supervisor.hardware.device_machine import RanClean, decide, replay
from rsup.supervisor.hardware.states import Standing, avoided, one_line
from rsup.supervisor.hardware.verbs import FOR_ANYONE, VERBS
from rsup.supervisor.records import EvidenceSaved
from rsup.supervisor.wire import UsageError
from tests.core.evidence_story import HOUR_US, START_US, History, job, seen

PERSISTENT = seen("verdict", "persistent", job=job("t1"), text="rank 1: nan here, 2.5 on GPU-a", iteration=7)


def other(evidence: Evidence, name: str, at_h: float = 0.0, **fields: object) -> Evidence:
    """The same, seen in another job."""
    values = {field: getattr(evidence, field) for field in evidence.__struct_fields__}
    at_us = START_US + int(at_h * HOUR_US)
    values |= {"episode": f"job:local/ann/{name}.1", "job": job(name), "at_us": at_us, **fields}
    return Evidence(**values)


@pytest.mark.parametrize(
    ("source", "code", "state"),
    [
        ("verdict", "persistent", "quarantined"),
        ("verdict", "persistent-data-dependent", "quarantined"),
        ("verdict", "suspect-1-of-n", "suspect"),
        ("verdict", "transient", "watch"),
        ("verdict", "corrupted-state", "watch"),
        ("verdict", "undecided", "watch"),
        ("verdict", "application", "clear"),
        ("hang", "hang", "watch"),
        ("rank-lost", "SIGBUS", "clear"),
        ("xid", "13", "clear"),
        ("xid", "43", "clear"),
        ("xid", "94", "watch"),
        ("xid", "79", "quarantined"),
        ("xid", "64", "in_repair"),
        ("xid", "4711", "watch"),
        ("ecc", "uncorrectable", "quarantined"),
        ("remap", "pending", "watch"),
        ("remap", "failed", "in_repair"),
        ("recovery-action", "reset", "quarantined"),
        ("throttle", "hw-thermal", "watch"),
        ("unreadable", "nvmlDeviceGetUUID", "watch"),
        ("test", "failed", "quarantined"),
        ("test", "passed", "clear"),
        ("test", "skipped", "clear"),
        ("person", "flag", "watch"),
        ("person", "note", "clear"),
        ("of another release", "whatever", "clear"),
    ],
)
def test_what_a_first_sighting_leads_to(source: str, code: str, state: str) -> None:
    history = History()
    assert history.see(seen(source, code)) == state
    assert len(history.dossier.rows) == 1 and history.dossier.saved.version == len(history.changes) == (state != "clear")


def test_a_burst_counts_once_and_a_total_is_absolute() -> None:
    history = History()
    for _ in range(50):
        history.see(seen("verdict", "transient"))
    (row,) = history.dossier.rows.values()
    assert (history.state, row.count, len(history.changes)) == ("watch", 50, 1)
    history = History()
    for total in (3, 5, 5, 4):
        history.see(seen("ecc", "correctable", count=total, is_total=True))
    (row,) = history.dossier.rows.values()
    assert row.count == 5
    before = history.num_rows
    history.see(seen("ecc", "correctable", at_h=1, count=5, is_total=True))
    assert history.num_rows == before, "a total that has not grown is nothing new"


def test_transients_of_independent_jobs_within_the_window_make_a_suspect() -> None:
    """NH28: who fails again and again is seen, and one burst is not."""
    history = History()
    states = [history.see(other(seen("verdict", "transient"), f"t{number}", at_h=24 * number)) for number in range(3)]
    assert states == ["watch", "watch", "suspect"]
    history = History()
    states = [history.see(other(seen("verdict", "transient"), f"t{number}", at_h=24 * 20 * number)) for number in range(4)]
    assert "suspect" not in states, "too far apart"


def test_two_codes_of_one_job_are_one_episode() -> None:
    history = History()
    for source, code in (("hang", "hang"), ("verdict", "transient"), ("verdict", "undecided"), ("link", "nvlink-errors")):
        history.see(seen(source, code, episode="boot:1" if source == "link" else "job:local/ann/t1.1", job=job("t1")))
    assert history.state == "watch" and history.dossier.saved.score == 0.6


def test_the_score_adds_unlike_soft_evidence_and_fades() -> None:
    history = History()
    codes = [("verdict", "transient"), ("hang", "hang"), ("verdict", "undecided"), ("verdict", "corrupted-state")]
    states = [history.see(other(seen(s, c), f"t{n}", at_h=n)) for n, (s, c) in enumerate(codes)]
    assert states == ["watch", "watch", "watch", "suspect"] and history.dossier.saved.score > 2
    slow = History()
    states = [slow.see(other(seen(s, c), f"t{n}", at_h=150 * n)) for n, (s, c) in enumerate(codes)]
    assert "suspect" not in states and slow.dossier.saved.score < 1.5


def test_suspicion_expires_by_steps_and_confirmed_faults_never_do() -> None:
    """NH5: a critical fault does not age away; suspicion does."""
    history = History()
    history.see(seen("verdict", "suspect-1-of-n", share=0.25))
    assert history.dossier.saved.expires_us == START_US + 48 * HOUR_US
    assert history.wait(47.9) == "suspect" and history.wait(0.2) == "watch" and history.wait(120) == "clear"
    assert [change.verb for change in history.changes] == ["evidence", "expiry", "expiry"]
    hard = History()
    hard.see(PERSISTENT)
    assert hard.dossier.saved.expires_us is None and hard.wait(24 * 365) == "quarantined"


def test_one_of_a_group_is_never_more_than_suspect() -> None:
    history = History()
    for number in range(6):
        history.see(other(PERSISTENT, f"t{number}", at_h=number, share=0.25))
    assert history.state == "suspect" and history.dossier.saved.may_drain == ""


def test_a_worker_made_verdict_quarantines_at_once_and_drains_only_with_more() -> None:
    """DESIGN section 6, `drain_after`: a second independent episode, a failed test, or somebody's word."""
    history = History()
    history.see(PERSISTENT)
    assert (history.state, history.dossier.saved.may_drain) == ("quarantined", "")
    history.see(PERSISTENT)
    assert history.dossier.saved.may_drain == "", "the same job again is no second episode"
    history.see(other(PERSISTENT, "t2", at_h=5))
    assert history.dossier.saved.may_drain == "2 independent episodes" and history.dossier.saved.version == 2
    tested = History()
    tested.see(PERSISTENT)
    tested.see(seen("test", "failed", episode="test:1", at_h=1))
    assert "test" in tested.dossier.saved.may_drain
    said = History()
    said.ask("quarantine", "burnt smell")
    assert said.dossier.saved.may_drain == "the word of root: burnt smell"


@pytest.mark.parametrize("code", ["4711", "13"])
def test_unknown_and_application_xids_never_drain(code: str) -> None:
    """NH12: a user's bug must not take a node out; an unknown Xid is watched."""
    history = History()
    for number in range(5):
        history.see(seen("xid", code, episode=f"boot:{number}", at_h=number))
    assert history.state in ("watch", "suspect") and history.dossier.saved.may_drain == ""


def test_a_second_time_in_the_window_is_worse() -> None:
    """NH5: "2nd within 30 d" counts the first one too, though it was released meanwhile."""
    history = History()
    history.see(seen("xid", "79", episode="boot:1"))
    history.ask("release", without_test=True)
    history.wait(200)
    assert history.state == "probation"
    assert history.see(seen("xid", "79", episode="boot:2", at_h=300)) == "in_repair"
    late = History()
    late.see(seen("xid", "79", episode="boot:1"))
    late.ask("release", without_test=True)
    assert late.see(seen("xid", "79", episode="boot:2", at_h=800)) == "quarantined"


def test_the_way_back_needs_a_test_a_word_and_clean_hours() -> None:
    """NH23, NH28: no release without a test; on probation the next hit leads straight back."""
    history = History()
    history.see(PERSISTENT)
    refused = history.ask("release")
    assert refused.status == "refused" and "has not passed a test" in refused.message and history.state == "quarantined"
    history.see(seen("test", "skipped", episode="test:0", at_h=1))
    assert not history.ask("release").done, "a skip is no pass"
    history.see(seen("test", "passed", episode="test:1", at_h=2))
    assert history.state == "quarantined" and history.ask("release").done and history.state == "probation"
    history.feed(RanClean(20 * HOUR_US))
    assert history.state == "probation" and history.dossier.saved.clean_us == 20 * HOUR_US
    history.feed(RanClean(4 * HOUR_US))
    assert history.state == "clear" and history.changes[-1].verb == "clean"
    history = History()
    history.see(PERSISTENT)
    assert history.ask("release", without_test=True).done
    assert history.see(other(seen("verdict", "transient"), "t9", at_h=3)) == "quarantined"
    assert "on probation" in history.dossier.saved.reason


def test_what_is_old_does_not_come_back_after_a_release() -> None:
    history = History()
    history.see(PERSISTENT)
    history.now_us += HOUR_US
    history.ask("release", without_test=True)
    history.see(other(PERSISTENT, "late", at_h=0.5))
    assert history.state == "probation", "it was seen before the release, and told after it"


def test_a_passed_test_lowers_suspicion_and_does_not_end_what_is_certain() -> None:
    """NH15, NH18: a pass is weak evidence, a skip none."""
    history = History()
    history.see(seen("verdict", "suspect-1-of-n", share=0.5))
    assert history.see(seen("test", "skipped", episode="test:1", at_h=1)) == "suspect"
    assert history.see(seen("test", "passed", episode="test:2", at_h=2)) == "watch"
    assert history.see(other(seen("verdict", "suspect-1-of-n", share=0.5), "t5", at_h=3)) == "suspect"


def test_inert_and_refused_evidence_is_kept_and_moves_nothing() -> None:
    history = History()
    history.see(PERSISTENT, "inert: injected")
    history.see(PERSISTENT, "refused: job t1 does not hold the device")
    assert history.state == "clear" and len(history.dossier.rows) == 2
    assert {row.weight for row in history.dossier.rows.values()} == {0.0}
    history.see(PERSISTENT)
    history.see(PERSISTENT, "refused: job t1 does not hold the device")
    effects = sorted(row.effect for row in history.dossier.rows.values())
    assert effects == ["counted", "inert: injected", "refused: job t1 does not hold the device"]
    assert history.state == "quarantined", "a refused sighting does not touch the one that counts"


def test_retired_never_comes_back_by_itself() -> None:
    """NH9, NH26."""
    history = History()
    history.ask("retire", "RMA 17", ticket="RMA-17")
    assert history.state == "retired" and history.dossier.saved.ticket == "RMA-17"
    history.feed(RanClean(1000 * HOUR_US))
    history.see(seen("test", "passed", episode="test:1", at_h=1))
    assert history.wait(9999) == "retired"
    assert history.ask("release").status == "refused" and history.ask("allow").status == "refused"
    assert history.ask("repair").done and history.ask("release", without_test=True).done and history.state == "probation"


# ------------------------------------------------------------------------------------------------------------- properties

_TOLD = [
    other(seen(source, code), f"t{number}", at_h=number * 2, share=share)
    for number, (source, code, share) in enumerate(
        [
            ("verdict", "transient", 1.0),
            ("verdict", "undecided", 0.5),
            ("hang", "hang", 1.0),
            ("xid", "94", 1.0),
            ("xid", "4711", 1.0),
            ("verdict", "suspect-1-of-n", 0.25),
            ("verdict", "transient", 1.0),
            ("throttle", "hw-thermal", 1.0),
            ("verdict", "application", 1.0),
            ("test", "passed", 1.0),
            ("verdict", "persistent", 0.5),
            ("xid", "79", 1.0),
            ("verdict", "persistent", 1.0),
        ]
    )
]


@pytest.mark.parametrize("seed", range(40))
def test_the_order_and_number_of_tellings_do_not_matter(seed: int) -> None:
    """The same evidence in any order, some of it several times, leads to the same state, score and end of suspicion."""
    rng = random.Random(seed)
    told = rng.sample(_TOLD, rng.randint(2, len(_TOLD)))
    outcomes = set()
    for attempt in range(4):
        history = History()
        history.now_us = START_US + 30 * HOUR_US
        again = [rng.choice(told) for _ in range(rng.randint(0, 6))] if attempt else []
        for evidence in rng.sample(told + again, len(told) + len(again)):
            history.see(evidence)
        saved = history.dossier.saved
        outcomes.add((saved.state, saved.score, saved.expires_us, saved.may_drain, saved.rule if saved.expires_us else ""))
    assert len(outcomes) == 1, outcomes


def test_versions_number_the_changes_without_gaps() -> None:
    history = History()
    for evidence in _TOLD:
        history.see(evidence)
    history.ask("repair")
    history.ask("release", without_test=True)
    assert [change.version for change in history.changes] == list(range(1, len(history.changes) + 1))
    assert all(a.after == b.before for a, b in zip(history.changes, history.changes[1:], strict=False))


def test_a_replay_of_the_stored_rows_comes_to_the_same_end() -> None:
    history = History()
    for evidence in _TOLD[:8]:
        history.see(evidence)
    rows = list(history.dossier.rows.values())
    dossier, changes = replay("device", "GPU-b", rows, history.policy, history.now_us)
    assert (dossier.saved.state, dossier.saved.score) == (history.state, history.dossier.saved.score)
    assert [change.after for change in changes] == [change.after for change in history.changes]
    later, changes = replay("device", "GPU-b", rows, history.policy, history.now_us + 1000 * HOUR_US)
    assert later.saved.state == "clear" and changes[-1].verb == "expiry"


def test_committing_a_decision_twice_changes_nothing() -> None:
    history = History()
    history.see(PERSISTENT)
    once, rows = decide(history.dossier, RanClean(5), history.policy, history.now_us)
    assert once is history.dossier and rows == []
    counts = [row.count for row in history.dossier.rows.values() if isinstance(row, EvidenceSaved)]
    assert counts == [1], "counts are absolute: the row itself may be written again"


# ------------------------------------------------------------------------------------------------------------------ verbs


@pytest.mark.parametrize("verb", VERBS)
def test_only_flags_and_notes_are_for_everybody(verb: str) -> None:
    """DESIGN section 12: anyone may flag, which is evidence; the rest is the operators'."""
    history = History()
    verdict = history.ask(verb, principal="ann", is_operator=False, result="passed")
    assert (verdict.status == "forbidden") == (verb not in FOR_ANYONE)
    if verb == "flag":
        assert history.state == "watch" and next(iter(history.dossier.rows.values())).principal == "ann"


def test_three_people_make_a_suspect_and_one_who_insists_does_not() -> None:
    history = History()
    for number in range(5):
        history.now_us += 1
        history.ask("flag", f"slow again {number}", principal="ann", is_operator=False)
    assert history.state == "watch"
    for who in ("bob", "cyn"):
        history.now_us += 1
        history.ask("flag", "slow", principal=who, is_operator=False)
    assert history.state == "suspect"


def test_the_second_of_two_people_hears_of_the_first() -> None:
    """Two people change one device at once: a clear conflict that names who did what."""
    history = History()
    history.ask("quarantine", "fan is dead", principal="ann")
    second = history.ask("quarantine", "noise", principal="bob")
    assert (
        second.status == "conflict"
        and "version 1, quarantine by ann at 2027-" in second.message
        and "fan is dead" in second.message
    )
    stale = history.ask("release", "mine", principal="bob", if_version=0, without_test=True)
    assert stale.status == "conflict" and "since version 0" in stale.message and "ann" in stale.message
    assert history.ask("release", "mine", principal="bob", if_version=1, without_test=True).done


def test_an_allow_wins_until_its_end() -> None:
    history = History()
    history.see(PERSISTENT)
    known = avoided(history.dossier.saved, "GPU-b", history.now_us)
    assert known is not None and known.quarantined
    assert history.ask("allow", "needed tonight").done
    assert avoided(history.dossier.saved, "GPU-b", history.now_us) is None
    history.wait(23.9)
    assert avoided(history.dossier.saved, "GPU-b", history.now_us) is None
    history.wait(0.2)
    assert avoided(history.dossier.saved, "GPU-b", history.now_us) is not None
    assert history.changes[-1].verb == "expiry" and history.state == "quarantined"
    too_long = history.ask("allow", until_us=history.now_us + 10_000 * HOUR_US)
    assert too_long.status == "refused" and "720 h" in too_long.message
    assert history.ask("allow", until_us=history.now_us).status == "refused"


def test_a_dry_run_and_a_change_without_a_reason_do_nothing() -> None:
    history = History()
    verdict = history.ask("quarantine", dry_run=True)
    assert verdict.done and verdict.message == "device GPU-b: clear -> quarantined" and history.state == "clear"
    assert history.ask("quarantine", " ").status == "refused"
    assert history.ask("release").status == "conflict", "it is clear already"


def test_reasons_fit_into_slurms_line() -> None:
    line = one_line('a "quoted" x=1 `text`\nsecond line' + "y" * 500)
    assert line == "a quoted x 1 text" and len(one_line("z" * 500)) == 120


# ----------------------------------------------------------------------------------------------------------------- policy


def test_a_sites_file_is_merged_over_the_built_in_rules(tmp_path: Path) -> None:
    """NH25, NH29: policy as data, that a site can change."""
    path = tmp_path / "site.toml"
    path.write_text('name = "site-3"\nsuspect_ttl_h = 24.0\n[rules.mine]\nsource = "xid"\ncodes = ["79"]\nfirst = "watch"\n')
    mine = policy.load(path)
    history = History(mine)
    assert history.see(seen("xid", "79")) == "watch"
    assert next(iter(history.dossier.rows.values())).rule == "site-3/mine" and mine.suspect_ttl_h == 24
    assert History(mine).see(seen("xid", "64")) == "in_repair", "the rest stays"
    path.write_text("[rules.persistent]\nenabled = false\n")
    assert History(policy.load(path)).see(PERSISTENT) == "watch" and policy.load(path).name == "rsup-1+site"
    assert policy.configured("", {"RSUP_DEVICE_POLICY": str(path)}).name == "rsup-1+site"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x=", "is no TOML"),
        ("sus = 1", "unknown key 'sus'"),
        ("guard = 3", "guard: expected a table"),
        ('suspect_ttl_h = "a"', "suspect_ttl_h: expected `float`"),
        ("watch_ttl_h = 1.0", "watch_ttl_h"),
        ('[rules.xid-power]\nfirst = "watc"', "rules.xid-power.first: 'watc' is not possible"),
        ('[rules.xid-power]\nfrist = "watch"', "rules.xid-power: object contains unknown field `frist`"),
        ('[rules.a]\nfirst = "watch"', "rules.a: object missing required field `source`"),
        ('[rules.a]\nsource = "xid"\ngenerations = ["mars"]', "rules.a.generations"),
        ('[rules.a]\nsource="x"\ncodes=["1"]\n[rules.b]\nsource="x"\ncodes=["1"]', "code '1' of x is rules.a's already"),
        ('name = "a/b"', "name: use 1 to 60"),
        ("[guard]\nmax_fraction = 5", "guard.max_fraction: 5.0 is not possible; use a part from 0 to 0.5, as 0.05 for 5 %"),
        ("[guard]\nmax_fraction = 2\nmax_nodes = 0", "guard.max_fraction: 2.0 is not possible"),
        ("[guard]\nmax_per_hour = 4000", "guard.max_per_hour: 4000 is not possible; use a number from 0 to 1000"),
        ("[guard]\nmax_nodes = 60", "guard.max_nodes: 60 is not possible; use a number from 0 to most_nodes (50)"),
        ("[guard]\nmax_per_rack = -1", "guard.max_per_rack: -1 is not possible"),
    ],
)
def test_a_malformed_policy_is_one_line_with_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        policy.load(path)
    assert str(path) in str(caught.value) and says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        policy.load(tmp_path / "missing.toml")


def test_rules_know_gpu_generations(tmp_path: Path) -> None:
    found = policy.built_in()
    assert found.generation("NVIDIA GB200") == "blackwell" and found.generation("NVIDIA A100-SXM4-80GB") == "ampere"
    assert found.rule("device", "xid", "145", "blackwell").name == "xid-nvlink5"
    assert found.rule("device", "xid", "145", "hopper").name == "xid-unknown"


def test_the_guard_counts_by_number_share_and_hour() -> None:
    """NH11: zero is a normal value, small clusters may lose two."""
    guard = policy.built_in().guard
    assert guard.allows(0, 0, 0) and guard.allows(1, 10, 1) and not guard.allows(2, 10, 1)
    assert guard.allows(2, 100, 1) and not guard.allows(2, 100, 4) and not guard.allows(2, 100, 1, in_rack=2)


def test_every_state_has_a_reaction_or_a_way_out() -> None:
    for standing in Standing:
        history = History()
        history.dossier = history.dossier.__class__(
            history.dossier.saved.__class__("device", "GPU-b", standing.value, 0, "made up", 1), {}
        )
        assert history.ask("flag").done and history.ask("note").done
        if standing is not Standing.CLEAR:
            assert any(history.ask(verb, without_test=True, dry_run=True).done for verb in ("release", "repair")), standing
