"""What the board's watch finds overdue, and what it must leave alone."""

import typing

import pytest

from rsup.launcher import board_watch
from rsup.launcher.board_watch import WatchedRank, WatchState
from rsup.launcher.process_state import Gap
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import FLAG_ASYNC_SAVE, FLAG_DEBUGGER, SectionSample, SlotSample

S = 10**9
NOW = 1_000 * S


def section(name: str, open_since_s: float = 0, entered: int = 1, longest_s: float = 0) -> SectionSample:
    return SectionSample(name, int(open_since_s * S), entered, 0, int(longest_s * S))


def slot(*sections: SectionSample, **values: typing.Any) -> SlotSample:
    defaults: dict[str, typing.Any] = {
        "pid": 11,
        "attempt": 1,
        "liveness_ns": NOW,
        "main_ns": NOW - 5 * S,
        "iteration": 7,
        "phase": "train",
        "closed_since_ns": NOW - S,
        "flags": 0,
        "train_steps": 20,
        "eval_steps": 0,
        "checkpoints": 0,
        "heartbeats": 0,
        "heartbeat_ns": 0,
        "calls": 1,
    }
    return SlotSample(**(defaults | values), sections=sections)


class Watch:
    def __init__(self, limits: wire.Limits, held: bool = False) -> None:
        self.limits, self.held, self.state = limits, held, WatchState()

    def look(self, *samples: SlotSample | None, now_ns: int = NOW, gaps: tuple[Gap, ...] = ()) -> list[tuple[int, str]]:
        ranks = [WatchedRank(i, 11 + i, NOW - 100 * S, sample) for i, sample in enumerate(samples)]
        self.state, facts = board_watch.watch(self.state, ranks, self.limits, now_ns, gaps, 1, 5, lambda pid: self.held)
        self.facts = facts
        return [(fact.rank, fact.limit) for fact in facts]

    def twice(self, *samples: SlotSample | None, gaps: tuple[Gap, ...] = ()) -> list[tuple[int, str]]:
        assert self.look(*samples, gaps=gaps) == []
        return self.look(*samples, now_ns=NOW + S // 10, gaps=gaps)


STEP_3 = wire.Limits(sections={"step": 3.0, "checkpointing": 60.0, "free": None})


def test_default_limits_never_flag_anything() -> None:
    stuck = slot(section("step", 1), closed_since_ns=1, heartbeats=1, heartbeat_ns=1)
    assert Watch(wire.Limits()).twice(stuck, None, slot(closed_since_ns=1)) == []


def test_two_samples_of_the_same_entry_and_told_once() -> None:
    watch = Watch(STEP_3)
    stuck = slot(section("step", 996, entered=4))
    assert watch.twice(slot(), stuck) == [(1, "step")]
    (fact,) = watch.facts
    assert (fact.age_s, fact.limit_s, fact.iteration, fact.main_beat_age_s, fact.calculated) == (4.1, 3.0, 7, 5.1, False)
    assert watch.look(slot(), stuck, now_ns=NOW + S) == []


def test_another_entry_between_the_samples_is_progress() -> None:
    watch = Watch(STEP_3)
    assert watch.look(slot(section("step", 996, entered=4))) == []
    assert watch.look(slot(section("step", 996.5, entered=5))) == []


def test_an_expired_outer_section_is_not_masked_by_an_inner_one() -> None:
    inner_later = slot(section("step", 990), section("checkpointing", 999))
    assert Watch(STEP_3).twice(inner_later) == [(0, "step")]
    assert Watch(STEP_3).twice(slot(section("checkpointing", 900), section("step", 999))) == [(0, "checkpointing")]


def test_a_section_without_limit_is_unlimited() -> None:
    assert Watch(STEP_3).twice(slot(section("free", 1), section("unknown", 1))) == []


def test_out_of_section_runs_only_while_nothing_is_open() -> None:
    limits = wire.Limits(out_of_section_s=10.0)
    idle = slot(section("step"), closed_since_ns=980 * S)
    assert Watch(limits).twice(idle) == [(0, "out-of-section")]
    assert Watch(limits).twice(slot(section("setup", 1), closed_since_ns=980 * S)) == []


def test_heartbeat_limits() -> None:
    limits = wire.Limits(heartbeat_s=10.0, initial_heartbeat_s=20.0)
    assert Watch(limits).twice(slot(heartbeats=3, heartbeat_ns=985 * S)) == [(0, "heartbeat")]
    assert Watch(limits).twice(slot(heartbeats=3, heartbeat_ns=995 * S)) == []
    watch = Watch(limits)
    assert watch.look(slot(), now_ns=NOW - 30 * S) == []
    assert watch.twice(slot()) == [(0, "initial-heartbeat")]


def test_startup_ends_with_the_first_call() -> None:
    limits = wire.Limits(startup_s=50.0)
    assert Watch(limits).twice(slot(calls=0), None) == [(0, "startup"), (1, "startup")]
    assert Watch(limits).twice(slot()) == []


def test_warm_up_has_its_own_limit_if_one_is_set() -> None:
    warm = {"phase": "warmup", "train_steps": 2, "closed_since_ns": 900 * S}
    none_set = wire.Limits(sections={"step": 3.0}, out_of_section_s=60.0)
    assert Watch(none_set).twice(slot(**warm)) == [(0, "out-of-section")]
    own = wire.Limits(sections={"step": 3.0}, out_of_section_s=60.0, warmup_s=300.0)
    assert Watch(own).twice(slot(**warm)) == []
    assert Watch(own).twice(slot(**warm, main_ns=600 * S)) == []
    late = slot(**(warm | {"closed_since_ns": 600 * S}), main_ns=600 * S)
    assert Watch(own).twice(late) == [(0, "warmup")]
    in_step = slot(section("step", 990), phase="train", train_steps=2)
    assert Watch(own).twice(in_step) == []
    assert Watch(own).twice(slot(section("step", 990), phase="train", train_steps=5)) == [(0, "step")]


def test_calculated_limits_are_marked() -> None:
    watch = Watch(wire.Limits(sections={"step": 3.0}, calculated=["step"]))
    watch.twice(slot(section("step", 990)))
    assert watch.facts[0].calculated


def test_gaps_of_the_agent_do_not_count() -> None:
    suspended = (Gap(951 * S, 999 * S),)
    assert Watch(STEP_3).twice(slot(section("step", 950)), gaps=suspended) == []
    assert Watch(STEP_3).twice(slot(section("step", 940)), gaps=suspended) == [(0, "step")]


@pytest.mark.parametrize(
    ("gap", "expected_s"), [((0, 10), 50), ((40, 60), 40), ((60, 70), 40), ((90, 200), 40), ((100, 120), 50)]
)
def test_age_counts_only_the_overlap(gap: tuple[int, int], expected_s: int) -> None:
    assert board_watch.age_ns(50 * S, 100 * S, [Gap(gap[0] * S, gap[1] * S)]) == expected_s * S


def test_a_rank_held_by_a_debugger_is_not_overdue_and_starts_anew_when_it_is_let_go() -> None:
    watch = Watch(STEP_3, held=True)
    stuck = slot(section("step", 990))
    assert watch.twice(stuck) == []
    watch.held = False
    assert watch.look(stuck, now_ns=NOW + 2 * S) == []
    assert watch.look(stuck, now_ns=NOW + 4 * S) == []
    assert watch.look(stuck, now_ns=NOW + 5 * S) == [(0, "step")]
    flagged = slot(section("step", 990), flags=FLAG_DEBUGGER)
    assert Watch(STEP_3).twice(flagged) == []


def test_what_was_observed() -> None:
    watch = Watch(wire.Limits())
    first = slot(section("step", 0, 20, 0.5), section("checkpointing", 999, 3, 4.0), checkpoints=2, closed_since_ns=992 * S)
    second = slot(section("step", 0, 19, 0.75), train_steps=19, checkpoints=2, flags=FLAG_ASYNC_SAVE, closed_since_ns=995 * S)
    watch.look(first, second)
    fact = board_watch.observed(watch.state, [first, second], 1, 5)
    assert fact is not None
    assert fact.sections == {"step": wire.SectionSeen(0.75, 20), "checkpointing": wire.SectionSeen(4.0, 2)}
    assert (fact.num_train_steps, fact.num_checkpoints, fact.async_save, fact.out_of_section_s) == (19, 2, True, 7.0)
    assert board_watch.observed(watch.state, [slot(calls=0)], 1, 5) is None


def test_beats_of_ranks_that_never_called_us() -> None:
    (plain, known) = board_watch.beats(
        [WatchedRank(0, 11, 1, None), WatchedRank(1, 12, 1, slot(section("step", 999), section("setup", 998)))], NOW
    )
    assert (plain.beat_age_s, plain.main_beat_age_s, plain.iteration) == (-1.0, -1.0, 0)
    assert [(one.name, one.age_s) for one in known.open_sections] == [("setup", 2.0), ("step", 1.0)]
