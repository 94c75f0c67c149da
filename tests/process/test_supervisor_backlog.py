"""What waits for a supervisor that was busy: read at once, shortened to what is new, nothing of it lost, and bounded."""

import time
from pathlib import Path

import zmq
from msgspec.structs import replace

from rsup.supervisor import rpc_links, rpc_server, wire
from rsup.supervisor.rpc_server import Received, RpcServer
from rsup.supervisor.wire import AgentInfo, Hello, JobSpec, Note, RankBeat, Report, ToSupervisor


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
    until_s = time.monotonic() + 10
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
        sent, until_s = 0, time.monotonic() + 10
        while time.monotonic() < until_s and link.poll(200, zmq.POLLOUT):
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
