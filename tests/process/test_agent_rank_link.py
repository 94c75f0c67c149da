"""The rank socket and the result file, without an agent around them."""

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsup.launcher.rank_link import RankLink
from rsup.launcher.result_file import write_results
from rsup.supervisor import wire


@pytest.fixture
def link(own_directories: Path) -> Iterator[RankLink]:
    link = RankLink(own_directories / "ranks")
    yield link
    link.close()
    assert not (own_directories / "ranks").exists()


def dial(link: RankLink) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(link.path))
    return sock


HELLO = wire.RankHello(1, 2, 11)


def test_hello_first_and_junk_is_counted(link: RankLink) -> None:
    assert stat.S_IMODE(os.stat(link.path).st_mode) == 0o600
    with dial(link) as rank:
        rank.send(wire.encode(wire.RankNote("info", "too early")))
        rank.send(b"junk")
        rank.send(wire.encode(HELLO))
        rank.send(b"x" * (wire.MAX_RANK_MESSAGE_BYTES + 10))
        rank.send(wire.encode(wire.RankDeclares(17, "why")))
        assert link.read() == [(HELLO, HELLO), (HELLO, wire.RankDeclares(17, "why"))]
        assert link.num_bad == 3
        assert link.send(1, 2, wire.SaveNow("q"))
        assert wire.decode_agent_to_rank(rank.recv(1000)) == wire.SaveNow("q")
        assert not link.send(1, 1, wire.SaveNow("of another attempt"))
    link.read()
    assert not link.send(1, 2, wire.SaveNow("q"))


def test_a_rank_that_stops_reading_blocks_nobody_and_gets_the_newest_limits(link: RankLink) -> None:
    with dial(link) as rank:
        rank.send(wire.encode(HELLO))
        link.read()
        for number in range(3000):
            link.broadcast(2, wire.LimitsNow(wire.Limits(heartbeat_s=number)))
        last = None
        rank.setblocking(False)
        while last is None or last.limits.heartbeat_s != 2999:
            try:
                message = wire.decode_agent_to_rank(rank.recv(10_000))
                assert isinstance(message, wire.LimitsNow)
                last = message
            except BlockingIOError:
                link.flush()
        assert last.limits.heartbeat_s == 2999


def test_result_files(own_directories: Path) -> None:
    result = wire.JobResult(3, "rank 1 exited with code 3", 1, 2, "node")
    named = own_directories / "results/r.json"
    assert write_results(result, "a/b", 1, own_directories / "state", named) == []
    for path in (named, own_directories / "state/jobs/a_b.1/result.json"):
        content = json.loads(path.read_text())
        assert (content["exit_code"], content["rank"], content["attempts"]) == (3, 1, 2)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    (problem,) = write_results(result, "", 1, own_directories, Path("/proc/nope/result"))
    assert problem.startswith("rsup: cannot write the result file /proc/nope/result: ")
