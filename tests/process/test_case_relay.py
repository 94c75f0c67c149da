"""The answer to a rank that told of a case: once the supervisor has committed it, or the spool's file stands in for that."""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rsup.launcher.case_relay import ANSWER_WITHIN_S, CaseRelay
from rsup.launcher.rank_link import RankLink
from rsup.launcher.spool import Spool
from rsup.supervisor import wire


@dataclass
class Relayed:
    """A relay between a real socket and a real spool, with a clock that the test moves."""

    link: RankLink
    spool: Spool
    rank: socket.socket
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.relay = CaseRelay(self.link.send, self.spool, lambda: self.now_s)

    def tell(self, case_id: str, verdict: str = "") -> None:
        report = wire.CaseReport(case_id, 7, True, [], verdict)
        fact = wire.CaseReported(1, 2, 1, report)
        self.relay.told(self.spool.append(fact), fact)
        self.relay.answer()

    def note(self) -> None:
        fact = wire.Note(1, "info", "another fact")
        self.relay.told(self.spool.append(fact), fact)

    def acknowledge(self, sequence: int) -> None:
        self.spool.acknowledge(sequence)
        self.relay.answer()

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.relay.answer()

    def answers(self) -> list[tuple[str, str]]:
        """What the rank has been told since it last looked."""
        found = []
        while True:
            try:
                message = wire.decode_agent_to_rank(self.rank.recv(10_000, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return found
            assert isinstance(message, wire.CaseStored)
            found.append((message.case_id, message.verdict))


def relayed(folder: Path, spool_path: Path | None) -> Iterator[Relayed]:
    link, spool = RankLink(folder / "ranks"), Spool(spool_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(str(link.path))
        rank.send(wire.encode(wire.RankHello(1, 2, os.getpid())))
        deadline = time.monotonic() + 10
        while not link.read():
            assert time.monotonic() < deadline
        yield Relayed(link, spool, rank)
    spool.close()
    link.close()


@pytest.fixture
def kept(own_directories: Path) -> Iterator[Relayed]:
    yield from relayed(own_directories, own_directories / "spool")


def test_each_report_is_answered_once_its_fact_is_acknowledged(kept: Relayed) -> None:
    kept.note()
    kept.tell("a")
    kept.tell("a", "transient")
    kept.acknowledge(1)
    assert kept.answers() == []
    kept.acknowledge(2)
    assert kept.answers() == [("a", "")]
    kept.acknowledge(3)
    assert kept.answers() == [("a", "transient")]
    kept.pass_s(100)
    assert kept.answers() == []


def test_a_spooled_report_is_as_good_once_the_supervisor_stays_away(kept: Relayed) -> None:
    kept.tell("a", "persistent")
    kept.pass_s(ANSWER_WITHIN_S - 0.1)
    assert kept.answers() == []
    kept.pass_s(0.2)
    assert kept.answers() == [("a", "persistent")]
    again = Spool(kept.spool.path)
    assert [fact for _, fact in again.pending()] == [fact for _, fact in kept.spool.pending()] and len(again) == 1
    again.close()


def test_what_is_in_memory_only_is_not_called_stored(own_directories: Path) -> None:
    for kept in relayed(own_directories, None):
        kept.tell("a", "persistent")
        kept.pass_s(100)
        assert kept.answers() == []
        kept.acknowledge(1)
        assert kept.answers() == [("a", "persistent")]


def test_a_full_disk_holds_the_answer_back_until_there_is_room(kept: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        kept.tell("a", "persistent")
        kept.pass_s(100)
        assert kept.answers() == []
    kept.note()  # what comes next takes with it what is missing in the file
    kept.relay.answer()
    assert kept.answers() == [("a", "persistent")]


@pytest.mark.parametrize("acked", [0, 3, 40])
def test_a_supervisor_with_another_history_renumbers_and_still_acknowledges(kept: Relayed, acked: int) -> None:
    for _ in range(5):
        kept.note()
    kept.acknowledge(5)
    kept.tell("a", "transient")
    kept.tell("b", "persistent")
    kept.spool.rebase(acked)
    kept.relay.answer()
    assert kept.answers() == []
    kept.acknowledge(acked + 1)
    assert kept.answers() == [("a", "transient")]
    kept.acknowledge(acked + 2)
    assert kept.answers() == [("b", "persistent")]


def test_a_rank_that_is_gone_is_not_waited_for(kept: Relayed) -> None:
    kept.tell("a")
    kept.rank.close()
    kept.link.read()
    kept.acknowledge(1)
    kept.pass_s(100)
