"""NVRx's rules of sections, heartbeats and limits, from its messages to what the agent calls overdue. No process, and a clock
that hardly moves."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher import nvrx_pickle as nvrx
from rsup.launcher.board_reader import together
from rsup.launcher.board_watch import WatchedRank, WatchState, beats, watch
from rsup.launcher.nvrx_rank import OTHERS, Client, LimitsInForce, NvrxRank
from rsup.supervisor import heartbeat_board, wire
from rsup.supervisor.heartbeat_board import FLAG_LEFT, NUM_SECTIONS, Board, Slot
from rsup.supervisor.wire import Limits
from tests.compat.nvrx_client import SectionAction, from_bytes, kind, message, to_bytes

OPEN, CLOSE, CLOSE_ALL = SectionAction.OPEN, SectionAction.CLOSE, SectionAction.CLOSE_ALL
PID = 4711


class Rank:
    """One rank with its slot of a real board; what it tells the agent is kept."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.told: list[wire.RankToAgent] = []
        self.in_force = LimitsInForce()
        self.rank = NvrxRank(board.slot(0), self.in_force, self.told.append)
        self.rank.begin(1)
        self.state = WatchState()

    def client(self, newer: bool = False, pid: int = PID, num_warmup_iters: int | None = None) -> Client:
        client = Client(1)
        assert self.say(client, message("AuthkeyMsg", authkey=b"")) == "OkMsg"
        self.init(client, newer, pid, num_warmup_iters)
        return client

    def init(self, client: Client, newer: bool = False, pid: int = PID, num_warmup_iters: int | None = None) -> Any:
        info = message("RankInfo", global_rank="0", local_rank=0, host="h", pid=pid)
        more = {"iteration": None, "num_warmup_iters": num_warmup_iters} if newer else {}
        reply = self.rank.hear(client, nvrx.read_message(to_bytes(message("InitMsg", rank_info=info, **more))))
        return from_bytes(reply[4:]).cfg

    def say(self, client: Client, thing: Any) -> str:
        """The kind of answer, empty for none."""
        reply = self.rank.hear(client, nvrx.read_message(to_bytes(thing)))
        return kind(from_bytes(reply[4:])) if reply else ""

    def section(self, client: Client, action: SectionAction, name: str | None = None, iteration: int | None = None) -> str:
        return self.say(client, message("SectionMsg", rank=0, section=name, action=action, iteration=iteration))

    def overdue(self, after_s: float, limits: Limits) -> list[str]:
        """What is past its limit that long from now."""
        found: list[str] = []
        for _ in range(2):
            now_ns = heartbeat_board.monotonic_ns() + int(after_s * 1e9)
            watched = [WatchedRank(0, PID, 1, self.board.read(0))]
            self.state, facts = watch(self.state, watched, limits, now_ns, (), 1, 0)
            found += [fact.limit for fact in facts]
        self.state = WatchState(self.state.ranks)
        return found


@pytest.fixture
def rank(own_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    clock = itertools.count(heartbeat_board.monotonic_ns(), 1000)  # however long a test stands still
    for module in ("rsup.supervisor.heartbeat_board", "rsup.launcher.nvrx_rank"):
        monkeypatch.setattr(f"{module}.monotonic_ns", lambda: next(clock))
    board = Board.create(1, own_directories / "run")
    yield Rank(board)
    board.close()
    board.unlink()


def test_an_expired_outer_section_is_not_hidden_by_an_inner_one(rank: Rank) -> None:
    client = rank.client()
    rank.section(client, OPEN, "short")
    rank.section(client, OPEN, "long")
    assert rank.overdue(5, Limits(sections={"short": 2, "long": 100})) == ["short"]
    rank.section(client, CLOSE, "short")
    assert rank.overdue(5, Limits(sections={"short": 2, "long": 100})) == []


def test_sections_may_overlap_but_not_double(rank: Rank) -> None:
    client = rank.client()
    assert [rank.section(client, OPEN, name) for name in "aba"] == ["OkMsg", "OkMsg", "ErrorMsg"]
    assert [rank.section(client, CLOSE, name) for name in "abb"] == ["OkMsg", "OkMsg", "ErrorMsg"]


def test_newer_clients_get_no_answer_to_sections_and_heartbeats(rank: Rank) -> None:
    client = rank.client(newer=True)
    assert rank.section(client, OPEN, "step", 3) == rank.section(client, OPEN, "step", 3) == ""
    assert rank.say(client, message("HeartbeatMsg", rank=0, state=None)) == ""
    assert rank.say(client, message("UpdateConfigMsg", hb_timeouts=None, section_timeouts=None)) == "OkMsg"


def test_the_configuration_tells_each_generation_its_rule(rank: Rank) -> None:
    rank.in_force.limits = Limits(sections={"step": 3.0}, out_of_section_s=9, calculated=["extra"], safety_factor=4)
    old, new = rank.init(Client(1)), rank.init(Client(1), newer=True)
    assert (old.skip_section_response, new.skip_section_response) == (False, True)
    assert (old.rank_section_timeouts, old.rank_out_of_section_timeout, old.safety_factor) == ({"step": 3.0}, 9, 4)
    assert (old.initial_rank_heartbeat_timeout, old.rank_heartbeat_timeout) == (None, None)


def test_limits_that_nobody_asked_for_are_not_told_to_clients(rank: Rank) -> None:
    rank.in_force.limits = Limits(sections={"step": 50.0}, out_of_section_s=50, calculated=["out-of-section", "step"])
    cfg = rank.init(Client(1))
    assert cfg.rank_section_timeouts == {"setup": None, "step": None, "checkpointing": None}
    assert cfg.rank_out_of_section_timeout is None


def test_out_of_section_time_runs_from_init_last_close_and_close_all(rank: Rank) -> None:
    limits = Limits(out_of_section_s=10)
    client = rank.client()
    assert rank.overdue(11, limits) == ["out-of-section"]
    rank.section(client, OPEN, "a")
    rank.section(client, OPEN, "b")
    rank.section(client, CLOSE, "a")
    assert rank.overdue(11, limits) == []
    rank.section(client, CLOSE_ALL)
    assert rank.overdue(9, limits) == [] and rank.overdue(11, limits) == ["out-of-section"]


def test_warm_up_of_newer_clients_is_outside_step(rank: Rank) -> None:
    rank.in_force.limits = limits = Limits(sections={"step": 5}, out_of_section_s=10)
    client = rank.client(newer=True)
    rank.section(client, OPEN, "setup")
    rank.section(client, CLOSE, "setup")
    assert rank.overdue(11, limits) == []
    rank.section(client, OPEN, "step", 6)
    rank.section(client, CLOSE, "step", 6)
    assert rank.overdue(11, limits) == ["out-of-section"]


def test_out_of_section_counts_from_the_start_for_older_clients_and_with_a_warm_up_limit(rank: Rank) -> None:
    rank.in_force.limits = Limits(sections={"step": 5}, out_of_section_s=10)
    rank.rank.left(rank.client())
    rank.client()
    assert rank.overdue(11, rank.in_force.limits) == ["out-of-section"]
    rank.rank.begin(1)
    rank.in_force.limits = Limits(sections={"step": 5, "warmup": 100}, warmup_s=100, out_of_section_s=10)
    rank.client(newer=True, pid=PID + 1)
    assert rank.overdue(11, rank.in_force.limits) == ["out-of-section"]


@pytest.mark.parametrize(("newer", "override", "num_warm"), [(True, None, 2), (True, 3, 3), (True, 0, 0), (False, None, 2)])
def test_the_warm_up_limit_replaces_that_of_the_first_steps(
    rank: Rank, newer: bool, override: int | None, num_warm: int
) -> None:
    rank.in_force.limits = limits = Limits(sections={"step": 5, "warmup": 100}, warmup_s=100, num_warmup_iters=2)
    client = rank.client(newer, num_warmup_iters=override)
    found = []
    for iteration in range(70, 75):
        rank.section(client, OPEN, "step", iteration if newer else None)
        found.append(rank.overdue(6, limits))
        assert found[-1] or rank.overdue(101, limits) == ["warmup"]
        rank.section(client, CLOSE, "step", iteration if newer else None)
    assert found == [[]] * num_warm + [["step"]] * (5 - num_warm)


def test_megatrons_iteration_is_shown_as_the_one_under_way(rank: Rank) -> None:
    client = rank.client(newer=True)
    rank.section(client, OPEN, "step", 41)
    assert rank.board.read(0).iteration == 42


def test_heartbeats(rank: Rank) -> None:
    limits = Limits(initial_heartbeat_s=20, heartbeat_s=5)
    client = rank.client()
    assert rank.overdue(0, limits) == [], "the agent sees that it has begun"
    assert rank.overdue(6, limits) == [] and rank.overdue(21, limits) == ["initial-heartbeat"]
    assert rank.say(client, message("HeartbeatMsg", rank=0, state=None)) == "OkMsg"
    assert rank.overdue(4, limits) == [] and rank.overdue(6, limits) == ["heartbeat"]
    assert rank.say(client, message("HeartbeatMsg", rank=0, state={"loss": 1})) == "ErrorMsg"


def test_the_wait_for_the_first_heartbeat_begins_anew_with_init(rank: Rank) -> None:
    limits = Limits(initial_heartbeat_s=20, heartbeat_s=5)
    client = rank.client()
    rank.say(client, message("HeartbeatMsg", rank=0, state=None))
    rank.rank.left(client)
    assert rank.overdue(1000, limits) == []
    rank.client()
    assert rank.overdue(0, limits) == [], "the agent sees that it has begun"
    assert rank.overdue(6, limits) == [] and rank.overdue(21, limits) == ["initial-heartbeat"]


def test_the_same_visit_of_another_process_is_another_one(rank: Rank) -> None:
    limits = Limits(sections={"step": 1}, heartbeat_s=1)
    for pid in (PID, PID + 1, PID + 1):
        client = rank.client(pid=pid)
        rank.say(client, message("HeartbeatMsg", rank=0, state=None))
        rank.section(client, OPEN, "step")
        found = []
        for _ in range(2):
            watched = [WatchedRank(0, pid, 1, rank.board.read(0))]
            rank.state, facts = watch(rank.state, watched, limits, heartbeat_board.monotonic_ns() + 2 * 10**9, (), 1, 0)
            found += [fact.limit for fact in facts]
        assert sorted(found) == ["heartbeat", "step"]
        rank.rank.left(client)


def test_a_rank_that_left_is_not_watched_but_what_it_had_open_is_still_seen(rank: Rank) -> None:
    client = rank.client()
    rank.section(client, OPEN, "step")
    rank.rank.left(client)
    limits = Limits(sections={"step": 1}, out_of_section_s=1, initial_heartbeat_s=1, startup_s=1, heartbeat_s=1)
    assert rank.overdue(1000, limits) == []
    sample = rank.board.read(0)
    assert sample.flags == FLAG_LEFT and [s.name for s in sample.sections if s.open_since_ns] == ["step"]
    assert not beats([WatchedRank(0, PID, 1, sample)], heartbeat_board.monotonic_ns())[0].open_sections
    again = rank.client()
    assert not any(s.open_since_ns for s in rank.board.read(0).sections)
    assert rank.section(again, OPEN, "step") == "OkMsg" and rank.overdue(2, limits)


def test_several_connections_share_a_rank(rank: Rank) -> None:
    limits = Limits(sections={"a": 1, "b": 1})
    first, second = rank.client(), rank.client()
    assert rank.section(first, OPEN, "a") == rank.section(second, OPEN, "a") == rank.section(second, OPEN, "b") == "OkMsg"
    rank.section(first, CLOSE, "a")
    assert sorted(rank.overdue(2, limits)) == ["a", "b"]
    rank.rank.left(second)
    assert rank.overdue(2, limits) == [] and not rank.board.read(0).flags


def test_more_sections_than_the_board_has_places_for(rank: Rank) -> None:
    client = rank.client()
    names = [f"s{i}" for i in range(NUM_SECTIONS + 5)]
    assert {rank.section(client, OPEN, name) for name in names} == {"OkMsg"}
    for name in names[:-1]:
        rank.section(client, CLOSE, name)
    assert [s.name for s in rank.board.read(0).sections if s.open_since_ns] == [OTHERS]
    assert rank.overdue(10, Limits(out_of_section_s=1)) == []
    rank.section(client, CLOSE, names[-1])
    assert rank.overdue(10, Limits(out_of_section_s=1)) == ["out-of-section"]
    assert [type(note) for note in rank.told] == [wire.RankNote]


def test_long_names_have_their_limits(rank: Rank) -> None:
    client = rank.client()
    long, other = "very-long-section-name-" + "x" * 40, "very-long-section-name-" + "x" * 41
    rank.section(client, OPEN, long)
    rank.section(client, OPEN, other)
    assert len(rank.overdue(5, Limits(sections={long: 1, other: 100}))) == 1


@pytest.mark.parametrize("name", [None, "", "x" * 201, "a\nb", "\ud800", 7, b"step"])
def test_bad_names_are_an_error_and_no_more(rank: Rank, name: Any) -> None:
    client = rank.client()
    assert rank.section(client, OPEN, name) == "ErrorMsg"
    assert rank.section(client, OPEN, "step") == "OkMsg"


def timeouts(sections: Any, out_of_section: Any = None) -> Any:
    made = message("SectionTimeouts", section=sections, out_of_section=out_of_section, calculated_sections=set())
    return message("UpdateConfigMsg", hb_timeouts=None, section_timeouts=made)


def test_limits_of_a_client_hold_at_once_and_are_told_once(rank: Rank) -> None:
    rank.in_force.limits = Limits(sections={"step": 30, "setup": 60}, heartbeat_s=7, calculated=["step"])
    client = rank.client()
    assert rank.say(client, timeouts({"step": 2.0, "setup": None}, 4.0)) == "OkMsg"
    assert rank.say(client, timeouts({"step": 2.0, "setup": None}, 4.0)) == "OkMsg"
    assert rank.in_force.limits == Limits(
        sections={"step": 2.0, "setup": None},
        out_of_section_s=4.0,
        heartbeat_s=7,
        from_client=["out-of-section", "setup", "step"],
    )
    rank.section(client, OPEN, "step")
    assert rank.overdue(4.5, rank.in_force.limits) == [], "not before NVRx's own server would have looked"
    assert rank.overdue(6, rank.in_force.limits) == ["step"]
    assert len(rank.told) == 1
    beat = message("HeartbeatTimeouts", initial=8.0, subsequent=3.0, were_calculated=True)
    assert rank.say(client, message("UpdateConfigMsg", hb_timeouts=beat, section_timeouts=None)) == "OkMsg"
    assert (rank.in_force.limits.initial_heartbeat_s, rank.in_force.limits.heartbeat_s) == (8.0, 3.0)
    assert rank.init(Client(1)).rank_section_timeouts == {"step": 2.0, "setup": None}


@pytest.mark.parametrize("sections", [{"step": -1.0}, {"step": "1"}, {"a\nb": 1.0}, {7: 1.0}, [("step", 1.0)]])
def test_impossible_limits_change_nothing(rank: Rank, sections: Any) -> None:
    client, before = rank.client(), rank.in_force.limits
    with pytest.raises(nvrx.Refused):
        rank.say(client, timeouts(sections))
    assert rank.in_force.limits is before and not rank.told


def test_what_comes_before_init_or_is_unknown_is_refused(rank: Rank) -> None:
    with pytest.raises(nvrx.Refused, match="before InitMsg"):
        rank.say(Client(1), message("HeartbeatMsg", rank=0, state=None))
    with pytest.raises(nvrx.Refused, match="NewerMsg"):
        rank.say(Client(1), message("NewerMsg"))
    with pytest.raises(nvrx.Refused, match="no message"):
        rank.say(Client(1), (1, 2))


def test_another_attempt_starts_with_a_clean_slot(rank: Rank) -> None:
    client = rank.client()
    rank.section(client, OPEN, "step")
    rank.rank.begin(2)
    rank.client(pid=PID + 1)
    assert rank.section(client, CLOSE, "step") == "OkMsg", "a straggler of the attempt before is answered"
    rank.rank.left(client)
    sample = rank.board.read(0)
    assert (sample.attempt, sample.pid, sample.flags, sample.sections) == (2, PID + 1, 0, ())


def test_a_rank_that_also_uses_rsup_worker_is_seen_as_one(rank: Rank, own_directories: Path) -> None:
    board = Board.create(1, own_directories / "run")
    own: Slot = board.slot(0)
    own.take_over(PID, 1)
    own.section("step").enter()
    client = rank.client()
    rank.section(client, OPEN, "outer")
    both = together(board.read(0), rank.board.read(0))
    assert {s.name for s in both.sections if s.open_since_ns} == {"step", "outer"}
    rank.rank.left(client)
    both = together(board.read(0), rank.board.read(0))
    assert {s.name for s in both.sections if s.open_since_ns} == {"step"} and not both.flags
    board.close()
    board.unlink()
