"""The loop's own clock: nobody is accused because the supervisor was slow, and who is really silent is found all the same."""

from rsup.supervisor import wire
from rsup.supervisor.hardware.seat_index import SeatIndex
from rsup.supervisor.job_machine import LOST_AFTER_S
from rsup.supervisor.listening import MAX_TURN_S, Listening
from rsup.supervisor.loop import AgentMessage
from rsup.supervisor.records import SeatSaved
from tests.core.job_driver import hello, spec
from tests.core.test_supervisor_loop import Bench


class Turned(Bench):
    """A loop in turns as the daemon makes them: the links are read, what they gave is handled, then time passes."""

    def turn(self, *messages: AgentMessage, has_read_all: bool = True) -> None:
        self.loop.listened(has_read_all=has_read_all)
        self.loop.handle(messages)
        if self.loop.next_wakeup_s() <= 0:
            self.loop.tick()

    def spend(self, seconds: float, *alive: str) -> None:
        """A calm time in which those agents report every second."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.turn(*(said(name) for name in alive))

    def lost(self) -> list[str]:
        return [event.node for event in self.store.events if event.kind == "AgentLost"]


def said(name: str) -> AgentMessage:
    return AgentMessage(name, wire.Report(name, 1, 0))


def three_nodes() -> Turned:
    bench = Turned()
    for name in "abc":
        bench.turn(AgentMessage(name, hello(name, spec(min_nodes=3, max_nodes=3))))
    bench.spend(3, "a", "b", "c")
    return bench


def test_a_supervisor_that_was_away_for_a_minute_accuses_only_who_is_silent_then() -> None:
    bench = three_nodes()
    bench.now_s += 60.0
    for name in "abc":  # all three have reported all the time, and it takes several turns to read it
        bench.turn(said(name), has_read_all=False)
        bench.now_s += 7.0
    bench.turn(said("a"))
    assert bench.lost() == []
    bench.spend(LOST_AFTER_S - 3, "a", "c")
    assert bench.lost() == [], "b has its full time from when we listened again"
    bench.spend(4, "a", "c")
    assert bench.lost() == ["node-b"]


def test_a_turn_that_takes_long_counts_for_nobody() -> None:
    """Commits to a slow disk: each turn takes 20 s, and every report that came meanwhile is read at its beginning."""
    bench = three_nodes()
    for _ in range(5):
        bench.turn(said("a"), said("b"), said("c"))
        bench.now_s += 20.0
        bench.loop.tick()
    assert bench.lost() == []


def test_reports_that_wait_unread_for_ever_accuse_nobody() -> None:
    bench = three_nodes()
    for _ in range(300):
        bench.now_s += 1.0
        bench.turn(said("a"), has_read_all=False)
    assert bench.lost() == []
    bench.spend(LOST_AFTER_S + 2, "a", "b")
    assert bench.lost() == ["node-c"]


def test_a_job_has_its_full_time_to_come_together_while_we_are_away() -> None:
    bench = Turned()
    bench.turn(AgentMessage("a", hello("a", spec(min_nodes=2, max_nodes=2, join_timeout_s=30.0))))
    bench.now_s += 60.0
    bench.turn(has_read_all=False)
    assert bench.state.phase.value == "forming"
    bench.turn(AgentMessage("b", hello("b", spec(min_nodes=2, max_nodes=2, join_timeout_s=30.0))))
    assert bench.state.phase.value == "starting"


def test_the_clock_follows_the_machines_while_all_is_read_and_never_goes_back() -> None:
    clock, now_s, told = Listening(100.0), 100.0, [100.0]
    assert clock.now_s(500.0) == 500.0, "nobody looks: everything is handed in when it comes"
    clock = Listening(100.0)
    for step_s, has_read_all in [
        (1.0, True),
        (0.5, True),
        (60.0, True),
        (1.0, False),
        (60.0, False),
        (1.0, True),
        (0.2, False),
    ]:
        told.append(clock.now_s(now_s))
        now_s += step_s
        told.append(clock.now_s(now_s))
        clock.look(now_s, has_read_all=has_read_all)
        told.append(clock.now_s(now_s))
    assert told == sorted(told)
    counted_s = 1.0 + 0.5 + MAX_TURN_S + 1.0
    assert counted_s <= clock.now_s(now_s) - 100.0 <= counted_s + MAX_TURN_S


def test_seats_are_found_by_board_serial_and_node() -> None:
    first, second = SeatSaved("u1", 1, "n1", "p", "S1"), SeatSaved("u2", 1, "n1", "q")
    index = SeatIndex([first, second])
    assert index.find(["u1"]) == [first] and index.find([], ["S1"]) == [first] and index.find([], [], "n1") == [first, second]
    index.put(told := SeatSaved("u1", 1, "n1", "p", "S9"))
    assert index.find([], ["S1"]) == [] and index.find([], ["S9"]) == [told] == [index.get(first)]
    index.drop(first)
    assert index.find(["u1"], ["S9", ""], "") == [] and index.find([], [], "n1") == [second]
