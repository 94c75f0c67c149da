"""The sockets that REST answers on."""

import asyncio
import contextlib
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
from fastapi import FastAPI, Request

from rsup.supervisor import connection_room, standby_page
from rsup.supervisor.connection_room import Room
from rsup.supervisor.rest import server
from rsup.supervisor.rest.server import PeerProtocol
from rsup.supervisor.rest_thread import RestThread
from rsup.supervisor.standby_page import StandbyPage
from tests.rest.played import Served

ROOM = 6
HALVES = (b"GET / HT", b"", b"POST /api/v1/jobs/x/stop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{", b"GET / HT")


def test_no_answer_waits_for_the_acknowledgement_of_its_first_half(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and body are sent one after the other: with Nagle's algorithm on a kept connection 40 ms apart."""
    accepted: list[int] = []
    made = PeerProtocol.connection_made

    def note(self: PeerProtocol, transport: asyncio.Transport) -> None:
        accepted.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(PeerProtocol, "connection_made", note)
    assert served.client().get("/healthz").status_code == 200
    assert accepted == [1]
    bound = RestThread("127.0.0.1:0", lambda _: lambda: None)
    assert bound.listening.proto == socket.IPPROTO_TCP, "by which asyncio goes when it accepts"
    bound.stop()


def asked(address: str | Path, path: str = "/healthz") -> bytes:
    """The first line of an answer at `host:port` or a UNIX socket."""
    with socket.socket(socket.AF_INET if isinstance(address, str) else socket.AF_UNIX) as one:
        one.settimeout(30)
        one.connect(_place(address))
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        return one.recv(4096).splitlines()[0]


def _place(address: str | Path) -> tuple[str, int] | str:
    if isinstance(address, Path):
        return str(address)
    host, _, port = address.removeprefix("http://").partition(":")
    return host, int(port)


def hold(stack: contextlib.ExitStack, address: str, num: int) -> list[socket.socket]:
    """Connections on which a request has begun, or not even that."""
    held = []
    for number in range(num):
        held.append(stack.enter_context(socket.create_connection(_place(address), timeout=30)))  # type: ignore[arg-type]
        held[-1].sendall(HALVES[number % len(HALVES)])
    return held


def has_ended(one: socket.socket) -> bool:
    """Waits for it."""
    try:
        while one.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture
def app() -> FastAPI:
    """What answers `/healthz`, and reads what is posted."""
    made = FastAPI()
    made.get("/healthz")(lambda: {"status": "ok"})

    @made.post("/{path:path}")
    async def read(request: Request) -> int:
        return len(await request.body())

    return made


@pytest.fixture
def local(own_directories: Path) -> socket.socket:
    """A listening `rest.sock`."""
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(own_directories / "rest.sock"))
    bound.listen()
    return bound


def test_connections_without_a_request_take_nothing_from_others(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, local: socket.socket
) -> None:
    """Of the supervisor that leads and of one that stands by; in all 3 x the room is held, at each."""
    monkeypatch.setattr(server, "Room", partial(Room, ROOM))
    monkeypatch.setattr(standby_page, "Room", partial(Room, ROOM))
    leads = server.RestServer("127.0.0.1", 0)
    leads.start(app)
    stands_by = StandbyPage("127.0.0.1:0", lambda: ("this supervisor stands by", "http://far:1"), local)
    unix = Path(local.getsockname())
    try:
        with contextlib.ExitStack() as stack:
            for address in (leads.address, stands_by.address):
                num_threads = threading.active_count()
                held = hold(stack, address, 3 * ROOM)
                assert [asked(address) for _ in range(3)] == [b"HTTP/1.1 200 OK"] * 3
                assert has_ended(held[0]) and has_ended(held[1]), "the oldest make room"
                assert threading.active_count() - num_threads <= 3, "no thread for each"
            assert asked(unix) == b"HTTP/1.1 200 OK"
            assert asked(unix, "/readyz") == b"HTTP/1.1 503 Service Unavailable"
    finally:
        stands_by.stop()
        leads.stop()


def test_a_request_that_never_becomes_whole_is_given_up(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Room", partial(Room, arrive_s=0.2))
    monkeypatch.setattr(standby_page, "Room", partial(Room, arrive_s=0.2))
    assert connection_room.ARRIVE_S < 60
    leads = server.RestServer("127.0.0.1", 0)
    leads.start(app)
    stands_by = StandbyPage("127.0.0.1:0", lambda: ("this supervisor stands by", ""))
    try:
        with contextlib.ExitStack() as stack:
            held = [*hold(stack, leads.address, 3), *hold(stack, stands_by.address, 3)]
            kept = stack.enter_context(socket.create_connection(_place(leads.address), timeout=30))  # type: ignore[arg-type]
            kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HT")
            assert all(has_ended(one) for one in [*held, kept])
    finally:
        stands_by.stop()
        leads.stop()
