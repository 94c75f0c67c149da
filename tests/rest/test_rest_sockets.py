"""The sockets that REST answers on."""

import asyncio
import socket

import pytest

from rsup.supervisor.rest.server import PeerProtocol
from rsup.supervisor.rest_thread import RestThread
from tests.rest.played import Served


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
