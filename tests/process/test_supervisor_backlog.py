"""What waits for a supervisor that was busy: read at once, shortened to what is new, nothing of it lost, and bounded."""

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from rsup.supervisor import rpc_links, rpc_server, wire
from rsup.supervisor.agent_admission import Admission, Admitted, Known, Unsure
from rsup.supervisor.identities import Identities
from rsup.supervisor.peer_identity import Peers
from rsup.supervisor.principals import TokenBook
from rsup.supervisor.records import JobKey
from rsup.supervisor.rpc_server import Connection, Received, RpcServer
from rsup.supervisor.wire import AgentInfo, Hello, JobSpec, Note, RankBeat, Refusal, Report, ToSupervisor


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", address: str, agent_id: str) -> "zmq.Socket[bytes]":
    link: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    for option, value in ((zmq.IDENTITY, agent_id.encode()), (zmq.LINGER, 0), (zmq.SNDHWM, 1)):
        link.setsockopt(option, value)  # type: ignore[arg-type]
    link.connect(address)
    return link


def say(link: "zmq.Socket[bytes]", *messages: ToSupervisor) -> None:
    for message in messages:
        link.send(wire.encode(message))


def read(server: RpcServer, num_messages: int) -> list[Received]:
    """All that was said, once it is there: `num_messages`, whether they are handed on or not."""
    found: list[Received] = []
    until_s = time.monotonic() + 60
    while server.counters.received + server.counters.superseded < num_messages:
        assert time.monotonic() < until_s
        found += server.receive(0.1)
    assert server.has_read_all
    return found


def test_what_waits_is_shortened_to_what_is_new(tmp_path: Path) -> None:
    hello = Hello((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec())
    beat = [RankBeat(0, 1, 7, 0.1, 0.1)]
    with zmq.Context() as context:
        server = RpcServer()
        link = dealer(context, server.bind(f"ipc://{tmp_path}/rpc"), "a")
        say(link, *[hello] * 5, Report("a", 1, 0, beats=beat), Report("a", 1, 1, beats=beat))
        say(link, Report("a", 1, 1, 1, [Note(0, "info", "x")], beat), Report("a", 1, 2, beats=beat), Report("a", 1, 2))
        time.sleep(0.2)  # for the most of them to lie there together; the assertions hold without
        messages = [one.message for one in read(server, 10)]
        link.close()
        server.close()
    assert [type(one) for one in messages[:1]] == [Hello] and server.counters.superseded >= 1
    facts = [fact for one in messages if isinstance(one, Report) for fact in one.facts]
    assert facts == [Note(0, "info", "x")], "what an agent tells is never dropped"
    last = [one for one in messages if isinstance(one, Report)]
    assert max(one.acked_command for one in last) == 2 and any(one.beats for one in last)


def test_only_the_same_hello_again_replaces_one() -> None:
    """A `Hello` that would be refused is, whatever the same connection says next."""
    hello = Hello((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec())
    assert rpc_server._is_superseded(hello, replace(hello, credential="munge MUNGE:of-now"))
    for after in (replace(hello, attempt=1), replace(hello, spec=JobSpec(owner="bob")), Report("a", 1, 0)):
        assert not rpc_server._is_superseded(hello, after)


def test_a_report_that_would_take_something_away_does_not_replace() -> None:
    beat = [RankBeat(0, 1, 7, 0.1, 0.1)]
    plain, told = Report("a", 1, 3, beats=beat), Report("a", 1, 3, 1, [Note(0, "info", "x")], beat)
    assert rpc_server._is_superseded(plain, told) and rpc_server._is_superseded(plain, plain)
    for before, after in [(told, plain), (plain, Report("a", 1, 3)), (plain, Report("a", 1, 2, beats=beat))]:
        assert not rpc_server._is_superseded(before, after)
    for after in (Report("b", 1, 3, beats=beat), Report("a", 0, 3, beats=beat), wire.Bye("a")):
        assert not rpc_server._is_superseded(plain, after)


def test_a_busy_supervisor_knows_that_it_has_not_read_all_and_its_queues_are_bounded(tmp_path: Path) -> None:
    hello = Hello((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec())
    with zmq.Context() as context:
        server = RpcServer()
        link = dealer(context, server.bind(f"ipc://{tmp_path}/rpc"), "a")
        say(link, hello)
        read(server, 1)
        big = wire.encode(Report("a", 1, 0, 1, [Note(0, "info", "x" * 100_000)]))
        sent = 0
        while sent < 3 * rpc_links.RECEIVE_QUEUE_MESSAGES and link.poll(4000, zmq.POLLOUT):
            link.send(big)
            sent += 1
        assert rpc_links.RECEIVE_QUEUE_MESSAGES <= sent < 3 * rpc_links.RECEIVE_QUEUE_MESSAGES, "the rest waits with the agent"
        limit, rpc_server.MAX_MESSAGES_A_LINK = rpc_server.MAX_MESSAGES_A_LINK, 4
        try:
            assert len(server.receive(1.0)) == 4 and not server.has_read_all
        finally:
            rpc_server.MAX_MESSAGES_A_LINK = limit
        assert len(read(server, sent + 1)) == sent - 4
        link.close()
        server.close()


def test_one_who_says_too_much_does_not_stop_the_clock_of_others(tmp_path: Path) -> None:
    """Whatever reaches the socket: no `Hello` was let in there."""
    over = threading.Event()

    def flood(address: str) -> None:
        with zmq.Context() as context:
            link: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            link.setsockopt(zmq.LINGER, 0)
            link.connect(address)
            while not over.is_set():
                if link.poll(100, zmq.POLLOUT):
                    link.send(b"garbage", zmq.DONTWAIT)
            link.close()

    server = RpcServer()
    limit, rpc_server.MAX_MESSAGES_A_LINK = rpc_server.MAX_MESSAGES_A_LINK, 100
    thread = threading.Thread(target=flood, args=(server.bind(f"ipc://{tmp_path}/rpc"),))
    thread.start()
    try:
        until_s = time.monotonic() + 60
        while server.counters.bad < 3000:
            assert time.monotonic() < until_s
            server.receive(1.0)
            assert server.has_read_all
    finally:
        rpc_server.MAX_MESSAGES_A_LINK = limit
        over.set()
        thread.join()
        server.close()


def test_what_is_left_unread_of_many_agents_stops_the_clock(tmp_path: Path) -> None:
    server = RpcServer()
    server.bind(f"ipc://{tmp_path}/rpc")
    (link,) = server._links.values()
    agents = [f"a{i}".encode() for i in range(500)]
    server._route = {name.decode(): Connection(link, name) for name in agents}
    assert not server._is_flooded(link, Counter({name: 16 for name in agents}))
    assert server._is_flooded(link, Counter({name: 16 for name in agents} | {b"a7": 100})), "the others' queues were read"
    assert server._is_flooded(link, Counter({name: 1 for name in agents} | {b"x%d" % i: 1 for i in range(7692)}))
    assert not server._is_flooded(link, Counter({name: 15 for name in agents} | {b"x%d" % i: 1 for i in range(692)}))
    server.close()


def test_a_clock_that_stands_still_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    server = RpcServer()
    now_s = [100.0]
    monkeypatch.setattr(rpc_server.time, "monotonic", lambda: now_s[0])
    server.has_read_all = False
    for _ in range(90):
        server._note_unread()
        now_s[0] += 1.0
    assert caplog.records[0].message.startswith("for 10 s more has come from agents than could be read")
    assert len(caplog.records) == 2, "one line a minute"
    server.close()


def test_what_is_read_in_one_call_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "MAX_BYTES_A_LINK", 500_000)
    monkeypatch.setattr(rpc_server, "MAX_HELLO_BYTES", 50_000)
    hello = Hello((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec())
    big = Report("a", 1, 0, 1, [Note(0, "info", "x" * 100_000)])
    with zmq.Context() as context:
        server = RpcServer()
        link = dealer(context, server.bind(f"ipc://{tmp_path}/rpc"), "a")
        say(link, big, replace(hello, spec=JobSpec(command=["x" * 60_000])))  # of a stranger
        until_s = time.monotonic() + 60
        while server.counters.bad < 2:
            assert time.monotonic() < until_s
            assert server.receive(0.1) == []
        say(link, hello, *[big] * 20)
        found, sizes = 0, []
        while found < 21:
            assert time.monotonic() < until_s
            sizes.append(len(server.receive(0.1)))
            found += sizes[-1]
        assert max(sizes) <= 6
        say(link, wire.Bye("a"))
        while server._route:
            assert time.monotonic() < until_s
            server.receive(0.1)
        link.close()
        server.close()


def test_who_waits_for_a_job_is_not_ended_by_what_may_pass(tmp_path: Path) -> None:
    """`munged` or the directory of users is away: whoever was welcomed once asks again, though no ranks run."""
    admission = Admission(Identities(TokenBook(()), Peers(shared=True), str(tmp_path / "no-munged")), shared=True)
    server = RpcServer(None, admission)
    server.bind(f"ipc://{tmp_path}/rpc")
    (link,) = server._links.values()
    hello = Hello((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec())
    answers: list[Refusal | Unsure] = [Refusal(1, "not accepted"), Unsure("munged is away")]
    for answer in answers:
        assert server._decide(Connection(link, b"a"), replace(hello, job_id="j1"), answer) is None
    assert server._decide(Connection(link, b"a"), hello, answers[1]) is None
    assert (server.counters.refused, server.counters.bad) == (0, 3)
    server._decide(Connection(link, b"a"), hello, answers[0])
    assert server.counters.refused + server.counters.dropped == 2, "a new one is told, if it is still there"
    server.close()


def test_who_leaves_while_it_is_asked_who_it_is_has_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`munged` takes its time, and the `Bye` is read before it has answered."""
    admission = Admission(Identities(TokenBook(()), Peers(shared=True), str(tmp_path / "no-munged")), shared=True)
    monkeypatch.setattr(admission, "must_wait", lambda peer, hello: True)
    monkeypatch.setattr(admission, "who", lambda peer, hello: knows.wait(60) and Admitted(None))
    knows = threading.Event()
    hello = Hello(
        (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec(owner="ann")
    )
    server = RpcServer(None, admission)
    until_s = time.monotonic() + 60
    with zmq.Context() as context:
        link = dealer(context, server.bind(f"ipc://{tmp_path}/rpc"), "a")
        say(link, hello)
        while not server._asking:
            assert time.monotonic() < until_s and server.receive(0.1) == []
        say(link, wire.Bye("a"))
        while server._asking:
            assert time.monotonic() < until_s and server.receive(0.1) == []
        knows.set()
        while not server._asked:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert server.receive(0.1) == [] and not server._route and server.counters.bad == 0
        link.close()
        server.close()


def test_an_open_link_takes_no_word_for_an_agent_of_another_job() -> None:
    admission = Admission(Identities(TokenBook(()), Peers(shared=True), "/nonexistent"), shared=False)
    server = RpcServer(None, admission)
    server.listen("127.0.0.1:0")
    here, there = JobKey("local", "ann", "here", 1), JobKey("local", "ann", "there", 1)
    server.set_jobs("127.0.0.1:0", [here])
    (link,) = server._links.values()
    hello = Hello((wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION), wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec())
    for job, is_let in ((there, False), (here, True), (None, True)):
        server.known_agent = lambda agent_id, job=job: Known("ann", "", job)  # type: ignore[misc]
        received = server._decide(Connection(link, b"a"), hello, Admitted(None))
        assert (received is not None) is is_let
    server.close()
