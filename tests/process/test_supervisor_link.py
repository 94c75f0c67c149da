"""The link between an agent and its supervisor: what the sockets do, with a stand-in for the supervisor's loop."""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import LinkRefused, SupervisorClient
from rsup.supervisor import places, rpc_decoding, wire
from rsup.supervisor.records import JobKey
from rsup.supervisor.rpc_links import ListenError
from rsup.supervisor.rpc_server import Busy, RpcServer
from rsup.supervisor.wire import AgentInfo, Hello, JobSpec, Note, Order, Refusal, Report, SupervisorInfo, ToAgent, Welcome

SPEAKS = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
KEY = places.link_key(b"0123456789abcdef0123456789abcdef")
OTHER_KEY = places.link_key(b"another secret of enough characters")


class Acker:
    """A supervisor that applies facts in order and acknowledges them; every agent is of job `job`."""

    def __init__(self, server: RpcServer, job: str = "j1") -> None:
        self.server = server
        self.job = job
        self.texts: dict[str, list[str]] = {}
        self.hellos: list[Hello] = []
        self.num_reports = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.stop.is_set():
            for received in self.server.receive(0.05):
                self._take(received.agent_id, received.message)
            for request, future in self.server.take_requests():
                future.set_result(f"did {request}")

    def _take(self, agent_id: str, message: wire.ToSupervisor) -> None:
        texts = self.texts.setdefault(agent_id, [])
        if isinstance(message, Hello):
            self.hellos.append(message)
            if message.spec.listen:
                self.server.set_jobs(message.spec.listen, [JobKey("local", "ann", self.job, 1)])
            info = SupervisorInfo("i1", 1, "h", True)
            self.server.send(agent_id, Welcome(SPEAKS, wire.RELEASE, info, self.job, 1, 0, len(texts)))
        elif isinstance(message, Report):
            self.num_reports += 1
            for sequence, fact in enumerate(message.facts, message.first_sequence):
                if sequence == len(texts) + 1:
                    assert isinstance(fact, Note)
                    texts.append(fact.text)
            self.server.send(agent_id, Order(agent_id, message.epoch, len(texts)))


@contextmanager
def running(server: RpcServer, job: str = "j1") -> Iterator[Acker]:
    acker = Acker(server, job)
    acker.thread.start()
    try:
        yield acker
    finally:
        acker.stop.set()
        server.wake()
        acker.thread.join(60)
        server.close()


@contextmanager
def client_of(
    address: str, spool: Spool | None = None, key: places.LinkKey | None = None, spec: JobSpec | None = None, agent_id: str = ""
) -> Iterator[SupervisorClient]:
    agent = AgentInfo(agent_id or secrets.token_hex(4), "node0", "127.0.0.1", 1)
    client = SupervisorClient(address, agent, spec or JobSpec(), Spool(None) if spool is None else spool, key)
    try:
        yield client
    finally:
        client.close()


def until(condition: Callable[[], object], poll: Callable[[], object] = lambda: None, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        poll()
        time.sleep(0.005)


def first_message(client: SupervisorClient, within_s: float = 60.0) -> ToAgent:
    messages: list[ToAgent] = []
    until(lambda: messages, lambda: messages.extend(client.poll()), within_s)
    return messages[0]


def test_facts_arrive_once_in_order_and_are_acknowledged(tmp_path: Path) -> None:
    server = RpcServer()
    address = server.bind(f"ipc://{tmp_path}/rpc")
    spool = Spool(tmp_path / "spool")
    with running(server) as acker, client_of(address, spool, agent_id="a1") as client:
        assert isinstance(first_message(client), Welcome) and client.connected and client.job_id == "j1"
        for i in range(3000):
            spool.append(Note(0, "info", str(i)))
        client.send_report(1, 0, attempt=1)
        until(lambda: not len(spool), client.poll)
        assert acker.texts["a1"] == [str(i) for i in range(3000)]
        assert acker.num_reports < 20


def test_the_descriptor_is_readable_when_there_is_something(tmp_path: Path) -> None:
    import select

    server = RpcServer()
    address = server.bind(f"ipc://{tmp_path}/rpc")
    with running(server), client_of(address) as client:
        first_message(client)
        for _ in range(200):
            client.send_report(0, 0)
            assert select.select([client], [], [], 60.0)[0], "no answer was signalled"
            until(lambda: any(isinstance(m, Order) for m in client.poll()))


def test_submit_from_other_threads_is_answered_and_bounded() -> None:
    server = RpcServer()
    with running(server):
        assert server.submit("stop").result(60) == "did stop"
    with pytest.raises(Busy):
        server.submit("late")
    idle = RpcServer()
    waiting = [idle.submit(i) for i in range(256)]
    with pytest.raises(Busy):
        idle.submit(256)
    idle.close()
    with pytest.raises(Busy):
        waiting[0].result(1)


def test_garbage_is_counted_and_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RpcServer()
    address = server.bind(f"ipc://{tmp_path}/rpc")
    report = wire.encode(Report("liar", 0, 0))
    with running(server) as acker:
        context = zmq.Context()
        for identity, frames in (
            (b"g1", [b""]),
            (b"g2", [b"\xc1 garbage"]),
            (b"g3", [wire.encode(Report("g3", 0, 0))[:-3]]),
            (b"g4", [b"two", b"frames"]),
            (b"g5", [report]),
            (b"\xff\xfe", [report]),
            (b"", [report]),
        ):
            peer = context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 60_000)
            if identity:
                peer.setsockopt(zmq.IDENTITY, identity)
            peer.connect(address)
            peer.send_multipart(frames)
            peer.close()
        context.term()
        until(lambda: server.counters.bad == 7)
        with client_of(address) as client:
            assert isinstance(first_message(client), Welcome)
        assert len(acker.hellos) == 1
    assert len([r for r in caplog.records if "bad message" in r.message]) == 1


def test_an_oversized_or_broken_stream_ends_only_its_own_connection(tmp_path: Path) -> None:
    server = RpcServer(KEY)
    address = server.bind("tcp://127.0.0.1:0")
    local = server.bind(f"ipc://{tmp_path}/rpc")
    port = int(address.rpartition(":")[2])
    with running(server):
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 100_000, b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL"):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as raw, contextlib.suppress(ConnectionError):
                raw.sendall(data)  # the server may have hung up before it has all
        context = zmq.Context()
        big = context.socket(zmq.DEALER)
        big.setsockopt(zmq.IDENTITY, b"big")
        big.setsockopt(zmq.LINGER, 0)
        monitor = big.get_monitor_socket()
        big.connect(local)
        big.send(b"x" * (wire.MAX_MESSAGE_BYTES + 1))
        events = []
        until(lambda: zmq.Event.DISCONNECTED in events, lambda: events.extend(_events(monitor)))
        big.disable_monitor()
        big.close()
        context.destroy(0)
        with client_of(local) as client:
            assert isinstance(first_message(client), Welcome)


def _events(monitor: "zmq.Socket[bytes]") -> list[zmq.Event]:
    from zmq.utils.monitor import recv_monitor_message

    found = []
    while monitor.poll(0):
        found.append(recv_monitor_message(monitor)["event"])
    return found


def test_the_right_key_talks_over_tcp() -> None:
    server = RpcServer(KEY)
    address = server.listen("127.0.0.1:0")
    with running(server), client_of(address, key=KEY) as client:
        assert isinstance(first_message(client), Welcome)


@pytest.mark.parametrize("theirs", [None, OTHER_KEY])
def test_a_wrong_or_missing_key_is_one_clear_line(theirs: places.LinkKey | None) -> None:
    server = RpcServer(KEY)
    address = server.listen("127.0.0.1:0")
    with running(server) as acker, client_of(address, key=theirs) as client:
        with pytest.raises(LinkRefused, match="--key-file or RSUP_KEY_FILE") as refused:
            until(lambda: False, client.poll)
        assert "\n" not in str(refused.value)
        assert not acker.hellos


def test_a_client_key_that_is_not_the_derived_one_is_refused() -> None:
    """Who learned the server's public key but not the secret cannot make the client's."""
    public, private = zmq.curve_keypair()
    thief = places.LinkKey(KEY.server_public, b"", public, private)
    server = RpcServer(KEY)
    address = server.listen("127.0.0.1:0")
    with running(server) as acker, client_of(address, key=thief) as client:
        with pytest.raises(LinkRefused):
            until(lambda: False, client.poll)
        assert not acker.hellos


def test_a_key_where_the_supervisor_has_none_is_one_clear_line() -> None:
    server = RpcServer()
    address = server.listen("127.0.0.1:0")
    with running(server), client_of(address, key=KEY) as client, pytest.raises(LinkRefused):
        until(lambda: False, client.poll)


def test_a_port_in_use_is_one_clear_line() -> None:
    server = RpcServer()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"^port {port} of 127.0.0.1 is in use; choose another --rdzv-endpoint$"):
            server.listen(f"127.0.0.1:{port}")
        with pytest.raises(ListenError, match=r"choose another --rpc-listen$"):
            server.listen(f"127.0.0.1:{port}", "--rpc-listen")
    with pytest.raises(ListenError, match=r"192\.0\.2\.7 is no address of this host"):
        server.listen("192.0.2.7:0")
    with pytest.raises(ListenError, match="needs a key"):
        server.bind("tcp://127.0.0.1:0")
    server.listen(f"127.0.0.1:{port}")
    server.unlisten(f"127.0.0.1:{port}")
    until(lambda: _can_bind(port))
    server.close()


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_an_open_link_is_for_its_own_job_only(tmp_path: Path) -> None:
    server = RpcServer()
    local = server.bind(f"ipc://{tmp_path}/rpc")
    endpoint = "127.0.0.1:0"
    open_address = server.listen(endpoint)
    with running(server, job="mine") as acker:
        with client_of(open_address, agent_id="early") as early:
            for _ in range(20):
                assert not early.poll(), "nobody is let in before the job exists"
                time.sleep(0.01)
            with client_of(local, spec=JobSpec(listen=endpoint)) as first:
                assert isinstance(first_message(first), Welcome)
                assert isinstance(first_message(early), Welcome)
        (let_in,) = {(hello.spec.job_id, hello.spec.owner) for hello in acker.hellos if hello.agent.agent_id == "early"}
        assert let_in == ("mine", "ann")
        with client_of(open_address, spec=JobSpec(job_id="other")) as other:
            refusal = first_message(other)
        assert isinstance(refusal, Refusal) and refusal.exit_code == 2 and "for job mine only" in refusal.message
        before = acker.num_reports
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"stranger")
        stranger.connect(open_address)
        stranger.send(wire.encode(Report("stranger", 0, 0)))
        until(lambda: server.counters.bad == 1)
        stranger.close(linger=0)
        context.term()
        assert acker.num_reports == before


def raw_hello(tmp_path: Path, message: bytes, agent_id: bytes = b"old") -> bytes:
    """The answer of a supervisor to these bytes."""
    server = RpcServer()
    address = server.bind(f"ipc://{tmp_path}/rpc")
    with running(server):
        context = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, agent_id)
        peer.setsockopt(zmq.RCVTIMEO, 60_000)
        peer.connect(address)
        peer.send(message)
        try:
            return peer.recv()
        finally:
            peer.close(linger=0)
            context.term()


def hello_of(speaks: tuple[int, int], release: str) -> Hello:
    return Hello(speaks, release, AgentInfo("old", "node7", "127.0.0.1", 1), JobSpec())


@pytest.mark.parametrize("distance", [-2, -1, 1, 2])
def test_releases_close_enough_talk(tmp_path: Path, distance: int) -> None:
    newest = wire.WIRE_VERSION + distance
    answer = wire.decode_to_agent(raw_hello(tmp_path, wire.encode(hello_of((newest - 2, newest), "x"))))
    assert isinstance(answer, Welcome)


@pytest.mark.parametrize(("distance", "remedy"), [(-3, "upgrade rsup there"), (3, "upgrade the supervisor")])
def test_releases_too_far_apart_are_refused_in_one_line(tmp_path: Path, distance: int, remedy: str) -> None:
    newest = wire.WIRE_VERSION + distance
    answer = wire.decode_to_agent(raw_hello(tmp_path, wire.encode(hello_of((newest - 2, newest), "9.9.9"))))
    assert isinstance(answer, Refusal) and answer.exit_code == 1
    assert "rsup 9.9.9 on node7" in answer.message and wire.RELEASE in answer.message and remedy in answer.message
    assert "\n" not in answer.message


def test_a_far_release_is_refused_even_if_its_hello_has_another_form(tmp_path: Path) -> None:
    import msgspec

    strange = {"type": "Hello", "speaks": [20, 22], "release": "7.0", "agent": {"agent_id": "old", "node": 5}, "spec": "?"}
    with pytest.raises(wire.MessageError):
        rpc_decoding.decode(msgspec.msgpack.encode(strange))
    strange["agent"] = {"agent_id": "old", "node": "n", "host": 17}
    answer = wire.decode_to_agent(raw_hello(tmp_path, msgspec.msgpack.encode(strange)))
    assert isinstance(answer, Refusal) and "7.0" in answer.message


def test_a_fact_that_only_a_newer_agent_knows_does_not_hold_up_the_others() -> None:
    import msgspec

    report = msgspec.to_builtins(Report("a", 0, 0, 1, [Note(1, "info", "known")]))
    report["facts"].insert(0, {"type": "QuantumFlip", "at_us": 7, "qubit": 3})
    report["facts"].insert(1, 17)
    message = rpc_decoding.decode(msgspec.msgpack.encode(report))
    assert isinstance(message, Report) and message.first_sequence == 1
    assert message.facts[0].at_us == 7
    assert "QuantumFlip" in message.facts[0].text and message.facts[2] == Note(1, "info", "known")  # type: ignore[union-attr]


def test_numbers_that_no_column_holds_get_no_further_than_the_link() -> None:
    for most in (2**62, 2**63 - 1, 2**64 - 1):
        facts: list[wire.AnyFact] = [Note(most, "info", "x"), Note(1, "info", "\u03c1"), wire.SignalReceived(2, -(most // 4))]
        facts.append(wire.HealthSeen(3, [wire.HealthReading("GPU-a", "ecc", "0", most)]))
        beats = [wire.RankBeat(0, 1, most, 0.1, 0.1), wire.RankBeat(1, 1, 5, 0.1, 0.1)]
        message = rpc_decoding.decode(wire.encode(Report("a", 1, 0, 7, facts, beats)))
        assert isinstance(message, Report) and message.first_sequence == 7 and message.beats == beats[1:]
        told = [fact.text if isinstance(fact, Note) else "" for fact in message.facts]
        assert "a Note with a number" in told[0] and told[1:3] == ["\u03c1", ""] and "a HealthSeen with" in told[3]
        assert message.facts[0].at_us < most and message.facts[3].at_us == 3
        hello = Hello(SPEAKS, wire.RELEASE, AgentInfo("a", "n", "h", 1), JobSpec(), attempt=most)
        for bad in (hello, Report("a", most, 0)):
            with pytest.raises(wire.MessageError, match="with a number beyond"):
                rpc_decoding.decode(wire.encode(bad))


def test_a_supervisor_of_a_far_release_is_named_by_the_client(tmp_path: Path) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/rpc")
    with client_of(f"ipc://{tmp_path}/rpc") as client:
        until(lambda: router.poll(0), client.poll)
        identity, _ = router.recv_multipart()
        info = SupervisorInfo("i", 1, "h", True)
        router.send_multipart([identity, wire.encode(Welcome((90, 92), "88.0", info, "j", 1, 0, 0))])
        answer = first_message(client)
    assert isinstance(answer, Refusal) and "88.0" in answer.message and not client.connected
    router.close(linger=0)
    context.term()


def test_an_agent_that_does_not_read_costs_the_server_nothing(tmp_path: Path) -> None:
    server = RpcServer()
    address = server.bind(f"ipc://{tmp_path}/rpc")
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.IDENTITY, b"deaf")
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(address)
    speaks = (wire.OLDEST_WIRE_VERSION, wire.WIRE_VERSION)
    deaf.send(wire.encode(wire.Hello(speaks, wire.RELEASE, AgentInfo("deaf", "node0", "127.0.0.1", 1), JobSpec())))
    until(lambda: server.receive(0.1))
    started = time.monotonic()
    for _ in range(5000):
        server.send("deaf", Refusal(1, "x" * 10_000))
    assert time.monotonic() - started < 60
    assert server.counters.dropped > 4000
    server.send("nobody", Refusal(1, ""))
    deaf.close(linger=0)
    context.term()
    server.close()
